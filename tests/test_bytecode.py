"""What is read of Python's instructions is the same in all its versions."""

from __future__ import annotations

import dis

import pytest

from fxprune.modules.bytecode import (
    catches_errors,
    decided,
    ends_in_error,
    outcomes,
    steps,
    takes_by,
)


def if_else(n):
    if n:
        a()
    else:
        b()
    c(n, n, n)
    return c(n, n)  # Python 3.12 repeats a shorter end in both branches


def early(n):
    if n:
        return a()
    b()
    return c()


def loop(n):
    while n:
        a()
    c()


def nested(n):
    for _ in n:
        if n:
            continue
        a()
    c()


def both(n):
    if n and a():
        b()
    c()


@pytest.mark.parametrize("code, hanging", [
    (if_else, "ab"), (early, "abc"), (loop, "a"), (nested, "a"), (both, "ab"),
], ids=lambda f: getattr(f, "__name__", f))  # fmt: skip
def test_a_condition_decides_up_to_where_both_ways_meet(code, hanging):
    code = code.__code__
    first = next(i for i, step in enumerate(steps(code)) if "_IF_" in step.opname)
    done = [steps(code)[i].argval for i in decided(code, first)]
    assert "".join(sorted({name for name in done if name in ("a", "b", "c")})) == hanging


def test_an_error_is_no_way_on():
    def checked(n):
        if n:
            raise ValueError(a)
        return n

    code = checked.__code__
    first = next(i for i, step in enumerate(steps(code)) if "_IF_" in step.opname)
    assert [ends_in_error(code, i) for i in outcomes(code, first)] == [True, False]


def test_what_goes_on_behind_an_error_catches_it():
    def goes_on(n):
        try:
            return a(n)
        except ValueError:
            return n

    def cleans_up(n):
        try:
            a(n)
        finally:
            b(n)
        with c():
            a(n)

    assert catches_errors(goes_on.__code__) and not catches_errors(cleans_up.__code__)


def test_steps_of_two_variables_are_two():
    def adds(n, m):
        return n + m

    loaded = [s.argval for s in steps(adds.__code__) if s.opname.startswith("LOAD_FAST")]
    assert loaded == ["n", "m"] and any(s.opname == "RETURN_VALUE" for s in steps(adds.__code__))
    assert len(list(dis.get_instructions(adds.__code__))) >= 3


a = b = c = lambda *given: given


def test_items_are_taken_at_once_or_by_a_variable():
    def takes(n, things):
        k = n + 1
        return things[k], things[n + 2], things[: n + 3], things[n + 4 :], things[:, n + 5], k

    code = takes.__code__
    made = [i for i, step in enumerate(steps(code)) if step.opname == "BINARY_OP"]
    made = [i for i in made if steps(code)[i].argrepr != "[]"]  # of Python 3.14
    found = [takes_by(code, steps(code)[i].offset) for i in made]
    assert [len(places) for places in found] == [1, 1, 1, 1, 0]
    assert len(set(sum(found, ()))) == 4
