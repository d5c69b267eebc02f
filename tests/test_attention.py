"""Attention in the ways people write it: heads or slices of every head go, with no hint."""

from __future__ import annotations

import copy
import io
import math
import types
from functools import partial

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.nn.attention.flex_attention import create_block_mask, flex_attention

import fxprune

from .oracle import awake, check, difference, run
from .test_constructs import Net

HOW = ["heads", "head_dim"]


def tokens(n=7, c=6, batch=2, seed=1):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(batch, n, c, dtype=torch.float64, generator=generator)


def pruned_units(plan, name):
    group = next(g for g in plan.groups if g.name == name)
    return group.width, len(group.removed), group.frozen


# -- written by hand ----------------------------------------------------------------------------


def sdpa(q, k, v):
    return F.scaled_dot_product_attention(q, k, v)


def by_matmul(q, k, v):
    scores = (q * q.shape[-1] ** -0.5) @ k.transpose(-2, -1)
    return scores.softmax(dim=-1) @ v


def by_einsum(q, k, v):
    scores = torch.einsum("bhid,bhjd->bhij", q, k) / math.sqrt(q.shape[-1])
    return torch.einsum("bhij,bhjd->bhid", F.softmax(scores, -1), v)


FUSED = {
    "reshape 3 h d": lambda y, b, n, h: y.reshape(b, n, 3, h, -1).permute(2, 0, 3, 1, 4).unbind(0),
    "view h 3 d": lambda y, b, n, h: y.view(b, n, h, 3, -1).permute(3, 0, 2, 1, 4).unbind(0),
    "chunk": lambda y, b, n, h: [t.view(b, n, h, -1).transpose(1, 2) for t in y.chunk(3, -1)],
    "split": lambda y, b, n, h: [
        t.view(b, n, h, t.shape[-1] // h).transpose(1, 2) for t in y.split(y.shape[-1] // 3, dim=-1)
    ],
    "index": lambda y, b, n, h: [
        y.reshape(b, n, 3, h, -1).transpose(1, 3)[:, :, i] for i in range(3)
    ],
    "heads then chunk": lambda y, b, n, h: y.view(b, n, h, -1).transpose(1, 2).chunk(3, -1),
}  # fmt: skip


def fused_net(form, mix):
    def forward(s, x):
        y = F.silu(s.inp(x))
        b, n, c = y.shape
        q, k, v = FUSED[form](s.qkv(y), b, n, s.heads)
        return s.out(y + s.proj(mix(q, k, v).transpose(1, 2).reshape(b, n, -1)))

    net = Net(forward, inp=nn.Linear(6, 16), qkv=nn.Linear(16, 48), proj=nn.Linear(16, 16),
              out=nn.Linear(16, 3))  # fmt: skip
    net.heads = 4
    return net


@pytest.mark.parametrize("how", HOW)
@pytest.mark.parametrize("mix", [sdpa, by_matmul, by_einsum], ids=lambda f: f.__name__)
@pytest.mark.parametrize("form", FUSED)
def test_26_fused_qkv_in_six_forms(form, mix, how):
    plan, small = check(fused_net(form, mix), tokens(), attention=how)
    assert small.inp.out_features == 8 and small.qkv.out_features == 24
    assert small.heads == (2 if how == "heads" else 4)


@pytest.mark.parametrize("how", HOW)
@pytest.mark.parametrize("mix", [sdpa, by_matmul], ids=lambda f: f.__name__)
def test_27_separate_projections(mix, how):
    def forward(s, x):
        b, n, _ = x.shape
        q, k, v = (layer(x).view(b, n, s.heads, -1).transpose(1, 2) for layer in (s.q, s.k, s.v))
        return s.out(mix(q, k, v).transpose(1, 2).flatten(2))

    net = Net(forward, q=nn.Linear(6, 16), k=nn.Linear(6, 16), v=nn.Linear(6, 24),
              out=nn.Linear(24, 3))  # fmt: skip
    net.heads = 4
    plan, small = check(net, tokens(), attention=how)
    assert (small.q.out_features, small.v.out_features) == (8, 12)


GROUPED = {
    "expand": lambda k, r: k[:, :, None].expand(-1, -1, r, -1, -1).flatten(1, 2),
    "expand reshape": lambda k, r: k[:, :, None].expand(
        k.shape[0], k.shape[1], r, k.shape[2], k.shape[3]
    ).reshape(k.shape[0], k.shape[1] * r, k.shape[2], k.shape[3]),
    "repeat_interleave": lambda k, r: k.repeat_interleave(r, dim=1),
}  # fmt: skip


def grouped_net(repeat, mix=sdpa):
    def forward(s, x):
        b, n, _ = x.shape
        q = s.q(x).view(b, n, s.heads, s.dim).transpose(1, 2)
        k, v = (layer(x).view(b, n, s.kv, s.dim).transpose(1, 2) for layer in (s.k, s.v))
        k, v = (repeat(t, s.heads // s.kv) for t in (k, v))
        return s.out(mix(q, k, v).transpose(1, 2).reshape(b, n, -1))

    net = Net(forward, q=nn.Linear(6, 16), k=nn.Linear(6, 8), v=nn.Linear(6, 8),
              out=nn.Linear(16, 3))  # fmt: skip
    net.heads, net.kv, net.dim = 4, 2, 4
    return net


@pytest.mark.parametrize("how", HOW)
@pytest.mark.parametrize("repeat", GROUPED)
def test_28_query_groups(repeat, how):
    plan, small = check(grouped_net(GROUPED[repeat]), tokens(), attention=how)
    assert (small.q.out_features, small.k.out_features, small.v.out_features) == (8, 4, 4)


@pytest.mark.parametrize("how", HOW)
def test_28_query_groups_inside_the_attention_call(how):
    def mix(q, k, v):
        return F.scaled_dot_product_attention(q, k, v, enable_gqa=True)

    plan, small = check(grouped_net(lambda k, r: k, mix), tokens(), attention=how)
    assert (small.q.out_features, small.k.out_features, small.v.out_features) == (8, 4, 4)


ONE_HEAD = {
    "expand": lambda q, k, v: sdpa(q, *(t[:, None].expand(-1, 4, -1, -1) for t in (k, v))),
    "repeat": lambda q, k, v: sdpa(q, *(t[:, None].repeat(1, 4, 1, 1) for t in (k, v))),
    "gqa": lambda q, k, v: F.scaled_dot_product_attention(
        q, k[:, None], v[:, None], enable_gqa=True
    ),
    "matmul": lambda q, k, v: by_matmul(q, k[:, None], v[:, None]),
    "einsum": lambda q, k, v: torch.einsum(
        "bhij,bjd->bhid", (torch.einsum("bhid,bjd->bhij", q, k) * 0.5).softmax(-1), v
    ),
}  # fmt: skip


@pytest.mark.parametrize("how", HOW)
@pytest.mark.parametrize("mix", ONE_HEAD)
def test_28_one_head_of_keys_for_all_queries_is_cut_along_its_slices(mix, how):
    def forward(s, x):
        b, n, _ = x.shape
        q = s.q(x).view(b, n, 4, -1).transpose(1, 2)
        return s.out(ONE_HEAD[mix](q, s.k(x), s.v(x)).transpose(1, 2).reshape(b, n, -1))

    net = Net(forward, q=nn.Linear(6, 16), k=nn.Linear(6, 4), v=nn.Linear(6, 6),
              out=nn.Linear(24, 3))  # fmt: skip
    plan, small = check(net, tokens(), attention=how)
    assert (small.q.out_features, small.k.out_features, small.v.out_features) == (8, 2, 3)
    assert small.out.in_features == 12


@pytest.mark.parametrize("how", HOW)
def test_28_one_head_of_keys_that_rotates_in_pairs_is_cut_along_them_and_keeps_its_scale(how):
    def pairs(x, angle):
        a, b = x[..., ::2], x[..., 1::2]
        turned = a * angle.cos() - b * angle.sin(), a * angle.sin() + b * angle.cos()
        return torch.stack(turned, -1).flatten(-2)

    def forward(s, x):
        b, n, _ = x.shape
        q = s.q(x).view(b, n, 4, -1).transpose(1, 2)
        k, v = (layer(x).unsqueeze(1) for layer in (s.k, s.v))
        angle = torch.arange(n, dtype=x.dtype)[:, None] * s.rates
        q, k = pairs(q, angle), pairs(k, angle)
        scores = q @ k.transpose(-1, -2) / math.sqrt(q.size(-1))
        return s.out((scores.softmax(-1) @ v).transpose(1, 2).reshape(b, n, -1))

    net = Net(forward, q=nn.Linear(6, 32), k=nn.Linear(6, 8), v=nn.Linear(6, 6),
              out=nn.Linear(24, 3))  # fmt: skip
    net.register_buffer("rates", torch.tensor([1.0, 0.5, 0.2, 0.1], dtype=torch.float64))
    plan, small = check(net, tokens(), attention=how)
    assert (small.q.out_features, small.k.out_features, small.v.out_features) == (16, 4, 3)
    assert small(tokens(5, batch=1)).shape == (1, 5, 3)


class RMS(nn.Module):
    def __init__(self, n):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(n))

    def forward(self, x):
        return self.weight * (x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6))


def rotate(x, cos, sin, form):
    if form == "halves":
        a, b = x.chunk(2, -1)
        return x * cos + torch.cat([-b, a], -1) * sin
    if form == "slices":
        half = x.shape[-1] // 2
        return x * cos + torch.cat((-x[..., half:], x[..., :half]), dim=-1) * sin
    if form == "written":
        y = torch.empty_like(x)
        y[..., ::2], y[..., 1::2] = -x[..., 1::2], x[..., ::2]
        return x * cos + y * sin
    pairs = torch.stack([-x[..., 1::2], x[..., ::2]], -1).reshape(x.shape)
    return x * cos + pairs * sin


@pytest.mark.parametrize("form", ["halves", "slices", "interleaved"])
@pytest.mark.parametrize("norm", [nn.RMSNorm, RMS, nn.LayerNorm], ids=lambda n: n.__name__)
def test_29_normalised_queries_and_rotary_embeddings(norm, form):
    def forward(s, x):
        b, n, _ = x.shape
        q, k, v = s.qkv(x).view(b, n, 3, s.heads, -1).permute(2, 0, 3, 1, 4).unbind(0)
        q, k = (rotate(f(t), s.cos, s.sin, form) for f, t in ((s.qn, q), (s.kn, k)))
        return s.out(sdpa(q, k, v).transpose(1, 2).flatten(2))

    angles = torch.arange(7).double()[:, None] * torch.tensor([1.0, 0.1]).double()
    angles = torch.cat([angles, angles], -1) if form != "interleaved" else (
        angles.repeat_interleave(2, -1))  # fmt: skip
    net = Net(forward, qkv=nn.Linear(6, 48), qn=norm(4), kn=norm(4), out=nn.Linear(16, 3),
              cos=angles.cos(), sin=angles.sin())  # fmt: skip
    net.heads = 4
    plan, small = check(net, tokens())
    assert pruned_units(plan, "qkv") == (4, 2, None) and small.heads == 2


@pytest.mark.parametrize("form", ["halves", "slices", "interleaved", "written"])
@pytest.mark.parametrize("fused", [True, False])
@pytest.mark.parametrize("heads", [2, 4])
def test_29_slices_of_heads_with_rotary_embeddings(form, fused, heads):
    def forward(s, x):
        b, n, _ = x.shape
        q, k, v = s.qkv(x).split(32, -1) if fused else (s.q(x), s.k(x), s.v(x))
        q, k, v = (t.view(b, n, s.heads, -1).transpose(1, 2) for t in (q, k, v))
        q, k = (rotate(t, s.cos, s.sin, form) for t in (q, k))
        return s.out(sdpa(q, k, v).transpose(1, 2).flatten(2))

    torch.manual_seed(0)
    angles = torch.rand(7, 32 // heads).double()
    layers = {name: nn.Linear(6, 32) for name in "qkv"}
    net = Net(forward, qkv=nn.Linear(6, 96), out=nn.Linear(32, 3), cos=angles.cos(),
              sin=angles.sin(), **layers)  # fmt: skip
    net.heads = heads
    plan, small = check(net, tokens(), attention="head_dim")
    assert small.heads == heads and small.out.in_features == 16
    assert small.cos.shape[1] == 16 // heads


def test_29_a_rotary_table_that_is_a_product_of_frequencies_and_positions():
    def forward(s, x):
        b, n, _ = x.shape
        q, k, v = s.qkv(x).view(b, n, 3, s.heads, -1).permute(2, 0, 3, 1, 4).unbind(0)
        positions = torch.arange(n, dtype=x.dtype)[None, None, :].expand(b, 1, n)
        angles = (s.frequencies[None, :, None].expand(b, -1, 1) @ positions).transpose(1, 2)
        angles = torch.cat([angles, angles], -1)[:, None]
        q, k = (rotate(t, angles.cos(), angles.sin(), "halves") for t in (q, k))
        return s.out(sdpa(q, k, v).transpose(1, 2).flatten(2))

    net = Net(forward, qkv=nn.Linear(6, 48), out=nn.Linear(16, 3))
    net.heads = 4
    net.register_buffer("frequencies", torch.tensor([1.0, 0.1]).double())
    plan, small = check(net, tokens())
    assert pruned_units(plan, "qkv") == (4, 2, None) and small.heads == 2
    assert torch.equal(small.frequencies, net.frequencies)


@pytest.mark.parametrize("part", [2, 4])
def test_29_rotary_embeddings_of_a_part_which_may_be_all(part):
    def forward(s, x):
        b, n, _ = x.shape
        q, k, v = s.qkv(x).split(16, -1)
        q, k, v = (t.view(b, n, -1, 4).transpose(1, 2) for t in (q, k, v))
        q, k = (
            torch.cat([rotate(t[..., :part], s.cos, s.sin, "slices"), t[..., part:]], -1)
            for t in (q, k)
        )
        return s.out(sdpa(q, k, v).transpose(1, 2).reshape(b, n, -1))

    angles = torch.rand(7, part).double()
    net = Net(forward, qkv=nn.Linear(6, 48), out=nn.Linear(16, 3), cos=angles.cos(),
              sin=angles.sin())  # fmt: skip
    plan, small = check(net, tokens())
    assert pruned_units(plan, "qkv") == (4, 2, None)


@pytest.mark.parametrize("bias", ["alibi", "table", "mask", "sink"])
def test_29_biases_of_the_scores(bias):
    def forward(s, x):
        b, n, _ = x.shape
        q, k, v = s.qkv(x).view(b, n, 3, s.heads, -1).permute(2, 0, 3, 1, 4).unbind(0)
        scores = q @ k.transpose(-2, -1)
        if bias == "alibi":
            scores = scores + s.slopes.view(1, -1, 1, 1) * s.distance
        elif bias == "table":
            table = s.table[s.index.view(-1)].view(n, n, -1).permute(2, 0, 1)
            scores = scores + table.unsqueeze(0)
        elif bias == "mask":
            scores = scores.masked_fill(s.mask == 0, float("-inf"))
        if bias == "sink":
            sink = s.sink.reshape(1, -1, 1, 1).expand(b, -1, n, 1)
            w = torch.cat([scores, sink], -1).softmax(-1)[..., :-1]
        else:
            w = scores.softmax(-1)
        return s.out((w @ v).transpose(1, 2).reshape(b, n, -1))

    place = torch.arange(7)
    net = Net(
        forward, qkv=nn.Linear(6, 48), out=nn.Linear(16, 3), slopes=torch.rand(4).double(),
        distance=(place[:, None] - place).abs().double(), index=(place[:, None] - place) % 9,
        table=nn.Parameter(torch.randn(9, 4)), mask=torch.tril(torch.ones(7, 7)),
        sink=nn.Parameter(torch.randn(4)),
    )  # fmt: skip
    net.heads = 4
    plan, small = check(net, tokens())
    assert pruned_units(plan, "qkv") == (4, 2, None)


class Window(nn.Module):
    """Windowed attention, shifted, as in Swin."""

    def __init__(self, c=16, heads=4, side=2, shift=1):
        super().__init__()
        self.inp, self.qkv, self.proj = nn.Conv2d(3, c, 1), nn.Linear(c, 3 * c), nn.Linear(c, c)
        self.out, self.heads, self.side, self.shift = nn.Conv2d(c, 3, 1), heads, side, shift
        self.table = nn.Parameter(torch.randn((2 * side - 1) ** 2, heads))
        self.register_buffer("index", torch.arange(side**4).view(side**2, -1) % len(self.table))

    def forward(self, x):
        y = torch.sigmoid(self.inp(x)).permute(0, 2, 3, 1)
        b, h, w, c = y.shape
        n = self.side
        y = torch.roll(y, shifts=(-self.shift, -self.shift), dims=(1, 2))
        z = y.view(b, h // n, n, w // n, n, c).permute(0, 1, 3, 2, 4, 5).reshape(-1, n * n, c)
        qkv = self.qkv(z).reshape(z.size(0), n * n, 3, self.heads, c // self.heads)
        q, k, v = qkv.permute(2, 0, 3, 1, 4)
        q = q * (c // self.heads) ** -0.5
        bias = self.table[self.index.view(-1)].view(n * n, n * n, -1).permute(2, 0, 1)
        a = F.softmax(q.matmul(k.transpose(-2, -1)) + bias.unsqueeze(0), dim=-1)
        z = self.proj(a.matmul(v).transpose(1, 2).reshape(z.size(0), n * n, c))
        z = z.view(b, h // n, w // n, n, n, c).permute(0, 1, 3, 2, 4, 5).reshape(b, h, w, c)
        return self.out((y + torch.roll(z, (self.shift, self.shift), (1, 2))).permute(0, 3, 1, 2))


def test_29_windows_that_are_shifted():
    x = torch.randn(2, 3, 4, 4, dtype=torch.float64)
    plan, small = check(Window(), x)
    assert small.inp.out_channels == 8


class Retention(nn.Module):
    """Every head is normalised by itself, as a group of channels."""

    def __init__(self, norm):
        super().__init__()
        self.heads = 4
        self.qkv, self.out = nn.Linear(6, 72), nn.Linear(24, 3)
        self.norm = norm if isinstance(norm, nn.Module) else None
        self.function = None if self.norm else norm

    def forward(self, x):
        b, n, _ = x.shape
        q, k, v = self.qkv(x).view(b, n, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        y = (q @ k.transpose(-2, -1) / n) @ v
        y = y.transpose(1, 2).reshape(b * n, -1)
        y = self.norm(y) if self.norm else self.function(self, y)
        return self.out(y.view(b, n, -1))


NORMS = {
    "module": lambda: nn.GroupNorm(4, 24),
    "without weights": lambda: nn.GroupNorm(4, 24, affine=False),
    "two groups a head": lambda: nn.GroupNorm(8, 24),
    "by an attribute": lambda: lambda s, y: F.group_norm(y, s.heads),
    "by a number": lambda: lambda s, y: F.group_norm(y, 4),
}


@pytest.mark.parametrize("norm", NORMS)
def test_29_heads_that_are_groups_of_a_norm_go_with_their_groups(norm):
    model, x = awake(Retention(NORMS[norm]())), tokens()
    plan, small = check(model, x)
    assert small.heads == 2 and small.qkv.out_features == 36
    if small.norm:
        assert small.norm.num_groups == model.norm.num_groups // 2
    for n in (7, 4):  # a group that is gone was counted by no other: what masks make is exact
        assert difference(run(plan.mask(model), tokens(n)), run(small, tokens(n))) < 1e-9
    assert check(model, x, attention="head_dim")[1].qkv.out_features < 72


def test_29_a_norm_of_two_heads_together_keeps_equally_many_of_each_of_its_groups():
    plan, small = check(awake(Retention(nn.GroupNorm(2, 24))), tokens(), sparsity=0.5)
    assert (small.heads, small.norm.num_groups) == (2, 2)
    gone = plan.groups[0].removed.tolist()
    assert len(gone) == 2 and sorted(head // 2 for head in gone) == [0, 1]


@pytest.mark.parametrize("how", HOW)
def test_29_linear_attention(how):
    """No softmax over positions: a kernel of features of each head."""

    def forward(s, x):
        b, n, _ = x.shape
        q, k, v = s.qkv(x).view(b, n, 3, s.heads, -1).permute(2, 0, 3, 1, 4).unbind(0)
        q, k = F.elu(q) + 1, F.elu(k) + 1
        context = k.transpose(-2, -1) @ v
        y = q @ context / (q * k.sum(2, keepdim=True)).sum(-1, keepdim=True)
        return s.out(y.transpose(1, 2).reshape(b, n, -1))

    net = Net(forward, qkv=nn.Linear(6, 48), out=nn.Linear(16, 3))
    net.heads = 4
    check(net, tokens(), attention=how, shrinks=how == "heads")


@pytest.mark.parametrize("how", HOW)
def test_29_attention_across_channels(how):
    """As in XCiT: the softmax runs along the slices of a head, and these are summed."""

    def forward(s, x):
        b, n, c = x.shape
        qkv = s.qkv(F.silu(s.inp(x))).reshape(b, n, 3, s.heads, -1).permute(2, 0, 3, 4, 1)
        q, k, v = qkv.unbind(0)
        q, k = (F.normalize(t, dim=-1) for t in (q, k))
        w = (q @ k.transpose(-2, -1) * s.temperature).softmax(-1)
        return s.out((w @ v).permute(0, 3, 1, 2).reshape(b, n, -1))

    net = Net(forward, inp=nn.Linear(6, 16), qkv=nn.Linear(16, 48), out=nn.Linear(16, 3),
              temperature=nn.Parameter(torch.ones(4, 1, 1)))  # fmt: skip
    net.heads = 4
    plan, small = check(net, tokens(), attention=how)
    assert small.inp.out_features == 8


class ViT(nn.Module):
    def __init__(self, c=16, heads=4, depth=2):
        super().__init__()
        self.patch = nn.Conv2d(3, c, 2, 2)
        self.cls, self.pos = (nn.Parameter(torch.randn(1, n, c)) for n in (1, 5))
        layer = nn.TransformerEncoderLayer(c, heads, 2 * c, batch_first=True, norm_first=True)
        self.blocks = nn.ModuleList([copy.deepcopy(layer) for _ in range(depth)])
        self.norm, self.head = nn.LayerNorm(c), nn.Linear(c, 5)

    def forward(self, x):
        y = self.patch(x).flatten(2).transpose(1, 2)
        y = torch.cat([self.cls.expand(y.shape[0], -1, -1), y], 1) + self.pos
        for block in self.blocks:
            y = block(y)
        return self.head(self.norm(y)[:, 0])


@pytest.mark.parametrize("how", HOW)
def test_31_vision_transformers_shrink_through_their_residual_stream(how):
    x = torch.randn(2, 3, 4, 4, dtype=torch.float64)
    plan, small = check(ViT(), x, attention=how)
    assert small.pos.shape[-1] == small.cls.shape[-1] == small.head.in_features == 8
    stream = next(g for g in plan.groups if ("pos", 2) in g.members)
    assert stream.name == "patch"
    whole, kept = check(ViT(), x, attention=how, ignore=["patch"])
    assert kept.head.in_features == 16 and kept.blocks[0].linear1.out_features == 16


# -- layers of torch.nn ---------------------------------------------------------------------------


class Block(nn.Module):
    def __init__(self, width=16, heads=4, need_weights=False, **settings):
        super().__init__()
        kdim, vdim = settings.get("kdim") or width, settings.get("vdim") or width
        self.inp, self.mem, self.value = nn.Linear(6, width), nn.Linear(5, kdim), nn.Linear(5, vdim)
        self.attention = nn.MultiheadAttention(width, heads, **settings)
        self.out, self.need_weights = nn.Linear(width, 3), need_weights

    def forward(self, x, memory=None, **masks):
        y = k = v = F.silu(self.inp(x))
        if memory is not None:
            k, v = torch.sigmoid(self.mem(memory)), torch.sigmoid(self.value(memory))
        return self.out(y + self.attention(y, k, v, need_weights=self.need_weights, **masks)[0])


CAUSAL = torch.triu(torch.full((7, 7), float("-inf"), dtype=torch.float64), 1)
PADDING = torch.tensor([[0] * 7, [0] * 5 + [1] * 2], dtype=torch.bool)
INSIDE = {
    "plain": ({}, {}), "batch first": ({"batch_first": True}, {}),
    "two heads": ({"heads": 2}, {}), "weights": ({"need_weights": True}, {}),
    "no bias": ({"bias": False}, {}), "bias kv": ({"add_bias_kv": True}, {}),
    "zero": ({"add_zero_attn": True, "batch_first": True}, {}),
    "cross": ({"batch_first": True}, {"memory": tokens(4, 5)}),
    "kdim": ({"kdim": 10, "vdim": 12}, {"memory": tokens(7, 5)}),
    "mask": ({"batch_first": True}, {"attn_mask": CAUSAL, "is_causal": True}),
    "bool mask": ({"batch_first": True}, {"attn_mask": CAUSAL < 0}),
    "padding": ({"batch_first": True, "need_weights": True}, {"key_padding_mask": PADDING}),
}  # fmt: skip


@pytest.mark.parametrize("how", HOW)
@pytest.mark.parametrize("kind", INSIDE)
def test_30_multihead_attention(kind, how):
    settings, more = INSIDE[kind]
    plan, small = check(Block(**settings), {"x": tokens(), **more}, attention=how)
    m = small.attention
    assert isinstance(m, nn.MultiheadAttention) and m.embed_dim == 8
    assert m.out_proj.in_features == 8 and m.num_heads * (1 if how == "head_dim" else 2) == (
        settings.get("heads", 4)
    )


def test_30_multihead_attention_without_a_batch():
    check(Block(), tokens()[0])


@pytest.mark.parametrize("settings", [{}, {"add_zero_attn": True}, {"add_bias_kv": True}])
def test_30_a_narrow_attention_takes_what_the_wide_one_takes(settings):
    """No batch, and PyTorch's hint that a mask is causal, by which it leaves out what it adds."""
    model = awake(Block(batch_first=True, **settings))
    plan = fxprune.plan(model, tokens(), sparsity={"attention": 0.5, "inp": 0.0})
    masked, small = plan.mask(model), plan.apply(model)
    assert plan.code.keys() == {"attention"}
    for x in (tokens(), tokens()[0]):
        for more in ({}, {"attn_mask": CAUSAL}, {"attn_mask": CAUSAL, "is_causal": True}):
            given = {"x": x, **more}
            assert difference(run(masked, given), run(small, given)) < 1e-9
    with pytest.raises(RuntimeError, match="Need attn_mask"):
        small(tokens(), is_causal=True)


def test_30_heads_stay_where_the_attention_weights_are_returned():
    class Returns(Block):
        def forward(self, x):
            y = F.silu(self.inp(x))
            z, w = self.attention(y, y, y)
            return self.out(y + z), w

    plan, small = check(Returns(), tokens())
    assert small.attention.num_heads == 4 and small.inp.out_features == 8
    assert "attention weights" in pruned_units(plan, "attention")[2]


def test_30_a_head_wise_mask_keeps_the_heads():
    mask = torch.zeros(8, 7, 7, dtype=torch.float64)
    plan, small = check(Block(batch_first=True), {"x": tokens(), "attn_mask": mask})
    assert small.attention.num_heads == 4 and small.inp.out_features == 8


class Encoder(nn.Module):
    def __init__(self, **settings):
        super().__init__()
        layer = nn.TransformerEncoderLayer(16, 4, 32, **settings)
        self.inp, self.out = nn.Linear(6, 16), nn.Linear(16, 3)
        self.encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)

    def forward(self, x, **masks):
        return self.out(self.encoder(self.inp(x), **masks))


@pytest.mark.parametrize("how", HOW)
@pytest.mark.parametrize("settings", [
    {}, {"batch_first": True, "activation": "gelu"}, {"batch_first": True, "norm_first": True},
    {"bias": False},
], ids=str)  # fmt: skip
def test_30_transformer_encoders(settings, how):
    plan, small = check(Encoder(**settings), tokens(), attention=how)
    layer = small.encoder.layers[0]
    assert layer.linear1.out_features == 16 and layer.linear1.in_features == 8


@pytest.mark.parametrize("masks", [
    {"mask": CAUSAL, "is_causal": True}, {"src_key_padding_mask": PADDING},
], ids=["causal", "padding"])  # fmt: skip
def test_30_transformer_encoders_with_masks(masks):
    check(Encoder(batch_first=True), {"x": tokens(), **masks})


def test_30_decoders_and_whole_transformers():
    class Whole(nn.Module):
        def __init__(self):
            super().__init__()
            self.inp, self.mem, self.out = nn.Linear(6, 16), nn.Linear(5, 16), nn.Linear(16, 3)
            self.transformer = nn.Transformer(16, 4, 1, 2, 32, batch_first=True)

        def forward(self, x, memory):
            return self.out(self.transformer(self.inp(x), self.mem(memory)))

    plan, small = check(Whole(), (tokens(), tokens(4, 5)))
    cross = small.transformer.decoder.layers[1].multihead_attn
    assert cross.num_heads == 2 and cross.embed_dim == 8


@pytest.mark.parametrize("ignore", [(), ("inp", "*.linear2", "*.out_proj")], ids=["all", "heads"])
@pytest.mark.parametrize("how", HOW)
def test_30_the_fast_path_neither_hides_layers_nor_breaks_on_the_result(how, ignore):
    model = awake(Encoder(batch_first=True)).float()
    x = tokens().float()
    small = fxprune.prune(model, x, attention=how, ignore=ignore)
    assert small.encoder.layers[0].linear1.out_features == 16
    with torch.no_grad():
        fast = small(x)
        torch.backends.mha.set_fastpath_enabled(False)
        try:
            slow = small(x)
        finally:
            torch.backends.mha.set_fastpath_enabled(True)
    assert torch.allclose(fast, slow, atol=1e-5)


@pytest.mark.parametrize("settings", [
    {"sparsity": {"encoder.*.self_attn": 0.5}}, {"sparsity": 0.25}, {"sparsity": 0.5},
], ids=["inside", "odd", "all"])  # fmt: skip
@pytest.mark.parametrize("how", HOW)
def test_30_padded_inputs_become_nested_tensors_on_the_fast_path(how, settings):
    model = awake(Encoder(batch_first=True)).float()
    model.encoder = nn.TransformerEncoder(model.encoder.layers[0], 2)
    left = torch.arange(7) >= torch.tensor([[7], [4]])
    x = {"x": tokens().float()[:2], "src_key_padding_mask": left}
    small = fxprune.prune(model.eval(), x, attention=how, **settings)
    assert small.encoder.layers[0].self_attn.in_proj_weight.shape[0] < 48
    with torch.no_grad():
        fast = small(**x)
    assert torch.allclose(fast[~left], small(**x)[~left], atol=1e-5)


def test_30_a_narrow_attention_is_saved_copied_trained_and_pruned_again():
    model = awake(Encoder(batch_first=True, dropout=0.1))
    x = tokens()
    plan = fxprune.plan(model, x, ignore=["inp", "*.linear2", "*.out_proj"])
    small = plan.apply(model)
    file = io.BytesIO()
    torch.save(small, file)
    file.seek(0)
    for other in (copy.deepcopy(small), torch.load(file, weights_only=False)):
        assert difference(run(small, x), run(other, x)) == 0
    small.train()(x).square().mean().backward()
    assert all(p.grad is not None for p in small.encoder.parameters())
    small.eval()
    again = fxprune.plan(small, x)
    smaller = again.apply(small)
    assert smaller.encoder.layers[0].self_attn.num_heads == 1
    assert fxprune.proving.proof.prove(again, small, smaller, x) < 1e-9


@pytest.mark.parametrize(
    "heads, how", [(1, "heads"), (2, "heads"), (3, "heads"), (1, "head_dim"), (2, "head_dim")]
)
def test_multihead_attention_is_pruned_again_and_again_down_to_one_head_and_further(heads, how):
    class Block(nn.Module):
        def __init__(self):
            super().__init__()
            self.up, self.down = nn.Linear(6, 12), nn.Linear(12, 3)
            self.attention = nn.MultiheadAttention(12, heads, batch_first=True)

        def forward(self, x):
            y = torch.relu(self.up(x))
            return self.down(y + self.attention(y, y, y, need_weights=False)[0])

    torch.manual_seed(0)
    block, inner = Block(), 12
    for _ in range(3):
        _, block = check(block, tokens(), attention=how)
        assert block.attention.out_proj.in_features < inner
        inner = block.attention.out_proj.in_features


def test_heads_of_a_size_that_others_share_keep_it_and_nothing_else_has_to():
    """Queries, keys and values are cut up by one attribute; keys are scaled slice by slice."""

    class MultiQuery(nn.Module):
        def __init__(self):
            super().__init__()
            self.q, self.k, self.v = nn.Linear(12, 16), nn.Linear(12, 4), nn.Linear(12, 4)
            self.o, self.head_dim = nn.Linear(16, 12), 4

        def forward(self, x, place):
            place.shape = x.shape  # so it cannot be written anew
            shape = (*x.shape[:-1], -1, self.head_dim)
            q, k, v = (f(x).view(shape).transpose(1, 2) for f in (self.q, self.k, self.v))
            y = F.scaled_dot_product_attention(q, k * torch.arange(1, 5), v, enable_gqa=True)
            return self.o(y.transpose(1, 2).reshape(*x.shape[:-1], -1))

    class Whole(nn.Module):
        def __init__(self):
            super().__init__()
            self.up, self.attention, self.down = nn.Linear(6, 12), MultiQuery(), nn.Linear(12, 3)

        def forward(self, x):
            y = torch.relu(self.up(x))
            return self.down(y + self.attention(y, types.SimpleNamespace()))

    plan, _ = check(Whole(), tokens())
    assert pruned_units(plan, "up") == (12, 6, None)
    width, gone, why = pruned_units(plan, "attention.v")
    assert (width, gone) == (4, 0) and "the code computes" in why


@pytest.mark.parametrize("use, goes", [
    (lambda y, w: (w.unsqueeze(1), y)[1], True), (lambda y, w: y + w.sum(), False),
], ids=["dropped", "used"])  # fmt: skip
def test_heads_go_where_nothing_comes_of_the_attention_weights(use, goes):
    class Attends(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.out = nn.Linear(4, 16), nn.Linear(16, 3)
            self.attention = nn.MultiheadAttention(16, 4, batch_first=True)

        def forward(self, x):
            x = self.first(x)
            return self.out(x + use(*self.attention(x, x, x)))

    x = torch.randn(2, 5, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    _, small = check(Attends(), x)
    assert small.attention.num_heads == (2 if goes else 4)


@pytest.mark.parametrize("heads, each", [(2, 8), (4, 4), (8, 4)])
@pytest.mark.parametrize("attention", ["heads", "head_dim"])
@pytest.mark.parametrize("shared", ["scale", "matrix"])
def test_what_all_heads_share_ties_them_whatever_their_number(heads, each, attention, shared):
    def forward(s, x):
        b, n, _ = x.shape
        q, k, v = s.qkv(x).reshape(b, n, 3, s.heads, -1).permute(2, 0, 3, 1, 4)
        if shared == "scale":
            q, k = q * s.scale, k * s.scale
        else:
            q, k = torch.relu(q @ s.matrix.t()), torch.relu(k @ s.matrix.t())
        y = (q @ k.transpose(-1, -2)).softmax(-1) @ v
        return s.out(y.transpose(1, 2).flatten(2))

    torch.manual_seed(0)
    net = Net(
        forward,
        qkv=nn.Linear(3, 3 * heads * each),
        out=nn.Linear(heads * each, 2),
        scale=nn.Parameter(torch.rand(each) + 0.5),
        matrix=torch.randn(6, each).double(),
    )
    net.heads = heads  # fmt: skip
    x = torch.randn(2, 5, 3, dtype=torch.float64)
    plan, small = check(net, x, attention=attention)
    assert small.qkv.out_features == 3 * heads * each // 2, plan


MASKS = {
    "expand": lambda m, b, h, n: m[:, None, None].expand(b, h, n, n),
    "expand at a number": lambda m, b, h, n: m[:, None, None].expand(-1, 4, n, -1),
    "repeat": lambda m, b, h, n: m[:, None, None].repeat(1, h, n, 1),
    "repeat_interleave": lambda m, b, h, n: m.repeat_interleave(h, 0)[:, None].view(b, h, 1, n),
    "repeat_interleave at a number": lambda m, b, h, n: m.repeat_interleave(4, dim=0).view(
        b, -1, 1, n
    ),
}


@pytest.mark.parametrize("spread, heads", [
    *((spread, 4) for spread in MASKS.values()),
    *((spread, 2) for name, spread in MASKS.items() if "number" not in name),
], ids=[*MASKS, *(f"{name}, of one" for name in MASKS if "number" not in name)])  # fmt: skip
@pytest.mark.parametrize("attention", ["heads", "head_dim"])
def test_masks_that_are_laid_out_for_every_head_are_as_many_as_heads_are_left(
    spread, heads, attention
):
    def forward(s, x, mask):
        b, n, _ = x.shape
        q, k, v = s.qkv(x).view(b, n, 3, s.heads, -1).permute(2, 0, 3, 1, 4).unbind(0)
        scores = (q @ k.transpose(-2, -1)).masked_fill(~spread(mask, b, s.heads, n), -1e9)
        return s.out((scores.softmax(-1) @ v).transpose(1, 2).flatten(2))

    torch.manual_seed(0)
    net = Net(forward, qkv=nn.Linear(6, 48), out=nn.Linear(16, 3))
    net.heads = heads
    mask = torch.ones(2, 7, dtype=torch.bool)
    mask[0, 5:] = False
    plan, small = check(net, (tokens(), mask), attention=attention)
    assert small.out.in_features == 8, plan


@pytest.mark.parametrize("heads_in_batch", [True, False])
def test_masks_meet_heads_that_lie_in_the_batch(heads_in_batch):
    def forward(s, x, mask):
        b, n, _ = x.shape
        h = s.heads
        q, k, v = (f(x).view(b, n, h, -1).transpose(1, 2).flatten(0, 1) for f in (s.q, s.k, s.v))
        scores = q @ k.transpose(1, 2)
        mask = mask.repeat_interleave(h, 0)[:, None] if heads_in_batch else mask[:1, None]
        y = scores.masked_fill(~mask, -1e9).softmax(-1) @ v
        return s.out(y.view(b, h, n, -1).transpose(1, 2).flatten(2))

    torch.manual_seed(0)
    net = Net(forward, **{f: nn.Linear(6, 16) for f in "qkv"}, out=nn.Linear(16, 3))
    net.heads = 4
    mask = torch.ones(2, 7, dtype=torch.bool)
    mask[:, 5:] = False
    plan, small = check(net, (tokens(), mask))
    assert small.heads == 2, plan


# -- torch.nn.functional.multi_head_attention_forward ----------------------------------------------


class Pooled(nn.Module):
    """Attention of the mean to all positions, with weights that are layers of their own (CLIP)."""

    def __init__(self, n, c, heads, out, dropout):
        super().__init__()
        self.place = nn.Parameter(torch.randn(n + 1, c) / 3)
        self.q, self.k, self.v = (nn.Linear(c, c) for _ in range(3))
        self.o, self.heads, self.dropout = nn.Linear(c, out), heads, dropout

    def forward(self, x):
        x = torch.cat([x.mean(1, keepdim=True), x], 1).transpose(0, 1) + self.place[:, None]
        return F.multi_head_attention_forward(
            query=x[:1], key=x, value=x, embed_dim_to_check=x.shape[-1], num_heads=self.heads,
            q_proj_weight=self.q.weight, k_proj_weight=self.k.weight, v_proj_weight=self.v.weight,
            in_proj_weight=None, in_proj_bias=torch.cat([self.q.bias, self.k.bias, self.v.bias]),
            bias_k=None, bias_v=None, add_zero_attn=False, dropout_p=self.dropout,
            out_proj_weight=self.o.weight, out_proj_bias=self.o.bias,
            use_separate_proj_weight=True, training=self.training, need_weights=False,
        )[0].squeeze(0)  # fmt: skip


class Packed(nn.Module):
    """Attention of a sequence to itself, with one weight for queries, keys and values."""

    def __init__(self, c, heads, dropout, weights=False):
        super().__init__()
        self.w, self.b = nn.Parameter(torch.randn(3 * c, c) / 4), nn.Parameter(torch.randn(3 * c))
        self.o, self.c, self.heads, self.dropout = nn.Linear(c, c), c, heads, dropout
        self.weights = weights

    def forward(self, x):
        x = x.transpose(0, 1)
        y, _ = F.multi_head_attention_forward(
            x, x, x, self.c, self.heads, self.w, self.b, None, None, False, self.dropout,
            self.o.weight, self.o.bias, training=self.training, need_weights=self.weights,
        )  # fmt: skip
        return y.transpose(0, 1)


@pytest.mark.parametrize("how", HOW)
@pytest.mark.parametrize("dropout", [0.0, 0.5])
@pytest.mark.parametrize("kind", ["pooled", "packed"])
def test_the_function_behind_multihead_attention_is_followed(kind, dropout, how):
    c = 16
    attention = Pooled(7, c, 4, 12, dropout) if kind == "pooled" else Packed(c, 4, dropout)
    net = Net(
        lambda s, x: s.b(torch.sigmoid(s.attention(torch.sigmoid(s.a(x))))),
        a=nn.Linear(6, c), attention=attention, b=nn.Linear(12 if kind == "pooled" else c, 3),
    )  # fmt: skip
    plan, small = check(net, tokens(), attention=how)
    assert small.attention.o.in_features == c // 2 and small.b.in_features < net.b.in_features
    if kind == "pooled":
        assert small.a.out_features == c // 2
    assert small(tokens(batch=5)).shape[0] == 5
    x = tokens()
    assert difference(run(small, x), run(small, x)) == 0
    small.train()
    torch.manual_seed(0)
    first, second = small(x), small(x)
    assert bool((first == second).all()) is (dropout == 0)
    first.sum().backward()
    assert all(p.grad is not None for p in small.attention.o.parameters())


def test_attention_that_drops_weights_in_training_only_is_not_written_anew_without_it():
    """With ``need_weights=True`` no call for dropout is made in eval mode."""
    net = Net(
        lambda s, x: s.b(torch.sigmoid(s.attention(torch.sigmoid(s.a(x))))),
        a=nn.Linear(6, 16), attention=Packed(16, 4, 0.5, weights=True), b=nn.Linear(16, 3),
    )  # fmt: skip
    plan, small = check(net, tokens(), attention="head_dim", shrinks=False)
    reasons = [group.frozen for group in plan.groups if group.name.startswith("attention")]
    assert any("runs other code in training mode" in (reason or "") for reason in reasons)
    small.train()
    assert (small(tokens()) != small(tokens())).any()


@pytest.mark.parametrize("kind", ["layer", "parameter"])
def test_heads_go_beside_relative_positions_that_all_of_them_share(kind):
    torch.manual_seed(0)
    table = nn.Embedding(21, 8)

    def forward(s, x):
        b, n, _ = x.shape
        q, k, v = (t.view(b, n, 4, -1).transpose(1, 2) for t in (s.q(x), *s.kv(x).chunk(2, -1)))
        apart = torch.arange(n)[:, None] - torch.arange(n) + 10
        places = s.table(apart) if kind == "layer" else s.table[apart]
        scores = torch.einsum("bhid,bhjd->bhij", q, k)
        scores = scores + torch.einsum("bhid,ijd->bhij", q, places)
        y = torch.einsum("bhij,bhjd->bhid", scores.softmax(-1), v)
        return s.o(y.transpose(1, 2).reshape(b, n, -1))

    net = Net(forward, q=nn.Linear(6, 32), kv=nn.Linear(6, 64), o=nn.Linear(32, 3),
              table=table if kind == "layer" else table.weight)  # fmt: skip
    plan, small = check(net, torch.randn(2, 7, 6, dtype=torch.float64))
    assert small.q.out_features == small.o.in_features == 16
    x = torch.randn(3, 5, 6, dtype=torch.float64)
    assert difference(run(plan.mask(net), x), run(small, x)) < 1e-9


PADDED = {  # what is put around the slices of every head is there as long as the head is
    "to a multiple": lambda q, k, v: F.scaled_dot_product_attention(
        *(F.pad(t, (0, -t.shape[-1] % 8)) for t in (q, k, v)), scale=0.3
    )[..., : q.shape[-1]],
    "by a number": lambda q, k, v: F.scaled_dot_product_attention(
        *(F.pad(t, (1, 2)) for t in (q, k, v)), scale=0.3
    )[..., 1:-2],
    "with ones, for the sum of weights": lambda q, k, v: parted(
        q.exp() @ (k.exp().transpose(-1, -2) @ F.pad(v, (0, 1), value=1.0))
    ),
    "beside a column of ones": lambda q, k, v: parted(
        q.exp() @ (k.exp().mT @ torch.cat([v, torch.ones_like(v[..., :1])], -1))
    ),
    "beside columns of stated sizes": lambda q, k, v: (
        parted(q.exp() @ (k.exp().mT @ torch.cat([v, v.new_ones(*v.shape[:-1], 1)], -1)))
        + F.scaled_dot_product_attention(
            *(
                torch.cat([torch.zeros(*t.shape[:-1], 2), t, t[..., :1] * 0.5], -1)
                for t in (q, k, v)
            )
        )[..., 2:-1]
    ),
}


def parted(y):
    return y[..., :-1] / (y[..., -1:] + 1e-6)


@pytest.mark.parametrize("attend", PADDED.values(), ids=PADDED)
def test_heads_go_where_their_slices_are_padded(attend):
    def forward(s, x):
        q, k, v = (m(x).view(*x.shape[:2], 4, 6).transpose(1, 2) for m in (s.q, s.k, s.v))
        return s.o(attend(q, k, v).transpose(1, 2).flatten(2))

    net = Net(forward, **{n: nn.Linear(6, 24) for n in "qkv"}, o=nn.Linear(24, 5))
    plan, small = check(net, tokens())
    assert [m.out_features for m in (small.q, small.k, small.v)] == [12, 12, 12]
    assert difference(run(plan.mask(net), tokens(9)), run(small, tokens(9))) < 1e-9


@pytest.mark.parametrize("read, kept", [
    (lambda s, y: y * y.sum(-1, keepdim=True), 12),  # by heads: one unit is all of a head
    (lambda s, y: y, 12), (lambda s, y: y + 1, 12),  # by slices: as many are put around as ever
], ids=["heads", "slices", "shifted"])  # fmt: skip
@pytest.mark.parametrize("first", [True, False])
@pytest.mark.parametrize("put", [
    lambda y: F.pad(y, (1, 2), value=0.7),
    lambda y: torch.cat(
        [torch.ones(*y.shape[:-1], 1).to(y), y, y.new_full((*y.shape[:-1], 2), 0.7)], -1
    ),
], ids=["pad", "cat"])  # fmt: skip
def test_what_is_put_around_slices_of_heads_goes_with_a_whole_head_alone(read, kept, put, first):
    def forward(s, x):
        y = s.a(x).view(*x.shape[:2], 4, 6)
        y = put(read(s, y)) if first else read(s, put(y))
        return s.o(y.flatten(2))

    net = Net(forward, a=nn.Linear(6, 24), o=nn.Linear(36, 5))
    plan, small = check(net, tokens())
    assert small.a.out_features == kept


def test_heads_between_others_that_are_put_around_them():
    def forward(s, x):
        y = s.a(x).view(*x.shape[:2], 4, 6)
        return s.o(F.pad(y, (0, 0, 1, 1), value=-0.3).flatten(2))

    check(Net(forward, a=nn.Linear(6, 24), o=nn.Linear(36, 5)), tokens(), shrinks=False)


def filled(write, k, r):
    y = k.new_zeros(*k.shape[:-1], k.shape[-1] + 4)
    write(y, k, r.expand(-1, k.shape[1], -1, -1))
    return y


def set_parts(y, k, r):
    y[..., :6], y[..., 6:] = k, r


def copy_parts(y, k, r):
    y[..., :-4].copy_(k)
    y[..., -4:].copy_(r)


def copy_behind(y, k, r):
    y[..., 4:].copy_(k)
    y[..., :4] += r


def set_between(y, k, r):
    y[:, :, :, 2:8] = k
    y[..., 1] = r[..., 0]


BESIDE = {
    "cat": lambda k, r: torch.cat([k, r.expand(*k.shape[:-1], -1)], -1),
    "cat, in front": lambda k, r: torch.cat([r.expand(-1, k.shape[1], -1, -1), k], -1),
    **{
        f.__name__: lambda k, r, f=f: filled(f, k, r)
        for f in (set_parts, copy_parts, copy_behind, set_between)
    },
}


@pytest.mark.parametrize("attention", HOW)
@pytest.mark.parametrize("beside", BESIDE)
def test_heads_go_whose_keys_have_a_part_that_all_heads_share(beside, attention):
    """Multi-head latent attention: turned by positions, that part stays as it is."""

    def forward(s, x):
        q = s.q(x).view(*x.shape[:2], -1, 10).transpose(1, 2)
        k, v = s.kv(s.latent(x)).view(*x.shape[:2], -1, 12).transpose(1, 2).chunk(2, -1)
        r = s.shared(x)[:, None] * torch.linspace(0.5, 1, 4, dtype=x.dtype)
        y = (q @ BESIDE[beside](k, r).mT).softmax(-1) @ v
        return s.o(y.transpose(1, 2).flatten(2))

    net = Net(forward, q=nn.Linear(6, 40), latent=nn.Linear(6, 8), kv=nn.Linear(8, 48),
              shared=nn.Linear(6, 4), o=nn.Linear(24, 5))  # fmt: skip
    plan, small = check(net, tokens(), attention=attention)
    assert difference(run(plan.mask(net), tokens(9)), run(small, tokens(9))) < 1e-9
    if attention == "heads":
        assert [m.out_features for m in (small.q, small.kv, small.shared)] == [20, 24, 4]
        assert fxprune.prune(small, tokens(), sparsity=0.5).q.out_features == 10


def later(score, b, h, i, j):
    return torch.where(i >= j, score, -torch.inf)


def nearer(score, b, h, i, j):
    return score - (i - j).abs() * 0.1


def nearer_by_heads(score, b, h, i, j):
    return score - (i - j).abs() * 0.1 * (h + 1)


def masked_by(function, heads=None):
    def attend(q, k, v):
        n = q.shape[2]
        mask = create_block_mask(function, None, heads, n, n, device="cpu")
        return flex_attention(q, k, v, block_mask=mask)

    return attend


FLEX = {  # how, and whether heads go
    "plain": (flex_attention, True),
    "later": (partial(flex_attention, score_mod=later), True),
    "nearer": (partial(flex_attention, score_mod=nearer, scale=0.3), True),
    "mask": (masked_by(lambda b, h, i, j: i >= j), True),
    "nearer by heads": (partial(flex_attention, score_mod=nearer_by_heads), False),
    "mask of each head": (masked_by(lambda b, h, i, j: i >= j + h - 9, 4), False),
    "function of no code": (partial(flex_attention, score_mod=partial(nearer)), False),
}


@pytest.mark.parametrize("how", FLEX)
def test_heads_go_where_no_function_of_flex_attention_tells_them_apart(how):
    attend, go = FLEX[how]
    net = Net(
        lambda s, x: s.o(
            attend(*(m(x).unflatten(2, (-1, 6)).transpose(1, 2) for m in (s.q, s.k, s.v)))
            .transpose(1, 2).flatten(2)
        ),
        **{n: nn.Linear(6, 24) for n in "qkv"}, o=nn.Linear(24, 5),
    )  # fmt: skip
    plan, small = check(net, tokens(), shrinks=False)
    if go:
        assert [m.out_features for m in (small.q, small.k, small.v)] == [12, 12, 12]
        assert difference(run(plan.mask(net), tokens(9)), run(small, tokens(9))) < 1e-9
    else:
        assert small.q.out_features == 24 and small.v.out_features in (12, 24)
        assert "tells heads apart" in dict(plan.skipped)["q"] or "scale" in dict(plan.skipped)["q"]


def test_groups_of_queries_of_flex_attention_go_with_their_keys():
    def forward(s, x):
        q, k, v = (m(x).unflatten(2, (-1, 6)).transpose(1, 2) for m in (s.q, s.k, s.v))
        return s.o(flex_attention(q, k, v, enable_gqa=True).transpose(1, 2).flatten(2))

    layers = {"q": nn.Linear(6, 48), "k": nn.Linear(6, 24), "v": nn.Linear(6, 24)}
    _, small = check(Net(forward, **layers, o=nn.Linear(48, 5)), tokens())
    assert [m.out_features for m in (small.q, small.k)] == [24, 12]


SCALES = {
    "a layer": lambda s, y: s.mix(y),
    "a function": lambda s, y: F.conv1d(y, s.mix.weight, s.mix.bias, groups=12),
    "behind another": lambda s, y: s.mix(s.each(y)),
    "transposed": lambda s, y: s.back(y),
}


@pytest.mark.parametrize("scale", SCALES)
@pytest.mark.parametrize("read", ["both", "one"])
def test_heads_go_where_they_are_the_groups_of_a_convolution(scale, read):
    """Linear attention at several scales: the groups that make the queries, keys and values of a
    head go with it, and read those of another scale."""

    def forward(s, x):
        y = s.qkv(x.mT)
        z = SCALES[scale](s, y)
        y = torch.cat([y, z], 1) if read == "both" else z
        q, k, v = y.view(len(x), -1, 18, x.shape[1]).mT.chunk(3, -1)
        z = parted(q.exp() @ (k.exp().mT @ torch.cat([v, torch.ones_like(v[..., :1])], -1)))
        return s.o(z.mT.flatten(1, 2)).mT

    net = Net(forward, qkv=nn.Conv1d(6, 72, 1), mix=nn.Conv1d(72, 72, 1, groups=12),
              each=nn.Conv1d(72, 72, 3, padding=1, groups=72),
              back=nn.ConvTranspose1d(72, 72, 3, padding=1, groups=12),
              o=nn.Conv1d(48 if read == "both" else 24, 5, 1))  # fmt: skip
    plan, small = check(net, tokens())
    assert small.qkv.out_channels == 36 and small.o.in_channels == net.o.in_channels // 2
    mix = small.back if scale == "transposed" else small.mix
    assert mix.weight.shape[:2] == (36, 6) and (scale == "a function" or mix.groups == 6)
    assert difference(run(plan.mask(net), tokens(9)), run(small, tokens(9))) < 1e-9
    assert fxprune.prune(small, tokens(), sparsity=0.5).qkv.out_channels == 18


def test_channels_of_each_group_go_where_heads_are_no_groups():
    def forward(s, x):
        q, k, v = (m(x.mT).unflatten(1, (4, -1)).mT for m in (s.q, s.k, s.v))
        return s.o(by_matmul(q, k, v).mT.flatten(1, 2)).mT

    layers = {n: nn.Conv1d(6, 24, 1, groups=2) for n in "qkv"}
    plan, small = check(Net(forward, **layers, o=nn.Conv1d(24, 5, 1)), tokens())
    assert (small.q.groups, small.q.out_channels) == (2, 12)  # a head of two
