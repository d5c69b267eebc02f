"""What code does, one step after the other, as its instructions tell: they differ between versions
of Python, and what is read of them here does not."""

from __future__ import annotations

import dis
import functools
import re
from bisect import bisect_left
from collections.abc import Iterable
from itertools import pairwise
from operator import attrgetter
from types import CodeType

Step = dis.Instruction


@functools.lru_cache(maxsize=256)
def steps(code: CodeType) -> tuple[Step, ...]:
    """The instructions of code that do something. From Python 3.13 on some load or store two
    variables: these are two steps at the same place."""
    found: list[Step] = []
    for step in dis.get_instructions(code):
        halves = _HALF.findall(step.opname) if isinstance(step.argval, tuple) else ()
        if len(halves) == 2:
            both = zip(halves, step.argval, strict=True)
            found += [step._replace(opname=name, argval=variable) for name, variable in both]
        elif step.opname not in _NOTHING:
            found.append(step)
    return tuple(found)


_HALF = re.compile("(?:LOAD|STORE)_FAST(?:_BORROW)?")
# A jump asks for the truth of what TO_BOOL makes a flag of.
_NOTHING = frozenset(("CACHE", "EXTENDED_ARG", "NOP", "NOT_TAKEN", "TO_BOOL"))


def step_at(code: CodeType, place: int) -> int:
    """Which of the steps of code is at a place in it, or the next one behind."""
    return bisect_left(steps(code), place, key=attrgetter("offset"))


def arguments(code: CodeType, *instructions: str) -> frozenset[str]:
    """What code does one of these instructions with: names that it loads or stores, say."""
    return frozenset(step.argval for step in steps(code) if step.opname in instructions)


def condition_at(code: CodeType, place: int) -> int | None:
    """The step that jumps or does not, by what is asked at a place in code."""
    i = step_at(code, place)
    for j, step in enumerate(steps(code)[i : i + 3], i):
        if _is_condition(step):
            return j
        if j > i and step.opname != "COPY":  # of what goes on if it does not jump
            return None
    return None


def _is_condition(step: Step) -> bool:
    return "JUMP" in step.opname and "_IF_" in step.opname


def outcomes(code: CodeType, condition: int) -> tuple[int, int]:
    """The steps that a condition leads to: where it does not jump, and where it does."""
    return condition + 1, step_at(code, steps(code)[condition].argval)


def jumps_if_true(code: CodeType, condition: int) -> bool | None:
    """None where it asks for something else, such as None."""
    name = steps(code)[condition].opname
    return True if "IF_TRUE" in name else False if "IF_FALSE" in name else None


@functools.lru_cache(maxsize=1024)
def catches_errors(code: CodeType) -> bool:
    """Whether code catches errors, which may be its way to go on; ``with`` does not, but by a
    context that is there for it."""
    names = [step.opname for step in steps(code)]
    ends = sum(a == "POP_EXCEPT" and b != "RERAISE" for a, b in pairwise(names))
    return ends > names.count("WITH_EXCEPT_START") or "suppress" in code.co_names


def is_looped_over(code: CodeType, place: int) -> bool:
    """Whether what is asked at a place in code is the range of a loop."""
    following = steps(code)[step_at(code, place) + 1 :][:1]
    return any(step.opname == "GET_ITER" for step in following)


def is_in_loop(code: CodeType, place: int) -> bool:
    """Whether a loop over something runs what is at a place in code."""
    return any(s.opname == "FOR_ITER" and s.offset < place < s.argval for s in steps(code))


def names_beside(code: CodeType, place: int) -> set[str]:
    """What the statement has loaded in which something is asked at a place in code."""
    found = set[str]()
    for step in reversed(steps(code)[: step_at(code, place)]):
        if step.opname.startswith(("STORE", "POP_", "RETURN", "JUMP")):
            break
        if isinstance(step.argval, str):
            found.add(step.argval)
    return found


def ends_in_error(code: CodeType, step: int) -> bool:
    """Whether an error is raised from a step on, whatever the conditions behind it say."""
    return _surely_behind(code)[step : step + 1] == [_everything(code)]


def decided(code: CodeType, condition: int) -> list[int]:
    """The steps that hang on a condition: those up to where both of its outcomes go on alike."""
    alike, found, waiting = _surely_behind(code)[condition], set[int](), [condition]
    while waiting:
        new = [i for i in _next(code, waiting.pop()) if not (alike >> i & 1 or i in found)]
        found.update(new)
        waiting += new
    return sorted(found)


@functools.lru_cache(maxsize=4096)
def takes_by(code: CodeType, place: int, nth: int | None = None) -> tuple[int, ...]:
    """The places where an item or a part is taken by a number that is made at a place in code: at
    once, or by the variable that keeps it; of several that are made together, by the ``nth``, where
    they are unpacked at once."""
    i = step_at(code, place + 1)  # a call of Python's own is at a place behind its instruction
    if nth is not None:
        if [step.opname for step in steps(code)[i : i + 1]] != ["UNPACK_SEQUENCE"]:
            return ()
        i += nth + 1
    found = [_take_at(code, i)]
    for step in steps(code)[i : i + 1]:
        if step.opname == "STORE_FAST":
            loads = [j for j, other in enumerate(steps(code)) if _loads(other, step.argval)]
            found += [_take_at(code, j + 1) for j in loads]
    return tuple(place for place in found if place is not None)


def _loads(step: Step, variable: str) -> bool:
    return step.opname.startswith("LOAD_FAST") and step.argval == variable


def _take_at(code: CodeType, i: int) -> int | None:
    """The place of the step that takes an item by the value that is left before a step, or a part
    between that and another."""
    near = steps(code)[i : i + 4]
    ends = [j for j, step in enumerate(near) if not step.opname.startswith("LOAD_")][:1]
    for j in ends:
        parts = near[j].opname in ("BUILD_SLICE", "BINARY_SLICE")
        if near[j].opname == "BUILD_SLICE":
            j += 1
        if (parts or j == 0) and j < len(near) and near[j].opname in PARTS:
            return near[j].offset
    return None


# Of Python 3.14 the first is an operator.
PARTS = ("BINARY_SUBSCR", "BINARY_SLICE")


def steps_behind(code: CodeType, step: int) -> set[int]:
    """Those that may come some time behind a step."""
    found, waiting = set[int](), [step]
    while waiting:
        new = set(_next(code, waiting.pop())) - found
        found |= new
        waiting += new
    return found


def taking(code: CodeType, condition: int) -> list[int]:
    """The steps behind all these that take a value which hangs on the condition, too, as it is:
    up to the end of the statement."""
    among = [condition, *decided(code, condition)]
    join = {j for i in among for j in _next(code, i)}.difference(among)
    if not any(join.intersection(_next(code, i)) and _leaves_value(code, i) for i in among):
        return []
    found: list[int] = []
    for i, step in enumerate(steps(code)[min(join) :], min(join)):
        found.append(i)
        if step.opname.startswith(("STORE", "POP_", "RETURN", "RAISE")):
            break
    return found


def _leaves_value(code: CodeType, i: int) -> bool:
    """Whether a step, or the one that jumps on from there, leaves a value to those behind it."""
    before = steps(code)[max(i - 1, 0)].opname
    name = steps(code)[i].opname
    if _is_condition(steps(code)[i]):
        return not name.startswith("POP_") or before == "COPY"
    name = before if name.startswith("JUMP") else name
    return not name.startswith(("STORE", "DELETE", "POP_", "END_", "FOR_ITER"))


@functools.lru_cache(maxsize=256)
def _surely_behind(code: CodeType) -> list[int]:
    """By step, the steps that come behind it in all ways in which code returns, and it itself, as
    bits: all of them where none does."""
    whole = _everything(code)
    behind = [whole] * len(steps(code))
    changed = True
    while changed:
        changed = False
        for i in reversed(range(len(behind))):
            following = _next(code, i)
            common = whole if following or _raises(steps(code)[i]) else 0
            for j in following:
                common &= behind[j]
            changed |= behind[i] != common | 1 << i
            behind[i] = common | 1 << i
    return behind


def _everything(code: CodeType) -> int:
    return (1 << len(steps(code))) - 1


def _next(code: CodeType, i: int) -> list[int]:
    """The steps that may come next; none where code returns or raises an error."""
    step = steps(code)[i]
    if _raises(step) or (step.opname.startswith("RETURN") and step.opname != "RETURN_GENERATOR"):
        return []
    if step.argval == "StopIteration":  # a loop ends, which is no error
        return []
    found: Iterable[int] = [i + 1]
    if step.opcode in dis.hasjrel or step.opcode in dis.hasjabs:
        always = "JUMP" in step.opname and not _is_condition(step)
        always &= not step.opname.startswith("JUMP_IF")  # of errors that match, in Python 3.10
        found = outcomes(code, i)[1 if always else 0 :]
    return [j for j in found if j < len(steps(code))]


def _raises(step: Step) -> bool:
    return step.opname in ("RAISE_VARARGS", "RERAISE")
