"""What the code of a module does otherwise in another run."""

from __future__ import annotations

from typing import Any

from torch import fx

from ..modules import tree
from .trace import CannotRewrite, Trace

# Arguments of a node that are others in another run: (position or name, value there).
Differences = dict[fx.Node, list[tuple[int | str, Any]]]


def compared(trace: Trace, index: int, other: Trace, name: str, there: str) -> Differences:
    """Arguments of the calls that the code of call ``index`` makes, and that are others elsewhere.

    Args:
        other: another run of the same model.
        there: where that run was made, for the reason.

    Raises:
        CannotRewrite: the code makes other calls there, or makes them of other results.
    """
    twin = twin_of(trace, index, other)
    if twin is None or _steps(trace, index) != _steps(other, twin):
        raise CannotRewrite(f"{name} runs other code {there}")
    twins = dict(zip(own_nodes(trace, index), own_nodes(other, twin), strict=True))
    found = differing(twins)
    if found is None:
        raise CannotRewrite(f"{name} runs other code {there}")
    if not _same(_output(trace, index), _output(other, twin), twins):
        raise CannotRewrite(f"{name} returns something else {there}")
    return found


def twin_of(trace: Trace, index: int, other: Trace) -> int | None:
    """The same call of the module in another run: its second there, where it is its second here.
    None where the module does not run as often."""
    mine, theirs = (
        [i for i, call in enumerate(run.calls) if call.path == trace.calls[index].path]
        for run in (trace, other)
    )
    return theirs[mine.index(index)] if len(mine) == len(theirs) else None


def differing(twins: dict[fx.Node, fx.Node]) -> Differences | None:
    """Numbers among the arguments of calls that are others in those of another run; None where
    results of other calls are among them."""
    found: Differences = {}
    for node, twin in twins.items():
        for place in (*range(len(node.args)), *node.kwargs):
            here, there = (
                n.args[place] if isinstance(place, int) else n.kwargs.get(place)
                for n in (node, twin)
            )
            if _same(here, there, twins):
                continue
            computed: list[fx.Node] = []
            fx.node.map_arg((here, there), computed.append)
            if computed:
                return None
            found.setdefault(node, []).append((place, there))
    return found


def _same(here: Any, there: Any, twins: dict[fx.Node, fx.Node]) -> bool:
    if isinstance(here, fx.Node) and isinstance(there, fx.Node):
        return twins.get(here, there) is there  # what other modules compute is not looked into
    if type(here) is not type(there):
        return False
    if isinstance(here, (tuple, list, dict, slice)):
        keys = (list(here), list(there)) if isinstance(here, dict) else (0, 0)
        parts = tree.children(here), tree.children(there)
        alike = keys[0] == keys[1] and len(parts[0]) == len(parts[1])
        return alike and all(_same(*pair, twins) for pair in zip(*parts, strict=True))
    return bool(here == there or (here != here and there != there))  # NaN


def _steps(trace: Trace, index: int) -> list[list[Any]]:
    """The calls that a module's own code makes, with how many arguments."""
    own = [
        (n.meta["index"], n.op, n.target, len(n.args), *n.kwargs) for n in own_nodes(trace, index)
    ]
    parts = [(c.start, "module", c.path) for c in trace.calls if c.parent == index]
    return [step for _, *step in sorted(own + parts, key=lambda step: step[0])]


def _output(trace: Trace, index: int) -> Any:
    if trace.calls[index].parent is None:
        return next(n for n in trace.graph.nodes if n.op == "output").args[0]
    return trace.calls[index].output


def own_nodes(trace: Trace, index: int) -> list[fx.Node]:
    """The calls that a module's own code makes."""
    return [
        n for n in trace.graph.nodes
        if n.meta.get("call") == index and n.op in ("call_function", "call_method", "call_module")
    ]  # fmt: skip
