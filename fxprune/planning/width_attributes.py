"""Attributes that say a width and that no code of the run reads: ``model.num_features``.

An attribute that the forward reads is set because its size would come out wrong; the others are for
whoever uses the model. Their names are registered (:func:`fxprune.rules.registry.width`), and their
value has to be the width of something that the module's own code handles, the same before and
after.
"""

from __future__ import annotations

from collections.abc import Container, Iterator

from torch import fx

from ..replaying.replay import Replay
from ..rules import registry
from ..rules.channels import Channels
from ..tracing.trace import Trace


def announced(trace: Trace, replay: Replay, fixed: Container[str]) -> dict[str, int]:
    """New values of such attributes, by dotted name; ``fixed`` are those that the code reads."""
    handled = _handled(trace)
    found: dict[str, set[int]] = {}
    for index, call in enumerate(trace.calls):
        prefix = f"{call.path}." if call.path else ""
        mine = {
            f"{prefix}{key}": value for key, value in vars(replay.modules[call.path]).items()
            if type(value) is int and key in registry.width_names()
        }  # fmt: skip
        for old, new in (p for node in handled[index] if mine for p in _widths(replay, node)):
            for name in (n for n, value in mine.items() if value == old):
                found.setdefault(name, set()).add(new)
    return {
        name: next(iter(new)) for name, new in found.items()
        if len(new) == 1 and name not in fixed and new != {trace.tensor(name)}
    }  # fmt: skip


def _handled(trace: Trace) -> list[dict[fx.Node, None]]:
    """For each call of a module, the tensors that its own code takes, computes and returns, in an
    order that is the same every time."""
    handled: list[dict[fx.Node, None]] = [{} for _ in trace.calls]
    for node in trace.graph.nodes:
        if node.meta.get("call") is not None:
            handled[node.meta["call"]][node] = None
    for index, call in enumerate(trace.calls):
        found: list[fx.Node] = []
        fx.node.map_arg((call.args, call.kwargs, call.output), found.append)
        passed = dict.fromkeys(found)
        handled[index] |= passed
        if call.parent is not None:
            handled[call.parent] |= passed
    return handled


def _widths(replay: Replay, node: fx.Node) -> Iterator[tuple[int, int]]:
    """(old, new) of every size of a node's tensors along which channels lie."""
    value = replay.before.get(node)
    for x in value if isinstance(value, tuple) else (value,):
        if isinstance(x, Channels):
            new = replay.new_shape(x)
            yield from ((x.shape[d], new[d]) for axis in x.axes for d in axis.dims)
