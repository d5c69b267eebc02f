"""Which conditions of a model's code are checks: the other way is an error.

PYTEST_DONT_REWRITE: the assertions of the functions below are what is looked at.
"""

from __future__ import annotations

import sys

import pytest
import torch
from torch import nn

from fxprune.tracing.assertions import _checked_at, is_check
from fxprune.tracing.record import record

from .oracle import check, difference, run
from .test_constructs import Net
from .test_odd_programs import steps

pytestmark = pytest.mark.filterwarnings("ignore::fxprune.PruningWarning")


class Asked:
    """Notes whether the condition that asks for its truth is a check."""

    def __init__(self, answer):
        self.answer, self.found = answer, None

    def __bool__(self):
        self.found = is_check(sys._getframe(1), self.answer)
        return self.answer


def _recorded(code, asked):
    """What is further out than a function of this name is no model's code."""
    code(asked)


def asserts(a):
    assert a


def asserts_with_words(a):
    assert a, f"{a} is not {sys.version}"


def raises(a):
    if not a:
        raise ValueError(f"{a} has to be {a.answer}")


def raises_else(a):
    if a:
        a.other = 1
    else:
        raise ValueError
    return a


def asserts_both(a):
    assert a and sys.version


@pytest.mark.parametrize("code", [asserts, asserts_with_words, raises, raises_else, asserts_both])
def test_a_condition_that_else_raises_is_a_check(code):
    asked = Asked(True)
    _recorded(code, asked)
    assert asked.found is True


def chooses(a):
    return 1 if a else 2


def returns_early(a):
    if a:
        return 1
    return 2


def loops(a):
    while not a:
        a = Asked(True)


def raises_at_times(a):
    if not a:
        if sys.version:
            raise ValueError
        return 1
    return 2


def goes_on(a):
    try:
        assert a
    except AssertionError:
        return 2
    return 1


def is_caught(a):
    try:
        asserts(a)
    except AssertionError:
        return 2
    return 1


class Counting:
    def __init__(self, a):
        self.asked = a

    def __next__(self):
        if not self.asked:
            raise StopIteration
        return 1


def ends_a_loop(a):
    next(Counting(a))


def keeps(a):
    return bool(a)


@pytest.mark.parametrize(
    "code", [chooses, returns_early, loops, raises_at_times, goes_on, is_caught, ends_a_loop, keeps]
)
def test_a_condition_with_another_way_is_none(code):
    asked = Asked(True)
    _recorded(code, asked)
    assert asked.found is False


def test_a_check_of_values_does_not_keep_code_from_being_written():
    """Multi-scale attention asserts that the sizes of its maps add up to the length."""

    def forward(s, x):
        shapes = torch.as_tensor([(1, 4), (2, 1)])
        assert (shapes[:, 0] * shapes[:, 1]).sum() == x.shape[1]
        y = s.a(x).sigmoid().view(-1, x.shape[1], 2, 4)
        parts = [p.flatten(2) * (i + 1) for i, p in enumerate(y.split([4, 2], 1))]
        return s.head(torch.cat(parts, 1))

    net = Net(forward, a=nn.Linear(8, 8), head=nn.Linear(8, 3))
    plan, small = check(net, steps())
    assert list(plan.code) == [""]


class Maps(nn.Module):
    def __init__(self, how):
        super().__init__()
        self.how, self.a, self.head = how, nn.Linear(8, 8), nn.Linear(8, 3)

    def forward(self, x, shapes):
        y = self.a(x).sigmoid()
        h, w = shapes[0]
        if self.how == "split":
            parts = y.split([h * w, y.shape[1] - h * w], 1)
        elif self.how == "narrow":
            parts = y.narrow(1, 0, h * w), y.narrow(1, h * w, y.shape[1] - h * w)
        elif self.how == "reshape":
            parts = [y.view(-1, y.shape[1], 8).mT.reshape(-1, y.shape[2], w, h).cumsum(2).mean(2)]
            parts = [parts[0].mT]
        else:
            parts = [y.view(-1, y.shape[1], 8)[:, :1].expand(-1, h, -1)]
        return self.head(torch.cat([p * (i + 1) for i, p in enumerate(parts)], 1))


@pytest.mark.parametrize("how", ["split", "narrow", "reshape", "expand"])
def test_sizes_that_tensors_tell_are_those_of_each_run(how):
    plan, small = check(Maps(how), (steps(), torch.tensor([(2, 3 - (how != "reshape"))])))
    again = steps(), torch.tensor([(1, 6) if how == "reshape" else (3, 1)])
    masked = plan.mask(plan._trace.model)
    assert difference(run(masked, again), run(small, again)) < 1e-9


class Halving(nn.Module):
    def forward(self, x):
        if x.shape[1] > 8:
            raise ValueError("too wide")
        return 0.5 * x  # a float: other code stands in for this while a run is recorded


def test_code_is_searched_for_checks_once_however_often_it_is_recorded():
    record(Halving(), torch.ones(2, 3))
    before = _checked_at.cache_info().misses
    trace = record(Halving(), torch.ones(2, 3))
    assert trace.calls[0].questions[0].only_checks
    assert _checked_at.cache_info().misses == before
