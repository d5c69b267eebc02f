"""What the code of a module does otherwise in training mode, in which nothing is pruned.

A call may be told the mode (``F.dropout(x, training=self.training)``), or get another number by it
(``p if self.training else 0.0``): then new code reads the mode when it runs.
"""

from __future__ import annotations

from typing import Any

from torch import fx

from . import tree
from .faults import CannotRewrite
from .flags import may_read_mode, training_argument
from .recording import Trace

# Arguments of a node that are others in training mode: (position or name, value there).
Differences = dict[fx.Node, list[tuple[int | str, Any]]]


def handed_on(trace: Trace, index: int) -> Differences:
    """The flags that code passes on, where it does nothing else by the mode."""
    if not may_read_mode(trace.modules[trace.calls[index].path]):
        return {}
    flags = ((node, training_argument(node)) for node in own_nodes(trace, index))
    return {node: [(place, True)] for node, place in flags if place is not None}


def differences(trace: Trace, index: int, trained: Trace | None, name: str) -> Differences:
    """What the code of call ``index`` passes on in training mode in the place of other numbers.

    Raises:
        CannotRewrite: it makes other calls there, or none that can be told.
    """
    if trained is None:
        raise CannotRewrite(f"{name} does not run in training mode")
    runs = [i for i, call in enumerate(trained.calls) if call.path == trace.calls[index].path]
    if len(runs) != 1 or _steps(trace, index) != _steps(trained, runs[0]):
        raise CannotRewrite(f"{name} runs other code in training mode")
    mine, theirs = own_nodes(trace, index), own_nodes(trained, runs[0])
    twins = dict(zip(mine, theirs, strict=True))

    def same(here: Any, there: Any) -> bool:
        if isinstance(here, fx.Node) or isinstance(there, fx.Node):
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
            if isinstance(here, fx.Node) or isinstance(there, fx.Node):
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
