"""Runs of nodes in the trace: which are found, and which give their nodes another meaning.

The nodes between the first and the last of a run have one reader each (sizes aside), unless its
pattern is ``shared``. From each node the longest registered run that starts there is taken. Where
two runs would give one node a meaning, the longer one does, then the one that starts first.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from operator import itemgetter
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
    words = {node: _words(trace, node) for node in trace.graph.nodes}
    root = _Runs()
    for number, (run, pattern) in enumerate(registry.runs().items()):
        root.add(run, pattern, number)
    for node in trace.graph.nodes:
        nodes: list[fx.Node] = []
        best: _Match | None = None
        todo: list[fx.Node] = [] if "same" in words[node] else [node]
        alive = [root]
        forked = False
        while todo and alive:
            (current,) = todo
            if "same" not in words[current]:
                alive = [
                    after for runs in alive for after in runs.after(trace, current, words[current])
                    if after.shared or not forked
                ]  # fmt: skip
                nodes.append(current)
                ends = [
                    runs.end for runs in alive if runs.end and (runs.end[2].shared or not forked)
                ]
                if ends:
                    _, run, made = max(ends, key=itemgetter(0))
                    best = _Match(run, made, list(nodes))
            users = [user for user in current.users if not is_size(user)]
            if len(users) > 1:
                forked = True
                users = [
                    user for user in users
                    if any(after.shared for runs in alive
                           for after in runs.after(trace, user, words[user]))
                ]  # fmt: skip
            todo = users[:1]
        if best is not None:
            yield best


class _Runs:
    """Registered runs that begin alike, from their next step on."""

    def __init__(self) -> None:
        self.shared = False  # whether a pattern of one is
        self.end: tuple[int, tuple[Any, ...], Pattern] | None = None  # of one that has no more
        self._words: dict[str, _Runs] = {}  # by the next step: a kind, or a function's name
        self._others: dict[Any, _Runs] = {}  # or a class or a function

    def add(self, run: tuple[Any, ...], pattern: Pattern, number: int) -> None:
        """Of two that a node fits in the same place, the one with the higher number counts."""
        step = self
        for item in run:
            step = (step._words if isinstance(item, str) else step._others).setdefault(
                item, _Runs()
            )
            step.shared = step.shared or pattern.shared
        step.end = number, run, pattern

    def after(self, trace: Trace, node: fx.Node, words: Iterable[str]) -> list[_Runs]:
        """Those whose next step a node is."""
        found = [self._words[word] for word in words if word in self._words]
        return found + [runs for item, runs in self._others.items() if _is(trace, node, item)]


def _is(trace: Trace, node: fx.Node, wanted: Any) -> bool:
    """Whether a node is a call of a class or a function."""
    if isinstance(wanted, type) and issubclass(wanted, nn.Module):
        return node.op == "call_module" and isinstance(trace.modules[str(node.target)], wanted)
    return node.op == "call_function" and key_of(node.target) == key_of(wanted)


def _words(trace: Trace, node: fx.Node) -> set[str]:
    """What names a node: its kind, and its function's name."""
    kind = _kind(trace, node)
    return {kind, op_name(node.target)} if node.op in _CALLS else {kind}


def _kind(trace: Trace, node: fx.Node) -> str:
    if node.op == "output":
        return "output"
    pattern = trace.pattern(node)
    return pattern.kind if pattern is not None else ""


def _name(node: fx.Node) -> str:
    if node.op == "call_module":
        return str(node.target)
    return op_name(node.target) or node.name
