"""What a recorded graph expects of its inputs: the answers that the code got when it was recorded.

The graph holds the way that the run went, so many steps of a loop and one branch of a condition.
Where sizes decide that, other sizes are an error.
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

from torch import fx

from . import sizes
from .code import expect_answer
from .recording import Trace

_OF_TEXT = (hash, str, repr, format)  # what is asked for a message, or for a key


def number_in(
    graph: fx.Graph,
    number: Any,
    value: Callable[[fx.Node], Any],
    attribute: Callable[[str], fx.Node],
) -> Any:
    """The expression of a traced number in another graph, where ``value`` stands for a recorded
    node and ``attribute`` for what is read of the model."""
    origin = getattr(number, "origin", None)
    if isinstance(origin, sizes.Dimension):
        return graph.call_method("size", (value(origin.source), origin.dim))
    if isinstance(origin, sizes.Operation):
        operands = (number_in(graph, operand, value, attribute) for operand in origin.operands)
        return graph.call_function(origin.function, tuple(operands))
    if isinstance(origin, sizes.Attribute):
        node, at = attribute(origin.name), origin.index
        return node if at is None else graph.call_function(operator.getitem, (node, at))
    return number


def checked(trace: Trace) -> fx.Graph:
    """The graph of a trace, which asks again what the code has asked of sizes."""
    graph, copies = fx.Graph(), dict[fx.Node, fx.Node]()
    asked = {q.key: q for call in trace.calls for q in call.questions if _depends_on_input(q)}
    waiting = {key: {o.source for o in _read(q)} for key, q in asked.items()}

    def attribute(name: str) -> fx.Node:
        return graph.create_node("get_attr", name)

    for node in trace.graph.nodes:
        copies[node] = graph.node_copy(node, copies.__getitem__)
        for key in [key for key, sources in waiting.items() if sources <= copies.keys()]:
            del waiting[key]
            question = asked[key]
            operands = [
                number_in(graph, n, copies.__getitem__, attribute) for n in question.operands
            ]
            answer = graph.call_function(question.function, tuple(operands))
            graph.call_function(expect_answer, (answer, question.answer, str(question)))
        if node.target == "unbind" and not _is_written(node.args[0], _dim(node)):
            count, parts = graph.call_function(len, (copies[node],)), len(node.meta["spec"])
            graph.call_function(expect_answer, (count, parts, f"len({node.name})"))
    return graph


def _read(question: sizes.Question) -> list[sizes.Dimension]:
    found = [o for number in question.operands for o in sizes.origins(number)]
    return [o for o in found if isinstance(o, sizes.Dimension)]


def _depends_on_input(question: sizes.Question) -> bool:
    read = _read(question)
    # Whether a batch is as large as another is what caches ask; what they keep is the same for it.
    of_caches = question.function in (operator.eq, operator.ne) and all(o.dim == 0 for o in read)
    return bool(read) and not of_caches and question.function not in _OF_TEXT


def _dim(node: fx.Node) -> int:
    return node.args[1] if len(node.args) > 1 else node.kwargs.get("dim", 0)  # type: ignore


def _is_written(x: Any, dim: int) -> bool:
    """Whether the code has a number for a dimension's size: ``view(b, n, 3, -1).unbind(2)``."""
    if x.target == "permute":
        order = x.args[1] if isinstance(x.args[1], (tuple, list)) else x.args[1:]
        return _is_written(x.args[0], order[dim])
    given = x.args[1:] if x.target in ("view", "reshape") else ()
    shape = given[0] if given and isinstance(given[0], (tuple, list)) else given
    return bool(shape) and isinstance(shape[dim], int) and shape[dim] > 0
