"""What the code of a module does otherwise in training mode, in which nothing is pruned.

A call may be told the mode (``F.dropout(x, training=self.training)``), or get another number by it
(``p if self.training else 0.0``): then new code reads the mode when it runs.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import fx

from ..modules import tree
from .flags import hands_mode_on, may_read_mode, training_argument
from .trace import CannotRewrite, Trace

# Arguments of a node that are others in training mode: (position or name, value there).
Differences = dict[fx.Node, list[tuple[int | str, Any]]]


def differences(
    trace: Trace, index: int, trained: Callable[[], Trace | None], name: str
) -> Differences:
    """What the code of call ``index`` passes on in training mode in the place of other numbers.

    Args:
        trained: gives the trace in training mode, which is asked for where the code alone does not
            tell.

    Raises:
        CannotRewrite: it makes other calls there, or none that can be told.
    """
    if not may_read_mode(trace.modules[trace.calls[index].path]):
        return {}
    found = _handed_on(trace, index)
    return _compared(trace, index, trained(), name) if found is None else found


def flags_of(trace: Trace, trained: Callable[[], Trace | None]) -> Differences:
    """What code of the whole model passes on; of modules that do more by the mode than a graph can
    say, the flags that they may have passed on."""
    found: Differences = {}
    for i, call in enumerate(trace.calls):
        try:
            found |= differences(trace, i, trained, call.path)
        except CannotRewrite:
            flags = {n: training_argument(n) for n in own_nodes(trace, i)}
            found |= {node: [(at, True)] for node, at in flags.items() if at is not None}
    return found


def _handed_on(trace: Trace, index: int) -> Differences | None:
    """The flags that code passes on; None where it does something else by the mode, some calls are
    told by others that nothing trains (``F.batch_norm``, by default), or some that are told do
    nothing then (``drop_path(x, p, training=self.training)``)."""
    places = hands_mode_on(trace.modules[trace.calls[index].path])
    flags = {n: at for n in own_nodes(trace, index) if (at := training_argument(n)) is not None}
    if places is None or len({(n.meta["where"], n.target) for n in flags}) != places:
        return None
    return {node: [(at, True)] for node, at in flags.items()}


def _compared(trace: Trace, index: int, trained: Trace | None, name: str) -> Differences:
    if trained is None:
        raise CannotRewrite(f"{name} does not run in training mode")
    runs = [i for i, call in enumerate(trained.calls) if call.path == trace.calls[index].path]
    if len(runs) != 1 or _steps(trace, index) != _steps(trained, runs[0]):
        raise CannotRewrite(f"{name} runs other code in training mode")
    mine, theirs = own_nodes(trace, index), own_nodes(trained, runs[0])
    twins = dict(zip(mine, theirs, strict=True))

    def same(here: Any, there: Any) -> bool:
        if isinstance(here, fx.Node) and isinstance(there, fx.Node):
            # What other modules compute is not looked into.
            return twins.get(here) is there or not (here in twins or there in twins.values())
        if type(here) is not type(there):
            return False
        if isinstance(here, (tuple, list, dict, slice)):
            keys = (list(here), list(there)) if isinstance(here, dict) else (0, 0)
            parts = tree.children(here), tree.children(there)
            return keys[0] == keys[1] and len(parts[0]) == len(parts[1]) and all(map(same, *parts))
        return bool(here == there)

    found: Differences = {}
    for node, twin in twins.items():
        for place in (*range(len(node.args)), *node.kwargs):
            here, there = (
                n.args[place] if isinstance(place, int) else n.kwargs.get(place)
                for n in (node, twin)
            )
            if same(here, there):
                continue
            computed: list[fx.Node] = []
            fx.node.map_arg((here, there), computed.append)
            if computed:
                raise CannotRewrite(f"{name} runs other code in training mode")
            found.setdefault(node, []).append((place, there))
    if not same(_output(trace, index), _output(trained, runs[0])):
        raise CannotRewrite(f"{name} returns something else in training mode")
    return found


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
