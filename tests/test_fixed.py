"""What another run may do otherwise is not folded: pruned is masked on inputs of other sizes."""

from __future__ import annotations

import functools
import operator

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import fxprune

from .oracle import awake, check, difference, run

pytestmark = pytest.mark.filterwarnings("ignore::fxprune.PruningWarning")


class Gate(nn.Module):
    """A module whose forward is a function of what it gets."""

    def __init__(self, function):
        super().__init__()
        self.function = function

    def forward(self, h):
        return self.function(h)


def returns_early(h):
    if len(h) > 2:
        return h
    return h.sin()


def either(h):
    return h if len(h) > 2 else h.cos()


def of_two(h):
    g = h.sin()
    return h if len(h) > 2 else g


def negates(h):
    out = h
    if len(h) <= 2:
        out = -h
    return out


def swaps(h):
    a, b = h, h.sin()
    if len(h) <= 2:
        a, b = b, a
    return a


def by_a_flag(h):
    flag = True
    if len(h) <= 2:
        flag = False
    if flag:
        return h
    return h.sin()


def by_a_number(h):
    at = 0
    if len(h) <= 2:
        at = 1
    return [h, h.sin()][at]


def doubles_in_place(h):
    if len(h) <= 2:
        h.mul_(2.0)
    return h


def short_circuit(h):
    _ = len(h) > 2 or h.mul_(2.0)
    return h


def until_four(h):
    n = len(h)
    while n < 4:
        h, n = h.sin(), n + 1
    return h


def goes_on(h):
    for i in range(4):
        if i < len(h):
            continue
        h = h.sin()
    return h


def last_of(h):
    parts = [h]
    if len(h) <= 2:
        parts.append(h.sin())
    return parts[-1]


def pads(h):
    return F.pad(h, (0, 0, 0, len(h) % 2))


def strict(h):
    if len(h) <= 2:
        raise ValueError
    return h


def caught(h):
    try:
        return strict(h)
    except ValueError:
        return h.sin()


def one_in_a_list(h):
    return [h, h.sin(), h.cos()][len(h) % 3]


def one_by_a_variable(h):
    n, _ = h.shape
    return (torch.sin, torch.cos, torch.exp, torch.tan)[-(n // 2)](h)


def the_last_of_a_part(h):
    return (h, h.sin(), h.cos(), h.tan())[: h.size(0)][-1]


def a_number_in_a_list(h):
    return h * [0.5, 2.0][h.shape[0] % 2]


def a_product_over_a_list(h):
    return h * functools.reduce(operator.mul, [1.5] * len(h))


def a_letter(h):
    return h if "abcdefghi"[len(h)] == "e" else h.sin()


def without_a_rest(h):
    return h if (len(h) / 4).is_integer() else h.sin()


def a_row(h):
    return h + h[len(h) - 1]


WAYS = [returns_early, either, of_two, negates, swaps, by_a_flag, by_a_number, doubles_in_place,
        short_circuit, until_four, goes_on, last_of, pads, caught, one_in_a_list,
        one_by_a_variable, the_last_of_a_part, a_number_in_a_list, a_product_over_a_list, a_letter,
        without_a_rest, a_row]  # fmt: skip


class Net(nn.Module):
    def __init__(self, forward, **modules):
        super().__init__()
        self.a, self.c, self.run = nn.Linear(6, 8), nn.Linear(8, 3), forward
        for name, module in modules.items():
            self.add_module(name, module)

    def forward(self, x):
        return self.run(self, x)


def same_at_other_sizes(net: nn.Module) -> int:
    """Returns how many biases take something in."""
    net = awake(net)
    x = torch.randn(4, 6, generator=torch.Generator().manual_seed(3), dtype=torch.float64)
    plan = fxprune.plan(net, x, sparsity=0.5, bias="propagate")
    masked, small = plan.mask(net), plan.apply(net)
    for other in (x, x[:2], x[:1], x[:3], torch.cat([x, x])):
        assert difference(run(masked, other), run(small, other)) <= 1e-9
    return len(plan.folds(net).shifts)


@pytest.mark.parametrize("way", WAYS, ids=lambda f: f.__name__)
def test_what_a_module_gives_back_by_a_size_is_not_folded(way):
    same_at_other_sizes(Net(lambda s, x: s.c(s.gate(s.a(x).sigmoid())), gate=Gate(way)))


@pytest.mark.parametrize("way", WAYS, ids=lambda f: f.__name__)
def test_what_a_helper_gives_back_by_a_size_is_not_folded(way):
    same_at_other_sizes(Net(lambda s, x: s.c(way(s.a(x).sigmoid()))))


def reads_again(s, x):
    h = s.a(x).sigmoid()
    y = s.c(h)
    if len(x) <= 2:
        y = s.c(h.sin())
    return y


def asks_a_module(s, x):
    h = s.a(x).sigmoid()
    if not s.big(x):
        h = h.sin()
    return s.c(h)


def adds_a_size(s, x):
    return s.c(s.a(x).relu() + (len(x) - 4))


@pytest.mark.parametrize("forward", [reads_again, asks_a_module, adds_a_size])
def test_what_code_itself_does_by_a_size_is_not_folded(forward):
    same_at_other_sizes(Net(forward, big=Gate(lambda x: len(x) > 2)))


def test_a_layer_that_nothing_decides_over_is_folded_beside_such_code():
    def forward(s, x):
        return s.c(s.b(s.gate(s.a(x).sigmoid())).sigmoid())

    assert same_at_other_sizes(Net(forward, b=nn.Linear(8, 8), gate=Gate(returns_early))) == 1


def test_a_pad_of_numbers_in_the_code_is_sure():
    net = Net(lambda s, x: s.c(F.pad(s.a(x).sigmoid(), (2, 2, 0, 0))[:, 2:-2]))
    assert same_at_other_sizes(net) == 1


def test_a_row_that_is_taken_by_a_size_is_no_doubt():
    def forward(s, x):
        h = s.a(x).sigmoid()
        n, (rows, *_) = len(x), x.shape[:1]
        return s.c(h + h[n - 1] + h[:rows].mean(0))

    assert same_at_other_sizes(Net(forward)) == 1


class NormThenLayer(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.layer = nn.LayerNorm(8), nn.Linear(8, 8)

    def forward(self, h):
        return self.layer(self.norm(h))


def test_what_a_norm_said_before_a_size_was_asked_is_what_the_proof_goes_by():
    """Behind ``if len(h) …`` nothing before is sure to be the same; a layer within had read it."""

    def forward(s, x):
        h = s.block(s.a(x))
        if len(h) > 100:
            h = h.sin()
        return s.c(h)

    net = Net(forward, block=NormThenLayer())
    plan, _ = check(net, torch.randn(4, 6, dtype=torch.float64))
    assert [name for name, _ in plan.notes] == ["c"]
    fxprune.prune(awake(net), torch.randn(4, 6, dtype=torch.float64), sparsity=0.5)
