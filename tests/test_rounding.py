"""Widths are rounded in channels, to what the device likes where that is asked for."""

from __future__ import annotations

import pytest
import torch
import torchvision
from torch import nn

import fxprune
from fxprune.choosing.rounding import preferred

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
