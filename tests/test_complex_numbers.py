"""Parameters and results of complex numbers: layers of spectra, state spaces, complex networks."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import fxprune

from .oracle import check
from .test_constructs import Net, image


def drawn(*shape, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return nn.Parameter(torch.randn(*shape, dtype=torch.complex128, generator=generator))


def rows(*shape):
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(1))


def spectral(s, x):
    """A layer of a Fourier neural operator: the lowest frequencies are mixed, the others are 0."""
    found = torch.fft.rfft2(x)
    mixed = torch.zeros(len(x), s.width, 8, 5, dtype=found.dtype)
    mixed[:, :, :3, :3] = torch.einsum("bixy,ioxy->boxy", found[:, :, :3, :3], s.low)
    mixed[:, :, -3:, :3] = torch.einsum("bixy,ioxy->boxy", found[:, :, -3:, :3], s.high)
    return torch.fft.irfft2(mixed, s=x.shape[-2:])


def state_space(s, u):
    """y = u * k, with the kernel k[l] = Re Σ c exp(λ l): diagonal state spaces of each channel."""
    length = u.shape[1]
    times = torch.arange(length, dtype=torch.float64)
    k = torch.einsum("hn,hnl->hl", s.c, torch.exp(0.1 * s.rates[..., None] * times)).real
    spectra = torch.fft.rfft(u.mT, n=2 * length) * torch.fft.rfft(k, n=2 * length)
    return torch.fft.irfft(spectra, n=2 * length)[..., :length].mT


def complex_linear(s, x):
    h = F.linear(x.to(s.w1.dtype), s.w1, s.b1)
    return F.linear(torch.tanh(h), s.w2, s.b2).abs()


def two_complex_layers():
    return {"w1": drawn(8, 6), "b1": drawn(8), "w2": drawn(3, 8), "b2": drawn(3)}


NETWORKS = {
    "spectral": (
        lambda s, x: s.b(F.gelu(spectral(s, s.a(x)) + s.skip(s.a(x)))), image(),
        {"a": nn.Conv2d(3, 8, 1), "low": drawn(8, 6, 3, 3), "high": drawn(8, 6, 3, 3),
         "skip": nn.Conv2d(8, 6, 1), "b": nn.Conv2d(6, 4, 1), "width": 6}),
    "filter": (
        lambda s, x: s.b(torch.fft.irfft2(torch.fft.rfft2(s.a(x)) * s.f, s=x.shape[-2:])), image(),
        {"a": nn.Conv2d(3, 8, 1), "f": drawn(8, 8, 5), "b": nn.Conv2d(8, 4, 1)}),
    "state space": (
        lambda s, x: s.b(state_space(s, s.a(x))), rows(2, 7, 6),
        {"a": nn.Linear(6, 8), "rates": drawn(8, 4), "c": drawn(8, 4), "b": nn.Linear(8, 3)}),
    "linear": (complex_linear, rows(5, 6), two_complex_layers()),
    "layers": (
        lambda s, x: s.b(s.a(x.to(torch.complex128)) * torch.exp(s.rates)), rows(5, 6),
        {"a": nn.Linear(6, 8, dtype=torch.complex128), "rates": drawn(8),
         "b": nn.Linear(8, 3, dtype=torch.complex128)}),
}  # fmt: skip


@pytest.mark.parametrize("name", NETWORKS)
def test_complex_channels_go_like_others(name):
    forward, x, layers = NETWORKS[name]
    check(Net(forward, **layers), x)


class InPairs(nn.Module):
    """The same numbers as pairs of real ones."""

    def __init__(self, net):
        super().__init__()
        for name, p in net.named_parameters():
            setattr(self, name, nn.Parameter(torch.view_as_real(p.detach().clone())))

    def forward(self, x):
        h = x @ self.w1[..., 0].T + self.b1[:, 0], x @ self.w1[..., 1].T + self.b1[:, 1]
        h = torch.tanh(torch.complex(*h))
        re, im = self.w2.unbind(-1)
        out = (h.real @ re.T - h.imag @ im.T + self.b2[:, 0],
               h.real @ im.T + h.imag @ re.T + self.b2[:, 1])  # fmt: skip
        return torch.complex(*out).abs()


@pytest.mark.parametrize("importance", [
    "l2", fxprune.importance.Taylor([(rows(5, 6), rows(5, 3))], loss=F.mse_loss),
], ids=["l2", "taylor"])  # fmt: skip
def test_complex_weights_count_as_the_pairs_that_they_are(importance):
    net = Net(complex_linear, **two_complex_layers()).eval()
    x = rows(5, 6)
    assert torch.allclose(net(x), InPairs(net)(x))
    plans = [fxprune.plan(model, x, importance=importance) for model in (net, InPairs(net))]
    kept = [plan.kept["w1"][0].tolist() for plan in plans]
    assert len(kept[0]) == 4 and kept[0] == kept[1]


def test_a_model_of_complex_numbers_alone_is_proved_in_its_own_precision():
    net = Net(complex_linear, **two_complex_layers())
    for p in net.parameters():
        p.data = p.data.to(torch.complex64)
    small = fxprune.prune(net, rows(5, 6).float())
    assert small.w1.shape == (4, 6)
