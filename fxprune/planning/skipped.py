"""Layers with weights that keep every output channel, and why."""

from __future__ import annotations

from collections.abc import Iterator

from torch import nn
from torch.nn.utils.parametrize import ParametrizationList

from ..relating.groups import Group
from ..relating.relations import Relations
from ..rules.call import node_name
from ..tracing.trace import Trace
from .pruning_plan import ChannelGroup

_NO_PATTERN = "fxprune has no pattern for how its weight is used"
_NOT_CALLED = "it is not called on the example input"

Reasons = Iterator[tuple[str, str]]


def skipped(
    trace: Trace, relations: Relations, groups: list[tuple[Group, ChannelGroup]], kept: set[str]
) -> list[tuple[str, str]]:
    """(layer or tensor, reason) for all that could be pruned, and is not.

    Args:
        groups: each with what the plan says of it.
        kept: names of the tensors that the plan cuts.
    """
    found = [
        (axis.name.rpartition(".")[0] or axis.name, shown.frozen)
        for group, shown in groups if shown.frozen for axis in group.producers
    ]  # fmt: skip
    known = {what for what, _ in found}
    used = {s.name for s in relations.sources}
    bare = used - {s.name for s in relations.sources if not s.is_bare}
    whole = {a.name: g.frozen for g, _ in groups if g.frozen for a in g.axes if a.name in bare}
    called = {id(trace.modules[path]) for path in trace.called}
    own_code = {call.path for call in trace.calls}
    for path, module in trace.modules.items():
        weights = [p for p in module._parameters.values() if p is not None and p.dim() > 1]
        if not weights or path in known or isinstance(module, ParametrizationList):
            continue
        if id(module) in called and path not in trace.called:
            continue  # it goes by another name
        names = {trace.names.get(id(p), "") for p in weights}
        if path in own_code:  # no layer: it goes by its tensors
            found += _unused_tensors(trace, names - used)
            names -= kept | known
        elif reason := _of_layer(trace, path, used.isdisjoint(names), weights):
            found.append((path, reason))
        found += [(name, whole[name]) for name in sorted(names & whole.keys())]
    return list(dict.fromkeys(found))


def _unused_tensors(trace: Trace, names: set[str]) -> Reasons:
    read = {str(n.target) for n in trace.graph.nodes if n.op == "get_attr"}
    for name in sorted(names):
        yield name, _NO_PATTERN if name in read else _NOT_CALLED


def _of_layer(trace: Trace, path: str, unused: bool, weights: list[nn.Parameter]) -> str:
    """Why a layer keeps its channels, as far as no group says so.

    Args:
        unused: whether no pattern has spoken of its weights.
    """
    if path in trace.called and (hooked := trace.computed_by_hook(path)):
        return f"a hook computes its {hooked}, where a parametrization could be pruned"
    if not unused:
        return ""
    if path in trace.called:
        if all(p.shape[:2].numel() == 1 for p in weights):  # no axis is made for one slice
            return "it has a single unit, and one has to stay"
        return _NO_PATTERN
    if path in trace.within:
        call = node_name(trace.within[path])
        return f"it runs beneath {call}, which fxprune has no pattern for"
    return _NOT_CALLED
