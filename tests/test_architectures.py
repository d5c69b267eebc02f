"""Small networks of well-known kinds, written as their authors write them: each shrinks, and all
oracles hold."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from .oracle import check


def data(*shape, seed=1):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, dtype=torch.float64, generator=generator)


class MultiQuery(nn.Module):
    def __init__(self):
        super().__init__()
        self.q, self.kv, self.o = nn.Linear(6, 16), nn.Linear(6, 8), nn.Linear(16, 3)

    def forward(self, x):
        b, n, _ = x.shape
        q = self.q(x).view(b, n, 4, -1).transpose(1, 2)
        k, v = self.kv(x).unsqueeze(1).chunk(2, -1)
        w = (q @ k.transpose(-1, -2) / math.sqrt(k.size(-1))).softmax(-1)
        return self.o((w @ v).transpose(1, 2).reshape(b, n, -1))


class TalkingHeads(nn.Module):
    def __init__(self):
        super().__init__()
        self.qkv, self.o = nn.Linear(6, 48), nn.Linear(16, 3)
        self.before, self.after = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x):
        b, n, _ = x.shape
        q, k, v = self.qkv(x).view(b, n, 3, 4, 4).permute(2, 0, 3, 1, 4)
        w = self.before((q @ k.transpose(-1, -2)).permute(0, 2, 3, 1)).permute(0, 3, 1, 2)
        w = self.after(w.softmax(-1).permute(0, 2, 3, 1)).permute(0, 3, 1, 2)
        return self.o((w @ v).transpose(1, 2).reshape(b, n, 16))


class SharedBias(nn.Module):
    """As T5: one table of relative positions for all layers."""

    def __init__(self):
        super().__init__()
        self.inp, self.out, self.table = nn.Linear(6, 8), nn.Linear(8, 3), nn.Embedding(7, 4)
        self.heads, self.dim = 4, 4
        self.layers = nn.ModuleList(
            [nn.ModuleList([nn.Linear(8, 16) for _ in "qkv"] + [nn.Linear(16, 8)]) for _ in "ab"]
        )

    def cut(self, t):
        return t.view(t.shape[0], -1, self.heads, self.dim).transpose(1, 2)

    def forward(self, x):
        y, place = torch.sigmoid(self.inp(x)), torch.arange(x.shape[1])
        where = (place[:, None] - place[None]).clamp(-3, 3) + 3
        bias = self.table(where).permute(2, 0, 1).unsqueeze(0)
        for q, k, v, o in self.layers:
            scores = self.cut(q(y)) @ self.cut(k(y)).transpose(2, 3) + bias
            z = (scores.softmax(-1) @ self.cut(v(y))).transpose(1, 2).contiguous()
            y = y + o(z.view(y.shape[0], -1, self.heads * self.dim))
        return self.out(y)


class Perceiver(nn.Module):
    def __init__(self):
        super().__init__()
        self.inp, self.latents = nn.Linear(6, 8), nn.Parameter(torch.randn(1, 3, 12))
        self.q, self.kv, self.p = nn.Linear(12, 16), nn.Linear(8, 32), nn.Linear(16, 12)
        self.out = nn.Linear(12, 3)

    def forward(self, x):
        b, latents = x.shape[0], self.latents.expand(x.shape[0], -1, -1)
        k, v = self.kv(torch.sigmoid(self.inp(x))).chunk(2, -1)
        q, k, v = (
            t.reshape(b, -1, 4, t.shape[-1] // 4).transpose(1, 2) for t in (self.q(latents), k, v)
        )
        y = F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2)
        return self.out(latents + self.p(y)).mean(1)


class GraphAttention(nn.Module):
    def __init__(self):
        super().__init__()
        self.w, self.o = nn.Linear(6, 16), nn.Linear(16, 3)
        self.left, self.right = nn.Parameter(torch.randn(4, 4)), nn.Parameter(torch.randn(4, 4))

    def forward(self, x, adjacency):
        h = self.w(x).view(len(x), 4, 4)
        e = (h * self.left).sum(-1)[:, None] + (h * self.right).sum(-1)[None]
        e = F.leaky_relu(e, 0.2).masked_fill(adjacency[:, :, None] == 0, -1e9).softmax(1)
        return self.o(F.elu(torch.einsum("ijh,jhd->ihd", e, h).reshape(len(x), 16)))


class ConvLSTM(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv, self.out, self.hidden = nn.Conv2d(11, 32, 3, padding=1), nn.Conv2d(8, 2, 1), 8

    def forward(self, x):
        h = torch.zeros(x.shape[0], self.hidden, *x.shape[3:], dtype=x.dtype)
        c = h.clone()
        for step in x.unbind(1):
            i, f, o, u = self.conv(torch.cat([step, h], 1)).chunk(4, 1)
            c = torch.sigmoid(f) * c + torch.sigmoid(i) * torch.tanh(u)
            h = torch.sigmoid(o) * torch.tanh(c)
        return self.out(h)


class HandGRU(nn.Module):
    def __init__(self):
        super().__init__()
        self.w = nn.ModuleList([nn.Linear(4, 8) for _ in "zrn"])
        self.u = nn.ModuleList([nn.Linear(8, 8) for _ in "zrn"])
        self.out = nn.Linear(8, 2)

    def forward(self, x):
        h = x.new_zeros(x.size(0), self.out.in_features)
        for t in range(x.size(1)):
            a, b = [w(x[:, t]) for w in self.w], [u(h) for u in self.u]
            z, r = torch.sigmoid(a[0] + b[0]), torch.sigmoid(a[1] + b[1])
            h = (1 - z) * h + z * torch.tanh(a[2] + r * b[2])
        return self.out(h)


class FiLM(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Conv2d(3, 8, 3, padding=1), nn.Conv2d(8, 2, 3, padding=1)
        self.c, self.f = nn.Linear(5, 6), nn.Linear(6, 16)

    def forward(self, x, condition):
        scale, shift = self.f(torch.sigmoid(self.c(condition))).chunk(2, 1)
        y = F.silu(self.a(x)) * (1 + scale[:, :, None, None]) + shift[:, :, None, None]
        return self.b(torch.cos(y))


class AdaIN(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b, self.f = nn.Conv2d(3, 8, 3), nn.Conv2d(8, 2, 1), nn.Linear(5, 16)

    def forward(self, x, style):
        y = F.silu(self.a(x))
        mean, std = y.mean((2, 3), keepdim=True), y.std((2, 3), keepdim=True) + 1e-3
        scale, shift = self.f(style).view(-1, 2, 8, 1, 1).unbind(1)
        return self.b((y - mean) / std * scale + shift)


class SelectiveScan(nn.Module):
    """As Mamba, step by step."""

    def __init__(self):
        super().__init__()
        self.inp, self.out = nn.Linear(6, 16), nn.Linear(8, 3)
        self.conv = nn.Conv1d(8, 8, 3, padding=2, groups=8)
        self.xp, self.dt = nn.Linear(8, 8), nn.Linear(2, 8)
        self.a, self.d = nn.Parameter(torch.rand(8, 3)), nn.Parameter(torch.rand(8))

    def forward(self, x):
        b, n, _ = x.shape
        u, z = self.inp(x).chunk(2, -1)
        u = F.silu(self.conv(u.transpose(1, 2))[..., :n].transpose(1, 2))
        dt, k, c = self.xp(u).split([2, 3, 3], -1)
        dt, a, h, found = F.softplus(self.dt(dt)), -torch.exp(self.a), 0.0, []
        for t in range(n):
            step = dt[:, t, :, None]
            h = torch.exp(step * a) * h + step * k[:, t, None, :] * u[:, t, :, None]
            found.append((h * c[:, t, None, :]).sum(-1))
        return self.out((torch.stack(found, 1) + u * self.d) * F.silu(z))


class ParallelBlock(nn.Module):
    """Attention and MLP from one projection and into one."""

    def __init__(self):
        super().__init__()
        self.inp, self.norm, self.out = nn.Linear(6, 8), nn.LayerNorm(8), nn.Linear(8, 3)
        self.fused, self.proj, self.inner, self.wide = nn.Linear(8, 68), nn.Linear(36, 8), 16, 20

    def forward(self, x):
        x = torch.sigmoid(self.inp(x))
        b, n, _ = x.shape
        q, k, v, f = self.fused(self.norm(x)).split([*[self.inner] * 3, self.wide], -1)
        q, k, v = (t.view(b, n, 4, -1).transpose(1, 2) for t in (q, k, v))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2)
        return self.out(x + self.proj(torch.cat([y.reshape(b, n, self.inner), F.gelu(f)], -1)))


class PointNet(nn.Module):
    def __init__(self):
        super().__init__()
        self.t0, self.t1 = nn.Conv1d(3, 8, 1), nn.Linear(8, 9)
        self.a, self.norm, self.b = nn.Conv1d(3, 8, 1), nn.BatchNorm1d(8), nn.Conv1d(8, 12, 1)
        self.out = nn.Conv1d(20, 4, 1)

    def forward(self, x):
        turn = self.t1(torch.sigmoid(self.t0(x)).amax(2)).view(-1, 3, 3)
        y = F.silu(self.norm(self.a(torch.bmm(x.transpose(2, 1), turn).transpose(2, 1))))
        whole = F.silu(self.b(y)).max(2, keepdim=True)[0].expand(-1, -1, x.size(2))
        return self.out(torch.cat([whole, y], 1))


class SplitAttention(nn.Module):
    """As ResNeSt."""

    def __init__(self):
        super().__init__()
        self.conv, self.out = nn.Conv2d(4, 16, 3, padding=1, groups=2), nn.Conv2d(8, 2, 1)
        self.f1, self.f2 = nn.Conv2d(8, 4, 1), nn.Conv2d(4, 16, 1)

    def forward(self, x):
        y = F.silu(self.conv(x))
        b, width = y.shape[:2]
        parts = torch.split(y, width // 2, 1)
        w = self.f2(F.relu(self.f1(sum(parts).mean((2, 3), keepdim=True))))
        w = w.view(b, 1, 2, -1).transpose(1, 2).softmax(1).reshape(b, -1, 1, 1)
        weights = torch.split(w, width // 2, 1)
        return self.out(sum(p * q for p, q in zip(weights, parts, strict=True)))


class Translator(nn.Module):
    """An encoder, and a decoder that attends to its states one step after the other."""

    def __init__(self):
        super().__init__()
        self.source, self.target = nn.Embedding(9, 6), nn.Embedding(9, 6)
        self.encoder, self.cell = nn.LSTM(6, 8, batch_first=True), nn.LSTMCell(6, 8)
        self.score, self.mix, self.out = nn.Linear(8, 8), nn.Linear(16, 8), nn.Linear(8, 9)

    def forward(self, x, y):
        states, (h, c) = self.encoder(self.source(x))
        h, c, found = h[0], c[0], []
        for t in range(y.shape[1]):
            h, c = self.cell(self.target(y[:, t]), (h, c))
            w = torch.bmm(states, self.score(h).unsqueeze(2)).squeeze(2).softmax(1)
            context = torch.bmm(w.unsqueeze(1), states).squeeze(1)
            found.append(self.out(torch.tanh(self.mix(torch.cat([context, h], 1)))))
        return torch.stack(found, 1)


class GatedMLP(nn.Module):
    """As gMLP: a layer over tokens gates one half with the other."""

    def __init__(self):
        super().__init__()
        self.inp, self.norm, self.out = nn.Linear(6, 16), nn.LayerNorm(8), nn.Linear(8, 3)
        self.tokens = nn.Linear(5, 5)

    def forward(self, x):
        u, v = F.gelu(self.inp(x)).chunk(2, -1)
        return self.out(u * self.tokens(self.norm(v).transpose(1, 2)).transpose(1, 2))


ROWS, IMAGE = data(2, 5, 6), data(2, 3, 6, 6)
NETWORKS = {
    MultiQuery: ROWS, TalkingHeads: ROWS, SharedBias: ROWS, Perceiver: ROWS, ParallelBlock: ROWS,
    SelectiveScan: ROWS, GatedMLP: ROWS, GraphAttention: (data(5, 6), torch.ones(5, 5)),
    ConvLSTM: data(2, 3, 3, 4, 4), HandGRU: data(2, 3, 4), FiLM: (IMAGE, data(2, 5)),
    AdaIN: (IMAGE, data(2, 5)), PointNet: data(2, 3, 6), SplitAttention: data(2, 4, 5, 5),
    Translator: (torch.arange(8).view(2, 4), torch.arange(6).view(2, 3)),
}  # fmt: skip


@pytest.mark.parametrize("kind", NETWORKS, ids=lambda kind: kind.__name__)
def test_the_network_shrinks_to_less_than_two_thirds(kind):
    model = kind()
    before = sum(p.numel() for p in model.parameters())
    _, small = check(model, NETWORKS[kind])
    assert sum(p.numel() for p in small.parameters()) < 0.66 * before


@pytest.mark.parametrize("kind", NETWORKS, ids=lambda kind: kind.__name__)
def test_slices_of_heads_are_right_or_refused(kind):
    check(kind(), NETWORKS[kind], attention="head_dim", shrinks=False)
