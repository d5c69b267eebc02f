"""Sparsity that grows while a model trains, and penalties that make units die."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import fxprune
from fxprune import mask_methods
from fxprune.errors import SettingError
from fxprune.schedules import MaskScheduler, cubic, linear, one_shot


def test_schedules_begin_and_end_where_they_should():
    for schedule in (linear(0.8, 4), cubic(0.8, 4), linear(0.8, 4, start=0.2, after=2)):
        values = [schedule(i) for i in range(9)]
        assert values == sorted(values) and values[-1] == pytest.approx(0.8)
    assert linear(0.8, 4)(1) == pytest.approx(0.2) and cubic(0.8, 4)(1) == pytest.approx(0.4625)
    assert [one_shot(0.5, at=2)(i) for i in range(4)] == [0, 0, 0.5, 0.5]
    for wrong in (lambda: linear(1.5, 4), lambda: cubic(0.5, 0), lambda: one_shot(-1)):
        with pytest.raises(SettingError):
            wrong()


@pytest.mark.parametrize("together", [False, True])
def test_masks_follow_the_schedule_and_only_grow(together):
    net = nn.Sequential(nn.Linear(10, 20), nn.Linear(20, 10))
    scheduler = MaskScheduler([(m, "weight") for m in net], cubic(0.75, 5), together=together)
    before = torch.zeros(20, 10, dtype=torch.bool)
    for i in range(1, 7):
        assert scheduler.step() == pytest.approx(cubic(0.75, 5)(i), abs=0.005)
        gone = ~fxprune.masks.mask_of(net[0], "weight")
        assert bool((gone | ~before).all())
        before = gone
    other = MaskScheduler([(net[0], "weight")], cubic(0.75, 5))
    other.load_state_dict(scheduler.state_dict())
    assert other.steps == 6 and "step 6" in repr(other)


def test_any_method_can_be_scheduled():
    conv = nn.Conv2d(3, 8, 3)

    def filters(scores, keep, amount):
        return mask_methods.slices_of_norm(scores, keep, amount, 2, 0)

    scheduler = MaskScheduler([(conv, "weight")], linear(0.5, 2), filters)
    scheduler.step()
    scheduler.step()
    dead = (~fxprune.masks.mask_of(conv, "weight")).flatten(1)
    assert dead.all(1).sum() == 4 and bool((dead.all(1) == dead.any(1)).all())


def residual():
    torch.manual_seed(0)

    class Residual(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b = nn.Linear(6, 8), nn.Linear(8, 8)
            self.c = nn.Linear(8, 2)

        def forward(self, x):
            y = torch.relu(self.a(x))
            return self.c(y + torch.relu(self.b(y)))

    return Residual()


def test_the_penalty_is_the_sum_of_norms_over_all_coupled_layers():
    net = residual()
    plan = fxprune.plan(net, torch.randn(2, 6))
    rows = torch.cat([net.a.weight, net.b.weight], 1)
    assert float(plan.penalty(net)) == pytest.approx(float(rows.norm(dim=1).sum()), rel=1e-4)
    plan.penalty(net, grow=4.0).backward()
    assert net.a.weight.grad is not None and net.c.weight.grad is None
    weak, strong = (rows.norm(dim=1).argsort()[i] for i in (0, -1))
    pull = torch.cat([net.a.weight.grad, net.b.weight.grad], 1).norm(dim=1)
    assert float(pull[weak] / pull[strong]) == pytest.approx(16, rel=1e-3)


def test_a_proximal_step_takes_the_same_from_every_norm_and_none_below_zero():
    net = residual()
    plan = fxprune.plan(net, torch.randn(2, 6))
    before = torch.cat([net.a.weight, net.b.weight], 1).norm(dim=1).detach()
    amount = float(before.sort()[0][2:4].mean())
    dead = plan.proximal_step(net, amount)
    after = torch.cat([net.a.weight, net.b.weight], 1).norm(dim=1)
    assert dead == 3 and torch.allclose(after, (before - amount).clamp(min=0), atol=1e-6)
    small = fxprune.compact(net, torch.randn(2, 6))
    assert small.a.out_features == 5
    with pytest.raises(SettingError, match="negative"):
        plan.proximal_step(net, -1)


def test_training_with_the_penalty_kills_units_that_compact_takes_out():
    net = residual()
    x = torch.randn(256, 6)
    y = torch.stack([x[:, 0] * x[:, 1], x[:, 2].abs()], 1)
    plan, rate, weight = fxprune.plan(net, x[:2]), 0.02, 0.13
    optimizer = torch.optim.SGD(net.parameters(), rate)
    first = float((net(x) - y).square().mean())
    for _ in range(400):
        loss = (net(x) - y).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        dead = plan.proximal_step(net, rate * weight)
    assert float(loss) < first and 0 < dead < 8
    small = fxprune.compact(net, x)
    assert small.a.out_features == 8 - dead
    assert float((small(x) - net(x)).abs().max()) < 1e-5
