"""Patterns of a user's own: module classes, functions, custom ops, runs of nodes."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import fxprune
from fxprune.proving.proof import prove

from .oracle import check
from .test_trace import Net


def image(channels=3):
    g = torch.Generator().manual_seed(1)
    return torch.randn(2, channels, 8, 8, dtype=torch.float64, generator=g)


def rows(width=6):
    g = torch.Generator().manual_seed(1)
    return torch.randn(4, width, dtype=torch.float64, generator=g)


class Gated(nn.Module):
    """sigmoid(G * x + g) · (V * x + v), one parameter for both halves of the weight."""

    def __init__(self, inside, outside, size=3):
        super().__init__()
        self.in_channels, self.out_channels = inside, outside
        self.kernels = nn.Parameter(torch.randn(2, inside, outside, size, size) * 0.2)
        self.gate_bias = nn.Parameter(torch.randn(outside))
        self.value_bias = nn.Parameter(torch.randn(outside))

    def forward(self, x):
        gate, value = self.kernels.transpose(1, 2)
        return torch.sigmoid(F.conv2d(x, gate, self.gate_bias)) * F.conv2d(
            x, value, self.value_bias
        )


GATED = fxprune.pattern(
    Gated,
    layout={
        "x": "n in h w", "kernels": "two in out a b", "gate_bias": "out", "value_bias": "out",
        "return": "n out h2 w2",
    },
    biases=("gate_bias", "value_bias"),
    attributes={"in_channels": "in", "out_channels": "out"},
)  # fmt: skip


def gated_net():
    return nn.Sequential(nn.Conv2d(3, 8, 3), nn.Sigmoid(), Gated(8, 12), nn.Conv2d(12, 4, 1))


def test_a_layer_with_a_layout_of_its_own_shrinks_on_both_sides():
    net = gated_net()
    with fxprune.patterns(GATED):
        plan, small = check(net, image())
    assert small[2].kernels.shape == (2, 4, 6, 3, 3)
    assert (small[2].in_channels, small[2].out_channels) == (4, 6)


class Maxout(nn.Module):
    def __init__(self, inside, outside, pieces):
        super().__init__()
        self.pieces = pieces
        self.weight = nn.Parameter(torch.randn(outside * pieces, inside))
        self.bias = nn.Parameter(torch.randn(outside * pieces))

    def forward(self, x):
        return F.linear(x, self.weight, self.bias).unflatten(-1, (-1, self.pieces)).amax(-1)


MAXOUT = fxprune.pattern(
    Maxout,
    layout={"x": "... in", "weight": "(out k) in", "bias": "(out k)", "return": "... out"},
    sizes={"k": "pieces"},
    biases=["bias"],
    folds={"weight": "bias"},
)


def test_a_dimension_cut_in_two_goes_by_whole_pieces():
    net = nn.Sequential(nn.Linear(6, 8), nn.Sigmoid(), Maxout(8, 5, 3), nn.Linear(5, 3))
    with fxprune.patterns(MAXOUT):
        plan, small = check(net, rows(), sparsity=0.4)
    assert small[2].weight.shape == (9, 5) and not plan.notes


BILINEAR = fxprune.pattern(
    nn.Bilinear,
    layout={
        "input1": "... one", "input2": "... two", "weight": "out one two", "bias": "out",
        "return": "... out",
    },
    biases=["bias"],
    attributes={"in1_features": "one", "in2_features": "two", "out_features": "out"},
)  # fmt: skip


def test_a_layer_that_reads_two_arguments():
    def forward(s, x):
        return s.out(s.both(torch.sigmoid(s.a(x)), torch.sigmoid(s.b(x))))

    net = Net(forward, a=nn.Linear(6, 8), b=nn.Linear(6, 4), both=nn.Bilinear(8, 4, 6),
              out=nn.Linear(6, 3))  # fmt: skip
    with fxprune.patterns(BILINEAR):
        plan, small = check(net, rows())
    assert small.both.weight.shape == (3, 4, 2)


@torch.library.custom_op("fxprune_tests::scale_shift", mutates_args=())
def scale_shift(x: torch.Tensor, scale: torch.Tensor, shift: float) -> torch.Tensor:
    return x.clone() * scale.view(1, -1, 1, 1) + shift


class Squash(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, slope):
        ctx.save_for_backward(x, slope)
        numbers = torch.from_numpy(x.detach().numpy().copy())
        return torch.tanh(numbers * slope.view(1, -1, 1, 1)) + 1

    @staticmethod
    def backward(ctx, grad):
        x, slope = ctx.saved_tensors
        inner = x * slope.view(1, -1, 1, 1)
        along = grad * (1 - torch.tanh(inner) ** 2)
        return along * slope.view(1, -1, 1, 1), (along * x).sum((0, 2, 3))


def softly(x, factor=2.0, *, offset):
    """A helper that leaves PyTorch on its way."""
    return torch.from_numpy((x.detach() * factor).numpy().copy()) + offset.view(1, -1, 1, 1)


PER_CHANNEL = {"x": "n c h w", "return": "n c h w"}


def per_channel_net(function):
    net = Net(lambda s, x: s.out(function(s, torch.sigmoid(s.conv(x)))), conv=nn.Conv2d(3, 8, 3),
              out=nn.Conv2d(8, 4, 1))  # fmt: skip
    net.register_parameter("scale", nn.Parameter(torch.randn(8)))
    return net


@pytest.mark.parametrize("target, layout, run", [
    (scale_shift, {"x": "n c h w", "scale": "c", "return": "n c h w"},
     lambda s, x: scale_shift(x, s.scale, 0.5)),
    (torch.ops.fxprune_tests.scale_shift, {"x": "n c h w", "scale": "c", "return": "n c h w"},
     lambda s, x: torch.ops.fxprune_tests.scale_shift(x, s.scale, 0.5)),
    (Squash, {"x": "n c h w", "slope": "c", "return": "n c h w"},
     lambda s, x: Squash.apply(x, s.scale)),
    (softly, {"x": "n c h w", "offset": "c", "return": "n c h w"},
     lambda s, x: softly(x, offset=s.scale)),
], ids=["custom op", "its packet", "autograd function", "python function"])  # fmt: skip
def test_functions_with_a_parameter_for_each_channel(target, layout, run):
    with fxprune.patterns(fxprune.pattern(target, layout=layout)):
        plan, small = check(per_channel_net(run), image())
    assert small.conv.out_channels == small.out.in_channels == len(small.scale) == 4
    assert not plan.notes


class Both(nn.Module):
    """Two results of different widths, the second only if it is asked for."""

    def __init__(self, asked=True):
        super().__init__()
        self.asked = asked
        self.first, self.second = nn.Linear(8, 6), nn.Linear(8, 4, bias=False)

    def forward(self, x):
        y = torch.from_numpy(x.detach().numpy().copy())
        return torch.sigmoid(self.first(y)), self.second(y) if self.asked else None


BOTH = fxprune.pattern(
    Both,
    layout={
        "x": "n in", "first.weight": "one in", "first.bias": "one", "second.weight": "two in",
        "return": ["n one", "n two"],
    },
    biases=["first.bias"],
    attributes={"first.out_features": "one", "first.in_features": "in"},
)  # fmt: skip


@pytest.mark.parametrize("asked", [True, False])
def test_a_layer_with_two_results(asked):
    def forward(s, x):
        y, z = s.both(torch.sigmoid(s.a(x)))
        return s.b(y) if z is None else s.b(y) + s.c(z)

    net = Net(forward, a=nn.Linear(6, 8), both=Both(asked), b=nn.Linear(6, 3), c=nn.Linear(4, 3))
    with fxprune.patterns(BOTH):
        plan, small = check(net, rows())
    assert small.both.first.weight.shape == (3, 4) and small.both.first.out_features == 3
    assert small.both.second.weight.shape == ((2, 4) if asked else (4, 4))


def space_to_depth(x):
    """Not in PyTorch: what is recorded of it is one opaque call."""
    n, c, h, w = x.shape
    blocks = x.detach().numpy().reshape(n, c, h // 2, 2, w // 2, 2).transpose(0, 3, 5, 1, 2, 4)
    return torch.from_numpy(blocks.reshape(n, 4 * c, h // 2, w // 2).copy())


def block_index(a, call):
    """y[(i, j, c)] = x[c] at positions (2h + i, 2w + j)."""
    x = call.channels()
    return a.reindex(call, x, 1, torch.arange(x.shape[1]).repeat(4))


BLOCKS = fxprune.pattern(("conv", space_to_depth, "conv"), steps={1: block_index})


def blocks_net(between=lambda s, y: space_to_depth(y)):
    def forward(s, x):
        return s.b(between(s, s.a(x)))

    return Net(forward, a=nn.Conv2d(3, 8, 3, padding=1), b=nn.Conv2d(32, 4, 3))


def test_a_run_gives_its_nodes_a_meaning_and_the_plan_tells():
    with fxprune.patterns(BLOCKS):
        plan, small = check(blocks_net(), image())
    assert small.a.out_channels == 4 and small.b.in_channels == 16
    (fusion,) = (f for f in plan.fusions if f.meant)
    assert fusion.nodes == ("a", "space_to_depth", "b") and fusion.meant == ("space_to_depth",)
    assert "test_user_patterns" in fusion.source


@pytest.mark.parametrize("between", [
    lambda s, y: space_to_depth(torch.sigmoid(y)),
    lambda s, y: space_to_depth(y) + space_to_depth(y).mean(1, keepdim=True) * s.zero(y),
], ids=["another node between", "a second reader"])  # fmt: skip
def test_a_near_miss_of_a_run_means_nothing(between):
    net = blocks_net(between)
    net.zero = lambda y: 0.5
    with fxprune.patterns(BLOCKS):
        plan, small = check(net, image(), shrinks=False)
    assert small.a.out_channels == 8 and not any(f.meant for f in plan.fusions)
    assert "space_to_depth" in dict(plan.skipped)["a"]


def shared_net():
    def forward(s, x):
        y = s.a(x)
        return s.b(space_to_depth(y)) + s.c(y)

    return Net(forward, a=nn.Conv2d(3, 8, 3, padding=1), b=nn.Conv2d(32, 4, 1),
               c=nn.Conv2d(8, 4, 2, stride=2))  # fmt: skip


def test_a_node_with_another_reader_is_in_no_run_unless_its_pattern_says_so():
    with fxprune.patterns(BLOCKS):
        _, small = check(shared_net(), image(), shrinks=False)
    assert small.a.out_channels == 8
    shared = fxprune.pattern(("conv", space_to_depth, "conv"), steps={1: block_index}, shared=True)
    with fxprune.patterns(shared):
        _, small = check(shared_net(), image())
    assert small.a.out_channels == 4 and small.c.in_channels == 4


def test_of_two_runs_the_longer_one_gives_the_meaning():
    never = fxprune.pattern((space_to_depth, "conv"), name="short",
                            steps={0: lambda a, call: a.unknown(call)})  # fmt: skip
    with fxprune.patterns(BLOCKS, never):
        plan, small = check(blocks_net(), image())
    assert small.a.out_channels == 4
    short = next(f for f in plan.fusions if f.name == "short")
    assert short.overruled == "conv-space_to_depth-conv" and short.meant == ("space_to_depth",)


class Dependent(nn.Module):
    """What a constant channel comes to depends on something else that goes in."""

    def __init__(self, how):
        super().__init__()
        self.how = how
        self.w, self.b = nn.Parameter(torch.randn(8, 8)), nn.Parameter(torch.randn(8))

    def forward(self, x, k=None):
        y = torch.from_numpy(x.detach().numpy().copy())
        if self.how == "length":
            return y.sum(1)
        if self.how == "batch":
            return (y / y.shape[0]).mean(1)
        made = y @ self.w.T + self.b
        if self.how == "length of made":
            return made.sum(1)
        return (made * (~k)[..., None]).mean(1)


PASSING = {"x": "n t c", "return": "n c"}
MADE = {"x": "n t i", "k": "n t", "w": "u i", "b": "u", "return": "n u"}


@pytest.mark.parametrize("how", ["length", "batch", "length of made", "mask"])
def test_a_constant_that_depends_on_sizes_or_masks_is_none(how):
    makes = how in ("length of made", "mask")

    def forward(s, x, k):
        y = torch.sigmoid(s.a(x))
        return s.c(s.m(y, k) if how == "mask" else s.m(y))

    layer = Dependent(how)
    net = Net(forward, a=nn.Linear(6, 8), m=layer, c=nn.Linear(8, 3)).double()
    made = fxprune.pattern(Dependent, layout=MADE if makes else PASSING,
                           biases=["b"] if makes else [])  # fmt: skip
    g = torch.Generator().manual_seed(0)
    x = torch.randn(2, 5, 6, dtype=torch.float64, generator=g)
    no = torch.zeros(2, 5, dtype=torch.bool)
    plan = fxprune.plan(net, (x, no), patterns=[made])
    masked, small = plan.mask(net), plan.apply(net)
    longer = torch.randn(3, 9, 6, dtype=torch.float64, generator=g)
    for value, mask in ((x, no), (longer, torch.rand(3, 9, generator=g) > 0.5)):
        assert torch.allclose(masked(value, mask), small(value, mask), atol=1e-9)
    assert small.c.in_features == 4


class Holding(nn.Module):
    """A layer whose weight is a part's, and parametrized."""

    def __init__(self):
        super().__init__()
        self.l = nn.utils.parametrizations.weight_norm(nn.Linear(8, 6))

    def forward(self, x):
        return torch.from_numpy((x @ self.l.weight.T).detach().numpy()) + self.l.bias


def test_a_constant_goes_into_the_bias_of_a_part_whose_weight_is_parametrized():
    made = fxprune.pattern(
        Holding, biases=["l.bias"], folds={"l.weight": "l.bias"},
        layout={"x": "n in", "l.weight": "out in", "l.bias": "out", "return": "n out"},
    )  # fmt: skip
    model = nn.Sequential(nn.Linear(5, 8), nn.Sigmoid(), Holding(), nn.Linear(6, 3)).double()
    plan = fxprune.plan(model, rows(5), patterns=[made])
    small = plan.apply(model)
    prove(plan, model, small, rows(5))
    assert small[2].l.weight.shape[1] == 4 and "2" not in dict(plan.notes)
