"""Each rule by itself, under all oracles: it holds, also with a second reader beside it, and what
is nearly it stays whole. Rules with files of their own (attention, recurrent, experts, writes) are
tested there; docs/pattern-table.md has all of them."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from .oracle import check
from .test_trace import Net

pytestmark = pytest.mark.filterwarnings("ignore::fxprune.PruningWarning")

INDEX = torch.tensor([6, 0, 5, 5, 2])
GRID = torch.linspace(-0.9, 0.9, 2 * 6 * 6 * 2, dtype=torch.float64).reshape(2, 6, 6, 2)


class Layers(nn.Module):
    """What a case can use beside the value: a fixed tensor, norms' vectors, a table."""

    def __init__(self) -> None:
        super().__init__()
        self.gain, self.shift = nn.Parameter(torch.randn(8)), nn.Parameter(torch.randn(8))
        self.register_buffer("mean", torch.randn(8))
        self.register_buffer("var", torch.rand(8) + 0.5)
        self.kernel = nn.Parameter(torch.randn(8, 8, 3, 3) * 0.2)
        self.matrix = nn.Parameter(torch.randn(8, 8) * 0.3)
        self.batch = nn.BatchNorm2d(8)
        self.instance = nn.InstanceNorm2d(8, affine=True)
        self.prelu = nn.PReLU(8)
        self.group = nn.GroupNorm(2, 8)
        self.zero_pad, self.reflect = nn.ZeroPad2d(1), nn.ReflectionPad2d(2)
        self.softmax, self.channel_softmax = nn.Softmax(3), nn.Softmax(1)
        self.softmax2d, self.neighbours = nn.Softmax2d(), nn.LocalResponseNorm(2)
        self.adaptive, self.avg, self.lp = (
            nn.AdaptiveMaxPool2d(2),
            nn.AvgPool2d(2),
            nn.LPPool2d(2, 2),
        )
        self.unflatten, self.identity = nn.Unflatten(2, (2, 3)), nn.Identity()


def image_net(op, layers, shared):
    def forward(s, x):
        y = torch.sigmoid(s.a(x))
        z = s.c(op(s.m, y))
        return z.mean() * s.d(y) if shared else z

    return Net(forward, a=nn.Conv2d(3, 8, 3), m=layers, c=nn.LazyConv2d(4, 1),
               d=nn.Conv2d(8, 4, 1))  # fmt: skip


def row_net(op, layers, shared):
    def forward(s, x):
        y = torch.sigmoid(s.a(x))
        z = s.c(op(s.m, y))
        return z.mean() * s.d(y) if shared else z

    return Net(forward, a=nn.Linear(6, 8), m=layers, c=nn.LazyLinear(4), d=nn.Linear(8, 4))


def built(kind, op, shared):
    torch.manual_seed(0)
    g = torch.Generator().manual_seed(1)
    shape = (2, 3, 8, 8) if kind == "image" else (2, 5, 6)
    x = torch.randn(shape, generator=g, dtype=torch.float64)
    net = (image_net if kind == "image" else row_net)(op, Layers(), shared).double()
    with torch.no_grad():
        net(x)  # sizes of the lazy layer
    return net, x


FIXED = torch.linspace(0.5, 2, 8, dtype=torch.float64).view(8, 1, 1)


def fixed(s, z):
    """Meets a tensor of fixed width."""
    return z + (FIXED if z.dim() == 4 else FIXED.flatten())


# (rule, kind of value, the op, something nearly like it that leaves the channels whole)
CASES = [
    # arranging
    (
        "pixel_shuffle",
        "image",
        lambda s, y: F.pixel_shuffle(y, 2),
        lambda s, y: F.pixel_shuffle(fixed(s, y), 2),
    ),
    (
        "pixel_unshuffle",
        "image",
        lambda s, y: F.pixel_unshuffle(y, 2),
        lambda s, y: F.pixel_unshuffle(fixed(s, y), 2),
    ),
    (
        "channel_shuffle",
        "image",
        lambda s, y: F.channel_shuffle(y, 2),
        lambda s, y: fixed(s, F.channel_shuffle(y, 2)),
    ),
    (
        "expand",
        "image",
        lambda s, y: y.mean((2, 3), keepdim=True).expand(-1, -1, 3, 3),
        lambda s, y: fixed(s, y.mean((2, 3), keepdim=True).expand(2, 8, 3, 3)),
    ),
    (
        "expand_as",
        "image",
        lambda s, y: y.mean((2, 3), keepdim=True).expand_as(y),
        lambda s, y: y[:, :1].expand_as(FIXED[None].expand(2, 8, 6, 6)) + fixed(s, y),
    ),
    (
        "repeat",
        "image",
        lambda s, y: y.repeat(1, 2, 1, 1),
        lambda s, y: y.repeat(1, 2, 1, 1) + FIXED.repeat(2, 1, 1),
    ),
    (
        "repeat_interleave",
        "image",
        lambda s, y: y.repeat_interleave(2, 1),
        lambda s, y: y.repeat_interleave(torch.tensor([1, 2] * 4), 1),
    ),
    ("flip", "image", lambda s, y: y.flip(1), lambda s, y: fixed(s, y.flip(1))),
    ("roll", "image", lambda s, y: y.roll(1, 2), lambda s, y: y.roll(1, 1)),
    # shape
    (
        "view",
        "row",
        lambda s, y: y.view(2, 5, 2, 4).reshape(2, 5, 8),
        lambda s, y: fixed(s, y.view(2, 5, 2, 4).reshape(2, 5, 8)),
    ),
    (
        "flatten",
        "image",
        lambda s, y: y.flatten(2)[..., None],
        lambda s, y: fixed(s, y).flatten(2)[..., None],
    ),
    (
        "unflatten",
        "image",
        lambda s, y: y.unflatten(2, (2, 3)).flatten(2, 3),
        lambda s, y: (y.unflatten(1, (2, 4)) + FIXED.view(2, 4, 1, 1)).flatten(1, 2),
    ),
    (
        "nn.Unflatten",
        "image",
        lambda s, y: s.unflatten(y).flatten(2, 3),
        lambda s, y: fixed(s, s.unflatten(y).flatten(2, 3)),
    ),
    (
        "permute",
        "image",
        lambda s, y: y.permute(0, 1, 3, 2),
        lambda s, y: y.permute(0, 2, 1, 3).cumsum(2).permute(0, 2, 1, 3),
    ),
    (
        "transpose",
        "image",
        lambda s, y: y.transpose(2, 3),
        lambda s, y: fixed(s, y.transpose(2, 3)),
    ),
    ("mT", "image", lambda s, y: y.mT, lambda s, y: fixed(s, y.mT)),
    ("t", "row", lambda s, y: y[0].t().t(), lambda s, y: y[0].t().cumsum(0).t()),
    (
        "movedim",
        "image",
        lambda s, y: y.movedim(1, -1).movedim(-1, 1),
        lambda s, y: y.movedim(1, -1).cumsum(-1).movedim(-1, 1),
    ),
    (
        "squeeze",
        "image",
        lambda s, y: y[:, None].squeeze(1),
        lambda s, y: fixed(s, y[:, None][:, 0]),
    ),
    # joining and splitting
    (
        "cat",
        "image",
        lambda s, y: torch.cat([y, y * 2], 1),
        lambda s, y: torch.cat([y, y])[:2] + FIXED,
    ),
    (
        "stack",
        "image",
        lambda s, y: torch.stack([y, y * 2], 2).flatten(1, 2),
        lambda s, y: torch.stack([y, fixed(s, y)], 2).sum(2),
    ),
    (
        "chunk",
        "image",
        lambda s, y: torch.cat(y.chunk(2, 1)[::-1], 1),
        lambda s, y: y.chunk(2, 1)[0] + FIXED[:4] + y.chunk(2, 1)[1],
    ),
    (
        "split",
        "image",
        lambda s, y: torch.cat(y.split([2, 6], 1)[::-1], 1),
        lambda s, y: torch.cat(fixed(s, y).split([2, 6], 1), 1),
    ),
    (
        "tensor_split",
        "image",
        lambda s, y: torch.cat(y.tensor_split(2, 1), 1),
        lambda s, y: torch.cat(fixed(s, y).tensor_split(2, 1), 1),
    ),
    (
        "unbind",
        "image",
        lambda s, y: y.unbind(2)[0][..., None],
        lambda s, y: y.unbind(1)[0][:, None],
    ),
    # indexing and selecting
    ("getitem", "image", lambda s, y: y[:, 2:], lambda s, y: y[:, y[0].mean((1, 2)).argsort()]),
    (
        "select",
        "image",
        lambda s, y: y.select(2, 1)[..., None],
        lambda s, y: y.select(1, 1)[:, None] + fixed(s, y),
    ),
    ("narrow", "image", lambda s, y: y.narrow(1, 2, 5), lambda s, y: fixed(s, y).narrow(1, 2, 5)),
    (
        "index_select",
        "image",
        lambda s, y: y.index_select(2, INDEX[:3] % 6),
        lambda s, y: y.index_select(1, y[0].mean((1, 2)).argsort()),
    ),
    (
        "one_hot",
        "image",
        lambda s, y: y * F.one_hot(y.argmax(3), y.shape[3]).to(y),
        lambda s, y: y * F.one_hot(y.argmax(1), 8).movedim(3, 1).to(y),
    ),
    (
        "data_dependent",
        "image",
        lambda s, y: y + y.mean(1, keepdim=True).argmax(2, keepdim=True),
        lambda s, y: y.sort(1)[0],
    ),
    # elementwise
    ("elementwise", "image", lambda s, y: (y.exp() - 0.5).abs() ** 1.5, lambda s, y: fixed(s, y)),
    ("product", "image", lambda s, y: y * (y + 1), lambda s, y: y * FIXED),
    ("activation", "image", lambda s, y: F.gelu(y), lambda s, y: F.gelu(fixed(s, y))),
    (
        "same",
        "image",
        lambda s, y: F.dropout(y.contiguous().clone(), training=False),
        lambda s, y: fixed(s, y.clone()),
    ),
    ("prelu", "image", lambda s, y: s.prelu(y - 0.5), lambda s, y: s.prelu(fixed(s, y))),
    (
        "F.prelu",
        "image",
        lambda s, y: F.prelu(y - 0.5, s.gain),
        lambda s, y: F.prelu(fixed(s, y), s.gain),
    ),
    # norms
    ("batch_norm", "image", lambda s, y: s.batch(y), lambda s, y: s.batch(fixed(s, y))),
    (
        "F.batch_norm",
        "image",
        lambda s, y: F.batch_norm(y, s.mean, s.var, s.gain, s.shift),
        lambda s, y: F.batch_norm(fixed(s, y), s.mean, s.var),
    ),
    (
        "torch.batch_norm",
        "image",
        lambda s, y: torch.batch_norm(y, s.gain, s.shift, s.mean, s.var, False, 0.1, 1e-5, False),
        lambda s, y: F.batch_norm(y.transpose(1, 2), s.mean[:6], s.var[:6]).transpose(1, 2) + FIXED,
    ),
    ("instance_norm", "image", lambda s, y: s.instance(y), lambda s, y: s.instance(fixed(s, y))),
    (
        "F.instance_norm",
        "image",
        lambda s, y: F.instance_norm(y, weight=s.gain, bias=s.shift),
        lambda s, y: F.instance_norm(y.transpose(0, 1)).transpose(0, 1),
    ),
    (
        "F.layer_norm",
        "row",
        lambda s, y: F.layer_norm(y, y.shape[-1:], s.gain, s.shift),
        lambda s, y: F.layer_norm(fixed(s, y), (8,)),
    ),
    (
        "F.rms_norm",
        "row",
        lambda s, y: F.rms_norm(y, y.shape[-1:], s.gain),
        lambda s, y: F.rms_norm(fixed(s, y), (8,)),
    ),
    ("group_norm", "image", lambda s, y: s.group(y), lambda s, y: s.group(fixed(s, y))),
    (
        "F.group_norm",
        "image",
        lambda s, y: F.group_norm(y, 2, s.gain, s.shift),
        lambda s, y: F.group_norm(fixed(s, y), 2),
    ),
    # pooling
    ("max_pool", "image", lambda s, y: F.max_pool2d(y, 2), lambda s, y: F.max_pool3d(y, (2, 1, 1))),
    (
        "AdaptiveMaxPool2d",
        "image",
        lambda s, y: s.adaptive(y),
        lambda s, y: nn.AdaptiveMaxPool3d((4, 6, 6))(y),
    ),
    (
        "avg_pool",
        "image",
        lambda s, y: F.avg_pool2d(y, 3, 1, 1),
        lambda s, y: F.avg_pool3d(y, (2, 1, 1)),
    ),
    (
        "AvgPool2d",
        "image",
        lambda s, y: s.avg(y),
        lambda s, y: nn.AvgPool3d((2, 1, 1))(y),
    ),
    (
        "lp_pool",
        "image",
        lambda s, y: F.lp_pool2d(y, 2.0, 2),
        lambda s, y: F.lp_pool2d(fixed(s, y), 2.0, 2),
    ),
    (
        "LPPool2d",
        "image",
        lambda s, y: s.lp(y),
        lambda s, y: s.lp(fixed(s, y)),
    ),
    (
        "interpolate",
        "image",
        lambda s, y: F.interpolate(y, scale_factor=2, mode="bilinear"),
        lambda s, y: F.interpolate(y[:, None], (4, 6, 6))[:, 0],
    ),
    (
        "grid_sample",
        "image",
        lambda s, y: F.grid_sample(y, GRID, align_corners=False),
        lambda s, y: F.grid_sample(y.transpose(1, 2), GRID[:, :4], align_corners=False).transpose(
            1, 2
        ),
    ),
    (
        "pad",
        "image",
        lambda s, y: F.pad(y, (1, 1, 0, 2)),
        lambda s, y: F.pad(y[:, None], (0,) * 4 + (1, 1), "replicate")[:, 0],
    ),
    (
        "ZeroPad2d",
        "image",
        lambda s, y: s.zero_pad(y),
        lambda s, y: s.zero_pad(fixed(s, y)),
    ),
    (
        "ReflectionPad2d",
        "image",
        lambda s, y: s.reflect(y),
        lambda s, y: nn.ReflectionPad3d((0, 0, 0, 0, 2, 2))(y[:, None])[:, 0],
    ),
    # reduction
    (
        "mean",
        "image",
        lambda s, y: y.mean(2, keepdim=True),
        lambda s, y: fixed(s, y).mean(2, keepdim=True),
    ),
    ("sum", "image", lambda s, y: y.sum(2, keepdim=True), lambda s, y: fixed(s, y).sum(2, True)),
    (
        "logsumexp",
        "image",
        lambda s, y: y.logsumexp(2, keepdim=True),
        lambda s, y: fixed(s, y).logsumexp(2, keepdim=True),
    ),
    (
        "norm",
        "image",
        lambda s, y: y.norm(2, 2, keepdim=True),
        lambda s, y: fixed(s, y).norm(2, 2, keepdim=True),
    ),
    (
        "vector_norm",
        "image",
        lambda s, y: torch.linalg.vector_norm(y, 2, 3, keepdim=True),
        lambda s, y: torch.linalg.vector_norm(fixed(s, y), 2, 3, keepdim=True),
    ),
    (
        "var",
        "image",
        lambda s, y: y.var(2, keepdim=True),
        lambda s, y: fixed(s, y).var(2, keepdim=True),
    ),
    ("softmax", "image", lambda s, y: y.softmax(2), lambda s, y: y.softmax(1)),
    ("nn.Softmax", "image", lambda s, y: s.softmax(y), lambda s, y: s.channel_softmax(y)),
    (
        "Softmax2d",
        "image",
        lambda s, y: s.softmax2d(y.transpose(1, 2)).transpose(1, 2),
        lambda s, y: s.softmax2d(y),
    ),
    (
        "local_response_norm",
        "image",
        lambda s, y: (
            y + F.local_response_norm(y[:, :, :1, 0].transpose(1, 2), 2).transpose(1, 2)[..., None]
        ),
        lambda s, y: F.local_response_norm(y, 2),
    ),
    ("glu", "image", lambda s, y: F.glu(y, 1), lambda s, y: F.glu(fixed(s, y), 1)),
    # matmul
    ("matmul", "row", lambda s, y: y @ s.matrix, lambda s, y: y.cumsum(-1) @ s.matrix),
    (
        "outer",
        "row",
        lambda s, y: torch.outer(y[0].mean(-1), y[0, 0]),
        lambda s, y: torch.outer(y[0, 0].cumsum(0), y[0, 0]),
    ),
    (
        "ger",
        "row",
        lambda s, y: y[0].mean(-1).ger(y[0, 0]),
        lambda s, y: y[0, 0].cumsum(0).ger(y[0, 0]),
    ),
    (
        "baddbmm",
        "row",
        lambda s, y: torch.baddbmm(y, torch.ones(2, 5, 5, dtype=y.dtype), y),
        lambda s, y: torch.baddbmm(fixed(s, y), torch.ones(2, 5, 5, dtype=y.dtype), y),
    ),
    (
        "addmm",
        "row",
        lambda s, y: torch.addmm(s.shift, y[0], s.matrix),
        lambda s, y: torch.addmm(s.shift, y[0].cumsum(1), s.matrix),
    ),
    (
        "einsum",
        "row",
        lambda s, y: torch.einsum("bnc,cd->bnd", y, s.matrix),
        lambda s, y: torch.einsum("bnc,cc->bnc", y, s.matrix),
    ),
    # weights as arguments
    (
        "F.linear",
        "row",
        lambda s, y: F.linear(y, s.matrix, s.shift),
        lambda s, y: F.linear(y.cumsum(-1), s.matrix),
    ),
    (
        "F.conv2d",
        "image",
        lambda s, y: F.conv2d(y, s.kernel, s.shift, padding=1),
        lambda s, y: F.conv2d(y.cumsum(1), s.kernel),
    ),
    (
        "convolution",
        "image",
        lambda s, y: torch.convolution(
            y, s.kernel, s.shift, [1, 1], [1, 1], [1, 1], False, [0, 0], 1
        ),
        lambda s, y: torch.convolution(
            y.cumsum(1), s.kernel, None, [1, 1], [1, 1], [1, 1], False, [0, 0], 1
        ),
    ),
    (
        "LocalResponseNorm",
        "row",
        lambda s, y: s.neighbours(y),
        lambda s, y: s.neighbours(y.transpose(1, 2)).transpose(1, 2),
    ),
    (
        "F.conv_transpose2d",
        "image",
        lambda s, y: F.conv_transpose2d(y, s.kernel, s.shift, stride=2),
        lambda s, y: F.conv_transpose2d(y.cumsum(1), s.kernel),
    ),
    (
        "F.embedding",
        "row",
        lambda s, y: y + F.embedding(torch.tensor([1, 0, 3, 3, 2]), s.matrix),
        lambda s, y: y + F.embedding(torch.tensor([1, 0, 3, 3, 2]), s.matrix).cumsum(-1),
    ),
    # creation
    (
        "filled",
        "image",
        lambda s, y: y + torch.full_like(y, 2.0) + torch.zeros(2, 8, 6, 6, dtype=y.dtype),
        lambda s, y: y + torch.arange(8.0, dtype=y.dtype)[:, None, None],
    ),
]
IDS = [name for name, *_ in CASES]


@pytest.mark.parametrize("kind, op", [c[1:3] for c in CASES], ids=IDS)
@pytest.mark.parametrize("shared", [False, True], ids=["alone", "shared"])
def test_the_rule_holds(kind, op, shared):
    net, x = built(kind, op, shared)
    plan, small = check(net, x)
    assert small.a.weight.shape[0] == 4, plan
    if shared:
        assert small.d.weight.shape[1] == 4


@pytest.mark.parametrize("kind, op", [(c[1], c[3]) for c in CASES], ids=IDS)
def test_what_is_nearly_it_stays_whole_and_says_why(kind, op):
    net, x = built(kind, op, False)
    plan, small = check(net, x, shrinks=False)
    assert small.a.weight.shape[0] == 8 and dict(plan.skipped)["a"]


@pytest.mark.parametrize("op", [
    lambda y: y.roll(3), lambda y: y.tensor_split(torch.tensor([4]), 1)[1],
    lambda y: y.take_along_dim(torch.arange(576)).view(2, -1),
    lambda y: y.view(torch.int64).double(),
])  # fmt: skip
def test_a_form_that_no_rule_follows_leaves_the_channels_whole(op):
    model = Net(lambda s, x: s.c(op(s.a(x).sigmoid()).flatten(1)), a=nn.Conv2d(3, 8, 1),
                c=nn.LazyLinear(4)).double()  # fmt: skip
    x = torch.randn(2, 3, 6, 6, dtype=torch.float64)
    model(x)
    plan, small = check(model, x, shrinks=False)
    assert small.a.out_channels == 8
    assert "in a form that no pattern follows" in dict(plan.skipped)["a"]


@pytest.mark.parametrize("settings", [
    {"padding": 1, "padding_mode": "circular"}, {"padding": 1, "padding_mode": "reflect"},
    {"padding": "valid"}, {"padding": "same", "padding_mode": "replicate"},
], ids=str)  # fmt: skip
def test_a_constant_stays_one_where_no_zeros_stand_around_it(settings):
    model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Conv2d(8, 8, 3, **settings), nn.ReLU(),
                          nn.Conv2d(8, 4, 1))  # fmt: skip
    plan, _ = check(model, torch.randn(2, 3, 8, 8, dtype=torch.float64))
    assert not plan.notes


def test_a_shuffle_and_its_inverse_leave_a_unit_of_blocks():
    net, x = built("image", lambda s, y: F.pixel_unshuffle(F.pixel_shuffle(y, 2), 2), False)
    assert check(net, x)[1].a.out_channels == 4


@pytest.mark.parametrize("op", [
    lambda z: torch.select(input=z, dim=2, index=1),
    lambda z: torch.narrow(input=z, dim=1, start=2, length=4),
    lambda z: torch.narrow(length=z.shape[1] // 2, start=z.shape[1] // 4, dim=1, input=z),
    lambda z: torch.flatten(input=z, start_dim=1),
    lambda z: torch.chunk(dim=1, chunks=2, input=z)[1],
    lambda z: torch.mean(input=z, dim=(2, 3)),
    lambda z: F.softmax(input=z, dim=3),
    lambda z: F.scaled_dot_product_attention(value=z, key=z.tanh(), query=z.cos()),
    lambda z: torch.mean(z, axis=(2, 3), keepdims=True) * z,  # as NumPy calls them
    lambda z: torch.std(x=z, axis=2, keepdims=True),
    lambda z: torch.softmax(z, axis=3),
    lambda z: torch.stack([z, z.cos()], axis=2),
    lambda z: torch.max(z, other=z.cos()),
    lambda z: torch.add(z, x2=z.cos()),
    lambda z: z / torch.numel(input=z[0, 0]),
])  # fmt: skip
def test_arguments_are_known_by_keyword_too(op):
    torch.manual_seed(0)
    net = Net(lambda s, x: s.c(op(s.a(x).sigmoid()).flatten(1)), a=nn.Conv2d(3, 8, 3),
              c=nn.LazyLinear(4)).double()  # fmt: skip
    x = torch.randn(2, 3, 8, 8, dtype=torch.float64)
    with torch.no_grad():
        net(x)
    plan, small = check(net, x)
    assert small.a.out_channels < 8, plan


@pytest.mark.parametrize("batched", [True, False])
def test_norms_that_are_not_called_or_take_no_batch_get_their_width_from_their_tensors(batched):
    torch.manual_seed(0)
    net = Net(lambda s, x: s.c(s.n(s.a(x).sigmoid())), a=nn.Conv1d(3, 8, 3),
              n=nn.InstanceNorm1d(8, affine=True), idle=nn.InstanceNorm1d(8, affine=True),
              c=nn.Conv1d(8, 4, 1)).double()  # fmt: skip
    net.idle.weight, net.idle.bias = net.n.weight, net.n.bias
    x = torch.randn(2, 3, 9, dtype=torch.float64)
    _, small = check(net, x if batched else x[0])
    assert small.n.num_features == small.idle.num_features == small.a.out_channels == 4


@pytest.mark.parametrize("op", [
    lambda z: torch.softmax(z, axis=1), lambda z: torch.cumsum(z, axis=1),
])  # fmt: skip
def test_what_mixes_channels_is_known_by_numpy_s_names_too(op):
    net = Net(lambda s, x: s.c(op(s.a(x))), a=nn.Conv2d(3, 8, 3), c=nn.Conv2d(8, 4, 1))
    plan, _ = check(net, torch.randn(2, 3, 6, 6, dtype=torch.float64), shrinks=False)
    assert "mixes its channels" in dict(plan.skipped)["a"]


@pytest.mark.parametrize("op", [
    lambda s, y: F.avg_pool2d(y, 2, divisor_override=3),
    lambda s, y: nn.AvgPool2d(2, divisor_override=3)(y),
    lambda s, y: torch.logsumexp(y, (2, 3), keepdim=True),
    lambda s, y: F.instance_norm(y, s.mean, s.var, use_input_stats=False, eps=0.1),
])  # fmt: skip
def test_what_calls_do_to_a_constant_map_is_followed(op):
    """Not what most of their kind do: other divisors, log n more, running statistics."""
    net = Net(lambda s, x: s.c(op(s, s.b(torch.sigmoid(s.a(x))))), a=nn.Conv2d(3, 8, 3),
              b=nn.Conv2d(8, 8, 1, bias=False), c=nn.Conv2d(8, 4, 1),
              mean=torch.randn(8, dtype=torch.float64),
              var=torch.rand(8, dtype=torch.float64) + 0.5)  # fmt: skip
    _, small = check(net, torch.randn(2, 3, 6, 6, dtype=torch.float64))
    assert small.b.out_channels == 4


OF_ONE_NUMBER = {
    "softmax": lambda n: n.softmax(-1),
    "sort": lambda n: n.sort(-1).values,
    "argmax": lambda n: n.argmax(0),
    "topk": lambda n: n.topk(1).values,
    "cummax": lambda n: n.cummax(0).values,
    "index_select": lambda n: n.index_select(0, torch.tensor(0)),
    "gather": lambda n: n.gather(0, torch.tensor(0)),
    "scatter": lambda n: n.scatter(0, torch.tensor(0), 2 * n),
    "transpose": lambda n: n.transpose(0, -1),
}


@pytest.mark.parametrize("op", OF_ONE_NUMBER.values(), ids=OF_ONE_NUMBER.keys())
def test_a_single_number_takes_a_dimension_as_a_row_of_one_does(op):
    def forward(s, x):
        y = s.a(x)
        return s.b(torch.sigmoid(y) * op(s.gains[1])) + op(y.mean())

    net = Net(forward, a=nn.Linear(5, 8), b=nn.Linear(8, 3), gains=nn.Parameter(torch.randn(3)))
    plan, small = check(net, torch.randn(4, 5, dtype=torch.float64))
    assert small.a.out_features == 4


MASKED = {
    "rows": lambda h, rows, at, both: h[rows].mean((1, 2)),
    "rows, one column": lambda h, rows, at, both: h[rows, 0],
    "rows, the last column, all": lambda h, rows, at, both: h[rows, -1, :, :],
    "rows, one of both": lambda h, rows, at, both: h[rows, 0, 1],
    "rows, one column, the rest": lambda h, rows, at, both: h[rows, 0, ...],
    "one row, columns": lambda h, rows, at, both: h[0, at],
    "columns": lambda h, rows, at, both: h[:, at],
    "columns, one line": lambda h, rows, at, both: h[:, at, 2],
    "columns and lines": lambda h, rows, at, both: h[:, both],
}


@pytest.mark.parametrize("read", MASKED.values(), ids=MASKED.keys())
def test_a_mask_and_numbers_beside_it_pick_from_what_is_no_channels(read):
    def forward(s, x):
        h = torch.sigmoid(s.a(x))
        return s.b(read(h, x.sum((1, 2, 3)) > -3, x[0, :, 0, 0] > -1, x.sum((0, 3)) > 0))

    x = torch.randn(3, 4, 6, 5, dtype=torch.float64, generator=torch.Generator().manual_seed(2))
    plan, small = check(Net(forward, a=nn.Linear(5, 8), b=nn.Linear(8, 3)), x)
    assert small.a.out_features == 4


@pytest.mark.parametrize("read", [
    lambda h, rows: h[rows, :, 0].flatten(1)[..., :8], lambda h, rows: h.movedim(-1, 1)[rows, 0],
], ids=["apart", "one channel"])  # fmt: skip
def test_a_mask_and_a_number_that_pick_channels_or_stand_apart_leave_them_whole(read):
    def forward(s, x):
        return s.b(read(torch.sigmoid(s.a(x)), x.sum((1, 2, 3)) > -9)).sum()

    net = Net(forward, a=nn.Linear(5, 8), b=nn.LazyLinear(3)).double()
    x = torch.randn(3, 4, 6, 5, dtype=torch.float64)
    net(x)
    plan, _ = check(net, x, shrinks=False)
    assert "positions that are data" in dict(plan.skipped)["a"]
