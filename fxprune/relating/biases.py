"""Which parameters are biases, in whatever form they are written."""

from __future__ import annotations

from collections.abc import Callable, Container, Iterable
from dataclasses import replace

from torch import fx

from ..rules.channels import SourceAxis
from ..rules.spec import Spec
from ..tracing.trace import Trace
from .relations import Relations

_CALLS = ("call_function", "call_method")
_SEVERAL = (Spec, tuple, list)  # tensors; numbers such as sizes are none


def with_biases(trace: Trace, relations: Relations) -> Callable[[SourceAxis], SourceAxis]:
    """A function of an axis: as it is, or with the role ``shift`` where it is a bias and was not
    said to be one by its role.

    Such are the biases of recurrent layers, which make units together with the weights, for a
    removed unit loses them too; and parameters that code uses bare, one number a unit, if all that
    it does with them is to add them.
    """
    alone = set[fx.Node]()  # what is computed from parameters alone
    readers: dict[str, list[fx.Node]] = {}
    for node in trace.graph.nodes:
        if node.op == "get_attr":
            readers.setdefault(str(node.target), []).append(node)
        tensors = [n for n in node.all_input_nodes if isinstance(n.meta.get("spec"), _SEVERAL)]
        if node.op == "get_attr" or (node.op in _CALLS and tensors and alone.issuperset(tensors)):
            alone.add(node)

    def found(axis: SourceAxis) -> SourceAxis:
        bare = axis.is_bare and axis.is_whole and axis.name in readers
        if axis.first in relations.added or (
            bare and _only_added(trace, readers[axis.name], alone)
        ):
            return replace(axis, role="shift")
        return axis

    return found


def _only_added(trace: Trace, nodes: Iterable[fx.Node], alone: Container[fx.Node]) -> bool:
    """Whether these are added wherever they meet what inputs have a part in."""
    waiting = list(nodes)
    while waiting:
        users = waiting.pop().users
        for user in (n for n in users if n.op == "output" or isinstance(n.meta["spec"], _SEVERAL)):
            if user in alone:
                waiting.append(user)
                continue
            pattern = trace.pattern(user)
            if pattern is None or pattern.kind != "add":
                return False
    return True
