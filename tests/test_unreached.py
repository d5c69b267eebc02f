"""Experts that no token of the example goes to."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import fxprune

from .networks import Conditioned
from .oracle import awake, check, difference, run


class Experts(nn.Module):
    def __init__(self):
        super().__init__()
        self.router = nn.Linear(16, 4)
        self.experts = nn.ModuleList([
            nn.Sequential(nn.Linear(16, 24), nn.Sigmoid(), nn.Linear(24, 16)) for _ in range(4)
        ])  # fmt: skip

    def forward(self, x):
        weights, chosen = self.router(x).topk(1)
        out = torch.zeros_like(x)
        for e, expert in enumerate(self.experts):
            token, nth = torch.where(chosen == e)
            if token.numel() == 0:
                continue
            out[token] += weights[token, nth, None] * expert(x[token])
        return out


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.mixed, self.last = nn.Linear(4, 16), Experts(), nn.Linear(16, 3)

    def forward(self, x):
        x = self.first(x)
        return self.last(x + self.mixed(x))


@pytest.mark.parametrize("seed", range(4))
def test_what_an_expert_reads_and_makes_stays_where_the_example_does_not_reach_it(seed):
    generator = torch.Generator().manual_seed(seed)
    x, more = (torch.randn(n, 4, generator=generator, dtype=torch.float64) for n in (2, 300))
    plan, small = check(Net(), x)
    reached = {
        p for p in plan._trace.called if p.startswith("mixed.experts.") and p.count(".") == 2
    }
    assert 0 < len(reached) < 4
    for i, expert in enumerate(small.mixed.experts):
        assert expert[0].out_features == (12 if f"mixed.experts.{i}" in reached else 24)
    assert "the example does not reach mixed.experts" in dict(plan.skipped)["first"]
    assert difference(run(plan.mask(plan._trace.model), more), run(small, more)) < 1e-9


class OneOfSeveralNames(nn.Module):
    """Its code asks how many there are of something, and calls one layer by two names."""

    def __init__(self):
        super().__init__()
        self.up = self.again = nn.Linear(8, 8)
        self.own = nn.Linear(8, 8)

    def forward(self, x):
        y = self.own(x)
        if len(torch.nonzero(y[0] > -100)):
            y = self.again(y.sigmoid()) + self.up(y.cos())
        return y


def test_a_layer_of_several_names_ran_by_each_of_them():
    net = nn.Sequential(nn.Linear(4, 8), nn.Sigmoid(), OneOfSeveralNames(), nn.Linear(8, 3))
    plan, small = check(net, torch.randn(5, 4, dtype=torch.float64))
    assert small[2].up is small[2].again and small[2].up.out_features == 4
    assert small[0].out_features == 4


def test_layers_that_no_code_ever_runs_hold_nothing():
    class Spare(nn.Module):
        def __init__(self):
            super().__init__()
            self.layers = nn.ModuleList([nn.Linear(8, 8) for _ in range(3)])

        def forward(self, x):
            return self.layers[1](self.layers[0](x).sigmoid())

    small = fxprune.prune(awake(Spare()), torch.ones(2, 8, dtype=torch.float64))
    assert small.layers[0].out_features == 4


@pytest.mark.parametrize("how", ["assert", "raise", "number"])
def test_code_that_only_checks_sizes_does_not_choose_between_layers_by_them(how):
    x = torch.randn(2, 5, 4, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    plan, small = check(Conditioned(how), x)
    assert small.a.out_features == 8
