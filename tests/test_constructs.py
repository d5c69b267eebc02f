"""Small networks that break pruners, each under all three oracles."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.nn.utils import parametrize

import fxprune

from .oracle import awake, check, difference, run


class Net(nn.Module):
    """A network of named layers and a forward function over them."""

    def __init__(self, forward, **layers: Any) -> None:
        super().__init__()
        self._run = forward
        for name, layer in layers.items():
            if isinstance(layer, torch.Tensor) and not isinstance(layer, nn.Parameter):
                self.register_buffer(name, layer)
            else:
                setattr(self, name, layer)

    def forward(self, *args, **kwargs):
        return self._run(self, *args, **kwargs)


def image(c=3, size=8, batch=2):
    return torch.randn(
        batch, c, size, size, dtype=torch.float64, generator=torch.Generator().manual_seed(1)
    )


def sequence(c=3, length=8, batch=2):
    return torch.randn(
        batch, c, length, dtype=torch.float64, generator=torch.Generator().manual_seed(1)
    )


def kept(plan, name):
    """Width left in the group that ``name`` leads."""
    return next(g.kept for g in plan.groups if g.name == name)


# -- index maps --------------------------------------------------------------------------------


@pytest.mark.parametrize("rank", [1, 2, 3])
@pytest.mark.parametrize("how", ["flatten", "view"])
def test_01_flatten_makes_blocks_of_columns(rank, how):
    conv = (nn.Conv1d, nn.Conv2d, nn.Conv3d)[rank - 1]
    x = torch.randn(2, 3, *[4] * rank, dtype=torch.float64)

    def forward(s, x):
        y = F.silu(s.conv(x))
        return s.fc(y.flatten(1) if how == "flatten" else y.view(x.size(0), -1))

    plan, small = check(
        Net(forward, conv=conv(3, 8, 3, padding=1), fc=nn.Linear(8 * 4**rank, 5)), x
    )
    assert small.fc.in_features == 4 * 4**rank
    assert kept(plan, "conv") == 4


@pytest.mark.parametrize("order", [(0, 2, 3, 1), (0, 3, 2, 1)])
def test_02_03_permuted_flatten(order):
    def forward(s, x):
        y = torch.sigmoid(s.conv(x)).permute(*order)
        return s.fc(y.reshape(x.shape[0], -1))

    plan, small = check(Net(forward, conv=nn.Conv2d(3, 8, 3), fc=nn.Linear(8 * 36, 5)), image())
    assert small.fc.in_features == 4 * 36


def shuffle_by_view(x, groups):
    b, c, h, w = x.shape
    return x.view(b, groups, c // groups, h, w).transpose(1, 2).contiguous().view(b, c, h, w)


@pytest.mark.parametrize("how", ["view", "module", "function"])
def test_06_channel_shuffle_takes_equally_from_each_group(how):
    def forward(s, x):
        y = F.gelu(s.a(x))
        y = {"view": lambda: shuffle_by_view(y, 2), "module": lambda: s.shuffle(y),
             "function": lambda: F.channel_shuffle(y, 2)}[how]()  # fmt: skip
        return s.b(y)

    net = Net(
        forward, a=nn.Conv2d(3, 8, 3), b=nn.Conv2d(8, 5, 3, padding=1), shuffle=nn.ChannelShuffle(2)
    )
    plan, small = check(net, image())
    assert small.a.out_channels == 4
    rows = plan.kept["a.weight"][0]
    assert int((rows < 4).sum()) == 2


class ShuffleUnit(nn.Module):
    def __init__(self, c):
        super().__init__()
        self.branch = nn.Sequential(
            nn.Conv2d(c // 2, c // 2, 1), nn.BatchNorm2d(c // 2), nn.ReLU(),
            nn.Conv2d(c // 2, c // 2, 3, padding=1, groups=c // 2), nn.BatchNorm2d(c // 2),
            nn.Conv2d(c // 2, c // 2, 1), nn.ReLU(),
        )  # fmt: skip

    def forward(self, x):
        a, b = x.chunk(2, dim=1)
        return shuffle_by_view(torch.cat((a, self.branch(b)), 1), 2)


@pytest.mark.parametrize("depth", [1, 2, 3])
def test_07_shufflenet_unit(depth):
    net = nn.Sequential(nn.Conv2d(3, 16, 3), nn.Sigmoid(), *[ShuffleUnit(16) for _ in range(depth)],
                        nn.Conv2d(16, 4, 1))  # fmt: skip
    plan, small = check(net, image())
    assert small[0].out_channels == 8


class ShuffleDown(nn.Module):
    """The strided unit: both branches read every channel, and their results are shuffled."""

    def __init__(self, a, c):
        super().__init__()
        self.left = nn.Sequential(nn.Conv2d(a, c // 2, 1), nn.BatchNorm2d(c // 2), nn.ReLU())
        self.right = nn.Sequential(nn.Conv2d(a, c // 2, 1), nn.BatchNorm2d(c // 2), nn.ReLU())

    def forward(self, x):
        return shuffle_by_view(torch.cat((self.left(x), self.right(x)), 1), 2)


@pytest.mark.parametrize("depth", [3, 5])
def test_07_shuffles_that_scatter_what_is_left_are_put_in_order(depth):
    net = nn.Sequential(ShuffleDown(3, 12), *[ShuffleUnit(12) for _ in range(depth)],
                        nn.Conv2d(12, 4, 1))  # fmt: skip
    plan, small = check(net, image())
    assert small[0].left[0].out_channels == small[0].right[0].out_channels == 3
    assert any("take" in code.source for code in plan.code.values())


def test_08_pixel_shuffle_unit_is_r_squared_filters():
    def forward(s, x):
        return s.b(F.softplus(F.pixel_shuffle(s.a(x), 2)))

    plan, small = check(
        Net(forward, a=nn.Conv2d(3, 24, 3, padding=1), b=nn.Conv2d(6, 4, 3)), image()
    )
    assert small.a.out_channels == 12 and small.b.in_channels == 3


def test_08_pixel_unshuffle_channel_is_r_squared_columns():
    def forward(s, x):
        return s.b(s.down(torch.sigmoid(s.a(x))))

    net = Net(
        forward, a=nn.Conv2d(3, 6, 3, padding=1), down=nn.PixelUnshuffle(2), b=nn.Conv2d(24, 4, 3)
    )
    plan, small = check(net, image())
    assert small.a.out_channels == 3 and small.b.in_channels == 12


def test_09_cat_with_the_image_keeps_its_columns():
    def forward(s, x):
        return s.b(torch.cat([x, F.elu(s.a(x)) + 1], 1))

    plan, small = check(
        Net(forward, a=nn.Conv2d(3, 8, 3, padding=1), b=nn.Conv2d(11, 4, 3, padding=1)), image()
    )
    assert plan.kept["b.weight"][1][:3].tolist() == [0, 1, 2] and small.b.in_channels == 7


def test_10_cat_with_itself():
    def forward(s, x):
        y = torch.sigmoid(s.a(x))
        return s.b(torch.cat([y, y], 1))

    plan, small = check(Net(forward, a=nn.Conv2d(3, 8, 3), b=nn.Conv2d(16, 4, 3)), image())
    assert small.b.in_channels == 8


def test_10_unet_skip():
    def forward(s, x):
        a = F.silu(s.a(x))
        b = F.silu(s.b(F.max_pool2d(a, 2)))
        return s.c(torch.cat([a, F.interpolate(b, scale_factor=2)], 1))

    net = Net(
        forward,
        a=nn.Conv2d(3, 8, 3, padding=1),
        b=nn.Conv2d(8, 12, 3, padding=1),
        c=nn.Conv2d(20, 4, 3, padding=1),
    )
    plan, small = check(net, image())
    assert small.c.in_channels == 10


def test_10_densenet_chain():
    def forward(s, x):
        features = [s.stem(x)]
        for layer in s.layers:
            features.append(layer(torch.cat(features, 1)))
        return s.head(torch.cat(features, 1))

    layers = nn.ModuleList(
        nn.Sequential(
            nn.BatchNorm2d(8 + 4 * i), nn.Sigmoid(), nn.Conv2d(8 + 4 * i, 4, 3, padding=1)
        )
        for i in range(3)
    )
    net = Net(forward, stem=nn.Conv2d(3, 8, 3), layers=layers, head=nn.Conv2d(20, 5, 1))
    plan, small = check(net, image())
    assert small.head.in_channels == 10


@pytest.mark.parametrize("how", ["flip", "buffer", "getitem"])
def test_11_fixed_permutations(how):
    def forward(s, x):
        y = torch.sigmoid(s.a(x))
        if how == "flip":
            y = y.flip(1)
        elif how == "buffer":
            y = y.index_select(1, s.p)
        else:
            y = y[:, s.p]
        return s.b(y)

    p = torch.tensor([3, 1, 7, 0, 5, 2, 6, 4])
    plan, small = check(Net(forward, a=nn.Conv2d(3, 8, 3), b=nn.Conv2d(8, 4, 3), p=p), image())
    assert small.a.out_channels == 4
    if how != "flip":
        assert sorted(small.p.tolist()) == [0, 1, 2, 3]


def test_12_stack_then_flatten_is_a_cat():
    def forward(s, x):
        return s.c(torch.stack([torch.sigmoid(s.a(x)), torch.tanh(s.b(x))], 1).flatten(1, 2))

    net = Net(forward, a=nn.Conv2d(3, 8, 3), b=nn.Conv2d(3, 8, 3), c=nn.Conv2d(16, 4, 3))
    plan, small = check(net, image())
    assert small.c.in_channels == 8


def test_13_repeat_is_two_columns():
    def forward(s, x):
        return s.b(torch.sigmoid(s.a(x)).repeat(1, 2, 1, 1))

    plan, small = check(Net(forward, a=nn.Conv2d(3, 8, 3), b=nn.Conv2d(16, 4, 3)), image())
    assert small.b.in_channels == 8


def test_14_shortcut_padded_in_channels():
    def forward(s, x):
        y = torch.sigmoid(s.a(x))
        return s.c(torch.sigmoid(s.b(y) + F.pad(y, (0, 0, 0, 0, 2, 2))))

    net = Net(
        forward, a=nn.Conv2d(3, 8, 3), b=nn.Conv2d(8, 12, 3, padding=1), c=nn.Conv2d(12, 4, 3)
    )
    plan, small = check(net, image())
    assert (small.a.out_channels, small.b.out_channels) == (4, 6)  # with 2 of the 4 put around


@pytest.mark.parametrize("kind", ["literal", "attribute", "module", "lambda"])
def test_14_what_is_put_around_a_shortcut_goes_with_the_channels_it_meets(kind):
    class Wider(nn.Module):
        def __init__(self, before, behind):
            super().__init__()
            self.amounts = (0, 0, 0, 0, before, behind)
            self.pad = nn.ConstantPad3d(self.amounts, 0.5)
            self.function = lambda y: F.pad(y, (0, 0, 0, 0, before, behind), value=1.0)

        def forward(self, y):
            return {
                "literal": lambda: F.pad(y, (1, 0, 0, 1, 3, 5))[:, :, :-1, 1:],
                "attribute": lambda: F.pad(y, self.amounts),
                "module": lambda: self.pad(y),
                "lambda": lambda: self.function(y),
            }[kind]()

    def forward(s, x):
        y = s.a(x).relu()
        y = (s.b(y) + s.once(y)).relu()
        return s.d((s.c(y) + s.again(y)).relu())

    net = Net(
        forward, a=nn.Conv2d(3, 8, 3), b=nn.Conv2d(8, 16, 3, padding=1), once=Wider(3, 5),
        c=nn.Conv2d(16, 24, 1), again=Wider(3, 5), d=nn.Conv2d(24, 4, 3),
    )  # fmt: skip
    plan, small = check(net, image())
    assert [m.out_channels for m in (small.a, small.b, small.c)] == [4, 8, 12]
    x = torch.randn(1, 3, 7, 9, dtype=torch.float64)
    assert difference(run(plan.mask(net), x), run(small, x)) < 1e-9


def test_14_what_is_put_around_stays_alone_where_its_amount_cannot_be_changed():
    def forward(s, x):
        y = s.a(x).relu()
        return s.c((s.b(y) + s.pad(y)).relu())

    net = Net(forward, a=nn.Conv2d(3, 8, 3), b=nn.Conv2d(8, 16, 1), pad=nn.Identity(),
              c=nn.Conv2d(16, 4, 3))  # fmt: skip
    net.pad.forward = lambda y: F.pad(y, (0, 0, 0, 0, 3, 5))  # hides the code that says so
    plan, small = check(net, image())
    assert (small.a.out_channels, small.b.out_channels) == (4, 12)
    assert any(what.startswith("the slices that it puts around") for _, what in plan.notes)


@pytest.mark.parametrize("pool", [
    nn.MaxPool2d((1, 2)), nn.AvgPool2d((1, 3), stride=(1, 2), padding=(0, 1)),
    lambda y: F.avg_pool2d(y, kernel_size=[1, 2]), lambda y: F.max_pool2d(y, (1, 1), (1, 2)),
])  # fmt: skip
def test_windows_do_not_slide_along_dimensions_of_which_they_see_one_place(pool):
    def forward(s, x):  # (batch, time, frequency, channels): pooled over frequencies
        return s.b(pool(s.a(x).transpose(2, 3)).transpose(2, 3).relu())

    net = Net(forward, a=nn.Linear(6, 16), b=nn.Linear(16, 5))
    plan, small = check(net, torch.randn(2, 3, 7, 6, dtype=torch.float64))
    assert small.a.out_features == 8


@pytest.mark.parametrize("pool", [
    lambda y: F.max_pool2d(y, (2, 1)), lambda y: F.max_pool2d(y, (1, 1), (2, 1)),
    lambda y: F.max_pool2d(y, (1, 2), return_indices=True)[0],
])  # fmt: skip
def test_windows_slide_where_they_see_more_than_each_place(pool):
    def forward(s, x):
        return s.b(pool(s.a(x).transpose(2, 3)).flatten(1))

    x = torch.randn(2, 3, 4, 6, dtype=torch.float64)
    features = pool(torch.empty(2, 3, 16, 4)).flatten(1).shape[1]
    plan, _ = check(Net(forward, a=nn.Linear(6, 16), b=nn.Linear(features, 5)), x, shrinks=False)
    assert dict(plan.skipped)["a"] == "a window slides over them"


def test_15_patch_merging():
    def forward(s, x):
        y = torch.sigmoid(s.a(x)).permute(0, 2, 3, 1)
        parts = [y[:, i::2, j::2] for j in (0, 1) for i in (0, 1)]
        return s.out(s.reduction(s.norm(torch.cat(parts, -1))))

    net = Net(
        forward,
        a=nn.Conv2d(3, 8, 1),
        norm=nn.LayerNorm(32),
        reduction=nn.Linear(32, 16),
        out=nn.Linear(16, 3),
    )
    plan, small = check(net, image())
    assert small.reduction.in_features == 16 and small.norm.normalized_shape == (16,)


def test_16_text_convolutions():
    def forward(s, x):
        y = s.table(x).transpose(1, 2)
        return s.fc(torch.cat([F.silu(c(y)).amax(-1) for c in s.convs], 1))

    convs = nn.ModuleList(nn.Conv1d(12, 6, k) for k in (2, 3, 4))
    net = Net(forward, table=nn.Embedding(20, 12), convs=convs, fc=nn.Linear(18, 3))
    plan, small = check(
        net, torch.randint(0, 20, (2, 9), generator=torch.Generator().manual_seed(0))
    )
    assert small.table.embedding_dim == 6 and small.fc.in_features == 9


# -- splits and gates ----------------------------------------------------------------------------


def test_20_the_bounds_of_slices_move():
    def forward(s, x):
        y = torch.sigmoid(s.a(x))
        return s.b(y[:, :4]) + s.c(y[:, 4:])

    class Sliced(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b, self.c = nn.Conv2d(3, 8, 3), nn.Conv2d(4, 5, 3), nn.Conv2d(4, 5, 3)

        def forward(self, x):
            return forward(self, x)

    plan, small = check(nn.Sequential(Sliced(), nn.Tanh()), image())
    assert small[0].a.out_channels == 4
    assert isinstance(small[0], Sliced)


@pytest.mark.parametrize("kind", ["glu", "chunk"])
def test_21_gates_pair_their_halves(kind):
    def forward(s, x):
        y = s.dw(s.a(x))
        if kind == "glu":
            return s.b(F.glu(y, 1))
        left, right = y.chunk(2, 1)
        return s.b(F.gelu(left) * right)

    net = Net(
        forward, a=nn.Conv2d(3, 16, 1), dw=nn.Conv2d(16, 16, 3, groups=16), b=nn.Conv2d(8, 4, 1)
    )
    plan, small = check(net, image())
    assert small.a.out_channels == 8 and small.b.in_channels == 4


@pytest.mark.parametrize("fused", [False, True])
def test_22_swiglu_leaves_exactly_half(fused):
    def forward(s, x):
        gate, up = s.both(x).chunk(2, -1) if fused else (s.gate(x), s.up(x))
        return s.down(F.silu(gate) * up)

    net = Net(
        forward,
        gate=nn.Linear(6, 16),
        up=nn.Linear(6, 16),
        both=nn.Linear(6, 32),
        down=nn.Linear(16, 6),
    )
    plan, small = check(net, torch.randn(2, 5, 6, dtype=torch.float64))
    assert small.down.in_features == 8


def test_23_one_channel_gate_stays():
    def forward(s, x):
        y = torch.sigmoid(s.a(x))
        return s.b(y * torch.sigmoid(s.gate(x)))

    net = Net(forward, a=nn.Conv2d(3, 8, 3), gate=nn.Conv2d(3, 1, 3), b=nn.Conv2d(8, 4, 3))
    plan, small = check(net, image())
    assert small.a.out_channels == 4 and small.gate.out_channels == 1


def test_24_spatial_attention_ends_the_coupling():
    def forward(s, x):
        y = torch.tanh(s.a(x))
        level = torch.cat([y.mean(1, keepdim=True), y.max(1, keepdim=True)[0]], 1)
        return s.b(y * torch.sigmoid(s.gate(level)))

    net = Net(
        forward, a=nn.Conv2d(3, 8, 3), gate=nn.Conv2d(2, 1, 3, padding=1), b=nn.Conv2d(8, 4, 3)
    )
    plan, small = check(net, image())
    assert small.gate.in_channels == 2 and small.a.out_channels == 4
    assert plan.approximate


def test_25_squeeze_excite():
    def forward(s, x):
        y = torch.sigmoid(s.a(x))
        g = torch.sigmoid(s.up(torch.relu(s.down(y.mean((2, 3))))))
        return s.b(y * g[:, :, None, None])

    net = Net(
        forward,
        a=nn.Conv2d(3, 8, 3),
        down=nn.Linear(8, 4),
        up=nn.Linear(4, 8),
        b=nn.Conv2d(8, 4, 3),
    )
    plan, small = check(net, image())
    assert small.a.out_channels == small.up.out_features == 4 and small.down.out_features == 2


# -- parameters, norms, ties ---------------------------------------------------------------------


@pytest.mark.parametrize(
    "kind", ["grouped", "depthwise", "multiplier", "transposed", "grouped transposed"]
)
def test_33_grouped_convolutions(kind):
    middle = {
        "grouped": nn.Conv2d(8, 12, 3, groups=2, padding=1),
        "depthwise": nn.Conv2d(8, 8, 3, groups=8, padding=1),
        "multiplier": nn.Conv2d(8, 16, 3, groups=8),
        "transposed": nn.ConvTranspose2d(8, 8, 3, groups=8, stride=2),
        "grouped transposed": nn.ConvTranspose2d(8, 12, 3, groups=2),
    }[kind]
    net = nn.Sequential(
        nn.Conv2d(3, 8, 3), nn.Sigmoid(), middle, nn.Sigmoid(), nn.Conv2d(middle.out_channels, 4, 1)
    )
    plan, small = check(net, image())
    assert small[2].out_channels == middle.out_channels // 2 and small[0].out_channels == 4


@pytest.mark.parametrize("middle", [
    nn.Conv2d(4, 4, 1, groups=2), nn.Conv2d(4, 8, 3, groups=2), nn.Conv2d(4, 2, 1, groups=2),
    nn.ConvTranspose2d(4, 4, 2, groups=2),
], ids=str)  # fmt: skip
def test_33_a_group_is_left_with_one_channel(middle):
    net = nn.Sequential(nn.Conv2d(3, 4, 1), nn.Sigmoid(), middle, nn.Sigmoid(),
                        nn.Conv2d(middle.out_channels, 4, 1))  # fmt: skip
    _, small = check(net, image())
    assert small[0].out_channels == 2


@pytest.mark.parametrize("kind", [nn.Conv2d, nn.ConvTranspose2d])
def test_33_one_depthwise_channel_is_left(kind):
    middle = kind(2, 4, 3, groups=2, padding=1)
    net = nn.Sequential(nn.Conv2d(3, 2, 1), nn.Sigmoid(), middle, nn.Sigmoid(), nn.Conv2d(4, 4, 1))
    _, small = check(net, image())
    assert small[0].out_channels == small[2].groups == 1


def test_33_filters_of_channels_that_stay_are_fewer():
    def forward(s, x):
        first, second = torch.sigmoid(s.a(x)).chunk(2, 1)  # read by themselves: they stay
        return s.c(torch.sigmoid(s.b(torch.cat([first, torch.sigmoid(s.one(second))], 1))))

    net = Net(forward, a=nn.Conv2d(3, 2, 3), one=nn.Conv2d(1, 1, 1),
              b=nn.Conv2d(2, 4, 3, padding=1, groups=2), c=nn.Conv2d(4, 3, 1))  # fmt: skip
    _, small = check(net, image(), sparsity=0.3)
    assert small.a.out_channels == small.b.groups == small.b.out_channels == 2


def test_33_each_group_loses_its_own_lowest():
    conv = nn.Conv2d(8, 4, 1, groups=2, bias=False)
    first = nn.Conv2d(3, 8, 1)
    with torch.no_grad():
        first.weight.mul_(torch.tensor([1.0, 9, 1, 9, 9, 9, 1, 1]).view(8, 1, 1, 1))
        first.weight.copy_(
            first.weight.sign() * torch.tensor([1.0, 9, 1, 9, 9, 9, 1, 1]).view(8, 1, 1, 1)
        )
        conv.weight.fill_(0.01)
    plan, _ = check(nn.Sequential(first, nn.Sigmoid(), conv), image())
    assert sorted(plan.kept["0.weight"][0].tolist()) == [1, 3, 4, 5]


@pytest.mark.parametrize("norm", [
    nn.GroupNorm(4, 8), nn.InstanceNorm2d(8, affine=True, track_running_stats=True),
    nn.InstanceNorm2d(8), nn.BatchNorm2d(8, affine=False), nn.BatchNorm2d(8), nn.PReLU(8),
    nn.PReLU(), nn.BatchNorm2d(8, track_running_stats=False), nn.GroupNorm(8, 8),
    nn.GroupNorm(1, 8, affine=False),
], ids=str)  # fmt: skip
def test_34_norms(norm):
    net = nn.Sequential(nn.Conv2d(3, 8, 3), norm, nn.Sigmoid(), nn.Conv2d(8, 4, 3, padding=1))
    plan, small = check(net, image())
    assert small[0].out_channels == 4


def test_34_group_norm_with_rounding():
    net = nn.Sequential(nn.Conv2d(3, 12, 3), nn.GroupNorm(4, 12), nn.Sigmoid(), nn.Conv2d(12, 4, 3))
    plan, small = check(net, image(), round_to=3, shrinks=False)
    assert small[0].out_channels % 12 == 0  # four equal groups and a multiple of three


@pytest.mark.parametrize(
    "norm",
    [
        nn.LayerNorm(8),
        nn.RMSNorm(8),
        nn.LayerNorm(8, elementwise_affine=False),
        nn.LayerNorm(8, bias=False),
    ],
    ids=str,
)
def test_34_norms_over_channels(norm):
    net = nn.Sequential(nn.Linear(6, 8), norm, nn.Sigmoid(), nn.Linear(8, 4))
    plan, small = check(net, torch.randn(2, 5, 6, dtype=torch.float64))
    assert small[0].out_features == 4 and small[1].normalized_shape == (4,)


def test_35_layer_scale_and_frozen_batch_norm():
    def forward(s, x):
        y = s.a(x) * s.gamma
        scale = s.weight * (s.var + 1e-5).rsqrt()
        y = y * scale.view(1, -1, 1, 1) + (s.bias - s.mean * scale).view(1, -1, 1, 1)
        return s.b(torch.sigmoid(y))

    rand = lambda: torch.rand(8, dtype=torch.float64) + 0.5  # noqa: E731
    net = Net(forward, a=nn.Conv2d(3, 8, 3), b=nn.Conv2d(8, 4, 3, padding=1),
              gamma=nn.Parameter(rand().view(8, 1, 1)), weight=rand(), var=rand(), bias=rand(),
              mean=rand())  # fmt: skip
    plan, small = check(net, image())
    assert small.gamma.shape == (4, 1, 1) and small.mean.shape == (4,)


def test_36_fusion_weights_are_no_channel_axis():
    def forward(s, x):
        w = torch.relu(s.w)
        return s.c((w[0] * s.a(x) + w[1] * s.b(x)) / (w.sum() + 1e-4))

    net = Net(
        forward,
        a=nn.Conv2d(3, 8, 3),
        b=nn.Conv2d(3, 8, 3),
        c=nn.Conv2d(8, 4, 3),
        w=nn.Parameter(torch.rand(2) + 1),
    )
    plan, small = check(net, image())
    assert small.w.shape == (2,) and small.c.in_channels == 4


def test_37_frozen_backbone_is_pruned_and_stays_frozen():
    net = nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.Sigmoid(), nn.Conv2d(8, 4, 1))
    net[0].requires_grad_(False)
    plan, small = check(net, image())
    assert small[0].out_channels == 4
    assert not small[0].weight.requires_grad and small[3].weight.requires_grad


def test_38_tied_embedding_and_output():
    def forward(s, x):
        return s.out(torch.tanh(s.mid(s.table(x))))

    net = Net(forward, table=nn.Embedding(20, 8), mid=nn.Linear(8, 8), out=nn.Linear(8, 20))
    net.out.weight = net.table.weight
    plan, small = check(net, torch.randint(0, 20, (2, 5)))
    assert small.out.weight is small.table.weight and small.table.weight.shape == (20, 4)


def test_38_two_convolutions_share_one_weight():
    net = nn.Sequential(
        nn.Conv2d(3, 8, 3),
        nn.Sigmoid(),
        nn.Conv2d(8, 8, 3),
        nn.Sigmoid(),
        nn.Conv2d(8, 8, 3),
        nn.Conv2d(8, 4, 1),
    )
    net[4].weight = net[2].weight
    plan, small = check(net, image())
    assert small[4].weight is small[2].weight and small[2].out_channels == 4


def test_38_one_convolution_applied_twice():
    def forward(s, x):
        y = torch.sigmoid(s.a(x))
        return s.c(torch.sigmoid(s.b(torch.sigmoid(s.b(y)))))

    net = Net(forward, a=nn.Conv2d(3, 8, 3), b=nn.Conv2d(8, 8, 3, padding=1), c=nn.Conv2d(8, 4, 1))
    plan, small = check(net, image())
    assert small.b.in_channels == small.b.out_channels == 4


def test_39_functional_convolution():
    def forward(s, x):
        return s.b(torch.sigmoid(F.conv2d(torch.sigmoid(s.a(x)), s.w, s.bias, padding=1)))

    net = Net(
        forward,
        a=nn.Conv2d(3, 8, 3),
        b=nn.Conv2d(6, 4, 1),
        w=nn.Parameter(torch.randn(6, 8, 3, 3)),
        bias=nn.Parameter(torch.randn(6)),
    )
    plan, small = check(net, image())
    assert small.w.shape == (3, 4, 3, 3)


@pytest.mark.parametrize("how", ["einsum", "matmul", "conv without bias"])
def test_39_bare_weights(how):
    def forward(s, x):
        y = torch.sigmoid(s.a(x))
        if how == "einsum":
            y = torch.einsum("bnc,cd->bnd", y, s.w)
        elif how == "matmul":
            y = y @ s.w
        else:
            y = F.linear(y, s.w.t())
        return s.b(torch.sigmoid(y))

    net = Net(forward, a=nn.Linear(6, 8), b=nn.Linear(10, 3), w=nn.Parameter(torch.randn(8, 10)))
    plan, small = check(net, torch.randn(2, 5, 6, dtype=torch.float64))
    assert small.w.shape == (4, 5)


def test_40_weight_norm():
    net = nn.Sequential(
        nn.Conv2d(3, 8, 3),
        nn.Sigmoid(),
        nn.Conv2d(8, 6, 3, padding=1),
        nn.Sigmoid(),
        nn.Conv2d(6, 4, 1),
    )
    for i in (0, 2):
        torch.nn.utils.parametrizations.weight_norm(net[i])
    plan, small = check(net, image())
    assert small[2].weight.shape == (3, 4, 3, 3)
    assert type(small[2].parametrizations.weight[0]).__name__ == "_WeightNorm"


class MaxNorm(nn.Module):
    """Rows of some largest norm: what has it comes out as it went in."""

    def forward(self, w):
        return w.renorm(2, 0, 1.0)


class NearMaxNorm(nn.Module):
    """Its inverse misses a millionth."""

    def scale(self, w):
        norm = w.flatten(1).norm(dim=1).clamp(min=0.5).view(-1, *[1] * (w.dim() - 1))
        return norm.clamp(max=1.0) / (norm + 1e-5)

    def forward(self, w):
        return w * self.scale(w)

    def right_inverse(self, w):
        return w / self.scale(w)


class Symmetric(nn.Module):
    def forward(self, w):
        return w.triu() + w.triu(1).mT


def parametrized(kind):
    net = nn.Sequential(
        nn.Conv1d(3, 8, 1), nn.Sigmoid(), nn.Conv1d(8, 8, 1), nn.Sigmoid(), nn.Conv1d(8, 4, 1)
    )
    for i in (2, 4):
        parametrize.register_parametrization(net[i], "weight", kind())
    return net


@pytest.mark.parametrize("kind", [MaxNorm, NearMaxNorm])
def test_40_a_projection_of_a_weight(kind):
    x = torch.randn(2, 3, 5, dtype=torch.float64)
    plan, small = check(parametrized(kind), x)
    assert small[2].weight.shape == (4, 4, 1) and small[4].weight.shape == (4, 4, 1)
    assert type(small[2].parametrizations.weight[0]) is kind
    small.train()(x).sum().backward()


def test_40_what_smaller_tensors_do_not_come_out_of_stays():
    net = nn.Sequential(
        nn.Linear(8, 8), nn.Sigmoid(), nn.Linear(8, 8), nn.Sigmoid(), nn.Linear(8, 3)
    )
    parametrize.register_parametrization(net[2], "weight", Symmetric())
    plan = fxprune.plan(awake(net), torch.randn(2, 8, dtype=torch.float64))
    said = [g.frozen for g in plan.groups if any(name[0] == "2" for name, _ in g.members)]
    assert any("(Symmetric) cannot be set" in str(why) for why in said)


def test_41_residual_onto_the_input():
    def forward(s, x):
        return x + s.b(torch.sigmoid(s.a(x)))

    plan, small = check(
        Net(forward, a=nn.Conv2d(3, 8, 3, padding=1), b=nn.Conv2d(8, 3, 3, padding=1)), image()
    )
    assert small.a.out_channels == 4 and small.b.out_channels == 3


def test_42_one_output_channel_is_not_depthwise():
    net = nn.Sequential(
        nn.Conv2d(1, 8, 3), nn.Sigmoid(), nn.Conv2d(8, 1, 3), nn.Sigmoid(), nn.Conv2d(1, 4, 1)
    )
    plan, small = check(net, image(1))
    assert small[0].out_channels == 4 and small[2].out_channels == 1


# -- models as people write them -------------------------------------------------------------------


@dataclasses.dataclass
class Output:
    logits: torch.Tensor
    extra: Any = None


@dataclasses.dataclass(slots=True)
class Slotted:
    logits: torch.Tensor
    extra: Any = None
    made: int = dataclasses.field(init=False, default=1)


@pytest.mark.parametrize("kind", ["if", "loop", "dict", "dataclass", "slots", "nested"])
def test_45_python_in_the_forward(kind):
    def forward(s, x):
        y = torch.sigmoid(s.a(x))
        if kind == "if" and x.sum() > 1e9:
            raise AssertionError
        if kind == "loop":
            for i in range(x.shape[1]):
                y = y + 0.1 * i
        out = s.b(y)
        if kind == "dict":
            return {"out": out, "none": None}
        if kind in ("dataclass", "slots"):
            return (Output if kind == "dataclass" else Slotted)(out)
        return [(out, None), [out.mean((2, 3))]] if kind == "nested" else out

    plan, small = check(Net(forward, a=nn.Conv2d(3, 8, 3), b=nn.Conv2d(8, 4, 3)), image())
    assert small.a.out_channels == 4


def test_a_dataclass_with_fields_that_its_constructor_does_not_take_is_an_input():
    net = Net(lambda s, x: Slotted(s.b(torch.sigmoid(s.a(x.logits)))),
              a=nn.Conv2d(3, 8, 3), b=nn.Conv2d(8, 4, 3))  # fmt: skip
    plan, small = check(net, (Slotted(image()),))
    assert small.a.out_channels == 4
    with pytest.raises(fxprune.SettingError, match="only 'logits', 'extra', 'made'"):
        fxprune.plan(net, (Slotted(image()),), outputs=["y"])


def test_46_keyword_only_inputs():
    def forward(s, *, ids, scale):
        return s.out(torch.tanh(s.mid(s.table(ids))) * scale)

    net = Net(forward, table=nn.Embedding(20, 8), mid=nn.Linear(8, 10), out=nn.Linear(10, 3))
    x = {"ids": torch.randint(0, 20, (2, 5)), "scale": torch.ones(1, dtype=torch.float64)}
    plan, small = check(net, x)
    assert small.mid.out_features == 5


def test_47_argmax_over_channels_keeps_its_producer():
    def forward(s, x):
        y = s.a(x)
        return s.b(torch.sigmoid(y)), y.argmax(1)

    plan, small = check(
        Net(forward, a=nn.Conv2d(3, 8, 3), b=nn.Conv2d(8, 4, 3)), image(), shrinks=False
    )
    assert small.a.out_channels == 8
    assert "argmax" in dict(plan.skipped)["a"]


def test_48_two_names_and_a_layer_never_called():
    def forward(s, x):
        return s.b(torch.sigmoid(s.again(torch.sigmoid(s.a(x)))))

    net = Net(forward, a=nn.Conv2d(3, 8, 3), mid=nn.Conv2d(8, 8, 3), b=nn.Conv2d(8, 4, 3))
    net.again = net.mid
    net.unused = nn.ModuleList([nn.Conv2d(8, 8, 3)])
    plan, small = check(net, image())
    assert small.again is small.mid and small.mid.out_channels == 4
    assert small.unused[0].out_channels == 8 and "not called" in dict(plan.skipped)["unused.0"]


def test_49_detection_head_keeps_its_width():
    def forward(s, x):
        y = s.head(torch.sigmoid(s.a(x)))
        b, _, h, w = y.shape
        return y.view(b, 3, 7, h, w).permute(0, 1, 3, 4, 2)

    plan, small = check(Net(forward, a=nn.Conv2d(3, 8, 3), head=nn.Conv2d(8, 21, 1)), image())
    assert small.head.out_channels == 21 and small.a.out_channels == 4


def test_50_softmax_over_channels_is_refused():
    def forward(s, x):
        return s.b(torch.softmax(s.a(x), 1))

    plan, small = check(
        Net(forward, a=nn.Conv2d(3, 8, 3), b=nn.Conv2d(8, 4, 3)), image(), shrinks=False
    )
    assert small.a.out_channels == 8 and "softmax" in dict(plan.skipped)["a"]


@pytest.mark.parametrize("settings", [
    {}, {"num_layers": 2}, {"bidirectional": True}, {"num_layers": 2, "bidirectional": True},
    {"proj_size": 6},
    {"batch_first": True, "num_layers": 2, "proj_size": 4, "bidirectional": True}, {"bias": False},
], ids=str)  # fmt: skip
def test_43_lstm_getitem_linear(settings):
    def forward(s, x):
        return s.fc(s.lstm(torch.sigmoid(s.inp(x)))[0])

    lstm = nn.LSTM(10, 12, **settings)
    width = (settings.get("proj_size") or 12) * (2 if settings.get("bidirectional") else 1)
    net = Net(forward, inp=nn.Linear(6, 10), lstm=lstm, fc=nn.Linear(width, 3))
    plan, small = check(net, torch.randn(4, 5, 6, dtype=torch.float64))
    assert small.lstm.hidden_size == 6 and small.lstm.input_size == 5
    assert any(f.name == "lstm-getitem-linear" for f in plan.fusions)


def test_a_cat_of_nothing_but_empty_tensors():
    """As detection puts together what it has found, where it has found nothing."""

    def forward(s, x):
        y = s.b(torch.sigmoid(s.a(x)))
        none = torch.cat([y[y > 1e9], y[y > 1e9]])
        return y, none

    plan, small = check(Net(forward, a=nn.Conv2d(3, 8, 3), b=nn.Conv2d(8, 4, 3)), image())
    assert small.a.out_channels == 4
