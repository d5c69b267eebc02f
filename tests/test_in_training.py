"""What code does in training mode alone: the pruned model does it, too, and can be trained."""

from __future__ import annotations

import types

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import fxprune
from fxprune.tracing.flags import chooses_numbers, hands_mode_on
from fxprune.tracing.record import record_another

from .oracle import awake, check
from .test_constructs import ShuffleDown, ShuffleUnit


def images(n=3):
    return torch.randn(n, 3, 6, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(n))


class Net(nn.Module):
    """Two convolutions; what stands between them in training mode alone is a test's."""

    width = 8

    def __init__(self):
        super().__init__()
        self.a, self.norm = nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8)
        self.b, self.c = nn.Conv2d(8, 6, 3), nn.Linear(6, 4)
        self.size = 8
        self.register_buffer("mean", torch.zeros(8))
        self.extra = nn.Parameter(torch.randn(8, 5))

    def forward(self, x):
        h = self.norm(self.a(x)).sigmoid()
        if self.training:
            h = self.more(h)
        return self.c(self.b(h).mean((2, 3)))


def averaged(net, h):
    net.mean.mul_(0.9).add_(h.detach().mean((0, 2, 3)), alpha=0.1)
    return h


def penalty(net, h):
    w = net.a.weight.flatten(1)
    net.loss = (w @ w.t() - torch.eye(8, dtype=w.dtype)).square().sum()
    return h


def one_is_dropped(net, h):
    h = h.clone()
    h[:, 7] = 0
    return h


MORE = {
    "a literal": lambda net, h: h * torch.full((1, 8, 1, 1), 0.9, dtype=h.dtype),
    "an attribute": lambda net, h: h * torch.full((1, net.size, 1, 1), 0.9, dtype=h.dtype),
    "an attribute of the class": lambda net, h: h.view(len(h), net.width, -1).view(h.shape),
    "halves change places": lambda net, h: h.view(-1, 2, 4, 6, 6).flip(1).reshape(h.shape),
    "a running mean": averaged,
    "a penalty": penalty,
    "a channel": one_is_dropped,
    "another parameter": lambda net, h: h + (h.mean((2, 3)) @ net.extra).sum(),
}


@pytest.mark.parametrize("case", MORE)
def test_what_training_mode_does_with_channels_holds_at_the_new_widths(case):
    net = awake(type("Trained", (Net,), {"more": MORE[case]})())
    plan, small = check(net, images())
    assert small.a.out_channels == 8
    assert "in training mode alone" in dict(plan.skipped)["a"]
    assert small.b.out_channels == 3
    small.train()(images()).sum().backward()


def test_channels_that_meet_in_training_mode_alone_stay():
    def more(self, h):
        return h * (self.a.weight[:6].mean((1, 2, 3)) * self.b.weight.mean((1, 2, 3))).sum()

    plan, small = check(awake(type("Trained", (Net,), {"more": more})()), images())
    assert small.a.out_channels >= 6 and small.b.out_channels == 6
    assert dict(plan.skipped)["b"] == "they meet other channels, in training mode alone"
    small.train()(images()).sum().backward()


def mixed(net, h):
    return h * 0.5 + h.roll(1, 0) * 0.5


def noise(net, h):
    return h + torch.randn_like(h) * h.std((0, 2, 3), keepdim=True)


def whole_channels_are_dropped(net, h):
    return h * torch.bernoulli(torch.full(h.shape[:2], 0.5, dtype=h.dtype))[..., None, None]


def weights_are_dropped(net, h):
    return F.conv2d(h, F.dropout(net.b.weight, 0.5), padding=1).mean() + h


@pytest.mark.parametrize("more", [mixed, noise, whole_channels_are_dropped, weights_are_dropped])
def test_what_training_mode_does_with_any_width_keeps_nothing(more):
    net = awake(type("Trained", (Net,), {"more": more})())
    _, small = check(net, images())
    assert (small.a.out_channels, small.b.out_channels) == (4, 3)
    small.train()(images()).sum().backward()


def test_where_one_line_serves_both_modes_what_is_set_for_one_is_right_for_the_other():
    def forward(self, x):
        h = self.norm(self.a(x)).sigmoid().view(len(x), self.size, 6, 6)
        if self.training:
            h = h + torch.zeros(1, self.size, 1, 1, dtype=h.dtype)
        return self.c(self.b(h).mean((2, 3)))

    plan, small = check(awake(type("Trained", (Net,), {"forward": forward})()), images())
    assert small.a.out_channels == small.size == 4 and not plan.code
    small.train()(images()).sum().backward()


def test_another_share_to_drop_in_training_mode_is_no_other_code():
    def forward(self, x):
        h = F.dropout(self.a(x).sigmoid(), 0.5 if self.training else 0.0)
        return self.c(self.b(h).mean((2, 3)))

    net = awake(type("Trained", (Net,), {"forward": forward})())
    plan = fxprune.plan(net, images())
    assert "training mode" not in str(plan.skipped)
    plan.apply(net).train()(images()).sum().backward()


class Picking(nn.Module):
    """A buffer holds positions of channels: a test says where it is read, in eval mode and in
    training mode."""

    def __init__(self, evaluating, training):
        super().__init__()
        self.a, self.b, self.c = nn.Linear(6, 16), nn.Linear(16, 16), nn.Linear(16, 4)
        self.d = nn.Linear(8, 4)
        self.register_buffer("even", torch.arange(0, 16, 2))
        self.ways = evaluating, training

    def forward(self, x):
        values = {"input": x.repeat(1, 3), "a": self.a(x).relu()}
        values["b"] = self.b(values["a"]).relu()
        way = self.ways[self.training]
        return self.c(values["b"]) + (self.d(values[way][:, self.even]) if way else 0)


@pytest.mark.parametrize(("evaluating", "training", "whole"), [
    ("", "a", ""), ("a", "a", ""), ("a", "input", "a"), ("input", "a", "a"), ("a", "b", "ab"),
])  # fmt: skip
def test_positions_that_training_mode_reads_are_those_of_the_channels_that_are_left(
    evaluating, training, whole, tmp_path
):
    model, x = Picking(evaluating, training), torch.randn(3, 6, dtype=torch.float64)
    plan, _ = check(model, x, shrinks=whole != "ab")
    dropped = fxprune.plan(model, x, bias="drop")
    masked, small = dropped.mask(model).train(), dropped.apply(model)
    assert torch.allclose(masked(x), small.train()(x), rtol=0, atol=1e-9)
    assert sorted(n for n, why in plan.skipped if "used for something else" in why) == [*whole]
    assert torch.equal(small.even, model.even) == bool(whole)
    fxprune.save(small, tmp_path / "small.safetensors")
    again = fxprune.load(awake(Picking(evaluating, training)), tmp_path / "small.safetensors")
    assert torch.equal(again.train()(x), small(x))


def test_channels_that_new_code_puts_in_order_are_in_order_in_training_mode():
    class Shuffled(nn.Sequential):
        def forward(self, x):
            h = super().forward(x)
            return h * h.mean((2, 3), keepdim=True) if self.training else h

    body = Shuffled(ShuffleDown(3, 12), *[ShuffleUnit(12) for _ in range(3)])
    plan, small = check(nn.Sequential(body, nn.Conv2d(12, 4, 1)), images())
    assert small[1].in_channels == 6 and any("take" in code.source for code in plan.code.values())
    small.train()(images()).sum().backward()


def shifted(h):
    """What PyTorch does not know: each channel moves on by one."""
    return torch.from_numpy(h.detach().numpy().take(range(1, h.shape[1] + 1), 1, mode="wrap"))


def test_a_run_of_nodes_means_in_training_mode_what_it_means_in_eval_mode():
    def forward(self, x):
        h = shifted(self.a(x)).sigmoid()
        h = h + 0 if self.training else h
        return self.c(self.b(h).mean((2, 3)))

    def rule(a, call):
        x = call.channels()
        return a.reindex(call, x, 1, torch.arange(1, x.shape[1] + 1) % x.shape[1])

    run = fxprune.pattern(("conv", shifted, "act"), steps={1: rule})
    net = awake(type("Trained", (Net,), {"forward": forward})())
    plan = fxprune.plan(net, images(), patterns=[run])
    assert "training mode" not in str(plan.skipped) and plan.apply(net).a.out_channels == 4


def handed_on(self, x):
    return F.dropout(self.a(x), self.p, training=self.training)


def chosen(self, x):
    return F.dropout(self.a(x), self.p if self.training else 0.0)


def chosen_the_other_way(self, x):
    return F.dropout(self.a(x), p=0.0 if not self.training else self.config.p, training=True)


def tensors_chosen(self, x):
    return self.a(x) * (self.scale if self.training else 1.0)


def branches(self, x):
    return self.a(x) * 2 if self.training else self.a(x)


def both_asked(self, x):
    return F.dropout(self.a(x), self.p if self.training and self.p else 0.0)


def chosen_and_branches(self, x):
    x = x * 2 if self.training else x
    return chosen(self, x)


@pytest.mark.parametrize(("forward", "alone"), [
    (handed_on, True), (chosen, True), (chosen_the_other_way, True), (tensors_chosen, False),
    (branches, False), (both_asked, False), (chosen_and_branches, False),
])  # fmt: skip
def test_code_that_only_chooses_numbers_by_the_mode_is_told_from_its_own_code(forward, alone):
    class Layer(nn.Module):
        p = 0.5

        def __init__(self):
            super().__init__()
            self.a, self.scale = nn.Linear(3, 3), nn.Parameter(torch.ones(3))
            self.config = types.SimpleNamespace(p=0.5)

    Layer.forward = forward
    layer = Layer()
    assert (hands_mode_on(layer) is not None or chooses_numbers(layer)) == alone


def test_a_model_that_does_the_same_in_training_mode_is_not_run_there(monkeypatch):
    class Dropping(nn.Sequential):
        p = 0.5

        def forward(self, x):
            return F.dropout(super().forward(x), self.p if self.training else 0.0)

    def runs(*_, **named):
        raise AssertionError(named)

    net = nn.Sequential(Dropping(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8)), nn.Conv2d(8, 5, 3))
    monkeypatch.setattr("fxprune.tracing.runs.record_another", runs)
    assert fxprune.plan(awake(net), images()).apply(net)[1].in_channels == 4


class Paths(nn.Module):
    """Gives back what it gets in eval mode; ``factor`` is what training mode multiplies it with."""

    def __init__(self, factor, width):
        super().__init__()
        self.factor, self.width, self.p = factor, width, 0.5

    def forward(self, x):
        return x * getattr(self, self.factor)(x) if self.training else x

    def paths(self, x):
        return torch.bernoulli(torch.full((len(x), 1, 1, 1), self.p, dtype=x.dtype))

    def channels(self, x):
        return torch.randn(1, self.width, 1, 1, dtype=x.dtype)


@pytest.mark.parametrize(("factor", "width", "runs"), [
    ("paths", None, False), ("paths", 8, True), ("channels", 8, True),
])  # fmt: skip
def test_what_drops_paths_costs_no_run_unless_it_holds_a_width(factor, width, runs, monkeypatch):
    made = []
    record = fxprune.tracing.runs.record_another
    monkeypatch.setattr(
        "fxprune.tracing.runs.record_another", lambda *a, **k: made.append(k) or record(*a, **k)
    )
    net = nn.Sequential(nn.Conv2d(3, 8, 3), Paths(factor, width), nn.Conv2d(8, 5, 3))
    small = fxprune.plan(awake(net), images()).apply(net)
    assert bool(made) == runs
    assert small[0].out_channels == (8 if factor == "channels" else 4)
    small.train()(images()).sum().backward()


class Left(nn.Module):
    """A part holds a tensor that no run in eval mode uses; what is done by the mode is a test's."""

    def __init__(self):
        super().__init__()
        self.a, self.c, self.scaled = nn.Linear(6, 8), nn.Linear(8, 4), False
        self.part = Part()

    def forward(self, x):
        return self.c(self.handed(self.a(x).sigmoid()))

    def handed(self, h):
        return self.part(h)


class Part(nn.Module):
    def __init__(self):
        super().__init__()
        self.b = nn.Linear(8, 8)
        self.extra = nn.Parameter(torch.randn(8))

    def forward(self, h, noisy=None):
        return self.b(h * self.extra if noisy else h).cos()


class Checkpoints(Left):
    def forward(self, x):
        if self.scaled and self.training:
            x = x * 2
        return super().forward(x)


class Warns(Left):
    """Reads the mode, but not in what runs."""

    def describe(self):
        return f"{self.training}: {self.part.b}"


class Tells(Left):
    def handed(self, h):
        return self.part(h, self.training)


class Takes(Left):
    def handed(self, h):
        h = self.part(h)
        return h * self.part.extra if self.training else h


class Scales(Checkpoints):
    def __init__(self):
        super().__init__()
        self.scaled = True


@pytest.mark.parametrize(
    ("kind", "runs"),
    [(Left, 0), (Warns, 0), (Checkpoints, 0), (Scales, 1), (Tells, 1), (Takes, 1)],
)
def test_a_run_in_training_mode_is_made_where_it_may_tell_something(kind, runs, monkeypatch):
    made = []

    def counted(*args, training=False, **settings):
        made.extend([1] * training)
        return record_another(*args, training=training, **settings)

    monkeypatch.setattr("fxprune.tracing.runs.record_another", counted)
    x = torch.randn(3, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    model = awake(kind())
    small = fxprune.prune(model, x)
    assert len(made) == runs
    small.train()
    small(x).sum().backward()
