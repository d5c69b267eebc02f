"""The flag that tells a call whether the model trains: off while recording, read when it runs."""

from __future__ import annotations

import inspect
import operator
from functools import lru_cache
from itertools import pairwise
from types import CodeType
from typing import Any

from torch import fx, nn

from ..modules.bytecode import Step, outcomes, step_at, steps
from ..modules.near import codes_near, names_in


def may_read_mode(module: nn.Module) -> bool:
    """Whether code of a module may ask whether it trains: what does not name the flag cannot."""
    return any("training" in names_in(code) for code in codes_near(module))


def is_off(module: nn.Module, code: CodeType) -> bool:
    """Whether code reads the flag behind ``self.x and`` alone, with an ``x`` that is False."""
    guards = _guards(code)
    return bool(guards) and all(name and getattr(module, name, None) is False for name in guards)


@lru_cache(maxsize=1024)
def _guards(code: CodeType) -> tuple[str, ...]:
    """Of each reading of the flag, the attribute that has to be true for it; "" where none has."""
    done = steps(code)
    found = []
    for i, step in enumerate(done):
        if step.argval != "training":
            continue
        before = done[max(i - 4, 0) : i]
        ways = ("LOAD_FAST", "LOAD_ATTR", "POP_JUMP", "LOAD_FAST")
        alike = len(before) == 4 and all(
            b.opname.startswith(way) for b, way in zip(before, ways, strict=True)
        )
        own = alike and {before[0].argval, before[3].argval} == {*code.co_varnames[:1]}
        found.append(before[1].argval if own and before[2].opname.endswith("IF_FALSE") else "")
    return tuple(found)


def hands_mode_on(module: nn.Module) -> int | None:
    """In how many places code of a module calls others with ``training=`` its own flag; None where
    it does something else by it, or says something else there. A function of its own that hands it
    on is no other."""
    places = {code: _hands_on(code) for code in codes_near(module)}
    if None in places.values():
        return None
    own = {code.co_name for code, count in places.items() if count}
    passed = sum(len(own.intersection(code.co_names)) for code, count in places.items() if count)
    return sum(filter(None, places.values())) - passed


@lru_cache(maxsize=1024)
def _hands_on(code: CodeType) -> int | None:
    done = steps(code)
    read = [i for i, step in enumerate(done) if step.argval == "training"]
    # Names of keywords are constants; where they are not loaded as such, dis gives their number.
    words = [code.co_consts[s.arg or 0] if s.opname == "KW_NAMES" else s.argval for s in done]
    handed = [names for names in words if isinstance(names, tuple) and "training" in names]
    pushes = ("LOAD_", "PUSH_", "KW_NAMES", "PRECALL", "CALL")
    only = len(read) == len(handed) and all(
        done[i].opname in ("LOAD_ATTR", "LOAD_FAST") and done[i + 1].opname.startswith(pushes)
        for i in read
    )
    return len(read) if only else None


def chooses_numbers(module: nn.Module) -> bool:
    """Whether all that code of a module does by the mode, but for handing it on, is to choose one
    of two numbers (``0.0 if not self.training else self.p``)."""
    reading = [code for code in codes_near(module) if _hands_on(code) is None]
    chosen = [_chosen(code) for code in reading]
    if None in chosen:
        return False
    try:
        values = [operator.attrgetter(name)(module) for names in chosen for name in names or ()]
    except AttributeError:
        return False
    return all(isinstance(value, (int, float, type(None))) for value in values)


@lru_cache(maxsize=1024)
def _chosen(code: CodeType) -> tuple[str, ...] | None:
    """The attributes between which, and constants, code chooses by its mode; None where it does
    something else by it."""
    done = steps(code)
    found: list[str] = []
    for i, step in enumerate(done):
        if step.argval != "training":
            continue
        test = done[i + 1]
        start = outcomes(code, i + 1)[1] if "JUMP" in test.opname else 0
        leave = done[start - 1] if start > i + 1 else test
        if leave.opname == "JUMP_FORWARD":
            branches = [done[i + 2 : start - 1], done[start : step_at(code, leave.argval)]]
        elif leave.opname.startswith("RETURN"):  # each has what follows both, from Python 3.12 on
            branches = _apart(done[i + 2 : start], done[start:])
        else:
            return None
        for branch in branches:
            first = branch[0] if branch else step
            if first.opname.startswith("LOAD_FAST") and first.argval in code.co_varnames[:1]:
                if not all(s.opname == "LOAD_ATTR" for s in branch[1:]) or not branch[1:]:
                    return None
                found.append(".".join(s.argval for s in branch[1:]))
            elif len(branch) != 1 or not isinstance(first.argval, (int, float, type(None))):
                return None
    return tuple(found)


def _apart(one: tuple[Step, ...], other: tuple[Step, ...]) -> list[tuple[Step, ...]]:
    """Two branches without what is the same behind both of them, up to the return."""
    ends = [i for i, step in enumerate(other) if step.opname.startswith("RETURN")]
    other = other[: ends[0] + 1] if ends else ()
    same = 0
    for a, b in zip(reversed(one), reversed(other), strict=False):
        if (a.opname, a.argval) != (b.opname, b.argval):
            break
        same += 1
    return [one[: len(one) - same], other[: len(other) - same]]


def reads_mode_of_others(module: nn.Module) -> bool:
    """Whether code of a module reads the flag of another one (``self.drop.training``)."""
    return any(map(_reads_of_others, codes_near(module)))


@lru_cache(maxsize=1024)
def _reads_of_others(code: CodeType) -> bool:
    own = code.co_varnames[:1]
    return any(
        step.opname == "LOAD_ATTR" and step.argval == "training" and before.argval not in own
        for before, step in pairwise(steps(code))
    )


def training_argument(node: fx.Node) -> int | str | None:
    """Where a call was told that the model does not train: a position, a keyword, or None."""
    if node.op != "call_function" or not inspect.isfunction(node.target):
        return None
    # Its own parameters: what a wrapper wraps may be a builtin, which has no signature.
    code = node.target.__code__
    names = code.co_varnames[: code.co_argcount + code.co_kwonlyargcount]
    if "training" not in names:
        return None
    if node.kwargs.get("training") is False:
        return "training"
    at = names.index("training")
    return at if at < len(node.args) and node.args[at] is False else None


def depend_on_mode(node: fx.Node, place: int | str, train: Any) -> None:
    """Have ``node`` take ``train`` there in training mode."""
    old = node.args[place] if isinstance(place, int) else node.kwargs[place]
    with node.graph.inserting_before(node):
        value = node.graph.create_node("get_attr", "training")
        if (train, old) != (True, False):
            value = node.graph.call_function(by_mode, (value, train, old))
    if isinstance(place, int):
        node.update_arg(place, value)
    else:
        node.update_kwarg(place, value)


def by_mode(training: bool, train: Any, evaluate: Any) -> Any:
    """An argument that depends on the mode (``p if self.training else 0.0``)."""
    return train if training else evaluate
