"""What a recorded graph expects of its inputs: the answers that the code got when it was recorded.

The graph holds the way that the run went, so many steps of a loop and one branch of a condition.
Where sizes decide that, other sizes are an error.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable
from typing import Any

from torch import fx

from ..code import QUESTIONS, expect_again
from ..rules import sizes
from ..rules.ops import argument_names
from .trace import Trace


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


def checked(trace: Trace, lengths: Iterable[tuple[fx.Node, Any, int]] = ()) -> fx.Graph:
    """The graph of a trace, which asks again what the code has asked of sizes.

    Args:
        lengths: of inputs that have to be as they were: an argument of the model, the keys of a
            tensor in it, and the dimension.
    """
    graph, copies = fx.Graph(), dict[fx.Node, fx.Node]()
    asked = {q.key: q for call in trace.calls for q in call.questions if is_asked_again(q)}
    waiting = {key: {o.source for o in sizes.dimensions(q.operands)} for key, q in asked.items()}

    def attribute(name: str) -> fx.Node:
        return graph.create_node("get_attr", name)

    def expect(function: Callable[..., Any], answer: Any, text: str, *operands: Any) -> None:
        graph.call_function(expect_again, (function.__name__, answer, text, *operands))

    for node in trace.graph.nodes:
        copies[node] = graph.node_copy(node, copies.__getitem__)
        for keys, dim in ((keys, dim) for argument, keys, dim in lengths if argument is node):
            tensor, spec = copies[node], node.meta["spec"]
            for key in keys:
                tensor, spec = graph.call_function(operator.getitem, (tensor, key)), spec[key]
            text = f"{''.join([node.name, *(f'[{key!r}]' for key in keys)])}.shape[{dim}]"
            expect(int, spec.shape[dim], text, graph.call_method("size", (tensor, dim)))
        for key in [key for key, sources in waiting.items() if sources <= copies.keys()]:
            del waiting[key]
            question, value = asked[key], copies.__getitem__
            operands = [number_in(graph, n, value, attribute) for n in question.operands]
            expect(question.function, question.answer, str(question), *operands)
        if parts_by_size(trace, node):
            expect(len, len(node.meta["spec"]), f"len({node.name})", copies[node])
    return graph


def is_asked_again(question: sizes.Question) -> bool:
    read = sizes.dimensions(question.operands)
    # Whether a batch is as large as another is what caches ask; what they keep is the same for it.
    of_caches = question.function in (operator.eq, operator.ne) and all(o.dim == 0 for o in read)
    return bool(read) and not of_caches and question.function in QUESTIONS.values()


def parts_by_size(trace: Trace, node: fx.Node) -> sizes.Dimension | None:
    """The size that says in how many parts a call takes a tensor apart (of a batch, of a sequence),
    where the code may have taken each in its turn; None where it does nothing like that."""
    pattern = trace.pattern(node)
    given = (*node.args, *node.kwargs.values())
    by_list = any(isinstance(each, (list, tuple)) for each in given)
    if pattern is None or pattern.kind != "split" or by_list:
        return None
    names = argument_names(node.target, len(node.args), node.kwargs) or []
    at = names.index("dim") if "dim" in names else len(given)
    dim = node.args[at] if at < len(node.args) else node.kwargs.get("dim", 0)
    if not (isinstance(given[0], fx.Node) and isinstance(dim, int)):
        return None
    return sizes.Dimension(given[0], dim % len(given[0].meta["spec"].shape))
