"""What code does by some answers to what it asks, and not by others."""

from __future__ import annotations

import functools
from collections.abc import Container, Iterable, Iterator, Sequence
from itertools import pairwise
from types import CodeType
from typing import NamedTuple

from ..modules.bytecode import (
    PARTS,
    Step,
    condition_at,
    decided,
    step_at,
    steps,
    steps_behind,
    taking,
)


class Hanging(NamedTuple):
    """What code does by some answers to what it asks, and not by others."""

    names: frozenset[str]  # what it may call
    sets: frozenset[str]  # attributes
    gives: bool = True  # other values than before may be at hand behind it, or given back
    returns: bool = True  # code may give back another value, if only a flag


@functools.lru_cache(maxsize=1024)
def hanging(code: CodeType, place: int) -> Hanging:
    """Of what is asked at a place in code."""
    condition = condition_at(code, place)
    if condition is None:  # the answer is kept: who knows
        behind = step_at(code, place) + 1
        near = steps(code)[behind : behind + 3]  # self.flag = len(x) > 2
        return Hanging(frozenset(code.co_names), _named(near, _SETTING))
    hangs = decided(code, condition) + taking(code, condition)
    found = [steps(code)[i] for i in hangs]
    names = [step.opname for step in found]
    # Python 3.10 does not tell what it calls so from what it has in a variable.
    unnamed = "PUSH_NULL" in names or "CALL_FUNCTION" in names
    called = frozenset(code.co_names) if unnamed else _named(found, _NAMING)
    kept = _named(found, ("STORE_FAST",))
    returned = _named((a for a, b in pairwise(steps(code)) if b.opname == "RETURN_VALUE"), _LOADING)
    returns = any("RETURN" in name for name in names) or not kept.isdisjoint(returned)
    flags = _named((b for a, b in pairwise(found) if a.opname not in PARTS), ("STORE_FAST",))
    idle = _is_idle(found) and all(_is_idle(used) for used in _used(code, condition, flags))
    return Hanging(called, _named(found, _SETTING), not idle, returns)


_MAKING = ("CALL", "BINARY_", "UNARY_NEG", "UNARY_POS", "UNARY_INV")
_LOADING = ("LOAD_FAST", "LOAD_FAST_BORROW", "LOAD_FAST_CHECK")
_SETTING = ("STORE_ATTR", "DELETE_ATTR")
_NAMING = ("LOAD_ATTR", "LOAD_METHOD", "LOAD_GLOBAL", "LOAD_DEREF", "LOAD_SUPER_ATTR")


def _named(found: Iterable[Step], instructions: Container[str]) -> frozenset[str]:
    return frozenset(step.argval for step in found if step.opname in instructions)


def _used(code: CodeType, condition: int, flags: Container[str]) -> Iterator[list[Step]]:
    """What code does behind a condition by what it then has in variables: as a condition, or to
    take an item."""
    for i in steps_behind(code, condition) if flags else ():
        step = steps(code)[i]
        if step.opname not in _LOADING or step.argval not in flags:
            continue
        asks = condition_at(code, step.offset)
        if asks is None and i + 2 < len(steps(code)):  # it is compared first
            asks = condition_at(code, steps(code)[i + 2].offset)
        if asks is not None:
            yield [steps(code)[j] for j in (*decided(code, asks), *taking(code, asks))]
        yield [each for each in steps(code)[i + 1 : i + 2] if each.opname in PARTS]


def _is_idle(found: Sequence[Step]) -> bool:
    """Whether steps do no more than to make flags, to take parts of what has the name that they
    store them by, and to return constants."""
    loaded, fresh = list[str](), False  # since the last statement; whether a call makes something
    for i, step in enumerate(found):
        before = found[i - 1].opname if i else ""
        name = step.opname
        if name.startswith("LOAD_FAST"):
            loaded.append(step.argval)
        elif name.startswith(_MAKING) and name not in PARTS:
            fresh = True
        elif name.startswith("RETURN") and name != "RETURN_CONST":
            if before != "LOAD_CONST":
                return False
        elif name == "STORE_FAST":
            taken = {*loaded[:1], *(loaded[-1:] if before.startswith("LOAD_FAST") else ())}
            if fresh or not taken <= {step.argval}:
                return False
            loaded = []
        elif name.startswith(("STORE", "DELETE", "YIELD", "INPLACE", "POP_TOP")):
            return False
        elif "JUMP" in name and "IF" in name:
            loaded, fresh = [], False  # what it has made was asked
    return not fresh and (not found or found[-1].opname not in PARTS)
