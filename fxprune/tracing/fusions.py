"""Runs of nodes in the trace: which are found, and which give their nodes another meaning.

The nodes between the first and the last of a run have one reader each (sizes aside), unless its
pattern is ``shared``. From each node the longest registered run that starts there is taken. Where
two runs would give one node a meaning, the longer one does, then the one that starts first.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from torch import fx, nn

from ..rules import registry
from ..rules.ops import key_of, op_name
from ..rules.pattern_types import Pattern
from ..rules.targets import label
from .trace import Trace, is_size

_CALLS = ("call_function", "call_method")


@dataclass(frozen=True)
class Fusion:
    """A run of nodes found in the trace.

    Attributes:
        name: of its pattern.
        nodes: module paths and functions, in order.
        meant: those of them whose channels go as the run's pattern says.
        overruled: the run that gives these a meaning in its place, or "".
        source: where the pattern is from.
    """

    name: str
    nodes: tuple[str, ...]
    meant: tuple[str, ...] = ()
    overruled: str = ""
    source: str = ""


@dataclass
class _Match:
    run: tuple[Any, ...]
    pattern: Pattern
    nodes: list[fx.Node]

    @property
    def name(self) -> str:
        return self.pattern.name if len(self.pattern.targets) == 1 else label(self.run)


def find(trace: Trace) -> list[Fusion]:
    """Every run of the trace; gives the nodes that runs have a meaning for that meaning."""
    matches = list(_matches(trace))
    winners: dict[fx.Node, _Match] = {}
    for match in sorted(matches, key=lambda m: -len(m.nodes)):  # stable: else by their start
        inner = [match.nodes[i] for i in match.pattern.steps or ()]
        if not any(node in winners for node in inner):
            winners |= dict.fromkeys(inner, match)
    found = []
    for match in matches:
        inner = [match.nodes[i] for i in sorted(match.pattern.steps or ())]
        over = next((winners[n] for n in inner if winners[n] is not match), None)
        found.append(Fusion(
            match.name, tuple(map(_name, match.nodes)), tuple(map(_name, inner)),
            "" if over is None else over.name, match.pattern.source,
        ))  # fmt: skip
    for node, match in winners.items():
        node.meta["pattern"] = match.pattern.steps[match.nodes.index(node)]  # type: ignore[index]
    return found


def _matches(trace: Trace) -> Iterator[_Match]:
    """The longest registered run from each node that starts one.

    Nodes of kind ``same`` (dropout, casts) are passed over. A run that ends in ``output`` ends
    where the model returns.
    """
    runs = list(registry.runs().items())
    words: dict[str, list[int]] = {}  # which runs start with a kind or a function's name
    others: list[int] = []
    for i, (run, _) in enumerate(runs):
        (words.setdefault(run[0], []) if isinstance(run[0], str) else others).append(i)
    for node in trace.graph.nodes:
        own = {_kind(trace, node)}
        if "same" in own:
            continue
        if node.op in _CALLS:
            own.add(op_name(node.target))
        alive = [runs[i] for i in sorted({*others, *(i for w in own for i in words.get(w, ()))})]
        nodes: list[fx.Node] = []
        best: _Match | None = None
        todo: list[fx.Node] = [node]
        forked = False
        while todo and alive:
            (current,) = todo
            if _kind(trace, current) != "same":
                at = len(nodes)
                alive = [
                    (run, p) for run, p in alive
                    if len(run) > at and _is(trace, current, run[at])
                    and (p.shared or not forked)
                ]  # fmt: skip
                nodes.append(current)
                for run, made in alive:
                    if len(run) == len(nodes):
                        best = _Match(run, made, list(nodes))
            users = [user for user in current.users if not is_size(user)]
            if len(users) > 1:
                forked = True
                onward = [
                    u for u in users
                    if any(len(r) > len(nodes) and _is(trace, u, r[len(nodes)])
                           for r, p in alive if p.shared)
                ]  # fmt: skip
                users = onward[:1]
            todo = users[:1]
        if best is not None:
            yield best


def _is(trace: Trace, node: fx.Node, wanted: Any) -> bool:
    """Whether a node is what a run has in this place: a kind, a class or a function."""
    if isinstance(wanted, str):
        return _kind(trace, node) == wanted or (
            node.op in _CALLS and op_name(node.target) == wanted
        )
    if isinstance(wanted, type) and issubclass(wanted, nn.Module):
        return node.op == "call_module" and isinstance(trace.modules[str(node.target)], wanted)
    return node.op == "call_function" and key_of(node.target) == key_of(wanted)


def _kind(trace: Trace, node: fx.Node) -> str:
    if node.op == "output":
        return "output"
    pattern = trace.pattern(node)
    return pattern.kind if pattern is not None else ""


def _name(node: fx.Node) -> str:
    if node.op == "call_module":
        return str(node.target)
    return op_name(node.target) or node.name
