"""bias="expected": what removed channels said in the mean goes into the layers behind them, in the
pruned model and in the masked one alike."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import fxprune
from fxprune.proving.proof import prove
from fxprune.relating.moments import DRAWS, normal_points
from fxprune.schedules import PlanScheduler, linear

from .oracle import awake, difference, masked_equals_pruned, run
from .test_trace import Net

X = torch.randn(2, 3, 12, 12, dtype=torch.float64, generator=torch.Generator().manual_seed(1))


def mean_of(function, mean, deviation):
    """E[function(z)] of a normal z, by the trapezoidal rule."""
    z = torch.linspace(-8, 8, 4001, dtype=torch.float64)
    density = torch.exp(-z.square() / 2) / math.sqrt(2 * math.pi)
    return torch.trapezoid(function(mean[:, None] + deviation[:, None] * z) * density, z)


def said(norm):
    return norm.bias.detach(), norm.weight.detach().abs()


def gone(plan, name="0"):
    return next(g.removed for g in plan.groups if g.name == name)


def sequential(act, **norm):
    torch.manual_seed(0)
    return awake(
        nn.Sequential(
            nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8, **norm), act, nn.Conv2d(8, 4, 3), nn.ReLU(),
            nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(4, 3),
        )
    )  # fmt: skip


def added(model, plan, small, layer):
    """What the removed channels add to the outputs of a layer that is kept whole."""
    return small.get_submodule(layer).bias.detach() - model.get_submodule(layer).bias.detach()


@pytest.mark.parametrize(
    "act",
    [nn.ReLU(), nn.GELU(), nn.SiLU(), nn.Hardswish(), nn.ELU(), nn.Sigmoid(), nn.ReLU6()],
    ids=lambda act: type(act).__name__,
)
def test_the_mean_of_an_activation_is_that_of_a_normal_variable(act):
    model = sequential(act)
    plan = fxprune.plan(model, X, sparsity={"0": 0.5}, bias="expected")
    mean, deviation = said(model[1])
    if isinstance(act, nn.ReLU):  # in closed form
        normal = torch.distributions.Normal(0.0, 1.0)
        ratio = mean / deviation
        wanted = mean * normal.cdf(ratio) + deviation * torch.exp(normal.log_prob(ratio))
    else:
        wanted = mean_of(act, mean, deviation)
    weight = model[3].weight.detach().sum((2, 3))[:, gone(plan)]
    found = added(model, plan, plan.apply(model), "3")
    off = (found - weight @ wanted[gone(plan)]).abs()
    assert (off <= 0.01 * weight.abs() @ deviation[gone(plan)]).all()
    propagated = fxprune.plan(model, X, sparsity={"0": 0.5}, bias="propagate")
    plain = added(model, plan, propagated.apply(model), "3")
    assert off.sum() < 0.2 * (plain - weight @ wanted[gone(plan)]).abs().sum()


def test_branches_of_a_sum_count_as_independent():
    torch.manual_seed(0)
    model = awake(
        Net(
            lambda s, x: s.last(F.relu(s.one(s.a(x)) + s.two(s.b(x)))),
            a=nn.Conv2d(3, 32, 3), one=nn.BatchNorm2d(32), b=nn.Conv2d(3, 32, 3),
            two=nn.BatchNorm2d(32), last=nn.Conv2d(32, 4, 1),
        )
    )  # fmt: skip
    plan = fxprune.plan(model, X, bias="expected")
    (means, deviations) = (
        torch.stack(s) for s in zip(said(model.one), said(model.two), strict=True)
    )
    mean, deviation = means.sum(0), deviations.square().sum(0).sqrt()
    wanted = mean_of(F.relu, mean, deviation)
    removed = gone(plan, "a")
    read = next(read for read in plan.constants(model).reads if read.axis.name == "last.weight")
    assert read.mean is None  # asked for when they are folded
    weight = model.last.weight.detach().sum((2, 3))[:, removed]
    found = added(model, plan, plan.apply(model), "last")
    off = found - weight @ wanted[removed]
    assert off.abs().mean() <= 0.05 * (weight.abs() @ deviation[removed]).mean()


def test_the_points_have_the_moments_of_a_normal_variable_and_relu_is_nearly_exact():
    points = normal_points(DRAWS)
    assert abs(points.mean()) < 1e-12 and 0.97 < points.square().mean() < 1
    assert abs(points.clamp(min=0).mean() - 1 / math.sqrt(2 * math.pi)) < 1e-12


def test_without_activation_the_mean_is_what_the_mask_says_and_is_folded_as_ever():
    model = awake(
        nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.Conv2d(8, 4, 3), nn.ReLU())
    )
    plans = [fxprune.plan(model, X, bias=bias) for bias in ("expected", "propagate")]
    assert difference(*(run(plan.apply(model), X) for plan in plans)) < 1e-12
    assert not plans[0]._folds.dropped


def test_a_norm_without_weights_has_mean_0_and_deviation_1():
    model = sequential(nn.ReLU(), affine=False)
    plan = fxprune.plan(model, X, sparsity={"0": 0.5}, bias="expected")
    masked_equals_pruned(plan, model, plan.apply(model), X)
    weight = model[3].weight.detach().sum((2, 3))[:, gone(plan)]
    found = added(model, plan, plan.apply(model), "3")
    assert torch.allclose(found, weight.sum(1) / math.sqrt(2 * math.pi), atol=1e-2)


def test_a_model_without_norms_is_pruned_as_by_propagate():
    model = awake(nn.Sequential(nn.Conv2d(3, 8, 3), nn.Sigmoid(), nn.Conv2d(8, 4, 3)))
    results = [run(fxprune.prune(model, X, bias=b), X) for b in ("expected", "propagate")]
    assert difference(*results) == 0


def test_a_norm_behind_scales_what_is_left_to_predict_the_whole():
    torch.manual_seed(0)
    model = awake(
        nn.Sequential(
            nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Conv2d(8, 6, 3, groups=2),
            nn.BatchNorm2d(6), nn.ReLU(), nn.Conv2d(6, 2, 1),
        )
    )  # fmt: skip
    mean, deviation = said(model[1])
    one = mean_of(F.relu, mean, deviation)
    varies = mean_of(lambda t: F.relu(t).square(), mean, deviation) - one.square()
    energy = model[3].weight.detach().square().sum((2, 3)).reshape(2, 3, 4)  # groups, out, in
    share = energy * varies.reshape(2, 1, 4)
    alone = share.sum(2).reshape(-1)
    with torch.no_grad():  # of the last three outputs no more is measured than of independent ones
        model[4].running_var.copy_(alone * torch.tensor([1.5, 3.0, 9.0, 1.0, 0.6, 0.1]))
    plan = fxprune.plan(model, X, sparsity={"0": 0.5}, bias="expected")
    stays = torch.ones(8, dtype=torch.float64).index_fill_(0, gone(plan), 0.0).reshape(2, 1, 4)
    q = (share * stays).sum(2).reshape(-1) / alone
    common = (model[4].running_var - alone).clamp(min=0)
    factor = (alone + common) / (q * common + alone)
    for result in (plan.apply(model), plan.mask(model)):
        found = model[4].running_var / result[4].running_var
        assert torch.allclose(found, factor.square(), rtol=0.05)
        assert (found[:3] > 1.01).all() and torch.allclose(found[4:], torch.ones(2).double())
    again = plan.apply(plan.mask(model))
    assert torch.equal(again[4].running_var, plan.mask(model)[4].running_var)


@pytest.mark.parametrize("loudness", [0.0, 1.5])
def test_what_channels_have_in_common_is_told_by_those_that_stay(loudness):
    """On inputs whose channels vary alike, or not at all alike: then nothing is multiplied."""
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Linear(64, 64, bias=False), nn.BatchNorm1d(64), nn.ReLU(), nn.Linear(64, 32),
        nn.BatchNorm1d(32), nn.Identity(), nn.Linear(32, 2),
    ).double()  # fmt: skip
    nn.init.orthogonal_(model[0].weight)
    with torch.no_grad():
        model[1].weight.uniform_(0.5, 2)
        model[1].bias.normal_()
        common = model[0].weight.sum(0, keepdim=True)  # which each channel hears equally
        data = torch.randn(4096, 64, dtype=torch.float64)
        data += loudness * torch.randn(4096, 1, dtype=torch.float64) * common
        if loudness:
            model[3].weight.abs_()
    for _ in range(200):
        model.train()(data)
    model.eval()
    whole, error = model[:5](data).detach(), {}
    for bias in ("expected", "propagate"):
        small = fxprune.prune(model, data[:2], sparsity={"0": 0.5}, bias=bias)
        error[bias] = float((small[:5](data).detach() - whole).square().mean() / whole.var())
        spread = float((small[:5](data).detach().std(0) / whole.std(0)).mean())
        assert spread < 1.2
    assert error["expected"] < (0.5 if loudness else 1.01) * error["propagate"]


# -- the masked model says the same -------------------------------------------------------------


def conv_norm(i, o, act=nn.SiLU, **settings):
    kernel = settings.pop("kernel", 3)
    return nn.Sequential(nn.Conv2d(i, o, kernel, **settings), nn.BatchNorm2d(o), act())


def padded():
    return nn.Sequential(conv_norm(3, 8, padding=1), conv_norm(8, 6, padding=1), nn.Conv2d(6, 4, 1))


def pooled_and_flattened():
    return nn.Sequential(
        conv_norm(3, 8), nn.MaxPool2d(2), conv_norm(8, 6, nn.GELU), nn.AvgPool2d(2), nn.Flatten(),
        nn.Linear(6, 5), nn.BatchNorm1d(5), nn.ReLU(), nn.Linear(5, 2),
    )  # fmt: skip


def depthwise():
    return nn.Sequential(
        conv_norm(3, 8), conv_norm(8, 8, nn.ReLU6, groups=8, padding=1), conv_norm(8, 12, kernel=1),
        conv_norm(12, 24, groups=12), conv_norm(24, 6, kernel=1, bias=False), nn.Conv2d(6, 2, 1),
    )  # fmt: skip


def residual():
    def forward(s, x):
        x = s.stem(x)
        for block in s.blocks:
            x = F.relu(x + block(x))
        return s.last(x.mean((2, 3)))

    def block():
        return nn.Sequential(conv_norm(8, 6, padding=1), nn.Conv2d(6, 8, 1), nn.BatchNorm2d(8))

    return Net(forward, stem=conv_norm(3, 8), last=nn.Linear(8, 2),
               blocks=nn.ModuleList([block(), block()]))  # fmt: skip


def concatenated():
    def forward(s, x):
        y = torch.cat([s.a(x), s.b(x), torch.sigmoid(s.c(x))], 1)
        b, c, h, w = y.shape
        y = y.view(b, 2, c // 2, h, w).transpose(1, 2).reshape(b, c, h, w)
        return s.last(F.pad(y, (1, 1, 1, 1)))

    return Net(forward, a=conv_norm(3, 4), b=conv_norm(3, 4), c=nn.Conv2d(3, 4, 3),
               last=nn.Conv2d(12, 3, 3))  # fmt: skip


def gated():
    def forward(s, x):
        x = s.stem(x)
        return s.last(x * torch.sigmoid(s.up(F.relu(s.down(x.mean((2, 3), keepdim=True))))))

    return Net(forward, stem=conv_norm(3, 8), down=conv_norm(8, 4, kernel=1),
               up=nn.Conv2d(4, 8, 1), last=nn.Conv2d(8, 2, 1))  # fmt: skip


def transposed():
    return nn.Sequential(
        conv_norm(3, 8), nn.ConvTranspose2d(8, 6, 2, stride=2), nn.BatchNorm2d(6), nn.ReLU(),
        nn.ConvTranspose2d(6, 4, 3, padding=1), nn.PReLU(4), conv_norm(4, 4, groups=2),
        nn.Upsample(scale_factor=2), nn.Conv2d(4, 2, 1),
    )  # fmt: skip


def functional():
    def forward(s, x):
        y = F.batch_norm(s.conv(x), s.mean, s.var, s.weight, s.bias)
        return s.last(F.instance_norm(F.silu(y)).relu())

    weight, bias = (nn.Parameter(torch.rand(8) + 0.5) for _ in range(2))
    model = Net(forward, conv=nn.Conv2d(3, 8, 3), weight=weight, bias=bias,
                last=nn.Conv2d(8, 2, 3, padding=1))  # fmt: skip
    model.register_buffer("mean", torch.randn(8))
    model.register_buffer("var", torch.rand(8) + 0.5)
    return model


def called_twice():
    def forward(s, x):
        y = s.two(s.one(x))
        return s.last(s.two(y))

    return Net(forward, one=conv_norm(3, 6), two=conv_norm(6, 6, padding=1),
               last=nn.Conv2d(6, 2, 1))  # fmt: skip


def recurrent():
    def forward(s, x):
        y = s.features(x).mean(3).transpose(1, 2)
        return s.last(s.lstm(y)[0])

    return Net(forward, features=conv_norm(3, 6), last=nn.Linear(8, 2),
               lstm=nn.LSTM(6, 4, batch_first=True, bidirectional=True))  # fmt: skip


def attending():
    def forward(s, x):
        y = s.features(x).flatten(2).transpose(1, 2)
        return s.last(s.attention(y, y, y, need_weights=False)[0])

    return Net(forward, features=conv_norm(3, 8), last=nn.Linear(8, 2),
               attention=nn.MultiheadAttention(8, 2, batch_first=True))  # fmt: skip


def one_dimension():
    return Net(
        lambda s, x: s.last(s.body(x.mean(3))), last=nn.Conv1d(6, 2, 3, bias=False),
        body=nn.Sequential(nn.Conv1d(3, 8, 3, bias=False), nn.BatchNorm1d(8), nn.Tanh(),
                           nn.Conv1d(8, 6, 3, bias=False), nn.InstanceNorm1d(6, affine=True),
                           nn.ELU()),
    )  # fmt: skip


NETS = [padded, pooled_and_flattened, depthwise, residual, concatenated, gated, transposed,
        functional, called_twice, recurrent, attending, one_dimension]  # fmt: skip


@pytest.mark.parametrize("build", NETS, ids=lambda build: build.__name__)
@pytest.mark.parametrize("sparsity", [0.3, 0.6])
def test_masked_equals_pruned(build, sparsity):
    torch.manual_seed(0)
    model = awake(build())
    plan = fxprune.plan(model, X, sparsity=sparsity, bias="expected")
    small, masked = plan.apply(model), plan.mask(model)
    masked_equals_pruned(plan, model, small, X)
    assert prove(plan, model, small, X) <= 1e-9
    assert difference(run(plan.apply(masked), X), run(small, X)) <= 1e-9
    plain = fxprune.plan(model, X, sparsity=sparsity, bias="propagate")
    assert [g.removed.tolist() for g in plan.groups] == [g.removed.tolist() for g in plain.groups]
    assert plan._folds.shifts
    assert difference(run(plain.apply(model), X), run(small, X)) > 1e-6


class Said(nn.Module):
    """An activation whose removed channels say one number each."""

    def __init__(self, act, removed, value):
        super().__init__()
        self.act, self.removed, self.value = act, removed, value

    def forward(self, x):
        y = self.act(x).clone()
        y[:, self.removed] = self.value[self.removed].view(-1, *[1] * (y.dim() - 2))
        return y


def test_the_pruned_model_is_the_model_whose_removed_channels_say_their_mean():
    """Shares no code with the folds."""
    model = sequential(nn.SiLU())
    plan = fxprune.plan(model, X, sparsity={"0": 0.5}, bias="expected")
    small = plan.apply(model)
    wanted = mean_of(F.silu, *said(model[1]))
    model[2] = Said(model[2], gone(plan), wanted)
    assert difference(run(model, X), run(small, X)) < 2e-3


# -- with other settings ------------------------------------------------------------------------


def test_it_is_the_default_but_where_a_carrier_emits_what_a_mask_leaves():
    model = sequential(nn.ReLU())
    assert fxprune.plan(model, X).settings.bias == "expected"
    assert fxprune.plan(model, X, exact=True).settings.bias == "propagate"
    assert fxprune.plan(model, X, bias="drop", exact=True).settings.bias == "drop"


def test_masks_put_on_in_training_move_no_constant():
    torch.manual_seed(0)
    model = awake(residual())
    scheduler = PlanScheduler(model, X, linear(0.5, 3))
    optimizer = torch.optim.SGD(model.parameters(), 0.01)
    for _ in range(3):
        model.train()
        optimizer.zero_grad()
        model(X).square().mean().backward()
        optimizer.step()
        model.eval()
        before = {name: b.clone() for name, b in model.named_buffers() if "running" in name}
        scheduler.step()
        after = dict(model.named_buffers())
        assert all(torch.equal(after[name], b) for name, b in before.items())
        assert scheduler.plan.settings.bias == "propagate"
        small = scheduler.plan.apply(model)
        masked_equals_pruned(scheduler.plan, model, small, X)


def test_a_mask_is_put_on_once_whatever_is_planned_again():
    """Means that are in a masked model's biases are not folded a second time."""
    torch.manual_seed(0)
    model = awake(residual())
    plan = fxprune.plan(model, X)
    once = plan.mask(model)
    twice = plan.mask(once)
    assert difference(run(once, X), run(twice, X)) <= 1e-12
    assert difference(run(once, X), run(plan.apply(twice), X)) <= 1e-9


def test_exact_is_refused_with_why():
    with pytest.raises(fxprune.SettingError, match=r"in the mean.*exact=False"):
        fxprune.plan(awake(padded()), X, bias="expected", exact=True)


@pytest.mark.parametrize("mode", ["sequential", "parallel"])
def test_a_regression_comes_before_the_mean(mode):
    torch.manual_seed(0)
    model = awake(residual())
    data = torch.randn(16, *X.shape[1:], dtype=torch.float64)
    plan = fxprune.plan(model, X, bias="expected", calibration=[data], calibration_mode=mode)
    small = plan.apply(model)
    assert prove(plan, model, small, X) <= 1e-9
    plain = fxprune.plan(model, X, bias="propagate", calibration=[data], calibration_mode=mode)
    assert plan._mixes.keys() == plain._mixes.keys()
    assert difference(run(small, X), run(plain.apply(model), X)) < 1e-9


def test_trained_masked_models_are_applied_as_they_are():
    torch.manual_seed(0)
    model = awake(residual())
    plan = fxprune.plan(model, X, bias="expected")
    masked = plan.mask(model).train()
    steps = torch.optim.SGD(masked.parameters(), 0.01)
    for _ in range(3):
        steps.zero_grad()
        masked(X).square().mean().backward()
        steps.step()
    masked.eval()
    assert difference(run(masked, X), run(plan.apply(masked), X)) <= 1e-9


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_other_precisions(dtype):
    torch.manual_seed(0)
    model = awake(residual()).to(dtype)
    small = fxprune.prune(model, X.to(dtype), bias="expected")
    assert next(small.parameters()).dtype == dtype


def over_a_map(h, join):
    """Channels beside positions in one dimension, as in the heads of a detector."""
    flat = h.permute(0, 2, 3, 1).reshape(len(h), -1)
    return torch.cat([flat, flat], 1) if join else flat


@pytest.mark.parametrize("join", [False, True])
def test_channels_of_a_large_map_in_one_dimension_say_what_a_mask_makes_of_them(join, monkeypatch):
    """Draws of each slice would take gigabytes: constants go on alone."""

    def build():
        return awake(Net(
            lambda s, x: s.last(F.softplus(over_a_map(F.softplus(s.norm(s.a(x))), join))),
            a=nn.Conv2d(3, 8, 1), norm=nn.BatchNorm2d(8),
            last=nn.Linear(8 * 144 * (1 + join), 3),
        ))  # fmt: skip

    model = build()
    plain = fxprune.plan(model, X, bias="propagate")
    drawn = fxprune.plan(model, X, bias="expected")
    monkeypatch.setattr(fxprune.rules.channels, "_MOST", (DRAWS + 1) * 8 * 144)
    plan = fxprune.plan(model, X, bias="expected")
    assert gone(plan, "a").tolist() == gone(plain, "a").tolist()
    (shift,), (only_masked,), (in_the_mean,) = (p._folds.shifts for p in (plan, plain, drawn))
    torch.testing.assert_close(shift.delta, only_masked.delta, rtol=1e-12, atol=1e-12)
    assert not torch.allclose(shift.delta, in_the_mean.delta, rtol=1e-3)
    masked_equals_pruned(plan, model, plan.apply(model), X)
