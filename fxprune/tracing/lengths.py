"""What code makes of lengths of the input, unseen by a recording.

Most numbers that are made of a size know it (:mod:`fxprune.rules.sizes`). Some do not: those that
Python makes of integers without asking them (``table[n]``, ``"%d" % n``). Another run, at other
lengths, tells.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import fx

from ..rules import sizes
from ..rules.spec import Spec
from .asking_again import is_asked_again, parts_by_size
from .comparing import compared, differing, own_nodes, twin_of
from .runs import OtherRuns
from .trace import CannotRewrite, Trace


def check_lengths(trace: Trace, index: int, others: OtherRuns, name: str) -> None:
    """That new code, written from what call ``index`` did, does the same at other lengths.

    Raises:
        CannotRewrite
    """
    for other in others.lengths if trace.reads_sizes else ():
        twin = twin_of(trace, index, other)
        if twin is not None and _of_code(other, twin) != _of_code(trace, index):
            continue  # new code asks that again, and says that it goes another way
        found = compared(trace, index, other, name, "at other lengths of the input")
        for node, ((place, instead), *_) in found.items():
            number = node.args[place] if isinstance(place, int) else node.kwargs[place]
            raise CannotRewrite(
                f"{name} makes {number} of lengths of the input, in a way that no recording sees: "
                f"at other lengths it is {instead}"
            )


def lengths_that_count(trace: Trace, others: OtherRuns) -> Iterator[tuple[fx.Node, Any, int]]:
    """Lengths of inputs that the graph of a trace is right for alone: an argument of the model, the
    keys of a tensor in it, and the dimension."""
    if not trace.reads_sizes or any(call.reads_data for call in trace.calls):
        return  # another way of the code may be one of other data
    for other in others.lengths:
        if _of_graph(other) == _of_graph(trace) and _differ(trace, other):
            arguments = (
                [n for n in t.graph.nodes if n.op == "placeholder"] for t in (trace, other)
            )
            for mine, theirs in zip(*arguments, strict=True):
                for keys, dim in _other_sizes(mine.meta["spec"], theirs.meta["spec"]):
                    yield mine, keys, dim


def _of_graph(trace: Trace) -> list[Any]:
    """What the graph of a trace asks again."""
    questions = [q for call in trace.calls for q in call.questions if is_asked_again(q)]
    return _answers(trace, questions, trace.graph.nodes)


def _of_code(trace: Trace, index: int) -> list[Any]:
    """What new code for call ``index`` asks again."""
    return _answers(trace, trace.calls[index].questions, own_nodes(trace, index))


def _answers(
    trace: Trace, questions: Iterable[sizes.Question], nodes: Iterable[fx.Node]
) -> list[Any]:
    parts = [len(node.meta["spec"]) for node in nodes if parts_by_size(trace, node)]
    return [(q.function, q.answer) for q in questions] + [("parts", n) for n in parts]


def _differ(trace: Trace, other: Trace) -> bool:
    """Whether the graphs of two runs do."""
    mine, theirs = list(trace.graph.nodes), list(other.graph.nodes)
    if [(n.op, n.target) for n in mine] != [(n.op, n.target) for n in theirs]:
        return True
    for name, value in trace.constants.items():
        if isinstance(value, torch.Tensor) and not torch.equal(value, other.constants[name]):
            return True
    return differing(dict(zip(mine, theirs, strict=True))) != {}


def _other_sizes(here: Any, there: Any, *keys: Any) -> Iterator[tuple[tuple[Any, ...], int]]:
    if isinstance(here, Spec) and isinstance(there, Spec):
        both = enumerate(zip(here.shape, there.shape, strict=True))
        yield from ((keys, dim) for dim, (mine, its) in both if mine != its)
    elif isinstance(here, (tuple, list, dict)):
        for key in here if isinstance(here, dict) else range(len(here)):
            yield from _other_sizes(here[key], there[key], *keys, key)
