"""What the model's code is told of sizes at the new widths, and where that leads it astray."""

from __future__ import annotations

import operator
from collections.abc import Iterable, Iterator
from typing import Any

import numpy as np

from ..rules import sizes
from ..rules.channels import Channels
from .faults import WrongAnswer
from .resizing import Resizing

# Questions whose answer for widths and lengths of some size says nothing of that for others.
_ORDER = (operator.lt, operator.le, operator.gt, operator.ge)


def at_new_widths(replay: Resizing, number: Any) -> Any:
    """What a traced number comes to."""
    origin = getattr(number, "origin", None)
    if isinstance(origin, sizes.Dimension):
        value = replay.values[origin.source]
        shape = value.shape if isinstance(value, Channels) else replay.tensor_shape(value)
        return shape[origin.dim]
    if isinstance(origin, sizes.Operation):
        return origin.function(*(at_new_widths(replay, operand) for operand in origin.operands))
    if isinstance(origin, sizes.Attribute):
        new = replay.new_attribute(origin.name)
        if new is not None:
            return new if origin.index is None else new[origin.index]
    return sizes.plain(number)


def answer(replay: Resizing, question: sizes.Question) -> tuple[Any, tuple[Any, ...]]:
    """What a question is answered at the new widths, and what its operands are there; None where
    there is no answer (a division by a difference of widths, say)."""
    try:
        operands = tuple(at_new_widths(replay, operand) for operand in question.operands)
        return question.function(*operands), operands
    except (ArithmeticError, ValueError):
        return None, question.operands


def is_mixed(replay: Resizing, question: sizes.Question) -> bool:
    """Whether a question is about widths that change and about sizes of the input: other inputs may
    have another answer, and at other widths it may be another one again."""
    read = sizes.dimensions(question.operands)
    return any(replay.is_free(o.source, o.dim) for o in read) and any(
        at_new_widths(replay, n) != at_new_widths(replay, as_recorded(replay, n))
        for n in question.operands
    )


def as_recorded(replay: Resizing, number: Any) -> Any:
    """A traced number with the widths and attributes that it had, in the place of new ones; what it
    reads of the input is read on."""
    origin = getattr(number, "origin", None)
    if isinstance(origin, sizes.Operation):
        parts = tuple(as_recorded(replay, operand) for operand in origin.operands)
        return sizes.traced(sizes.plain(number), sizes.Operation(origin.function, parts))
    if isinstance(origin, sizes.Dimension) and replay.is_free(origin.source, origin.dim):
        return number
    return number if at_new_widths(replay, number) == number else sizes.plain(number)


def wrong_answers(replay: Resizing) -> Iterator[WrongAnswer]:
    """Questions of the code, such as comparisons of sizes, that have other answers now. A key by
    another width may be looked up (in a cache): what is found there has been asked as well."""
    for index, call in enumerate(replay.trace.calls):
        questions = (q for q in call.questions if q.function is not hash)
        for question in {q.key: q for q in questions}.values():
            now, operands = answer(replay, question)
            if now != question.answer or (
                question.function in _ORDER and is_mixed(replay, question)
            ):
                units = _units_of_numbers(replay, question.operands)
                yield WrongAnswer(units, question, index, now, operands)


def _units_of_numbers(replay: Resizing, numbers: Iterable[Any]) -> np.ndarray:
    """Units of the axes whose sizes traced numbers are computed from."""
    units = [np.zeros(0, dtype=np.int64)]
    for origin in sizes.dimensions(numbers):
        value = replay.before[origin.source]
        axis = value.axis(origin.dim) if isinstance(value, Channels) else None
        units += [] if axis is None else [axis.units.reshape(-1).numpy()]
    return np.concatenate(units)
