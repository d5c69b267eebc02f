"""What the pruned model has to compute, got from the masked model.

Where a call counts channels (a layer norm over them, a mean), no mask can make the full-width call
equal the narrow one. There the reference runs the trace of the masked model and lets these calls
see the kept channels only.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, fx, nn

from . import tree
from .call import Named
from .channels import Channels
from .constants import Constants
from .recorder import Trace
from .running import bind_inputs, evaluating, outputs, read_attribute


def reference(plan: Any, model: nn.Module, small: nn.Module, example_input: Any) -> list[Tensor]:
    """Outputs of the masked model, with calls that count channels counting the kept ones.

    Args:
        small: the pruned model, whose narrow norms these calls run.
    """
    masked = plan.mask(model)
    if not plan.approximate:
        return outputs(masked, example_input)
    args, kwargs = bind_inputs(example_input)
    inputs = [*args, *kwargs.values()]
    with evaluating(masked), torch.no_grad():
        result = KeptOnly(plan, masked, small, model).run(*inputs)
        return [t.detach().clone() for t in tree.tensors(result)]


class KeptOnly(fx.Interpreter):
    """Runs the trace with a masked model's tensors; counting calls see kept channels only."""

    def __init__(self, plan: Any, masked: nn.Module, small: nn.Module, model: nn.Module) -> None:
        old: Trace = plan._trace
        trace = Trace(old.graph, masked, old.calls, old.constants, old.called, old.names, [])
        super().__init__(trace.graph_module())
        self._replay = plan._replay
        self._counting = {
            note.node for note in plan._relations.approximate
            if bool((~self._replay.kept(note.units)).any())
        }  # fmt: skip
        self._small = small
        self._constants = Constants(
            old, plan._relations, plan._removed, plan._silent, model,
            attention=plan.settings.attention,
        )  # fmt: skip
        self._constants.run()

    def run_node(self, n: fx.Node) -> Any:
        if n not in self._counting:
            return super().run_node(n)
        narrow = iter([self._narrow(node) for node in _tensor_nodes(n)])

        def swap(value: Any) -> Any:
            if isinstance(value, (Channels, Named)):
                return next(narrow)
            if isinstance(value, (tuple, list, dict, slice)):
                return tree.rebuild(value, swap)
            return value

        args, kwargs = (swap(v) for v in self._replay.calls[n])
        if n.op == "call_module":
            result = self._small.get_submodule(str(n.target))(*args, **kwargs)
        elif n.op == "call_method":
            result = getattr(args[0], str(n.target))(*args[1:], **kwargs)
        else:
            result = n.target(*args, **kwargs)  # type: ignore[operator]
        if isinstance(result, Tensor):
            return self._widen(n, result, self._constants.values[n])
        results = zip(result, self._constants.values[n], strict=True)
        return tuple(self._widen(n, r, c) for r, c in results)

    def _narrow(self, node: fx.Node) -> Tensor:
        """Kept slices of an argument."""
        value = self.env[node]
        old, new = (v.values[node] for v in (self._constants, self._replay))
        if not isinstance(old, Channels):  # a parameter: take the pruned model's own
            return read_attribute(self._small, str(node.target))
        for dim, order in self._replay.positions_kept(node, old, new):
            value = value.index_select(dim, order.to(value.device))
        return value

    def _widen(self, node: fx.Node, result: Tensor, full: Channels) -> Tensor:
        """The narrow result in a full-width tensor; removed slices hold their constant."""
        for axis in full.axes:
            if len(axis.dims) != 1:
                continue
            (dim,) = axis.dims
            kept = self._replay.kept(axis.units)
            if bool(kept.all()):
                continue
            shape = [1] * result.dim()
            shape[dim] = len(kept)
            constant = torch.zeros(len(kept)) if axis.constant is None else axis.constant
            wide = torch.nan_to_num(constant).to(result).reshape(shape)
            wide = wide.expand([len(kept) if d == dim else n for d, n in enumerate(result.shape)])
            new = self._replay.values[node]
            positions = dict(self._replay.positions_kept(node, full, new))[dim]
            result = wide.clone().index_copy(dim, positions.to(result.device), result)
        return result


def _tensor_nodes(node: fx.Node) -> list[fx.Node]:
    """Tensor arguments in the order of the call; one that stands twice is there twice."""
    found: list[fx.Node] = []

    def visit(value: Any) -> None:
        if isinstance(value, fx.Node):
            if hasattr(value.meta["spec"], "dtype"):
                found.append(value)
        elif isinstance(value, dict):
            for item in value.values():
                visit(item)
        elif isinstance(value, (tuple, list)):
            for item in value:
                visit(item)

    visit((node.args, node.kwargs))
    return found
