"""Criteria that run the model: scores equal a direct computation, and the model is left alone."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import fxprune
from fxprune.importance import Activation, Fisher, Taylor, Wanda
from fxprune.modules import tree
from fxprune.schedules import PlanScheduler

from .snapshot import Snapshot
from .test_calibration import randomised
from .test_importance import residual
from .test_plan import group
from .test_trace import Net

GENERATOR = torch.Generator().manual_seed(0)
X = torch.randn(2, 3, 8, 8, dtype=torch.float64, generator=GENERATOR)
IMAGES = torch.randn(12, 3, 8, 8, dtype=torch.float64, generator=GENERATOR)
LABELS = torch.randint(4, (12,), generator=GENERATOR)
BATCHES = list(zip(IMAGES.split(5), LABELS.split(5), strict=True))
STEPS = torch.randn(10, 5, 12, dtype=torch.float64, generator=GENERATOR)


def coupled():
    """conv - batch norm - ReLU - conv: one group of 8 units, made, scaled and read once."""
    torch.manual_seed(0)
    return randomised(nn.Sequential(
        nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Conv2d(8, 4, 3),
        nn.AdaptiveAvgPool2d(1), nn.Flatten(),
    ))  # fmt: skip


def gated(net, x, y):
    """Σ weight · gradient of each unit in the three layers, (3, 8); then Σ of squares."""
    loss = F.cross_entropy(net(x), y)
    weights = [net[0].weight, net[1].weight, net[3].weight]
    rows = [w * g for w, g in zip(weights, torch.autograd.grad(loss, weights), strict=True)]
    rows = [rows[0].flatten(1), rows[1][:, None], rows[2].transpose(0, 1).flatten(1)]
    joint, single = (torch.stack([f(r) for r in rows]) for f in (
        lambda r: r.sum(1).square(), lambda r: r.square().sum(1)))  # fmt: skip
    return {True: joint, False: single}


def over(net, batches, joint):
    return torch.stack([gated(net, *batch)[joint] for batch in batches]).mean(0)


SINGLE = [(x[None], y[None]) for x, y in zip(IMAGES, LABELS, strict=True)]
LOSS = {"loss": F.cross_entropy}


@pytest.mark.parametrize("importance, direct", [
    (Taylor(BATCHES, **LOSS), lambda net: over(net, BATCHES, True).mean(0)),
    (Taylor(BATCHES, joint=False, **LOSS), lambda net: over(net, BATCHES, False).mean(0)),
    (Taylor(BATCHES, limit=1, reduce="max", **LOSS),
     lambda net: over(net, BATCHES[:1], True).amax(0)),
    (Taylor(BATCHES, reduce="first", forward=lambda m, b: F.cross_entropy(m(b[0]), b[1])),
     lambda net: over(net, BATCHES, True)[0]),
    (Fisher(BATCHES, **LOSS), lambda net: over(net, SINGLE, True).mean(0) / 2),
    (Fisher(BATCHES, joint=False, reduce="sum", **LOSS),
     lambda net: over(net, SINGLE, False).sum(0) / 2),
    (Fisher(BATCHES, per_sample=False, **LOSS), lambda net: over(net, BATCHES, True).mean(0) / 2),
    (Activation(BATCHES), lambda net: read(net).abs().mean((0, 2, 3))),
    (Activation(BATCHES, statistic="variance"),
     lambda net: read(net).transpose(0, 1).flatten(1).var(1, correction=0)),
    (Activation(BATCHES, statistic="apoz"), lambda net: (read(net) != 0).double().mean((0, 2, 3))),
    (Wanda(BATCHES), lambda net: net[3].weight.abs().mean((0, 2, 3)) * read(net).square().mean(
        (0, 2, 3)).sqrt()),
])  # fmt: skip
def test_importance_equals_a_direct_computation(importance, direct):
    net = coupled()
    found = group(fxprune.plan(net, X, importance=importance), "0")
    wanted = direct(net).detach()
    assert torch.allclose(found.importance, wanted, rtol=1e-9, atol=1e-15)
    assert found.removed.tolist() == sorted(wanted.argsort()[:4].tolist())


def read(net):
    """What the second convolution reads."""
    return net[:3](IMAGES).detach()


def joint_of(rows):
    return rows.flatten(1).sum(1).square()


def test_units_that_several_layers_make_and_read():
    net, y = residual().double(), LABELS
    plan = fxprune.plan(net, X, importance=Taylor([(IMAGES, y)], **LOSS))
    made = [net.first.weight, net.blocks[0][5].weight, net.blocks[1][5].weight]
    reads = [net.blocks[0][0].weight, net.blocks[1][0].weight, net.last.weight]
    products = [w * g for w, g in zip(
        made + reads, torch.autograd.grad(F.cross_entropy(net(IMAGES), y), made + reads),
        strict=True)]  # fmt: skip
    wanted = [joint_of(p) for p in products[:3]] + [
        joint_of(p.transpose(0, 1)) for p in products[3:]
    ]
    assert torch.allclose(group(plan, "first").importance, torch.stack(wanted).mean(0))

    arrive = []
    for layer in (net.blocks[0][0], net.blocks[1][0], net.last):
        layer.register_forward_pre_hook(lambda m, args: arrive.append(args[0].detach()))
    net(IMAGES)
    rms = [a.transpose(0, 1).flatten(1).square().mean(1).sqrt() for a in arrive]
    weights = [w.transpose(0, 1).flatten(1).abs() for w in reads]
    wanted = sum(w.sum(1) * r for w, r in zip(weights, rms, strict=True))
    wanted = wanted / sum(w.shape[1] for w in weights)
    plan = fxprune.plan(residual().double(), X, importance=Wanda([IMAGES]))
    assert torch.allclose(group(plan, "first").importance, wanted.detach())
    depthwise = group(plan, "blocks.0.0")
    net.blocks[0][5].register_forward_pre_hook(lambda m, args: arrive.append(args[0].detach()))
    net(IMAGES)
    rms = arrive[4].square().mean((0, 2, 3)).sqrt()  # behind the depthwise one and its ReLU
    wanted = net.blocks[0][5].weight[..., 0, 0].abs().mean(0) * rms
    assert torch.allclose(depthwise.importance, wanted.detach())


def attention(dim=12, heads=4):
    torch.manual_seed(0)
    return randomised(Net(
        lambda s, x: s.last(s.attention(x, x, x, need_weights=False)[0].mean(1)),
        last=nn.Linear(dim, 4), attention=nn.MultiheadAttention(dim, heads, batch_first=True),
    ))  # fmt: skip


def test_a_head_is_one_unit():
    net, y = attention(), LABELS[:10]
    plan = fxprune.plan(net, STEPS[:2], importance=Taylor([(STEPS, y)], **LOSS))
    weights = [net.attention.in_proj_weight, net.attention.out_proj.weight]
    gradients = torch.autograd.grad(F.cross_entropy(net(STEPS), y), weights)
    made, reads = (w * g for w, g in zip(weights, gradients, strict=True))
    wanted = torch.stack([
        made.reshape(3, 4, 3, 12).sum((0, 2, 3)).square(),
        reads.reshape(12, 4, 3).sum((0, 2)).square(),
    ]).mean(0)  # fmt: skip
    assert torch.allclose(group(plan, "attention").importance, wanted)

    plan = fxprune.plan(net, STEPS[:2], importance=Activation([STEPS]))
    q, k, v = F.linear(STEPS, net.attention.in_proj_weight, net.attention.in_proj_bias).chunk(3, -1)
    q, k, v = (t.reshape(10, 5, 4, 3).transpose(1, 2) for t in (q, k, v))
    said = F.scaled_dot_product_attention(q, k, v)
    wanted = said.abs().mean((0, 2, 3)).detach()
    assert torch.allclose(group(plan, "attention").importance, wanted)


def queries(s, x):
    q, k = s.q(x), s.k(x)
    return s.last(torch.softmax(q @ k.transpose(1, 2), -1) @ s.v(x))


def test_units_that_no_weight_reads_are_seen_where_they_are_made():
    torch.manual_seed(0)
    layers = {name: nn.Linear(12, 6) for name in "qkv"}
    net = randomised(Net(queries, last=nn.Linear(6, 4), **layers))
    plan = fxprune.plan(net, STEPS[:2], importance=Activation([STEPS], reduce="max"))
    wanted = torch.stack([net.q(STEPS), net.k(STEPS)]).abs().mean((1, 2)).amax(0).detach()
    assert torch.allclose(group(plan, "q").importance, wanted)
    read = torch.softmax(net.q(STEPS) @ net.k(STEPS).transpose(1, 2), -1) @ net.v(STEPS)
    assert torch.allclose(group(plan, "v").importance, read.abs().mean((0, 1)).detach())
    plan = fxprune.plan(net, STEPS[:2], importance=Wanda([STEPS]))
    assert group(plan, "q").frozen.startswith("no weight that was seen reads")


def test_without_a_relu_there_are_no_zeros_to_rank_by():
    net = coupled()
    net[2] = nn.Sigmoid()
    plan = fxprune.plan(net, X, importance=Activation(BATCHES, statistic="apoz"))
    assert group(plan, "0").frozen.startswith("none of its activations is ever 0")


def recurrent():
    torch.manual_seed(0)
    lstm = nn.LSTM(12, 6, 2, batch_first=True, bidirectional=True)
    return randomised(Net(lambda s, x: s.last(s.lstm(x)[0][:, -1]), lstm=lstm,
                          last=nn.Linear(12, 4)))  # fmt: skip


def tokens():
    def forward(s, ids):
        return s.last(F.gelu(s.up(s.embed(ids))).mean(1))

    torch.manual_seed(0)
    return randomised(Net(forward, embed=nn.Embedding(20, 6), up=nn.Linear(6, 10),
                          last=nn.Linear(10, 4)))  # fmt: skip


def tied():
    """One weight in two places, a functional one, and a buffer that is a weight."""

    class Tied(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b = nn.Linear(12, 8), nn.Linear(8, 8)
            self.w = nn.Parameter(torch.randn(6, 8))
            self.register_buffer("fixed", torch.randn(4, 6))

        def forward(self, x):
            y = torch.tanh(self.b(torch.relu(self.b(torch.tanh(self.a(x))))))
            return F.linear(F.relu(F.linear(y, self.w)), self.fixed).mean(1)

    torch.manual_seed(0)
    return randomised(Tied())


def dense():
    torch.manual_seed(0)
    return nn.Sequential(nn.Flatten(), nn.Linear(60, 8), nn.ReLU(), nn.Linear(8, 6), nn.ReLU(),
                         nn.Linear(6, 4)).double()  # fmt: skip


def normed():
    net = dense()
    for i in (1, 3):
        nn.utils.parametrizations.weight_norm(net[i])
    return net


IDS = torch.randint(20, (10, 7), generator=GENERATOR)
NETS = {
    "convolutions": (coupled, IMAGES), "residual": (lambda: residual().double(), IMAGES),
    "attention": (attention, STEPS), "lstm": (recurrent, STEPS), "tokens": (tokens, IDS),
    "tied": (tied, STEPS), "weight norm": (normed, STEPS),
}  # fmt: skip
KINDS = {
    "taylor": lambda data: Taylor(data, loss=F.cross_entropy),
    "fisher": lambda data: Fisher(data, loss=F.cross_entropy, limit=1),
    "activation": Activation,
    "wanda": Wanda,
}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", NETS)
def test_every_kind_of_network_is_scored_and_left_as_it_was(name, kind):
    build, data = NETS[name]
    net = build()
    net.train()
    next(net.parameters()).requires_grad_(False)
    net(data[:4]).sum().backward()
    net.zero_grad(set_to_none=False) if name == "tied" else None
    grads = [(p.grad, None if p.grad is None else p.grad.clone()) for p in net.parameters()]
    batches = list(zip(data.split(4), LABELS[: len(data)].split(4), strict=True))
    before, state = Snapshot(net), torch.get_rng_state()
    plan = fxprune.plan(net, data[:2], importance=KINDS[kind](batches))
    assert before.differences() == [] and torch.equal(torch.get_rng_state(), state)
    for p, (grad, values) in zip(net.parameters(), grads, strict=True):
        assert p.grad is grad and (grad is None or torch.equal(grad, values))
    scores = [g.importance for g in plan.groups if g.importance is not None]
    assert scores and all((s > 0).any() and len(s.unique()) > 1 for s in scores)
    assert plan.kept


def test_frozen_layers_are_scored_like_others():
    net, frozen = coupled(), coupled()
    for p in frozen.parameters():
        p.requires_grad_(False)
    for kind in (KINDS["taylor"], KINDS["fisher"]):
        free, fixed = (group(fxprune.plan(m, X, importance=kind(BATCHES)), "0").importance
                       for m in (net, frozen))  # fmt: skip
        assert torch.equal(free, fixed)
    assert not any(p.requires_grad for p in frozen.parameters())


@pytest.mark.parametrize("kind", KINDS)
def test_a_computed_weight_is_scored_as_what_it_is(kind):
    batches = [(STEPS[:4], LABELS[:4]), (STEPS[4:], LABELS[4:10])]
    for name in "13":
        plain, computed = (
            group(fxprune.plan(m, STEPS[:2], importance=KINDS[kind](batches)), name).importance
            for m in (dense(), normed())
        )
        assert torch.allclose(plain, computed)


class OneWay(torch.autograd.Function):
    @staticmethod
    def forward(context, y):
        return y.clone()

    @staticmethod
    def backward(context, gradient):
        raise RuntimeError("one way")


class Named(nn.Module):
    def __init__(self):
        super().__init__()
        self.net = coupled()

    def forward(self, images):
        return self.net(images)


@pytest.mark.parametrize("example, batch, words", [
    ({"images": "X"}, "X", "example_input is a mapping, but a batch is Tensor"),
    ({"images": "X"}, {"pictures": "X"}, "a batch has no 'images'"),
    (("X",), "X", "a tuple of 1 arguments, and a batch is not: Tensor"),
])  # fmt: skip
def test_a_batch_of_another_kind_than_the_example_is_told(example, batch, words):
    def filled(form):
        return tree.rebuild(form, lambda _: X) if isinstance(form, (tuple, dict)) else X

    with pytest.raises(fxprune.InputError, match=words):
        fxprune.plan(Named(), filled(example), importance=Wanda([filled(batch)]))


def test_a_model_of_inference_mode_has_no_gradients_to_rank_by():
    with torch.inference_mode():
        net = coupled()
    with pytest.raises(fxprune.ModelError, match="nothing has a gradient"):
        fxprune.plan(net, X, importance=Taylor(BATCHES, **LOSS))


class Broken(Exception):
    pass


def breaks(*_):
    raise Broken("here")


@pytest.mark.parametrize("make, error, words", [
    (lambda: Taylor(BATCHES, loss=breaks), fxprune.SettingError, "loss= raised Broken"),
    (lambda: Fisher(BATCHES, forward=breaks), fxprune.SettingError, "forward= raised Broken"),
    (lambda: Taylor([(IMAGES[:, :2], LABELS)], **LOSS), fxprune.InputError, "does not run"),
    (lambda: Activation([IMAGES[:, :2]]), fxprune.InputError, "^batches: a batch does not run"),
    (lambda: Taylor(iter([]), **LOSS), fxprune.SettingError, "batches has no batches"),
    (lambda: Taylor(IMAGES, **LOSS), fxprune.SettingError, "batches=Tensor is no iterable"),
    (lambda: Taylor([(IMAGES[:0], LABELS[:0])], **LOSS), fxprune.InputError, "holds no sample"),
    (lambda: Wanda([IMAGES[:0]]), fxprune.InputError, "holds no sample"),
    (lambda: Wanda(BATCHES, limit=0), fxprune.SettingError, "limit=0"),
    (lambda: Taylor(BATCHES, loss=lambda y, t: y), fxprune.SettingError, "a scalar tensor"),
    (lambda: Taylor(BATCHES, loss=lambda y, t: y.sum().detach()), fxprune.SettingError,
     "without a gradient"),
    (lambda: Taylor([IMAGES], **LOSS), fxprune.SettingError, "loss= raised TypeError"),
    (lambda: Taylor([(IMAGES * torch.inf, LABELS)], **LOSS), fxprune.SettingError, "inf or NaN"),
    (lambda: Activation([IMAGES * torch.inf]), fxprune.SettingError, "inf or NaN"),
    (lambda: Fisher([(IMAGES, LABELS[:3])], **LOSS), fxprune.SettingError, "per_sample=False"),
    (lambda: Taylor(BATCHES, loss=lambda y, t: OneWay.apply(y).sum()), fxprune.SettingError,
     "gradient of the loss cannot be taken: one way"),
    (lambda: Wanda([{"x": IMAGES}]), fxprune.InputError, "a batch is a mapping, but example_input"),
])  # fmt: skip
def test_what_goes_wrong_is_said_and_leaves_the_model_alone(make, error, words):
    net = coupled().train()
    before, state = Snapshot(net), torch.get_rng_state()
    with pytest.raises(error, match=words):
        fxprune.plan(net, X, importance=make())
    assert before.differences() == [] and torch.equal(torch.get_rng_state(), state)


@pytest.mark.parametrize("make, words", [
    (lambda: Taylor(BATCHES), "needs one of loss="),
    (lambda: Fisher(BATCHES, loss=F.cross_entropy, forward=breaks), "needs one of loss="),
    (lambda: Taylor(BATCHES, loss="mse"), "loss='mse' is no function"),
    (lambda: Taylor(BATCHES, loss=nn.MSELoss), "loss=MSELoss is a class"),
    (lambda: Activation(BATCHES, statistic="mean"), "statistic='mean'"),
    (lambda: Taylor(BATCHES, loss=F.cross_entropy, joint="x"), "joint='x'"),
    (lambda: Fisher(BATCHES, loss=F.cross_entropy, per_sample="no"), "per_sample='no'"),
    (lambda: Taylor(BATCHES, loss=F.cross_entropy, limit=0), "limit=0"),
    (lambda: Wanda(BATCHES, limit=-1), "limit=-1"),
])  # fmt: skip
def test_criteria_say_what_they_cannot_be(make, words):
    with pytest.raises(fxprune.SettingError, match=words):
        make()


def test_a_criterion_without_its_data_is_told_where_it_goes():
    with pytest.raises(fxprune.SettingError, match="pass it as importance= to"):
        fxprune.plan(coupled(), X, importance=lambda slices: Wanda(BATCHES)(slices))


@pytest.mark.parametrize("kind", KINDS)
def test_under_autocast_scores_are_nearly_the_same(kind):
    net = coupled().float()
    data = [(x.float(), y) for x, y in BATCHES]
    plain = group(fxprune.plan(net, X.float(), importance=KINDS[kind](data)), "0").importance
    with torch.autocast("cpu", dtype=torch.bfloat16):
        net(X.float())  # whose copies of the weights have no gradient
        with torch.no_grad():
            net(X.float())
        found = group(fxprune.plan(net, X.float(), importance=KINDS[kind](data)), "0").importance
    assert (found - plain).norm() < 0.1 * plain.norm() and not torch.equal(found, plain)


@pytest.mark.parametrize("guard", [torch.no_grad, torch.inference_mode])
def test_gradients_are_taken_where_the_caller_takes_none(guard):
    net = coupled()
    wanted = group(fxprune.plan(net, X, importance=KINDS["taylor"](BATCHES)), "0").importance
    with guard():
        found = group(fxprune.plan(net, X, importance=KINDS["taylor"](BATCHES)), "0").importance
    assert torch.equal(found, wanted)


@pytest.mark.parametrize("kind", KINDS)
def test_half_precision_is_fine(kind):
    net = coupled().bfloat16()
    data = [(x.bfloat16(), y) for x, y in BATCHES]
    plan = fxprune.plan(net, X.bfloat16(), importance=KINDS[kind](data))
    assert group(plan, "0").importance.isfinite().all() and plan.kept


def test_batches_may_be_mappings_tuples_and_loaders():
    class Two(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b, self.c = nn.Linear(12, 8), nn.Linear(12, 8), nn.Linear(8, 4)

        def forward(self, x, y):
            return self.c(torch.tanh(self.a(x) + self.b(y)))

    torch.manual_seed(0)
    net, (x, y), t = Two().double(), (STEPS[:, 0], STEPS[:, 1]), LABELS[:10]
    named, placed = {"x": x[:2], "y": y[:2]}, (x[:2], y[:2])
    found = [
        group(fxprune.plan(net, example, importance=Taylor([batch], **more)), "a").importance
        for example, batch, more in [
            (placed, (x, y, t), LOSS), (placed, ((x, y), t), LOSS),
            (named, ({"x": x, "y": y}, t), LOSS),
            (named, {"x": x, "labels": t, "y": y}, LOSS),
            (named, {"x": x, "y": y, "t": t},
             {"forward": lambda m, b: F.cross_entropy(m(b["x"], b["y"]), b["t"])}),
        ]
    ]  # fmt: skip
    assert all(torch.equal(found[0], other) for other in found[1:])
    set_ = torch.utils.data.TensorDataset(IMAGES, LABELS)
    loader = torch.utils.data.DataLoader(set_, 5)
    first, second = (group(fxprune.plan(coupled(), X, importance=Taylor(b, **LOSS)), "0").importance
                     for b in (loader, BATCHES))  # fmt: skip
    assert torch.equal(first, second)


def test_a_schedule_of_masks_asks_a_criterion_with_data_anew():
    net = coupled()
    scheduler = PlanScheduler(net, X, lambda step: 0.25 * step, importance=KINDS["taylor"](BATCHES))
    wanted = fxprune.plan(copy.deepcopy(net), X, sparsity=0.25, importance=KINDS["taylor"](BATCHES))
    scheduler.step()
    assert torch.equal(group(scheduler.plan, "0").removed, group(wanted, "0").removed)
    scheduler.step()
    gone = set(group(scheduler.plan, "0").removed.tolist())
    assert len(gone) == 4 and gone > set(group(wanted, "0").removed.tolist())
