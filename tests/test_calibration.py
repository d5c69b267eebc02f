"""Calibration: what is folded is the regression, and it is better than a constant."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import fxprune
from fxprune.proof import prove

from .test_trace import Net


def randomised(model, seed=0):
    """Non-zero biases, norms and statistics that say something."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, t in model.state_dict().items():
            if t.is_floating_point() and t.dim() < 2:
                noise = torch.rand(t.shape, generator=generator, dtype=torch.float64)
                t.copy_(0.5 + noise if name.endswith(("var", "weight")) else noise - 0.3)
    return model.double().eval()


def correlated(count, *shape, seed=0, rank=3):
    """Inputs of few sources: what one channel says, others say too."""
    generator = torch.Generator().manual_seed(seed)
    basis = torch.randn(rank, *shape, generator=generator, dtype=torch.float64)
    weights = torch.randn(count, rank, generator=generator, dtype=torch.float64)
    noise = torch.randn(count, *shape, generator=generator, dtype=torch.float64)
    return torch.tensordot(weights, basis, 1) + 0.05 * noise


def conv_net():
    return randomised(nn.Sequential(
        nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.SiLU(), nn.Conv2d(8, 12, 3, groups=2), nn.SiLU(),
        nn.ConvTranspose2d(12, 10, 2), nn.Sigmoid(), nn.AdaptiveAvgPool2d(2), nn.Flatten(),
        nn.Linear(40, 5),
    ))  # fmt: skip


def residual_net():
    def forward(s, x):
        x = s.first(x)
        for block in s.blocks:
            x = x + block(x)
        return s.last(F.silu(x).mean((2, 3)))

    def block():
        return nn.Sequential(
            nn.Conv2d(8, 10, 1), nn.BatchNorm2d(10), nn.Tanh(), nn.Conv2d(10, 8, 1)
        )

    return randomised(Net(forward, first=nn.Conv2d(3, 8, 3), last=nn.Linear(8, 5),
                          blocks=nn.ModuleList([block(), block()])))  # fmt: skip


def attention_net():
    def forward(s, x):
        x = s.embed(x)
        y = s.norm(x)
        x = x + s.attention(y, y, y, need_weights=False)[0]
        return s.last(F.gelu(s.up(x)))

    return randomised(Net(
        forward, embed=nn.Linear(6, 16), norm=nn.LayerNorm(16), up=nn.Linear(16, 24),
        attention=nn.MultiheadAttention(16, 4, batch_first=True), last=nn.Linear(24, 3),
    ))  # fmt: skip


def lstm_net(kind=nn.LSTM, **settings):
    def forward(s, x):
        return s.last(s.lstm(x)[0])

    lstm = kind(6, 12, 2, batch_first=True, **settings)
    ways = 2 if settings.get("bidirectional") else 1
    return randomised(Net(forward, lstm=lstm, last=nn.Linear(12 * ways, 3)))


IMAGES, STEPS = correlated(40, 3, 9, 9), correlated(40, 7, 6)
NETS = {
    "convolutions": (conv_net, IMAGES),
    "residual": (residual_net, IMAGES),
    "attention": (attention_net, STEPS),
    "lstm": (lstm_net, STEPS),
    "gru, both ways": (lambda: lstm_net(nn.GRU, bidirectional=True), STEPS),
}


@pytest.mark.parametrize("mode", ["sequential", "parallel"])
@pytest.mark.parametrize("name", NETS)
def test_calibrated_is_proved_and_nearer_to_the_model_than_constants(name, mode):
    build, data = NETS[name]
    model, cal, unseen = build(), data[:32], data[32:]
    wanted = model(unseen)

    def off(**settings):
        plan = fxprune.plan(model, unseen[:2], sparsity=0.5, **settings)
        small = plan.apply(model)
        assert prove(plan, model, small, unseen[:2]) <= 1e-9
        return float((small(unseen) - wanted).square().mean())

    plain = off()
    assert off(calibration=[cal[:16], cal[16:]], calibration_mode=mode) < 0.5 * plain


def hooked(plan, model):
    """The masked model, with each regression applied to what its layer reads: W (A x + b). This
    shares no code with folding W · A; readers are modules that read along dimension 1 or -1."""
    masked = plan.mask(model)
    original = dict(model.named_modules())
    for name, mix in plan._mixes.items():
        path = name.removesuffix(".weight")
        layer = masked.get_submodule(path)
        nn.utils.parametrize.remove_parametrizations(layer, "weight")
        with torch.no_grad():
            layer.weight.copy_(original[path].weight)
            layer.bias.copy_(original[path].bias)
            for axis in plan._relations.sources:
                if axis.name == name and axis.role == "out":  # dead outputs stay dead
                    dead = axis.laid(plan.flags("removed", axis))
                    layer.weight.copy_(
                        (layer.weight.reshape(axis.view) * ~dead).reshape(layer.weight.shape)
                    )

        def hook(module, args, mix=mix):
            x = args[0].movedim(1, -1) if args[0].dim() == 4 else args[0]
            matrix = torch.block_diag(*mix.matrix)
            y = x @ matrix.T + mix.offset.reshape(-1)
            return (y.movedim(-1, 1) if args[0].dim() == 4 else y,)

        layer.register_forward_pre_hook(hook)
    return masked


@pytest.mark.parametrize("name", ["convolutions", "residual"])
def test_what_is_folded_is_what_the_regression_says(name):
    build, data = NETS[name]
    model = build()
    plan = fxprune.plan(model, data[:2], sparsity=0.5, calibration=[data[:32]])
    small = plan.apply(model)
    assert torch.allclose(hooked(plan, model)(data[32:]), small(data[32:]), rtol=0, atol=1e-9)
