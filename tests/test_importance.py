"""Scores equal a direct computation, over all slices that go with a unit and no others."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional as F

import fxprune
from fxprune.importance import FPGM, LAMP, BNScale, Magnitude, Random, Unscored

from .test_plan import X, coupled, deep, group
from .test_trace import Net


def parts(net):
    """The weights that go with each of the 8 units, by tensor; biases and statistics stay."""
    tensors = [net[0].weight.flatten(1), net[1].weight[:, None],
               net[3].weight.transpose(0, 1).flatten(1)]  # fmt: skip
    return [t.detach().double() for t in tensors]


def slices(net):
    return torch.cat(parts(net), 1)


def spread(net):
    flat = net[0].weight.detach().double().flatten(1)
    return (flat[:, None] - flat).square().sum(-1).sqrt().sum(1)


def means(net):
    """Of |w| in each tensor: (3, 8)."""
    return torch.stack([p.abs().mean(1) for p in parts(net)])


def share(net):
    size = slices(net).square().mean(1)
    return torch.stack([m / size[size >= m].sum() for m in size])


@pytest.mark.parametrize("importance, direct", [
    ("l2", lambda net: slices(net).square().mean(1).sqrt()),
    ("l1", lambda net: slices(net).abs().mean(1)),
    ("fpgm", spread),
    ("lamp", share),
    ("bn_scale", lambda net: net[1].weight.detach().abs()),
    (Magnitude(order=3, reduce="sum"), lambda net: slices(net).norm(3, dim=1)),
    (Magnitude(order=0.5), lambda net: slices(net).abs().sqrt().mean(1).square()),
    (Magnitude(order=math.inf, reduce="max"), lambda net: slices(net).abs().amax(1)),
    (Magnitude(order=1, reduce="max"), lambda net: means(net).amax(0)),
    (Magnitude(order=1, reduce="prod"), lambda net: means(net).log().mean(0).exp()),
    (Magnitude(order=1, reduce="first"), lambda net: means(net)[0]),
    (LAMP(order=1), lambda net: torch.stack([
        m / slices(net).abs().mean(1)[slices(net).abs().mean(1) >= m].sum()
        for m in slices(net).abs().mean(1)
    ])),
    (lambda parts: sum(s.total(s.weights.sum(1)) for s in parts if s.role == "out"),
     lambda net: net[0].weight.detach().double().flatten(1).sum(1)),
    (lambda parts: torch.arange(8.0), lambda net: torch.arange(8.0)),
])  # fmt: skip
def test_importance_equals_a_direct_computation(importance, direct):
    net = coupled()
    found = group(fxprune.plan(net, X, importance=importance), "0")
    assert torch.allclose(found.importance, direct(net).double(), rtol=1e-6)
    assert found.removed.tolist() == sorted(direct(net).argsort()[:4].tolist())


@pytest.mark.parametrize("how, direct", [
    ("mean", lambda s, n: s / s.mean()), ("max", lambda s, n: s / s.max()),
    ("sum", lambda s, n: s / s.sum()), ("size", lambda s, n: s / n),
    ("std", lambda s, n: (s - s.mean()) / s.std(correction=0)),
])  # fmt: skip
@pytest.mark.parametrize("kind", [Magnitude, LAMP, FPGM, BNScale])
def test_normalising_puts_groups_on_one_scale(kind, how, direct):
    plain, scaled = (group(fxprune.plan(coupled(), X, importance=kind(normalize=n)), "0").importance
                     for n in (None, how))  # fmt: skip
    assert torch.allclose(scaled, direct(plain, slices(coupled()).shape[1]))


def stream(s, x):
    x = s.first(x)
    for block in s.blocks:
        x = x + block(x)
    return s.last(F.silu(x).mean((2, 3)))


def residual():
    """A stream of 8 units that three convolutions make; depthwise ones inside the blocks."""
    torch.manual_seed(0)

    def block(n):
        return nn.Sequential(
            nn.Conv2d(8, n, 1), nn.BatchNorm2d(n), nn.ReLU(), nn.Conv2d(n, n, 3, 1, 1, groups=n),
            nn.ReLU(), nn.Conv2d(n, 8, 1),
        )  # fmt: skip

    blocks = nn.ModuleList([block(12), block(6)])
    net = Net(stream, first=nn.Conv2d(3, 8, 3), last=nn.Linear(8, 5), blocks=blocks)
    for p in net.parameters():
        nn.init.normal_(p)
    return net.eval()


def test_all_layers_of_a_stream_and_depthwise_ones_count():
    net = residual()
    plan = fxprune.plan(net, X, importance=Magnitude(order=1, reduce="sum"))
    made = [net.first, net.blocks[0][5], net.blocks[1][5]]
    read = [net.blocks[0][0], net.blocks[1][0], net.last]
    wanted = sum(m.weight.flatten(1).abs().sum(1) for m in made)
    wanted = wanted + sum(m.weight.transpose(0, 1).flatten(1).abs().sum(1) for m in read)
    assert torch.allclose(group(plan, "first").importance, wanted.double().detach(), rtol=1e-5)
    conv, norm, _, depthwise, _, last = net.blocks[0]
    rows = [conv.weight.flatten(1), norm.weight[:, None], depthwise.weight.flatten(1),
            last.weight[..., 0, 0].T]  # fmt: skip
    wanted = sum(r.abs().sum(1) for r in rows)
    found = group(plan, "blocks.0.0")
    assert torch.allclose(found.importance, wanted.double().detach(), rtol=1e-5)


class Biased(nn.Module):
    """A layer whose weight and bias are used as ``dense`` does it, and one that reads it."""

    def __init__(self, dense):
        super().__init__()
        generator = torch.Generator().manual_seed(0)
        self.w = nn.Parameter(torch.randn(6, 4, generator=generator))
        self.b = nn.Parameter(torch.tensor([9.0, 0, 0, 0, 0, 0]))
        self.last = nn.Linear(6, 3)
        nn.init.constant_(self.last.weight, 0.5)
        self.dense = dense

    def forward(self, x):
        return self.last(self.dense(x, self.w, self.b).relu())


@pytest.mark.parametrize("dense", [
    F.linear,
    lambda x, w, b: torch.addmm(b, x, w.t()),
    lambda x, w, b: x @ w.t() + b,
    lambda x, w, b: b.view(1, -1) + x @ w.t(),
    lambda x, w, b: (x @ w.t()).sub_(-b),
    lambda x, w, b: x @ w.t() + (2 * b / 2).expand(x.shape[0], b.shape[0]),
])  # fmt: skip
def test_a_bias_does_not_count_in_whatever_form_it_is_written(dense):
    net = Biased(dense).eval()
    rows = torch.cat([net.w, net.last.weight.t()], 1).detach().double()
    plan = fxprune.plan(net, torch.randn(2, 4))
    assert torch.allclose(group(plan, "w").importance, rows.square().mean(1).sqrt())


def fused_sum(x, y):
    """An addition of the user's own, as a kernel of another library is."""
    return torch.from_numpy(x.detach().numpy() + y.detach().numpy())


@pytest.mark.parametrize("kind", ["add", ""])
def test_what_is_added_is_what_a_pattern_of_that_kind_adds(kind):
    net = Biased(lambda x, w, b: fused_sum(x @ w.t(), b)).eval()
    own = fxprune.pattern(fused_sum, rule=lambda a, call: a.elementwise(call), kind=kind)
    rows = [net.w, net.last.weight.t()] if kind else [net.w, net.b[:, None], net.last.weight.t()]
    plan = fxprune.plan(net, torch.randn(2, 4), patterns=[own])
    wanted = torch.cat(rows, 1).detach().double().square().mean(1).sqrt()
    assert torch.allclose(group(plan, "w").importance, wanted)


@pytest.mark.parametrize("dense", [
    lambda x, w, b: (x @ w.t()) * (1 + b), lambda x, w, b: (x @ w.t() + b) * b,
])  # fmt: skip
def test_a_vector_that_is_multiplied_with_too_is_no_bias_and_counts(dense):
    net = Biased(dense).eval()
    rows = torch.cat([net.w, net.b[:, None], net.last.weight.t()], 1).detach().double()
    plan = fxprune.plan(net, torch.randn(2, 4))
    assert torch.allclose(group(plan, "w").importance, rows.square().mean(1).sqrt())


@pytest.mark.parametrize("kind", [nn.LSTM, nn.GRU, nn.RNN])
def test_biases_of_recurrent_layers_do_not_count(kind):
    net = Net(lambda net, x: net.last(net.layer(x)[0]), layer=kind(5, 6), last=nn.Linear(6, 2))
    x = torch.randn(3, 2, 5)
    scores = [fxprune.plan(net.eval(), x).groups[0].importance]
    nn.init.normal_(net.layer.bias_ih_l0, 5)
    nn.init.normal_(net.layer.bias_hh_l0)
    scores.append(fxprune.plan(net, x).groups[0].importance)
    assert torch.equal(*scores)


@pytest.mark.parametrize("criterion", [
    Magnitude(), Magnitude(order=1, reduce="sum"), Magnitude(reduce="max"), LAMP(),
    Magnitude(normalize="mean"),
])  # fmt: skip
def test_all_groups_at_once_score_as_one_by_one(criterion):
    net = deep().double()
    alone = fxprune.plan(net, X.double(), importance=lambda slices: criterion(slices))
    together = fxprune.plan(net, X.double(), importance=criterion)
    scored = [g for g in alone.groups if g.importance is not None]
    assert len(scored) == 3
    for one in scored:
        assert torch.allclose(group(together, one.name).importance, one.importance, rtol=1e-12)


def test_the_slices_of_a_head_are_one_unit():
    torch.manual_seed(0)
    net = Net(lambda s, x: s.last(s.attention(x, x, x)[0]), last=nn.Linear(12, 3),
              attention=nn.MultiheadAttention(12, 4, batch_first=True))  # fmt: skip
    plan = fxprune.plan(net, torch.randn(2, 5, 12), importance=Magnitude(reduce="sum"))
    made = net.attention.in_proj_weight.reshape(3, 4, 3, 12).square().sum((0, 2, 3))
    read = net.attention.out_proj.weight.reshape(12, 4, 3).square().sum((0, 2))
    found = group(plan, "attention")
    assert torch.allclose(found.importance, (made + read).sqrt().double().detach(), rtol=1e-6)


def test_a_group_without_a_scale_stays_whole_by_bn_scale():
    plan = fxprune.plan(residual(), X, importance="bn_scale")
    assert group(plan, "first").frozen.startswith("no norm with a scale stands behind it")
    assert group(plan, "blocks.0.0").kept == 6 and group(plan, "first").kept == 8


def test_random_importance_repeats_itself_and_does_not_look_at_weights():
    scores = [group(fxprune.plan(coupled(seed), X, importance="random"), "0").importance
              for seed in (0, 1)]  # fmt: skip
    assert torch.equal(*scores) and len(scores[0].unique()) == 8
    weights = group(fxprune.plan(coupled(), X, importance="l2"), "0").importance
    assert not np.array_equal(scores[0].argsort(), weights.argsort())
    seeded = [group(fxprune.plan(coupled(), X, importance=Random(seed=n)), "0").importance
              for n in (1, 1, 2)]  # fmt: skip
    assert torch.equal(seeded[0], seeded[1]) and not torch.equal(seeded[1], seeded[2])


# -- scores of one's own --------------------------------------------------------------------------


def test_scores_of_a_plan_can_be_changed_and_planned_with_again():
    net = residual()
    plan = fxprune.plan(net, X, sparsity=0.5)
    scores = {g.name: g.importance for g in plan.groups}
    again = fxprune.plan(net, X, sparsity=0.5, importance=scores)
    assert [g.removed.tolist() for g in again.groups] == [g.removed.tolist() for g in plan.groups]
    gone = group(plan, "first").removed
    scores["first"] = scores["first"].index_fill(0, gone, 1e9)
    other = fxprune.plan(net, X, sparsity=0.5, importance=scores)
    assert not set(group(other, "first").removed.tolist()) & set(gone.tolist())
    assert group(other, "blocks.0.0").removed.tolist() == group(plan, "blocks.0.0").removed.tolist()


def test_groups_may_have_criteria_by_name_and_glob_and_others_have_the_default():
    net = residual()
    mixed = fxprune.plan(net, X, importance={
        "first": list(range(8)), "blocks.*": Magnitude(order=1), "blocks.1.0": "fpgm",
    })  # fmt: skip
    plain = {name: fxprune.plan(net, X, importance=name) for name in ("l1", "l2", "fpgm")}
    assert group(mixed, "first").removed.tolist() == [0, 1, 2, 3]
    for name, of in (("blocks.0.0", "l1"), ("blocks.1.0", "fpgm")):
        assert torch.equal(group(mixed, name).importance, group(plain[of], name).importance)
    default = fxprune.plan(net, X, importance={"blocks.*": "l1"})
    wanted = group(plain["l2"], "first").importance
    assert torch.equal(group(default, "first").importance, wanted)


class Two(nn.Module):
    """Two weights of one module, each with units of its own."""

    def __init__(self):
        super().__init__()
        self.up, self.down = (nn.Parameter(torch.randn(6, 6)) for _ in range(2))

    def forward(self, x):
        return F.linear(F.relu(F.linear(x, self.up)), self.down)


def test_groups_of_one_layer_have_names_of_their_own():
    torch.manual_seed(0)
    net, x = nn.Sequential(Two(), nn.ReLU(), nn.Linear(6, 2)), torch.randn(5, 6)
    plan = fxprune.plan(net, x)
    assert [g.name for g in plan.groups if g.importance is not None] == ["0", "0 (2)"]
    scores = {"0": torch.arange(6), "0 (2)": -torch.arange(6)}
    again = fxprune.plan(net, x, importance=scores)
    assert group(again, "0").removed.tolist() == [0, 1, 2]
    assert group(again, "0 (2)").removed.tolist() == [3, 4, 5]


def test_a_function_may_leave_a_group_whole_for_a_reason_of_its_own():
    def importance(slices):
        if slices[0].count == 8:
            raise Unscored("eight is enough")
        return np.ones(slices[0].count)

    plan = fxprune.plan(residual(), X, importance=importance)
    assert dict(plan.skipped)["first"] == "eight is enough"
    assert group(plan, "blocks.0.0").kept == 6


def test_criteria_show_what_they_were_given():
    taylor = fxprune.importance.Taylor([X], loss=F.cross_entropy, reduce="max")
    assert repr(taylor) == "Taylor(reduce='max', loss=cross_entropy)"
    assert repr(Magnitude()) == "Magnitude()" and repr(Magnitude(order=1)) == "Magnitude(order=1)"


# -- what is wrong --------------------------------------------------------------------------------


def test_an_importance_that_raises_is_named():
    net = nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 2))
    with pytest.raises(fxprune.SettingError, match="ZeroDivisionError for group '0'"):
        fxprune.plan(net, torch.randn(1, 4), importance=lambda group: 1 / 0)


@pytest.mark.parametrize("make, words", [
    (lambda: Magnitude(order=0), "order=0"), (lambda: Magnitude(order=True), "order=True"),
    (lambda: Magnitude(reduce="avg"), "reduce='avg' is none of 'mean'"),
    (lambda: LAMP(normalize="means"), "did you mean 'mean'"),
    (lambda: Random(seed=-1), "seed=-1"), (lambda: FPGM(reduce="max"), "FPGM has no reduce"),
    (lambda: Random(normalize="mean"), "Random has no normalize"),
])  # fmt: skip
def test_criteria_say_what_they_cannot_be(make, words):
    with pytest.raises(fxprune.SettingError, match=words):
        make()


@pytest.mark.parametrize("importance, words", [
    ("lapm", "bn_scale, fpgm, l1, l2, lamp, random, reconstruction"),
    ("taylor", r"needs data: pass fxprune.importance.Taylor\(batches, loss="),
    (Magnitude, r"Magnitude\("),
    ({"frist": "l1"}, "'frist' matches no group; did you mean 'first'"),
    ({"blocks.0.5": "l1"}, "channels of blocks.0.5 are those of group .first., which have one"),
    ({nn.Conv2d: "l1"}, "is no group name"), ({"first": "reconstruction"}, "the one group 'first'"),
    ({"first": torch.ones(7)}, r"shape \(7,\) for group 'first'; it has 8 units"),
    ({"first": [[1], [2, 3]]}, "list for group 'first'"), ({"first": 3}, "importance=3"),
    ({"first": torch.full((8,), torch.nan)}, "NaN for group 'first'"),
])  # fmt: skip
def test_what_is_no_importance_is_said_to_be_none(importance, words):
    with pytest.raises(fxprune.SettingError, match=words):
        fxprune.plan(residual(), X, importance=importance)
