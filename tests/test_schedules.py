"""Sparsity that grows while a model trains, and penalties that make units die."""

from __future__ import annotations

import io
import math

import numpy as np
import pytest
import torch
from torch import nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

import fxprune
from fxprune.errors import PlanError, PruningWarning, SettingError
from fxprune.importance import Wanda
from fxprune.masking import methods as mask_methods
from fxprune.schedules import MaskScheduler, PlanScheduler, cubic, linear, one_shot


def test_schedules_begin_and_end_where_they_should():
    for schedule in (linear(0.8, 4), cubic(0.8, 4), linear(0.8, 4, start=0.2, after=2)):
        values = [schedule(i) for i in range(9)]
        assert values == sorted(values) and values[-1] == pytest.approx(0.8)
    assert linear(0.8, 4)(1) == pytest.approx(0.2) and cubic(0.8, 4)(1) == pytest.approx(0.4625)
    assert [one_shot(0.5, at=2)(i) for i in range(4)] == [0, 0, 0.5, 0.5]


@pytest.mark.parametrize("make, words", [
    (lambda: linear(1.5, 4), "sparsity=1.5"), (lambda: linear(None, 3), "sparsity=None"),
    (lambda: cubic("x", 3), "sparsity='x'"), (lambda: cubic(0.5, 0), "steps=0"),
    (lambda: cubic(0.5, "x"), "steps='x'"), (lambda: cubic(0.5, 3, after="x"), "after='x'"),
    (lambda: cubic(0.5, 3, start=2), "start=2"), (lambda: linear(0.5, 3, start=0.9), "than spars"),
    (lambda: one_shot(-1), "sparsity=-1"), (lambda: one_shot(0.5, at=None), "at=None"),
])  # fmt: skip
def test_schedules_say_what_they_cannot_be(make, words):
    with pytest.raises(SettingError, match=words):
        make()


LINEAR = nn.Linear(8, 4, bias=False)


@pytest.mark.parametrize("make, words", [
    (lambda: MaskScheduler(5, linear(0.5, 3)), "parameters=5"),
    (lambda: MaskScheduler([LINEAR], linear(0.5, 3)), "Linear is no pair"),
    (lambda: MaskScheduler([], linear(0.5, 3)), "no parameters"),
    (lambda: MaskScheduler([(LINEAR, "bias")], linear(0.5, 3)), "no parameter or buffer 'bias'"),
    (lambda: MaskScheduler([(LINEAR, "x")], linear(0.5, 3)), "'x'; it has weight"),
    (lambda: MaskScheduler([(LINEAR, "weight")], 0.5), "schedule=0.5 is no function of the step"),
    (lambda: MaskScheduler([(LINEAR, "weight")], linear(0.5, 3), "l1"), "method='l1'"),
    (lambda: MaskScheduler([(LINEAR, "weight")], linear(0.5, 3), together="no"), "together='no'"),
    (lambda: MaskScheduler([(LINEAR, "weight")], lambda: 0.5).step(), "schedule raised TypeError"),
    (lambda: PlanScheduler(conv_net(), IMAGE, [0.1, 0.2]), "schedule=.0.1, 0.2. is no function"),
    (lambda: PlanScheduler(conv_net(), IMAGE, "cubic"), "schedule='cubic' is no function"),
    (lambda: PlanScheduler(conv_net(), IMAGE, lambda step: None).step(), "sparsity=None"),
    (lambda: PlanScheduler(conv_net(), IMAGE, lambda step: math.nan).step(), "sparsity=nan"),
    (lambda: PlanScheduler(conv_net(), IMAGE, linear(0.5, 3), target=fxprune.Target(params=0.5)),
     "target: the schedule says how many units go"),
])  # fmt: skip
def test_what_a_scheduler_cannot_take_is_said_by_name(make, words):
    with pytest.raises(SettingError, match=words):
        make()


@pytest.mark.parametrize("make", [
    lambda schedule: MaskScheduler([(nn.Linear(10, 10), "weight")], schedule),
    lambda schedule: PlanScheduler(conv_net(), IMAGE, schedule),
    lambda schedule: fxprune.Pruner(conv_net(), IMAGE, schedule=schedule),
])  # fmt: skip
def test_a_schedule_that_falls_is_told_once(make):
    scheduler = make(lambda step: {1: 0.5, 5: 0.75}.get(step, 0.25))
    first = scheduler.step()
    with pytest.warns(PruningWarning, match="0.25 at step 2, and for 0.5 before") as told:
        assert [scheduler.step() for _ in range(3)] == [first] * 3 and scheduler.step() > first
    assert len([w for w in told if "before" in str(w.message)]) == 1


def test_a_schedule_that_stays_but_for_rounding_falls_nowhere(recwarn):
    scheduler = fxprune.Pruner(conv_net(), IMAGE, schedule=[0.1 + 0.2, 0.3])
    assert scheduler.step() == scheduler.step()
    scheduler = MaskScheduler(
        [(nn.Linear(10, 10), "weight")], lambda step: 0.3 + 1e-16 * (3 - step)
    )
    assert scheduler.step() == scheduler.step()
    assert not [w for w in recwarn if w.category is PruningWarning]


@pytest.mark.parametrize("state", [
    {}, None, {"steps": -3}, {"steps": "x"}, {"masks": None}, {"gone": {"a": 3}},
    {"masks": {"x.weight": torch.ones(2)}}, {"masks": {"0.weight": torch.ones(2)}},
])  # fmt: skip
def test_a_state_that_is_none_is_refused_and_nothing_changes(state):
    net = conv_net()
    of_plans = PlanScheduler(net, IMAGE, linear(0.5, 3))
    of_masks = MaskScheduler([(net[0], "weight")], linear(0.5, 3))
    for scheduler in (of_plans, *([of_masks] if not state or "steps" in state else [])):
        wrong = scheduler.state_dict() | {"steps": 1} | state if state else state
        with pytest.raises(PlanError, match="state"):
            scheduler.load_state_dict(wrong)
        assert scheduler.steps == 0 and not fxprune.masks.is_pruned(net)


def test_units_go_by_the_importance_of_their_group_at_each_step():
    """A criterion for one group, scores for another, and what is usual for the rest."""
    net = nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 8),
                        nn.ReLU(), nn.Linear(8, 4)).double()  # fmt: skip
    x = torch.randn(3, 6, dtype=torch.float64)
    scores = {"0": lambda group: -np.arange(8.0), "2": torch.arange(8)}
    scheduler = PlanScheduler(net, x, linear(0.5, 2), importance=scores)
    assert [scheduler.step(), scheduler.step()] == [0.25, 0.5]
    removed = {group.name: group.removed.tolist() for group in scheduler.plan.groups}
    assert removed["0"] == [4, 5, 6, 7] and removed["2"] == [0, 1, 2, 3] and len(removed["4"]) == 4
    assert torch.allclose(scheduler.plan.apply(net)(x), net(x))


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
    with pytest.raises(SettingError, match="no number from 0 on"):
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


def conv_net():
    torch.manual_seed(0)
    net = nn.Sequential(
        nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8), nn.SiLU(), nn.Conv2d(8, 12, 3), nn.SiLU(),
        nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(12, 4),
    ).double()  # fmt: skip
    with torch.no_grad():
        for p in net.parameters():
            p.add_(0.3 * torch.randn_like(p))
    return net.eval()


IMAGE = torch.randn(2, 3, 9, 9, dtype=torch.float64, generator=torch.Generator().manual_seed(1))


def train(net, optimizer, images):
    net.train()
    optimizer.zero_grad()
    (net(images) - 1).square().mean().backward()
    optimizer.step()
    net.eval()


def test_units_go_step_by_step_while_the_model_trains():
    net = conv_net()
    weights = [net[0].weight, net[3].weight]
    optimizer = torch.optim.AdamW(net.parameters(), lr=0.05)
    scheduler = PlanScheduler(net, IMAGE, linear(0.5, 4))
    gone = torch.zeros(12, dtype=torch.bool)
    for i in range(1, 5):
        for _ in range(3):
            train(net, optimizer, IMAGE)
        assert scheduler.step() == pytest.approx(linear(0.5, 4)(i), abs=0.06)
        now = (net[3].weight == 0).flatten(1).all(1)
        assert bool((now | ~gone).all()) and int(now.sum()) == 12 * i // 8
        gone = now
    assert [net[0].parametrizations.weight.original, net[3].parametrizations.weight.original] == (
        weights
    )
    wanted = net(IMAGE)
    assert torch.allclose(fxprune.compact(net, IMAGE)(IMAGE), wanted, rtol=0, atol=1e-9)
    small = scheduler.plan.apply(net)
    assert small[0].out_channels == 4 and small[3].out_channels == 6
    assert torch.allclose(small(IMAGE), wanted, rtol=0, atol=1e-9)


def by_name(net):
    """Parameters under the names that they have without masks."""
    return {
        name.replace("parametrizations.", "").replace(".original", ""): p.detach()
        for name, p in net.named_parameters()
    }


@pytest.mark.parametrize("resumed", [False, True])
def test_averages_get_the_masks_though_these_change_the_order_of_parameters(resumed):
    net = conv_net()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.05)
    average = AveragedModel(net, multi_avg_fn=get_ema_multi_avg_fn(0.9))
    scheduler = PlanScheduler(net, IMAGE, linear(0.5, 2), also=average)
    average.update_parameters(net)
    for _ in range(3):
        train(net, optimizer, IMAGE)
        before, now = by_name(average.module), by_name(net)
        wanted = {name: torch.lerp(before[name], now[name], 0.1) for name in now}
        average.update_parameters(net)
        found = by_name(average.module)
        assert found.keys() == wanted.keys()
        assert all(torch.allclose(found[name], wanted[name]) for name in wanted)
        scheduler.step()
    if resumed:
        states = [scheduler.state_dict(), average.state_dict()]
        average = AveragedModel(conv_net(), multi_avg_fn=get_ema_multi_avg_fn(0.9))
        scheduler = PlanScheduler(conv_net(), IMAGE, linear(0.5, 2), also=average)
        scheduler.load_state_dict(states[0])
        average.load_state_dict(states[1])
    small = scheduler.plan.apply(average.module)
    assert small[3].out_channels == 6
    assert torch.allclose(small(IMAGE), average.module(IMAGE), rtol=0, atol=1e-9)


def test_where_groups_compete_what_is_masked_stays_masked_too():
    net = conv_net()
    scheduler = PlanScheduler(net, IMAGE, linear(0.5, 3), scope="global")
    gone = {}
    for share in (1 / 6, 1 / 3, 1 / 2):
        assert scheduler.step() == pytest.approx(share, abs=0.06)
        now = {g.name: set(g.removed.tolist()) for g in scheduler.plan.groups}
        assert all(units <= now[name] for name, units in gone.items())
        gone = now
        with torch.no_grad():
            for i, p in enumerate(net.parameters()):
                p.mul_(10.0 ** (i % 5 - 2))  # other groups are the weak ones from now on


def test_a_plan_schedule_goes_on_in_another_process():
    net, other = conv_net(), conv_net()
    settings = {"importance": "random", "ignore": "0"}
    first = PlanScheduler(net, IMAGE, cubic(0.5, 4), **settings)
    first.step()
    first.step()
    with torch.no_grad():
        for p in net.parameters():
            p.add_(0.1 * torch.randn_like(p))
    second = PlanScheduler(other, IMAGE, cubic(0.5, 4), **settings)
    second.load_state_dict(torch.load(_saved(first.state_dict()), weights_only=True))
    other.load_state_dict(net.state_dict())
    assert torch.equal(net(IMAGE), other(IMAGE)) and "step 2" in repr(second)
    assert first.step() == second.step() and torch.equal(net(IMAGE), other(IMAGE))


def test_masks_of_a_schedule_go_on_in_another_process():
    nets = [nn.Linear(10, 20) for _ in range(2)]
    first, second = (MaskScheduler([(net, "weight")], cubic(0.5, 4)) for net in nets)
    first.step()
    second.load_state_dict(first.state_dict())
    nets[1].load_state_dict(nets[0].state_dict())
    assert first.step() == second.step() and torch.equal(nets[0].weight, nets[1].weight)


def _saved(state):
    file = io.BytesIO()
    torch.save(state, file)
    file.seek(0)
    return file


def test_what_a_plan_schedule_cannot_take_is_said():
    with pytest.raises(SettingError, match="the schedule says"):
        PlanScheduler(conv_net(), IMAGE, linear(0.5, 4), sparsity=0.5)
    with pytest.raises(SettingError, match="batches of Wanda are an iterator"):
        PlanScheduler(conv_net(), IMAGE, linear(0.5, 4), importance=Wanda(iter([IMAGE])))
    with pytest.raises(SettingError, match="chooses by calibration="):
        PlanScheduler(conv_net(), IMAGE, linear(0.5, 4), importance="reconstruction")
    with pytest.raises(SettingError, match="not in"):
        PlanScheduler(conv_net(), IMAGE, lambda step: 2.0).step()
    scheduler = PlanScheduler(conv_net(), IMAGE, linear(0.5, 4, after=2))
    assert scheduler.step() == 0.0 and scheduler.plan is None


@pytest.mark.parametrize("settings", [
    lambda layer: {"ignore": [layer]}, lambda layer: {"min_width": {layer: 1.0}}])  # fmt: skip
def test_modules_are_named_by_themselves_though_each_step_plans_on_a_copy(settings):
    net = conv_net()
    name, layer = next((n, m) for n, m in net.named_modules() if isinstance(m, nn.Conv2d))
    scheduler = PlanScheduler(net, IMAGE, lambda step: 0.5, **settings(layer))
    scheduler.step()
    group = next(g for g in scheduler.plan.groups if g.name == name)
    assert not len(group.removed) and any(len(g.removed) for g in scheduler.plan.groups)
