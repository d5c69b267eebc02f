"""Checks in a model's code: conditions whose other branch does nothing but raise an error."""

from __future__ import annotations

import dis
import functools
from types import CodeType, FrameType


def is_check(frame: FrameType | None, answer: object) -> bool:
    """Whether the condition that ``frame`` asks about now, and whose answer is ``answer``, has no
    other outcome than an error: ``assert``, or ``if``, with a ``raise``."""
    if frame is None or not isinstance(answer, bool):
        return False
    return answer in _checked_at(frame.f_code).get(frame.f_lasti, ())


@functools.lru_cache(maxsize=256)
def _checked_at(code: CodeType) -> dict[int, list[bool]]:
    """By the place of a condition in the code, the answers after which there is no error."""
    steps = [s for s in dis.get_instructions(code) if s.opname not in _NOTHING]
    if any(step.opname in _CATCHING for step in steps):
        return {}
    at = {step.offset: i for i, step in enumerate(steps)}
    found: dict[int, list[bool]] = {}
    for i, step in enumerate(steps):
        jumps = "IF_TRUE" in step.opname
        if "JUMP" not in step.opname or not (jumps or "IF_FALSE" in step.opname):
            continue
        answers = []
        if _raises(steps, i + 1):
            answers.append(jumps)
        if _raises(steps, at.get(step.argval, len(steps))):
            answers.append(not jumps)
        for asked in steps[max(i - 1, 0) : i + 1]:  # by the jump, or by the step before it
            if asked is step or asked.opname == "TO_BOOL":
                found[asked.offset] = answers
    return found


def _raises(steps: list[dis.Instruction], start: int) -> bool:
    for step in steps[start:]:
        if step.opname == "RAISE_VARARGS":
            return True
        if "JUMP" in step.opname or "RETURN" in step.opname or "YIELD" in step.opname:
            return False
    return False


_CATCHING = ("PUSH_EXC_INFO", "SETUP_FINALLY")  # an error may be a way to go on
_NOTHING = ("CACHE", "NOP", "EXTENDED_ARG")
