"""Checks in a model's code: conditions whose other branch does nothing but raise an error."""

from __future__ import annotations

import dis
import functools
from collections.abc import Callable
from types import CodeType, FrameType

from ..modules.frames import WHERE_RUNS_BEGIN, code_of, is_model_code


def is_check(frame: FrameType | None, answer: object) -> bool:
    """Whether the condition that ``frame`` asks about now, and whose answer is ``answer``, has no
    other outcome than an error: ``assert``, or ``if``, with a ``raise``."""
    if frame is None or not isinstance(answer, bool):
        return False
    if answer not in _checked_at(code_of(frame)).get(frame.f_lasti, ()):
        return False
    outer: FrameType | None = frame
    while outer is not None and outer.f_code.co_name != WHERE_RUNS_BEGIN:
        if is_model_code(outer) and _catches(code_of(outer)):
            return False
        outer = outer.f_back
    return True


def ends_otherwise(site: tuple[CodeType, int] | None) -> bool:
    """Whether a condition at a place in code, or one of several that are asked together, has but
    one outcome that is no error: what comes behind it has seen that one."""
    return site is not None and site[1] in _guards(site[0])


@functools.lru_cache(maxsize=256)
def _guards(code: CodeType) -> frozenset[int]:
    return _asked(code, lambda steps, here, there: (
        _raises(steps, here, there) or _raises(steps, there, here)
    ))  # fmt: skip


def _asked(
    code: CodeType, fits: Callable[[list[dis.Instruction], int, int], bool]
) -> frozenset[int]:
    """The places of the conditions in code that fit: ``fits(steps, here, there)`` gets the steps,
    the one behind the condition and the one that it leads to otherwise."""
    steps, at = _steps(code)
    found = set()
    for i, step in enumerate(steps):
        condition = "JUMP" in step.opname and "_IF_" in step.opname
        if condition and fits(steps, i + 1, at.get(step.argval, len(steps))):
            found |= {asked.offset for asked in steps[max(i - 1, 0) : i + 1]}
    return frozenset(found)


def may_compute(site: tuple[CodeType, int]) -> bool:
    """Whether a condition at a place in code decides over more than values that are there: what
    its function returns may be another by it."""
    return site[1] in _computing(site[0])


@functools.lru_cache(maxsize=256)
def _computing(code: CodeType) -> frozenset[int]:
    return _asked(code, lambda steps, here, there: any(
        each.opname.startswith(("CALL", "BINARY_OP")) for each in steps[here:there]
    ))  # fmt: skip


def is_looped_over(site: tuple[CodeType, int]) -> bool:
    """Whether what is asked at a place in code is the range of a loop."""
    steps, at = _steps(site[0])
    behind = at.get(site[1], len(steps)) + 1
    return behind < len(steps) and steps[behind].opname == "GET_ITER"


def is_in_loop(site: tuple[CodeType, int] | None) -> bool:
    """Whether a loop over something runs what is at a place in code."""
    return site is not None and any(start < site[1] < end for start, end in _loops(site[0]))


@functools.lru_cache(maxsize=256)
def _loops(code: CodeType) -> list[tuple[int, int]]:
    steps, _ = _steps(code)
    return [(step.offset, step.argval) for step in steps if step.opname == "FOR_ITER"]


def _place(steps: list[dis.Instruction], at: int) -> int:
    return steps[at].offset if at < len(steps) else -1


def _steps(code: CodeType) -> tuple[list[dis.Instruction], dict[int, int]]:
    """The instructions of code, and which of them is at which place."""
    steps = [s for s in dis.get_instructions(code) if s.opname not in _NOTHING]
    return steps, {step.offset: i for i, step in enumerate(steps)}


@functools.lru_cache(maxsize=1024)
def _catches(code: CodeType) -> bool:
    """Whether a function catches errors, which may be its way to go on; ``with`` does not."""
    names = [step.opname for step in dis.get_instructions(code)]
    handlers = names.count("PUSH_EXC_INFO") + names.count("SETUP_FINALLY")
    return handlers > names.count("WITH_EXCEPT_START")


@functools.lru_cache(maxsize=256)
def _checked_at(code: CodeType) -> dict[int, list[bool]]:
    """By the place of a condition in the code, the answers after which there is no error."""
    steps, at = _steps(code)
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
            if asked is step or asked.opname in ("TO_BOOL", "COMPARE_OP"):
                found[asked.offset] = answers
    return found


def _raises(steps: list[dis.Instruction], start: int, past: int | None = None) -> bool:
    """Whether an error is raised from ``start`` on; or by some further condition, of which the
    other outcome leads to the step ``past``."""
    for step in steps[start:]:
        if past is not None and "JUMP" in step.opname and step.argval == _place(steps, past):
            continue
        if step.opname == "RAISE_VARARGS":
            return True
        if step.argval == "StopIteration":  # a loop ends
            return False
        if "JUMP" in step.opname or "RETURN" in step.opname or "YIELD" in step.opname:
            return False
    return False


_NOTHING = ("CACHE", "NOP", "EXTENDED_ARG")
