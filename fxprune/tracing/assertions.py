"""Checks in a model's code: conditions whose other branch does nothing but raise an error."""

from __future__ import annotations

import functools
from collections.abc import Iterable
from types import CodeType, FrameType

from ..modules.bytecode import (
    catches_errors,
    condition_at,
    decided,
    ends_in_error,
    jumps_if_true,
    names_beside,
    outcomes,
    step_at,
    steps,
)
from ..modules.frames import code_of, codes_of


def is_check(frame: FrameType | None, answer: object) -> bool:
    """Whether the condition that ``frame`` asks about now, and whose answer is ``answer``, has no
    other outcome than an error: ``assert``, or ``if``, with a ``raise``."""
    if frame is None or not isinstance(answer, bool):
        return False
    sure = answer in _checked_at(code_of(frame), frame.f_lasti)
    return sure and not is_caught(codes_of(frame))


@functools.lru_cache(maxsize=1024)
def _checked_at(code: CodeType, place: int) -> list[bool]:
    """Of what is asked at a place in code, the answers after which there is no error."""
    condition = condition_at(code, place)
    asks = step_at(code, place)
    if condition is None or (asks != condition and steps(code)[asks].opname != "COMPARE_OP"):
        return []
    jumps = jumps_if_true(code, condition)
    stays, goes = (ends_in_error(code, step) for step in outcomes(code, condition))
    return [] if jumps is None else [jumps] * stays + [not jumps] * goes


def is_caught(codes: Iterable[CodeType]) -> bool:
    """Whether some of the codes that run may catch an error."""
    return any(map(catches_errors, codes))


@functools.lru_cache(maxsize=1024)
def ends_otherwise(code: CodeType, place: int) -> bool:
    """Whether a condition at a place in code, or one of several that are asked together, has but
    one outcome that is no error: what comes behind it has seen that one, if nobody catches it."""
    condition = condition_at(code, place)
    if condition is None:
        return "_assert" in names_beside(code, place)
    if any(ends_in_error(code, step) for step in outcomes(code, condition)):
        return True
    hangs = decided(code, condition)
    names = [steps(code)[i].opname for i in hangs if not ends_in_error(code, i)]
    return len(names) < len(hangs) and not any(name.startswith(_ACTING) for name in names)


_ACTING = ("STORE", "DELETE", "POP_TOP", "RETURN", "YIELD")
