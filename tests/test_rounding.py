"""Widths are rounded in channels, to what the device likes where that is asked for."""

from __future__ import annotations

import numpy as np
import pytest
import torch
import torchvision
from torch import nn

import fxprune
from fxprune.choosing.rounding import preferred
from fxprune.choosing.select import Choice

from .oracle import check
from .test_trace import Net

X = torch.randn(1, 3, 8, 8)


def net(width=40):
    return nn.Sequential(
        nn.Conv2d(3, width, 3), nn.ReLU(), nn.Conv2d(width, width, 3), nn.ReLU(),
        nn.Conv2d(width, 4, 1),
    )  # fmt: skip


@pytest.mark.parametrize("capability, dtype, number", [
    ("AVX512", torch.float32, 16), ("AVX2", torch.float32, 8), ("AVX2", torch.float64, 4),
    ("AVX2", torch.bfloat16, 16), ("AVX512", torch.float16, 32), ("DEFAULT", torch.float32, 1),
    ("SOMETHING NEW", torch.float32, 1),
])  # fmt: skip
def test_auto_fills_the_vector_registers_of_a_cpu(monkeypatch, capability, dtype, number):
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: capability)
    model = net().to(dtype)
    assert preferred(model)[0] == number
    plan = fxprune.plan(model, X.to(dtype), sparsity=0.45, round_to="auto")
    kept = [g.kept for g in plan.groups if len(g.removed)]
    assert all(n % number == 0 for n in kept) and all(n >= 22 for n in kept)
    assert f"round_to='auto' is {number}: {str(dtype)[6:]} on a CPU with {capability}" in str(plan)


@pytest.mark.parametrize("dtype, major, tf32, number", [
    (torch.float16, 7, False, 8), (torch.bfloat16, 8, False, 8), (torch.float16, 6, False, 1),
    (torch.float32, 8, True, 4), (torch.float32, 8, False, 1), (torch.float32, 7, True, 1),
    (torch.float64, 9, True, 1),
])  # fmt: skip
def test_auto_fills_the_tensor_cores_of_a_gpu(monkeypatch, dtype, major, tf32, number):
    class Parameter:
        device = torch.device("cuda")

        def __init__(self):
            self.dtype = dtype

        def numel(self):
            return 3

        def is_floating_point(self):
            return True

    class Model:
        def parameters(self):
            return [Parameter()]

    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda d: (major, 0))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda d: "some GPU")
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", tf32)
    found, why = preferred(Model())
    assert found == number and why == f"{str(dtype)[6:]} on some GPU"


def test_most_of_the_numbers_say_what_the_dtype_is(monkeypatch):
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: "AVX2")
    model = net().to(torch.bfloat16)
    model[2].float()
    assert preferred(model)[0] == 8
    assert preferred(nn.ReLU())[0] == 1


def test_heads_are_rounded_by_their_channels_not_by_their_number():
    torch.manual_seed(0)
    model = torchvision.models.VisionTransformer(16, 8, 1, 6, 48, 64).eval()
    x = torch.randn(1, 3, 16, 16)
    heads = "encoder.layers.encoder_layer_0.self_attention"
    kept = {}
    for round_to in (1, 8, 16, 64):
        plan = fxprune.plan(model, x, sparsity=0.5, round_to=round_to)
        kept[round_to] = {g.name: g.kept for g in plan.groups}[heads]
    assert kept == {1: 3, 8: 3, 16: 4, 64: 6}  # 24, 24, 32, 48 channels


def test_filters_before_a_pixel_shuffle_are_rounded_by_their_number():
    model = nn.Sequential(nn.Conv2d(3, 40, 3), nn.PixelShuffle(2), nn.Conv2d(10, 2, 1)).eval()
    kept = {r: fxprune.prune(model, X, round_to=r)[0].out_channels for r in (1, 4, 8, 16)}
    assert kept == {1: 20, 4: 20, 8: 24, 16: 32}


def test_bins_stay_equal_and_rounding_never_leaves_nothing():
    model = nn.Sequential(nn.Conv2d(4, 32, 3, groups=4), nn.ReLU(), nn.Conv2d(32, 2, 1)).eval()
    x = torch.randn(1, 4, 8, 8)
    for round_to, left in ((1, 4), (8, 8), (16, 16), (24, 24), (64, 32)):
        small = fxprune.prune(model, x, sparsity=0.95, round_to=round_to)
        assert small[0].out_channels == left


def beside(a, b, groups):
    """Two layers, whose channels are parts of a convolution in groups."""
    return Net(
        lambda s, x: s.c(torch.cat([s.a(x), s.b(x)], 1)),
        a=nn.Conv2d(3, a, 1), b=nn.Conv2d(3, b, 1), c=nn.Conv2d(a + b, 12, 1, groups=groups),
    )  # fmt: skip


def overlapping():
    """The channels of one layer are added to some of another's, and these lie in two groups."""

    def forward(s, x):
        a = s.a(x)
        a = torch.cat([a[:, :16] + s.d(x), a[:, 16:]], 1)
        return s.c(torch.cat([a, s.b(x)], 1))

    layers = {"a": nn.Conv2d(3, 40, 1), "b": nn.Conv2d(3, 24, 1), "d": nn.Conv2d(3, 16, 1)}
    return Net(forward, c=nn.Conv2d(64, 8, 1, groups=2), **layers)


@pytest.mark.parametrize("sparsity", [0.3, 0.6])
@pytest.mark.parametrize("round_to", [2, 4, 8])
@pytest.mark.parametrize("build", [
    lambda: beside(40, 40, 2), lambda: beside(40, 40, 4), lambda: beside(32, 96, 4),
    lambda: beside(40, 24, 2), overlapping,
], ids=["a layer a part", "two parts", "one and three", "across", "overlapping"])  # fmt: skip
def test_every_layer_that_makes_the_parts_is_rounded(build, round_to, sparsity):
    settings = {"sparsity": sparsity, "round_to": round_to, "importance": "l1"}
    x = torch.randn(2, 3, 4, 4, dtype=torch.float64)
    _, small = check(build(), x, **settings)
    names = [n for n, _ in small.named_children() if n != "c"]
    widths = {n: (getattr(small, n).out_channels, getattr(build(), n).out_channels) for n in names}
    assert all(now % round_to == 0 for now, _ in widths.values()), widths
    assert widths["a"][0] < widths["a"][1]


@pytest.mark.parametrize("round_to", [2, 8])
def test_halves_that_are_shuffled_are_rounded_one_by_one(round_to):
    model = torchvision.models.shufflenet_v2_x0_5(weights=None).eval()
    small = fxprune.prune(model, torch.randn(1, 3, 64, 64), sparsity=0.4, round_to=round_to)
    layers = [m for m in small.modules() if isinstance(m, nn.Conv2d)]
    assert all(m.out_channels % round_to == 0 for m in layers)


def test_units_that_no_part_holds_are_rounded_with_those_that_one_does():
    bins = [np.arange(1, 33).reshape(2, 16)]
    choice = Choice(np.arange(1, 38), np.arange(37.0), bins, [])
    kept = choice.keep(0.3, 8)
    assert kept.sum() in (24, 32) and kept[:16].sum() == kept[16:32].sum()


def bordered(groups=1):
    return nn.Sequential(
        nn.Conv2d(3, 32, 3, padding=1), nn.ReLU(),
        nn.Conv2d(32, 32, 3, padding=1, groups=groups), nn.ReLU(), nn.Conv2d(32, 4, 3, padding=1),
    )  # fmt: skip


@pytest.mark.parametrize("settings", [
    {}, {"sparsity": 0.3}, {"scope": "global"}, {"scope": "isomorphic"},
    {"target": fxprune.Target(params=0.4)},
], ids=str)  # fmt: skip
@pytest.mark.parametrize("groups", [1, 4])
@pytest.mark.parametrize("round_to", [4, 8])
def test_a_channel_that_stays_masked_counts_in_a_rounded_width(round_to, groups, settings):
    plan = fxprune.plan(bordered(groups), X, exact=True, round_to=round_to, **settings)
    found = [g for g in plan.groups if len(g.removed)]
    assert found and all(len(g.carriers) and g.kept % round_to == 0 for g in found)


@pytest.mark.parametrize("groups", [1, 4])
def test_rounded_widths_with_masked_channels_are_as_wide_as_without_and_proved(groups):
    x = torch.randn(2, 3, 8, 8, dtype=torch.float64)
    plan, small = check(bordered(groups), x, round_to=8)
    exact = fxprune.prune(bordered(groups), X, round_to=8, exact=True)
    assert [small[i].out_channels for i in (0, 2)] == [exact[i].out_channels for i in (0, 2)]
    assert small[0].out_channels == 16


@pytest.mark.parametrize("scope", ["local", "global", "isomorphic"])
def test_a_target_is_met_with_rounded_widths(scope):
    torch.manual_seed(0)
    model = torchvision.models.resnet18(weights=None).eval()
    target = fxprune.Target(params=0.4)
    plan = fxprune.plan(model, torch.randn(1, 3, 32, 32), target=target, round_to=8, scope=scope)
    assert all(g.kept % 8 == 0 for g in plan.groups if len(g.removed))
    assert abs(plan.target.error) <= 0.02


def test_a_rounding_that_means_nothing_is_refused():
    with pytest.raises(fxprune.SettingError, match=r"round_to='8'.*'auto'"):
        fxprune.plan(net(), X, round_to="8")
