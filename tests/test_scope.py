"""Scopes: who competes with whom, what is asked for in all is reached, and no group is emptied."""

from __future__ import annotations

from collections import Counter
from itertools import pairwise

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.nn import functional as F

import fxprune
from fxprune.choosing.scope import Contender, compete, fractions
from fxprune.choosing.select import Choice

from .oracle import check
from .test_trace import Net

X = torch.randn(2, 3, 8, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(1))


def contender(scores, bins=(), **settings):
    units = np.arange(1, len(scores) + 1)
    return Contender(Choice(units, np.array(scores, dtype=float), list(bins), []), **settings)


def loud(scale=10.0):
    """Four convolutions, each with weights larger than those of the one before."""
    torch.manual_seed(0)
    widths = [3, 8, 12, 10, 16]
    net = nn.Sequential()
    for i, (a, b) in enumerate(pairwise(widths)):
        net.extend([nn.Conv2d(a, b, 1), nn.Sigmoid()])
        with torch.no_grad():
            net[-2].weight.mul_(scale**i)
    net.extend([nn.Flatten(), nn.Linear(16 * 64, 4)])
    nn.init.normal_(net[-1].weight, std=scale**4)
    return net


def lost(plan):
    return {g.name: len(g.removed) for g in plan.groups if g.importance is not None}


# -- the arithmetic -------------------------------------------------------------------------------


def test_the_lowest_of_all_units_go():
    rng = np.random.default_rng(0)
    groups = [contender(rng.random(n) * scale) for n, scale in ((20, 1), (30, 2), (50, 4))]
    found = compete(groups, 0.4)
    every = np.concatenate([g.choice.scores for g in groups])
    limit = np.sort(every)[39]
    wanted = [int((g.choice.scores <= limit).sum()) for g in groups]
    assert [round(f * g.width) for f, g in zip(found, groups, strict=True)] == wanted
    kept = [g.choice.keep(f) for f, g in zip(found, groups, strict=True)]
    assert all(((g.choice.scores > limit) == k).all() for g, k in zip(groups, kept, strict=True))


@pytest.mark.parametrize("round_to", [1, 4, 8])
@pytest.mark.parametrize("s", [0.1, 0.3, 0.5, 0.7])
def test_what_rounding_bins_and_least_widths_forbid_goes_elsewhere(s, round_to):
    rng = np.random.default_rng(0)
    rows = np.arange(1, 41).reshape(8, 5)  # the groups of a convolution
    groups = [
        contender(rng.random(32), least=30, step=round_to),
        contender(rng.random(40), [rows], step=round_to),
        contender(2 * rng.random(64), step=round_to),
        contender(rng.random(96) + 1, step=round_to),
    ]
    found = fractions(groups, s, scope="global")
    kept = [g.choice.keep(f, round_to) for f, g in zip(found, groups, strict=True)]
    assert all(k.sum() >= g.least for k, g in zip(kept, groups, strict=True))
    assert all(k.sum() % round_to == 0 or k.all() for k in kept)
    assert len(set(kept[1].reshape(8, 5).sum(1))) == 1
    wanted = round(s * sum(len(k) for k in kept))
    assert abs(sum(int((~k).sum()) for k in kept) - wanted) <= round_to / 2


@pytest.mark.parametrize("bins", [(), [np.arange(1, 9).reshape(2, 4)], [
    np.array([[1, 2, 3, 4], [5, 6, 7, 8]]), np.array([[1, 5, 2, 6], [3, 7, 4, 8]])]],
    ids=["free", "rows", "crossing"])  # fmt: skip
def test_infinite_scores_say_what_stays_and_what_goes(bins):
    scores = np.array([np.inf, 1, 2, -np.inf, -np.inf, 1, np.inf, 2])
    groups = [contender(scores, bins), contender(np.ones(8) + 0.5)]
    found = fractions(groups, 0.25, scope="global")
    kept = [g.choice.keep(f) for f, g in zip(found, groups, strict=True)]
    assert kept[0][[0, 6]].all() and not kept[0][[3, 4]].any() and kept[0].sum() == 4
    assert kept[1].all()


CROSSING = [np.array([[1, 2, 3, 4], [5, 6, 7, 8]]), np.array([[1, 5, 2, 6], [3, 7, 4, 8]])]


@pytest.mark.parametrize("round_to", [1, 2, 4])
@pytest.mark.parametrize("s", [0.3, 0.5, 0.9])
@pytest.mark.parametrize("bins, covers", [
    ((), ()), ([np.arange(1, 9).reshape(2, 4)], ()), (CROSSING, ()), ((), [np.array([6, 7])]),
], ids=["free", "rows", "crossing", "covered"])  # fmt: skip
def test_a_unit_of_infinite_score_never_goes(bins, covers, s, round_to):
    scores = np.array([np.inf] * 3 + [1.0, np.inf, 3, 2, 4])
    choice = Choice(np.arange(1, 9), scores, list(bins), list(covers))
    kept = choice.keep(s, round_to)
    assert kept[[0, 1, 2, 4]].all() and kept.sum() % round_to == 0
    assert s < 0.5 or bins or round_to > 1 or kept.sum() == 4 + bool(covers)
    for scope in ("local", "global", "isomorphic"):
        groups = [Contender(choice, step=round_to), contender(np.arange(8.0) + 9)]
        found = fractions(groups, s, scope=scope)
        kept = groups[0].choice.keep(found[0], round_to)
        assert kept[[0, 1, 2, 4]].all()
        assert scope == "local" or round(found[1] * 8) >= round(16 * s) - 4 - 8 * (s == 0.9)


@given(st.lists(st.integers(1, 12), min_size=1, max_size=6), st.data())
def test_every_kind_of_units_keeps_its_share(sizes, data):
    kinds = np.repeat(np.arange(len(sizes)), sizes)
    n = len(kinds)
    scores = np.array(data.draw(st.permutations(range(n)), label="scores"), dtype=float)
    s = data.draw(st.floats(0, 0.9), label="sparsity")
    kept = Choice(np.arange(1, n + 1), scores, [], [], kinds=kinds).keep(s)
    count = int(Choice(np.arange(1, n + 1), scores, [], []).keep(s).sum())
    assert kept.sum() == count
    for kind, size in enumerate(sizes):
        own, left = scores[kinds == kind], kept[kinds == kind]
        assert abs(left.sum() - size * count / n) < 1
        assert not left.any() or left.all() or own[left].min() > own[~left].max()


def test_parts_of_one_layer_that_others_read_lose_the_same_share():
    class Parts(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b, self.c = nn.Linear(5, 24), nn.Linear(16, 3), nn.Linear(8, 3)
            with torch.no_grad():
                self.a.weight[:16] *= 10

        def forward(self, x):
            first, second = self.a(x).split([16, 8], -1)
            return self.b(torch.sigmoid(first)) + self.c(torch.sigmoid(second))

    for scope in ("local", "global"):
        plan, small = check(Parts(), torch.randn(2, 5, dtype=torch.float64), scope=scope)
        assert (small.b.in_features, small.c.in_features) == (8, 4)


def test_more_is_asked_for_than_can_go_and_every_group_keeps_its_least():
    groups = [contender(np.arange(10.0), least=4), contender(np.arange(10.0) + 5, least=1)]
    assert np.allclose(compete(groups, 0.99), [0.6, 0.9])


def test_the_knob_turns_one_way_and_fractions_of_their_own_do_not_move():
    rng = np.random.default_rng(0)
    groups = [contender(rng.random(24)), contender(rng.random(40), own=0.25), contender(
        rng.random(16), kind="b")]  # fmt: skip
    for scope in ("local", "global", "isomorphic"):
        found = np.array([fractions(groups, s, scope=scope) for s in np.linspace(0, 0.95, 20)])
        assert (np.diff(found, axis=0) >= 0).all() and (found[:, 1] == 0.25).all()
        assert (found[0, [0, 2]] == 0).all() and (found[-1] > 0).all()


# -- in models ------------------------------------------------------------------------------------


@pytest.mark.parametrize("s", [0.25, 0.5])
def test_global_takes_the_fraction_of_all_units_where_scores_are_least(s):
    plan = fxprune.plan(loud(), X.float(), sparsity=s, scope="global", importance="l1")
    assert sum(lost(plan).values()) == {0.25: 11, 0.5: 23}[s]  # of 46
    scored = [g for g in plan.groups if g.importance is not None]
    assert scored[0].kept == 1 and scored[-1].kept == 16  # at most nine in ten go
    highest = max(g.importance[g.removed].max() for g in scored if len(g.removed))
    for g in scored:
        if g.kept > 0.1 * g.width + 1:
            assert g.importance.sort().values[len(g.removed) :].min() >= highest
    assert fxprune.plan(loud(), X.float(), sparsity=s, scope="local").groups[1].kept == 8 * (1 - s)


def test_a_group_that_keeps_everything_says_why():
    plan = fxprune.plan(loud(), X.float(), sparsity=0.25, scope="global", min_width={"0": 8})
    reasons = {g.name: g.frozen for g in plan.groups}
    assert reasons["0"] == "no smaller width is within min_width, max_sparsity and round_to"
    assert reasons["6"] == "its units score higher than those that go in its place"
    assert dict(plan.skipped)["6"] == reasons["6"] and lost(plan)["6"] == 0


@pytest.mark.parametrize("settings, kept, least", [
    ({"min_width": 6}, [6, 6, 6, 8], [6, 6, 6, 6]),
    ({"min_width": 0.75}, [6, 9, 8, 12], [6, 9, 8, 12]),
    ({"min_width": {"[0-2]": 0.75, nn.Conv2d: 5}}, [6, 9, 5, 8], [6, 9, 5, 5]),
    ({"max_sparsity": 0.25}, [6, 9, 8, 12], [6, 9, 8, 12]),
    ({"max_sparsity": {"4": 0.0}}, [4, 6, 10, 8], [1, 2, 10, 2]),
    ({"min_width": 5, "round_to": 4}, [8, 8, 8, 8], [8, 8, 8, 8]),
], ids=str)  # fmt: skip
def test_least_widths_hold_for_every_scope(settings, kept, least):
    def widths(**more):
        plan = fxprune.plan(loud(), X.float(), **settings, **more)
        return [g.kept for g in plan.groups if g.name in ("0", "2", "4", "6")]

    assert widths() == kept
    for scope in ("global", "isomorphic"):
        assert widths(scope=scope, sparsity=0.99) == least


@pytest.mark.parametrize("settings", [
    {"sparsity": 0.5}, {"sparsity": 0.9}, {"sparsity": 0.9, "min_width": 2},
    {"sparsity": 0.75, "round_to": 3}, {"target": fxprune.Target(params=0.3)},
    {"target": fxprune.Target(macs=0.2)},
], ids=str)  # fmt: skip
@pytest.mark.parametrize("scope", ["local", "global", "isomorphic"])
@pytest.mark.filterwarnings("ignore::fxprune.PruningWarning")  # some targets are out of reach
def test_what_has_an_infinite_score_stays_whatever_is_asked_for(scope, settings):
    scores = {"0": [np.inf] * 5 + [1.0, 2, 3], "4": [np.inf] * 10}
    plan = fxprune.plan(loud(), X.float(), importance=scores, scope=scope, **settings)
    groups = {g.name: g for g in plan.groups}
    assert len(groups["0"].removed) and set(groups["0"].removed.tolist()) <= {5, 6, 7}
    assert groups["4"].kept == 10
    assert groups["4"].frozen == "the scores of its units are infinite"


def test_a_mapping_of_sparsity_is_each_groups_own_whatever_the_scope():
    wanted = {"0": 0.5, "4": 0.2}
    plans = [fxprune.plan(loud(), X.float(), sparsity=wanted, scope=scope)
             for scope in ("local", "global")]  # fmt: skip
    assert lost(plans[0]) == lost(plans[1]) == {"0": 4, "4": 2}


def test_scores_are_there_for_groups_that_lose_nothing():
    plan = fxprune.plan(loud(), X.float(), sparsity=0)
    assert not plan.kept and set(lost(plan)) == {"0", "2", "4", "6"}


def residual():
    def forward(s, x):
        x = s.first(x)
        for block in s.blocks:
            x = x + block(x)
        return s.last(F.silu(x).mean((2, 3)))

    def block(n):
        return nn.Sequential(
            nn.Conv2d(8, n, 1), nn.BatchNorm2d(n), nn.Tanh(),
            nn.Conv2d(n, n, 3, groups=2), nn.Sigmoid(), nn.ConvTranspose2d(n, 8, 3),
        )  # fmt: skip

    blocks = nn.ModuleList([block(12), block(16)])
    return Net(forward, first=nn.Conv2d(3, 8, 3), last=nn.Linear(8, 5), blocks=blocks)


@pytest.mark.parametrize("scope", ["global", "isomorphic"])
@pytest.mark.parametrize("build", [loud, residual])
def test_every_scope_is_proved(build, scope):
    plan, _ = check(build(), X, scope=scope, sparsity=0.4, importance="l1")
    widths = {g.name: (g.width, g.kept) for g in plan.groups if g.importance is not None}
    total = sum(w for w, _ in widths.values())
    assert abs(sum(k for _, k in widths.values()) - 0.6 * total) <= 3  # half of each pool's rest


def kinds(model, x):
    """Names of groups by structure."""
    plan = fxprune.plan(model, x, scope="isomorphic")
    named = dict(model.named_modules())
    found = {}
    from fxprune.choosing.scope import structure
    from fxprune.relating.groups import groups

    for group, shown in zip(groups(plan._relations), plan.groups, strict=True):
        if shown.importance is not None:
            found.setdefault(structure(group, named), []).append(shown.name)
    return plan, list(found.values())


def test_isomorphic_groups_of_a_residual_network():
    models = pytest.importorskip("torchvision.models")
    torch.manual_seed(0)
    model = models.resnet18()
    with torch.no_grad():
        for part in (model.layer1[0].conv1, model.layer1[0].bn1, model.layer1[0].conv2):
            part.weight.mul_(0.01)
    plan, found = kinds(model, torch.randn(1, 3, 64, 64))
    inner = [f"layer{i}.{j}.conv1" for i in range(1, 5) for j in range(2)]
    assert inner in found  # in every block, what its two convolutions say to each other
    assert ["layer2.0.conv2", "layer3.0.conv2"] in found  # the stream of a stage in the middle
    assert ["conv1"] in found and ["layer4.0.conv2"] in found
    groups = {g.name: g for g in plan.groups}
    for names in found:
        width = sum(groups[n].width for n in names)
        gone = sum(len(groups[n].removed) for n in names)
        assert abs(gone - 0.5 * width) <= 1
    assert groups["layer1.0.conv1"].kept == 7 and groups["layer1.1.conv1"].kept > 7


def test_isomorphic_groups_of_a_transformer():
    models = pytest.importorskip("torchvision.models")
    torch.manual_seed(0)
    model = models.VisionTransformer(32, 16, 3, 4, 32, 64)
    _, found = kinds(model, torch.randn(1, 3, 32, 32))
    layers = [f"encoder.layers.encoder_layer_{i}" for i in range(3)]
    assert Counter(map(tuple, found)) == Counter([
        ("conv_proj",), tuple(f"{p}.self_attention" for p in layers),
        tuple(f"{p}.mlp.0" for p in layers),
    ])  # fmt: skip


@pytest.mark.parametrize("settings, words", [
    ({"scope": "globe"}, "local, global, isomorphic"),
    ({"min_width": 0}, "min_width=0 is neither"),
    ({"min_width": 1.5}, "min_width=1.5"), ({"min_width": True}, "min_width=True"),
    ({"min_width": {"0": "a"}}, "min_width='a'"), ({"min_width": {"x": 2}}, "min_width: 'x'"),
    ({"max_sparsity": 1.5}, "max_sparsity=1.5"), ({"max_sparsity": True}, "max_sparsity=True"),
    ({"max_sparsity": {nn.LSTM: 0.5}}, "matches no module"),
], ids=str)  # fmt: skip
def test_settings_that_mean_nothing_are_said_to(settings, words):
    with pytest.raises(fxprune.SettingError, match=words):
        fxprune.plan(loud(), X.float(), **settings)


def test_what_has_to_stay_of_one_kind_is_lost_by_all_others():
    scores = np.array([*range(16), *[np.inf] * 8, *range(8)])
    kinds = np.repeat([0, 1, 2], [16, 8, 8])
    kept = Choice(np.arange(1, 33), scores, [], [], kinds=kinds).keep(0.5)
    assert [int(kept[kinds == kind].sum()) for kind in range(3)] == [5, 8, 3]  # of 24 others 8
