"""One node by itself, with channels along all dimensions of its arguments."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor, fx

from ..relating.first_walk import FirstWalk
from ..rules.call import leaves, map_specs, rigid
from ..rules.channels import Axis, Channels
from ..rules.spec import Spec
from ..tracing.trace import Trace


class Free(FirstWalk):
    """One node whose arguments have channels along every dimension: what its pattern says."""

    def __init__(self, trace: Trace, node: fx.Node) -> None:
        super().__init__(trace)
        self.inputs: dict[fx.Node, Channels] = {}
        with torch.no_grad():
            for source in node.all_input_nodes:
                self.values[source] = self._argument(source)
            self.results: list[Channels] = list(leaves(self._visit(node)))
        found, stays = self.labels.joined()
        self.classes = np.where(stays[found], 0, found + 1)  # by label; 0 stays

    def _argument(self, source: fx.Node) -> Any:
        spec = source.meta["spec"]
        if source.op == "get_attr":
            return self._attribute(source)
        if isinstance(spec, Spec) and spec.dtype.is_floating_point:
            axes = []
            for d, n in enumerate(spec.shape):
                if n > 1:
                    axes.append(Axis((d,), self.labels.fresh(n)))
            self.inputs[source] = Channels(spec.shape, tuple(axes))
            return self.inputs[source]
        return map_specs(spec, rigid)

    def of(self, units: Tensor) -> np.ndarray:
        return self.classes[units.numpy()]
