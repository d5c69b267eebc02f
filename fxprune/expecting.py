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
from .code import QUESTIONS, expect_again
from .ops import argument_names, op_name
from .recording import Trace


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

    def expect(function: Callable[..., Any], answer: Any, text: str, *operands: Any) -> None:
        graph.call_function(expect_again, (function.__name__, answer, text, *operands))

    for node in trace.graph.nodes:
        copies[node] = graph.node_copy(node, copies.__getitem__)
        for key in [key for key, sources in waiting.items() if sources <= copies.keys()]:
            del waiting[key]
            question, value = asked[key], copies.__getitem__
            operands = [number_in(graph, n, value, attribute) for n in question.operands]
            expect(question.function, question.answer, str(question), *operands)
        if _counts_parts(node):
            expect(len, len(node.meta["spec"]), f"len({node.name})", copies[node])
    return graph


def _read(question: sizes.Question) -> list[sizes.Dimension]:
    found = [o for number in question.operands for o in sizes.origins(number)]
    return [o for o in found if isinstance(o, sizes.Dimension)]


def _depends_on_input(question: sizes.Question) -> bool:
    read = _read(question)
    # Whether a batch is as large as another is what caches ask; what they keep is the same for it.
    of_caches = question.function in (operator.eq, operator.ne) and all(o.dim == 0 for o in read)
    return bool(read) and not of_caches and question.function in QUESTIONS.values()


def _counts_parts(node: fx.Node) -> bool:
    """Whether a call takes a tensor apart, in as many parts as its size says."""
    if op_name(node.target) not in ("unbind", "split", "unsafe_split"):
        return False
    given = dict(zip(argument_names(node.target, len(node.args)) or (), node.args, strict=False))
    given |= node.kwargs
    by_list = any(isinstance(value, (list, tuple)) for value in given.values())
    x: Any = node.args[0] if node.args else None
    return not by_list and isinstance(x, fx.Node) and not _is_written(x, given.get("dim", 0))


def _is_written(x: Any, dim: Any) -> bool:
    """Whether the code has a number for a dimension's size: ``view(b, n, 3, -1).unbind(2)``."""
    given = x.args[1:] or tuple(x.kwargs.values())
    sizes = given[0] if given and isinstance(given[0], (tuple, list)) else given
    if not isinstance(dim, int) or not -len(sizes) <= dim < len(sizes):
        return False
    if x.target == "permute":
        return _is_written(x.args[0], sizes[dim])
    return x.target in ("view", "reshape") and isinstance(sizes[dim], int) and sizes[dim] > 0
