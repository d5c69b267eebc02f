"""fxprune and its peers, each asked through its plain interface for half of the channels.

    pip install torch-pruning==1.6.1 torch-kirigami==0.2.1

* fxprune: ``fxprune.prune(model, x, sparsity=0.5, verify=False)``;
* torch-pruning: ``BasePruner(model, x, GroupMagnitudeImportance(p=2), pruning_ratio=0.5,
  ignored_layers=...)`` and ``step()``. As in its own examples, the layers that are as wide as the
  output are ignored, and ``output_transform`` picks the tensors of what a model returns;
* torch-kirigami: ``Pruner.prune`` with ``ChannelRatio(0.5)`` and, as in its README,
  ``Greedy(GroupMagnitude(p=2))``.

The peers change the model that they are given; fxprune makes a new one. Every function takes
``last``, the layers that make the outputs, so that whoever takes the time need not time the search
for them; ``only`` is ``outputs=`` of fxprune.
"""

from __future__ import annotations

import linecache
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from torch import nn

import fxprune
from fxprune.modules import tree
from fxprune.modules.running import bind_inputs, outputs, wanted


class NotInstalled(Exception):
    """What to install."""


def by_fxprune(
    model: nn.Module, x: Any, *, sparsity: float = 0.5, round_to: int = 1, only: Any = None,
    last: Any = None, **more: Any,
) -> nn.Module:  # fmt: skip
    return fxprune.prune(
        model, x, sparsity=sparsity, round_to=round_to, outputs=only, verify=False, **more
    )


def by_torch_pruning(
    model: nn.Module, x: Any, *, sparsity: float = 0.5, round_to: int = 1, only: Any = None,
    last: Any = None,
) -> nn.Module:  # fmt: skip
    import torch_pruning as tp

    pruner = tp.pruner.BasePruner(
        model, x, importance=tp.importance.GroupMagnitudeImportance(p=2), pruning_ratio=sparsity,
        ignored_layers=output_layers(model, x, only) if last is None else last,
        round_to=None if round_to == 1 else round_to,
        output_transform=lambda result: list(tree.tensors(wanted(model, result, only))),
        # By default all pruners of a process share these, which keeps their models alive.
        in_channel_groups={}, out_channel_groups={}, num_heads={}, channel_groups={},
    )  # fmt: skip
    pruner.step()
    return model


def by_kirigami(
    model: nn.Module, x: Any, *, sparsity: float = 0.5, round_to: int = 1, only: Any = None,
    last: Any = None,
) -> nn.Module:  # fmt: skip
    from torch_kirigami import DependencyGraph
    from torch_kirigami.pruning import ChannelRatio, Granularity, Greedy, GroupMagnitude, Pruner

    args, kwargs = bind_inputs(x)
    graph = DependencyGraph.build(model, args=args, kwargs=kwargs)
    pruner = Pruner(model, graph=graph, granularity=Granularity(round_to))
    return pruner.prune(
        pruner.discover_candidates(),
        budget=ChannelRatio(sparsity),
        strategy=Greedy(GroupMagnitude(p=2)),
    )[0]


Prune = Callable[..., nn.Module]
PRUNERS: dict[str, tuple[str, Prune]] = {
    "fxprune": ("fxprune", by_fxprune),
    "torch-pruning": ("torch_pruning", by_torch_pruning),
    "torch-kirigami": ("torch_kirigami", by_kirigami),
}
PEERS = tuple(PRUNERS)[1:]


def pruner(name: str) -> Prune:
    """The function called so; :class:`NotInstalled` where its package is missing."""
    package, function = PRUNERS[name]
    if find_spec(package) is None:
        raise NotInstalled(f"{name} is not installed: pip install {name}")
    return function


def output_layers(model: nn.Module, x: Any, only: Any = None) -> list[nn.Module]:
    """The linear layers and convolutions that are as wide as an output of the model."""
    shapes = [y.shape for y in outputs(model, x, only)]
    widths = {s[1] if len(s) > 3 else s[-1] for s in shapes if len(s)}
    return [
        m for m in model.modules()
        if getattr(m, "out_features", None) in widths
        or (isinstance(m, nn.modules.conv._ConvNd) and m.out_channels in widths)
    ]  # fmt: skip


def on_purpose(error: BaseException, name: str) -> bool:
    """Whether a pruner's own code raised or asserted: a refusal, not an accident."""
    if isinstance(error, fxprune.PruningError):
        return True
    frame = error.__traceback__
    while frame is not None and frame.tb_next is not None:
        frame = frame.tb_next
    spec = find_spec(PRUNERS[name][0])
    if frame is None or spec is None or spec.origin is None:
        return False
    file = frame.tb_frame.f_code.co_filename
    line = linecache.getline(file, frame.tb_lineno).lstrip()
    return Path(spec.origin).parent in Path(file).parents and line.startswith(("raise", "assert"))
