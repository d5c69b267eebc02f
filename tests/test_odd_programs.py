"""Compositions that random programs have found to break earlier versions, each made small; under
the oracles."""

from __future__ import annotations

import math
from functools import partial

import pytest
import torch
from torch import nn
from torch.autograd import Variable
from torch.nn import functional as F

import fxprune

from .oracle import awake, check, difference, run
from .test_constructs import Net, image, sequence

pytestmark = pytest.mark.filterwarnings("ignore::fxprune.PruningWarning")


def rows(n=4, width=5):
    return torch.randn(
        n, width, dtype=torch.float64, generator=torch.Generator().manual_seed(width)
    )


def drawn(*shape):
    return rows(1, math.prod(shape)).view(shape)


def steps(width=8):
    return rows(12, width).view(2, 6, width)


def parameter(*shape):
    generator = torch.Generator().manual_seed(3)
    return nn.Parameter(torch.randn(*shape, dtype=torch.float64, generator=generator))


@pytest.mark.parametrize("beta, alpha", [(0.5, 2.0), (0.0, 1.0), (1.0, -1.0)])
def test_terms_of_addmm_have_weights(beta, alpha):
    def forward(s, x):
        return s.head(torch.addmm(s.c, s.a(x).sigmoid(), s.w, beta=beta, alpha=alpha))

    net = Net(forward, a=nn.Linear(5, 6), w=parameter(6, 8), c=parameter(8), head=nn.Linear(8, 3))
    plan, small = check(net, rows())
    assert small.w.shape == (3, 4)


def test_terms_of_baddbmm_have_weights():
    def forward(s, x):
        return s.head(torch.baddbmm(s.c, x, s.w.expand(x.size(0), -1, -1), beta=0.5, alpha=3))

    net = Net(forward, w=parameter(1, 8, 12), c=parameter(1, 1, 12), head=nn.Linear(12, 3))
    check(net, steps())


@pytest.mark.parametrize("summed", [
    lambda s, y: torch.addbmm(s.w, y, y.mT), lambda s, y: s.b(torch.addbmm(s.c, y, s.both)),
], ids=["activations", "weight"])  # fmt: skip
def test_addbmm_sums_over_the_batch(summed):
    net = Net(lambda s, x: summed(s, s.a(x).relu()), a=nn.Linear(8, 8), w=parameter(6, 6),
              both=parameter(2, 8, 4), c=parameter(6, 4), b=nn.Linear(4, 3))  # fmt: skip
    check(net, steps())


@pytest.mark.parametrize("start, step", [(0, 3), (0, 2), (1, 2), (2, 3)])
@pytest.mark.parametrize("behind", [lambda s, y: y, lambda s, y: y.softmax(1)])
def test_every_third_channel_is_the_one_that_it_was(start, step, behind):
    net = Net(lambda s, x: behind(s, s.a(x)[:, start::step]), a=nn.Linear(5, 9))
    check(net, rows(), shrinks=False)


def test_a_size_that_comes_out_as_minus_one_is_no_question():
    def forward(s, x):
        first, second = torch.split(s.a(x), [5, s.a(x).shape[1] - 5], 1)
        return s.b(first) * second

    check(Net(forward, a=nn.Linear(5, 8), b=nn.Linear(5, 3)), rows(), shrinks=False)


def test_attention_without_biases_runs_on_the_fast_path():
    net = Net(lambda s, x: s.b(s.m(s.a(x), s.a(x), s.a(x))[0]), a=nn.Linear(8, 12),
              m=nn.MultiheadAttention(12, 4, bias=False, batch_first=True),
              b=nn.Linear(12, 3))  # fmt: skip
    plan, small = check(net, steps())
    expected = small(steps())  # with gradients PyTorch goes its plain way
    with torch.no_grad():
        assert difference([small(steps())], [expected]) <= 1e-9


@pytest.mark.parametrize("cast", [
    lambda y: y.to(y.dtype), lambda y: y.double(), lambda y: y.type(y.dtype), lambda y: y.cpu(),
])  # fmt: skip
def test_casts_of_tensors_are_no_casts_of_the_module(cast):
    net = Net(lambda s, x: s.b(cast(s.a(x)).view(-1, 2, 4).flatten(1)), a=nn.Linear(5, 8),
              b=nn.Linear(8, 3))  # fmt: skip
    plan, small = check(net, rows())
    assert plan.code


@pytest.mark.parametrize("part", [
    lambda s, x: x.narrow(1, 0, s.n), lambda s, x: x[:, : s.n], lambda s, x: x[:, s.n :],
    lambda s, x: F.pad(x, (0, 0, 0, s.n)), lambda s, x: x.roll(s.n, 1),
    lambda s, x: x.repeat_interleave(s.n, 1), lambda s, x: x * s.n,
])  # fmt: skip
def test_an_attribute_that_counts_heads_and_positions_is_set_for_neither(part):
    def forward(s, x):
        x = part(s, x)
        q, k, v = (f(x).view(*x.shape[:2], s.n, -1).transpose(1, 2) for f in (s.q, s.k, s.v))
        return s.o(((q @ k.mT).softmax(-1) @ v).transpose(1, 2).flatten(2))

    layers = {name: nn.Linear(8, 8) for name in "qkvo"}
    plan, small = check(Net(forward, n=2, **layers), steps())
    assert small.q.out_features == 4


def test_filters_that_are_cut_across_stay_whole():
    def forward(s, x):
        y = s.stem(x)
        n, c, h, w = y.shape
        kernels = s.kernels(y.mean((2, 3))).view(-1, c, 1, 1)
        return s.head(F.conv2d(y.reshape(1, -1, h, w), kernels, groups=n).view(n, -1, h, w))

    net = Net(forward, stem=nn.Conv2d(3, 6, 1), kernels=nn.Linear(6, 48), head=nn.Conv2d(8, 3, 1))
    check(net, image(batch=4), shrinks=False)


def test_channels_of_an_index_are_channels_of_what_is_looked_up():
    def forward(s, x):
        return s.head(s.table(s.a(x).argmax(-1)).sum(2))

    net = Net(forward, a=nn.Conv1d(3, 12, 3, padding=1), table=nn.Embedding(8, 5),
              head=nn.Linear(12, 3))  # fmt: skip
    check(net, sequence(), shrinks=False)
    flat = Net(lambda s, x: s.head(s.table(s.a(x).argmax(-1)).flatten(1)),
               a=nn.Conv1d(3, 12, 3, padding=1), table=nn.Embedding(8, 5),
               head=nn.Linear(60, 3))  # fmt: skip
    check(flat, sequence(), shrinks=False)


@pytest.mark.parametrize("hidden, projected", [(4, 3), (5, 4), (8, 3), (8, 7)])
def test_projections_stay_narrower_than_what_they_project(hidden, projected):
    net = Net(lambda s, x: s.head(s.rnn(x)[0]), head=nn.Linear(projected, 3),
              rnn=nn.LSTM(8, hidden, batch_first=True, proj_size=projected))  # fmt: skip
    plan, small = check(net, steps())
    assert small.rnn.proj_size < small.rnn.hidden_size


@pytest.mark.parametrize("pick", [
    lambda y: y.max(1)[0], lambda y: torch.min(y, 1).values, lambda y: y.median(1).values,
    lambda y: torch.var_mean(y, 1)[0], lambda y: y.sort(1)[0][:, 0],
], ids=["max", "min", "median", "var_mean", "sort"])  # fmt: skip
def test_one_of_several_results_over_one_of_two_channel_dimensions(pick):
    net = Net(lambda s, x: s.head(pick(s.mix(s.stem(x)))), stem=nn.Conv2d(3, 8, 3, padding=1),
              mix=nn.Linear(8, 12), head=nn.Linear(12, 3))  # fmt: skip
    plan, small = check(net, image())
    assert small.head.in_features == 6


@pytest.mark.parametrize("scaled", [
    lambda y: y * y.numel(), lambda y: y * len(y), lambda y: (y + y.shape[0]).sqrt(),
], ids=["numel", "len", "sum"])  # fmt: skip
def test_what_a_channel_says_by_the_size_of_the_batch_is_not_folded(scaled):
    net = awake(Net(lambda s, x: s.b(scaled(F.softplus(s.a(x)))), a=nn.Linear(5, 6),
                    b=nn.Linear(6, 3)))  # fmt: skip
    plan = fxprune.plan(net, rows())
    masked, small = plan.mask(net), plan.apply(net)
    for n in (1, 4, 7):
        assert difference(run(masked, rows(n)), run(small, rows(n))) <= 1e-9


def test_weights_that_are_divided_by_their_norm_cannot_be_masked():
    net = Net(lambda s, x: s.h(F.linear(x, s.w / s.w.norm(dim=1, keepdim=True)).relu()),
              w=parameter(8, 5), h=nn.Linear(8, 3))  # fmt: skip
    plan, _ = check(net, rows(), shrinks=False)
    assert "makes no finite number of masked ones" in dict(plan.skipped)["w"]


def test_channels_along_the_width_of_an_image_are_no_places_to_slide_over():
    def forward(s, x):
        y = F.unfold(s.mix(s.stem(x)), 2, stride=2)
        return s.head(F.fold(y, (8, 4), 2, stride=2))

    net = Net(forward, stem=nn.Conv2d(3, 4, 1), mix=nn.Linear(8, 4), head=nn.Conv2d(4, 2, 1))
    plan, small = check(net, image())
    assert small.stem.out_channels == 2 and small.mix.out_features == 4


@pytest.mark.parametrize("read", [
    lambda y, k: y.narrow(1, k, 3), lambda y, k: torch.narrow(y, 1, k, 3), lambda y, k: y[:, k:],
    lambda y, k: y.select(1, k),
], ids=["narrow", "function", "slice", "select"])  # fmt: skip
def test_positions_that_a_tensor_tells(read):
    def forward(s, x):
        return s.b(read(s.a(x), (x[..., 0] > -99).long().sum(1).max() // 6))

    net = Net(forward, a=nn.Linear(8, 16), b=nn.Linear(16, 4))
    plan, small = check(net, steps())
    assert small.a.out_features == 8


@pytest.mark.parametrize("table", [
    lambda t: t, lambda t: t[None], lambda t: t.expand(2, -1, -1), lambda t: t + 1,
    lambda t: t.view(1, 4, -1), lambda t: t.clone(),
], ids=["bare", "none", "expand", "add", "view", "clone"])  # fmt: skip
@pytest.mark.parametrize("kind", ["parameter", "buffer"])
def test_a_table_of_two_dimensions_goes_with_channels_that_were_cut_in_two(table, kind):
    t = parameter(4, 8) if kind == "parameter" else parameter(4, 8).detach()
    net = Net(lambda s, x: s.b((s.a(x).view(len(x), 4, -1) + table(s.t)).flatten(1)),
              a=nn.Linear(5, 32), t=t, b=nn.Linear(32, 3))  # fmt: skip
    plan, small = check(net, rows(2))
    assert small.a.out_features == 16


def test_memories_are_put_before_keys_of_heads():
    def forward(s, x):
        q, k, v = (f(x).view(2, 6, 4, -1).transpose(1, 2) for f in (s.q, s.k, s.v))
        k, v = (torch.cat([m.expand(2, -1, -1, -1), t], 2) for m, t in ((s.mk, k), (s.mv, v)))
        y = (q @ k.mT).softmax(-1) @ v
        return s.o(y.transpose(1, 2).flatten(2))

    net = Net(forward, mk=parameter(4, 2, 8), mv=parameter(4, 2, 8), o=nn.Linear(32, 3),
              **{name: nn.Linear(8, 32) for name in "qkv"})  # fmt: skip
    plan, small = check(net, steps())
    assert small.v.out_features == 16


@pytest.mark.parametrize("turned", [8, 4])
@pytest.mark.parametrize("groups", [4, 2])
def test_rotary_embeddings_of_a_part_with_grouped_queries(turned, groups):
    def halves(t):
        a, b = t.chunk(2, -1)
        return torch.cat([-b, a], -1)

    def turn(t):
        angles = torch.arange(6.0, dtype=t.dtype)[:, None] * torch.arange(turned)
        first, rest = t[..., :turned], t[..., turned:]
        return torch.cat([first * angles.cos() + halves(first) * angles.sin(), rest], -1)

    def forward(s, x):
        q, k, v = (f(x).view(2, 6, -1, 8).transpose(1, 2) for f in (s.q, s.k, s.v))
        q, k = turn(q), turn(k)
        if groups < 4:
            k, v = (t[:, :, None].expand(2, s.groups, 2, 6, 8).reshape(2, s.heads, 6, 8)
                    for t in (k, v))  # fmt: skip
        y = F.scaled_dot_product_attention(q, k, v)
        return s.o(y.transpose(1, 2).reshape(2, 6, -1))

    net = Net(forward, q=nn.Linear(8, 32), k=nn.Linear(8, 8 * groups), o=nn.Linear(32, 3),
              v=nn.Linear(8, 8 * groups), heads=4, groups=groups)  # fmt: skip
    plan, small = check(net, steps())
    assert small.q.out_features == 16 and small.k.out_features == 4 * groups


@pytest.mark.parametrize("empty", [(0, 8), (1, 0, 8)])
def test_registers_of_which_there_are_none(empty):
    def forward(s, x):
        return s.b(torch.cat([s.r.expand(len(x), *empty[-2:]), s.a(x)], 1))

    check(Net(forward, a=nn.Linear(8, 8), r=parameter(*empty), b=nn.Linear(8, 3)), steps())


def test_as_tensor_hands_channels_on():
    net = Net(lambda s, x: s.b(torch.as_tensor(s.a(x)).relu()), a=nn.Linear(5, 8),
              b=nn.Linear(8, 3))  # fmt: skip
    plan, small = check(net, rows())
    assert small.a.out_features == 4


def test_a_norm_of_a_table_has_its_width():
    net = Net(lambda s, x: s.b(s.a(x) + s.norm(s.table.weight).mean(0)), a=nn.Linear(5, 8),
              table=nn.Embedding(7, 8), norm=nn.LayerNorm(8), b=nn.Linear(8, 3))  # fmt: skip
    plan, small = check(net, rows())
    assert small.norm.normalized_shape == (small.a.out_features,)


@pytest.mark.parametrize("read", ["feed", "count"])
def test_hooks_that_look_on_fire_once(read):
    class Watched(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.act, self.b = nn.Linear(5, 16), nn.Sigmoid(), nn.Linear(16, 3)
            self.c, self.seen = nn.Linear(16, 3), []
            self.act.register_forward_hook(self.hook)

        def hook(self, module, given, result):
            self.seen.append(result)

        def forward(self, x):
            self.seen.clear()
            y = self.b(self.act(self.a(x)))
            return y + self.c(self.seen[0]) if read == "feed" else y * len(self.seen)

    plan, small = check(Watched(), rows())
    assert small.a.out_features == 8


def test_what_training_alone_returns_stays():
    class Deep(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.aux, self.b = nn.Linear(5, 8), nn.Linear(8, 6), nn.Linear(8, 3)

        def forward(self, x):
            h = self.a(x).sigmoid()
            outs = [self.b(h), self.aux(h)]
            return outs if self.training else outs[0]

    plan, small = check(Deep(), rows(), shrinks=False)
    assert [tuple(t.shape) for t in small.train()(rows())] == [(4, 3), (4, 6)]


class Features(nn.Module):
    """A head that returns what it reads, too, while it trains."""

    def __init__(self):
        super().__init__()
        self.norm, self.classes = nn.BatchNorm1d(8), nn.Linear(8, 3)

    def forward(self, x):
        scores = self.classes(self.norm(x))
        return (scores, x) if self.training else scores


@pytest.mark.parametrize("nested", [False, True])
def test_features_that_are_returned_in_training_alone_stay(nested):
    class Whole(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b, self.head = nn.Linear(5, 6), nn.Linear(6, 8), Features()

        def forward(self, x):
            x = self.b(self.a(x).sigmoid()).sigmoid()
            return self.head(x) if nested else (self.head(x), x)[: 1 + self.training]

    plan, small = check(Whole(), rows())
    assert small.b.out_features == 8 and small.a.out_features == 3
    assert "in training mode alone" in dict(plan.skipped)["b"]


def test_single_precision_on_the_way_is_no_fault():
    net = Net(lambda s, x: s.b((s.a(x).float().sin() * 100).exp().log().double()),
              a=nn.Linear(5, 64), b=nn.Linear(64, 3)).double()  # fmt: skip
    assert fxprune.prune(net, rows()).a.out_features == 32


class Mixer(nn.Module):
    """An MLP-Mixer whose linear layers over positions are convolutions of one place."""

    def __init__(self, steps=6, width=8):
        super().__init__()
        self.a, self.norm, self.b = nn.Linear(width, 12), nn.LayerNorm(12), nn.Linear(12, 3)
        self.mix, self.back = nn.Conv1d(steps, 10, 1), nn.Conv1d(10, steps, 1)
        self.up, self.down = nn.Linear(12, 16), nn.Linear(16, 12)

    def forward(self, x):
        h = self.a(x)
        h = h + self.back(F.gelu(self.mix(self.norm(h))))
        h = h + self.down(F.gelu(self.up(h)))
        return self.b(h.mean(1))


@pytest.mark.parametrize("transposed", [False, True])
def test_convolutions_of_one_place_over_positions_leave_the_width_alone(transposed):
    net = Mixer()
    if transposed:
        net.back = nn.ConvTranspose1d(10, 6, 1)
    plan, small = check(net, steps())
    assert small.a.out_features == 6 and small.mix.out_channels == 5


def test_parts_that_a_convolution_sums_have_the_same_channels():
    """CoaT stacks a token of each scale, and a convolution of one place weighs the scales."""

    def run(s, x):
        a, b, c = s.a(x), s.b(x), s.c(x)
        parts = [a + b.sin(), b + c.sin(), c + a.sin()]
        return s.head(s.weigh(torch.stack(parts, 1)).squeeze(1))

    layers = {name: nn.Linear(5, 8) for name in "abc"}
    net = Net(run, **layers, weigh=nn.Conv1d(3, 1, 1), head=nn.Linear(8, 3))
    plan, small = check(net, rows())
    assert [getattr(small, name).out_features for name in "abc"] == [4, 4, 4]


def test_an_attribute_may_be_called_size():
    net = Net(lambda s, x: s.b(s.a(x).softmax(0).add(1) * s.size), a=nn.Linear(5, 8), size=3,
              b=nn.Linear(8, 3))  # fmt: skip
    plan, small = check(net, rows())
    assert small.a.out_features == 4


class DeviationOfEachGroup(nn.Module):
    """What EvoNorm divides by: one number a group, as often as the group has channels."""

    def __init__(self, groups):
        super().__init__()
        self.groups = groups

    def forward(self, x):
        b, c, h, w = x.shape
        x = x.reshape(b, self.groups, c // self.groups, h, w)
        std = x.var((2, 3, 4), keepdim=True).add(1e-5).sqrt()
        return x.reshape(b, c, h, w) / std.expand(x.shape).reshape(b, c, h, w)


@pytest.mark.parametrize("groups", [1, 2, 4])
def test_one_group_may_be_left_of_several_that_are_repeated(groups):
    net = Net(lambda s, x: s.b(s.norm(s.a(x).sigmoid())), a=nn.Conv2d(3, 8, 3),
              norm=DeviationOfEachGroup(groups), b=nn.Conv2d(8, 4, 1))  # fmt: skip
    plan, small = check(net, image())
    assert small.a.out_channels == 4


def flagged(forward):
    net = Net(forward, a=nn.Linear(5, 8), head=nn.Linear(8, 3))
    net.register_buffer("flags", torch.arange(8) % 3 > 0)
    return net


@pytest.mark.parametrize("chosen", [
    lambda flags, y: torch.where(flags, y, y.cos()), lambda flags, y: y.masked_fill(~flags, 0.3),
    lambda flags, y: y * flags, lambda flags, y: y + flags.to(y),
    lambda flags, y: torch.where(flags & (y > 0.1), y, 0.2),
], ids=["where", "filled", "times", "cast", "and"])  # fmt: skip
def test_flags_of_channels_shrink_with_them(chosen):
    net = flagged(lambda s, x: s.head(chosen(s.flags, s.a(x).sigmoid())))
    plan, small = check(net, rows())
    assert small.flags.equal(net.flags[plan.kept["flags"][0]]) and len(small.flags) == 4


@pytest.mark.parametrize("asked", [torch.any, torch.all, torch.sum, torch.count_nonzero])
def test_flags_that_are_counted_stay(asked):
    net = flagged(lambda s, x: s.head(s.a(x).sigmoid().masked_fill(s.flags, 0.2) * asked(s.flags)))
    plan, small = check(net, rows(), shrinks=False)
    assert len(small.flags) == 8


def test_flags_that_choose_which_channels_are_read_stay():
    net = flagged(lambda s, x: s.head2(s.a(x).sigmoid()[:, s.flags]))
    net.head2 = nn.Linear(5, 3)
    check(net, rows(), shrinks=False)


def test_windows_along_time_leave_channels_alone():
    def forward(s, x):
        y = s.a(x).sigmoid().unfold(-1, 4, 2)
        return s.head(y.permute(0, 2, 1, 3).flatten(2))

    net = Net(forward, a=nn.Conv1d(6, 8, 3, padding=1), head=nn.Linear(32, 3))
    plan, small = check(net, steps(9))
    assert small.head.in_features == 16


def test_windows_along_channels_keep_them():
    net = Net(lambda s, x: s.head(s.a(x).unfold(1, 4, 2)), a=nn.Linear(5, 8), head=nn.Linear(4, 3))
    check(net, rows(), shrinks=False)


@pytest.mark.parametrize("as_other", [torch.Tensor.view_as, torch.Tensor.reshape_as])
def test_a_view_as_another_tensor_is_as_wide_as_that(as_other):
    def forward(s, x):
        a, b = s.a(x).sigmoid(), s.b(x).cos()
        return s.c(as_other(a.flatten(1), b)), s.d(b)

    net = Net(forward, a=nn.Conv2d(3, 8, 3, padding=1), b=nn.Conv2d(3, 8, 1),
              c=nn.Conv2d(8, 3, 1), d=nn.Conv2d(8, 2, 1))  # fmt: skip
    plan, small = check(net, image(3))
    assert small.a.out_channels == small.b.out_channels == 4


def test_a_view_as_a_tensor_that_stays_stays():
    def forward(s, x):
        other = x.mean(1, keepdim=True).expand(-1, 8, -1, -1)
        return s.c(s.a(x).sigmoid().flatten(2).view_as(other))

    net = Net(forward, a=nn.Conv2d(3, 8, 3, padding=1), c=nn.Conv2d(8, 3, 1))
    check(net, image(3), shrinks=False)


def test_what_stays_by_way_of_others_says_what_it_hangs_together_with():
    """A table that the code computes is written into a tensor that channels meet."""

    def forward(s, x):
        y = s.a(x)
        table = torch.zeros(y.shape[1:], dtype=y.dtype)
        table[:, 0::2] = torch.arange(4, dtype=y.dtype).sin()
        table[:, 1::2] = torch.arange(4, dtype=y.dtype).cos()
        return s.head((y + table).sigmoid())

    plan, _ = check(Net(forward, a=nn.Linear(8, 8), head=nn.Linear(8, 3)), steps(), shrinks=False)
    assert "fixed width in set_item" in dict(plan.skipped)["a"]


class Constrained(nn.Conv2d):
    """A convolution that does something to its weight before each run."""

    def __init__(self, how, *sizes, **settings):
        super().__init__(*sizes, **settings)
        self.how = how
        mask = torch.ones(self.weight.shape).double()
        mask[:, :, 2:] = 0
        self.register_buffer("mask", mask)

    def forward(self, x):
        if self.how == "masks":
            self.weight.data *= self.mask
        elif self.how == "clamps":
            self.weight.data.clamp_(-0.1, 0.1)
        elif self.how == "sets":
            self.weight.data = self.weight.data * self.mask
        elif self.how == "norms":
            self.weight.data.div_(self.weight.data.norm(dim=0))
        elif self.how == "centres":
            with torch.no_grad():
                self.weight.copy_(self.weight - self.weight.mean())
        else:
            self.weight.data = torch.renorm(self.weight.data, 2, 0, 0.5)
        return super().forward(x)


@pytest.mark.parametrize("how", ["norms", "centres"])
def test_weights_that_are_written_by_what_they_are_stay(how):
    net = nn.Sequential(nn.Conv2d(3, 8, 3), nn.Sigmoid(), Constrained(how, 8, 12, 3), nn.Sigmoid(),
                        nn.Conv2d(12, 3, 1), nn.Sigmoid(), nn.Conv2d(3, 4, 1))  # fmt: skip
    small = fxprune.prune(awake(net), image(3))
    assert small[2].weight.shape[:2] == (12, 8) and small[4].out_channels == 2


@pytest.mark.parametrize("how", ["masks", "clamps", "sets", "renorms"])
@pytest.mark.parametrize("norm", [nn.Sigmoid, partial(nn.BatchNorm2d, 8)], ids=["act", "norm"])
def test_weights_that_the_forward_changes(how, norm):
    """In place they can shrink; where they get other memory they stay, with all they read."""
    net = nn.Sequential(Constrained(how, 3, 8, 3, padding=1), norm(), nn.Sigmoid(),
                        Constrained(how, 8, 12, 3, padding=1), nn.Sigmoid(),
                        nn.Conv2d(12, 3, 1), nn.Sigmoid(), nn.Conv2d(3, 4, 1))  # fmt: skip
    net = awake(net)
    run(net, image(3))  # what is written in place is written once and for all
    plan, small = check(net, image(3))
    whole = how in ("sets", "renorms")
    assert small[0].weight.shape[0] == (8 if whole else 4)
    assert not whole or "writes to it" in dict(plan.skipped)["3"]


def test_a_kernel_that_is_used_as_a_matrix_too_keeps_its_size():
    def forward(s, x):
        y = F.conv2d(x, s.w, padding=1).sigmoid()
        return s.head(y.mean((2, 3))) + s.out(s.a(x.mean((2, 3))).sigmoid() @ s.w.sum((0, 1)))

    net = Net(forward, w=parameter(8, 3, 3, 3), a=nn.Linear(3, 3), head=nn.Linear(8, 2),
              out=nn.Linear(3, 2))  # fmt: skip
    plan, small = check(net, image(3))
    assert small.w.shape == (4, 3, 3, 3)


@pytest.mark.parametrize("spread", ["expand", "repeat"])
def test_the_models_own_attribute_may_be_called_size(spread):
    class Sized(nn.Module):
        def __init__(self):
            super().__init__()
            self.size, self.a, self.b = 3, nn.Linear(5, 8), nn.Linear(8, 3)

        def forward(self, x):
            y = self.a(x).sigmoid().unsqueeze(1)
            y = y.expand(-1, self.size, -1) if spread == "expand" else y.repeat(1, self.size, 1)
            return self.b(y)

    check(Sized(), rows())


@pytest.mark.parametrize("behind", ["norm", "mean"])
def test_stacked_features_have_the_same_channels_where_something_asks_for_it(behind):
    def forward(s, x):
        v = torch.stack([s.a(x), s.b(x).cos()], 2)
        v = s.norm(v)
        v = v + s.b2(s.c(v).sigmoid())
        return s.head(v.mean(2) if behind == "mean" else v)

    net = Net(forward, a=nn.Linear(8, 6), b=nn.Linear(8, 6), norm=nn.LayerNorm(6),
              c=nn.Linear(6, 10), b2=nn.Linear(10, 6), head=nn.Linear(6, 2))  # fmt: skip
    plan, small = check(net, steps())
    assert small.a.out_features == small.b.out_features == 3


@pytest.mark.parametrize("zero", [
    lambda x: x.data.new(x.shape[1], 8).zero_(), lambda x: x.new(x.shape[1], 8).fill_(0),
    lambda x: torch.empty(x.shape[1], 8, dtype=x.dtype).zero_(),
    lambda x: Variable(torch.zeros(x.shape[1], 8, dtype=x.dtype)),
    lambda x: Variable(x.data.new_zeros(x.shape[1], 8), requires_grad=False),
], ids=["new", "fill", "empty", "variable", "new variable"])  # fmt: skip
def test_states_begin_with_zeros_of_any_make(zero):
    def forward(s, x):
        x = s.a(Variable(x)).sigmoid()
        h, c = zero(x), zero(x)
        for each in x:
            h, c = s.cell(each, (h, c))
        return s.head(h)

    net = Net(forward, a=nn.Linear(8, 6), cell=nn.LSTMCell(6, 8), head=nn.Linear(8, 2))
    plan, small = check(net, steps())
    assert small.cell.hidden_size == 4 and small.a.out_features == 3


class Scattered(nn.Module):
    """Rows are written to places of a canvas that the input tells (pillars, voxels, tokens)."""

    def __init__(self, how):
        super().__init__()
        self.how, self.a, self.head = how, nn.Linear(4, 16), nn.Linear(16, 3)

    def forward(self, x, at):
        p, how = self.a(x).sigmoid(), self.how
        sizes = {"columns": (16, 20), "two": (4, 5, 16), "apart": (4, 16, 5)}.get(how, (20, 16))
        canvas = torch.full(sizes, 0.3 * (how == "filled"), dtype=x.dtype)
        if how == "columns":
            canvas[:, at] = p.t()
            return self.head(canvas.t())
        if how == "two":
            canvas[at % 4, at // 4] = p
        elif how == "apart":
            canvas[at % 4, :, at // 4] = p
            canvas = canvas.mT
        elif how == "added":
            canvas[at] += p
        else:
            canvas[at] = p
        return self.head(canvas)


@pytest.mark.parametrize("how", ["rows", "columns", "two", "apart", "filled", "added"])
def test_rows_that_are_written_where_data_says_keep_no_channels(how):
    plan, small = check(Scattered(how), (rows(5, 4), torch.tensor([3, 1, 7, 12, 19])))
    assert small.a.out_features == 8


class Gated(nn.Module):
    """One gate for all channels, repeated as often as the code says."""

    def __init__(self, repeated):
        super().__init__()
        self.a, self.gate, self.head = nn.Linear(8, 10), nn.Linear(8, 1), nn.Linear(10, 3)
        self.width, self.repeated = 10, repeated

    def forward(self, x):
        gate = self.gate(x).sigmoid()
        return self.head(self.a(x).cos() * self.repeated(self, gate) + 0.5)


@pytest.mark.parametrize("repeated", [
    lambda s, g: g.repeat(1, 1, 10), lambda s, g: g.expand(-1, -1, 10), lambda s, g: g.tile(10),
    lambda s, g: g.repeat(1, 1, s.width), lambda s, g: g.expand(-1, -1, s.width),
    lambda s, g: g.expand(*g.shape[:2], s.width),
    lambda s, g: g.expand(-1, -1, s.head.in_features),
    lambda s, g: torch.broadcast_to(g, (2, g.shape[1], 10)),
], ids=["repeat", "expand", "tile", "repeat own", "own", "shape", "layer", "to"])  # fmt: skip
def test_one_slice_is_repeated_as_often_as_there_are_channels(repeated):
    plan, small = check(Gated(repeated), steps())
    assert small.a.out_features == 5


def test_one_slice_that_is_repeated_and_meets_what_stays_is_as_wide_as_that():
    def forward(s, x):
        wide = s.gate(x).sigmoid().expand(-1, -1, 8)
        return s.head(s.a(x).sigmoid()) + s.out(wide + x)

    check(Net(forward, a=nn.Linear(8, 10), gate=nn.Linear(8, 1), head=nn.Linear(10, 3),
              out=nn.Linear(8, 3)), steps())  # fmt: skip


@pytest.mark.parametrize("sizes", [
    lambda s, x: (*x.shape[:2], s.heads, s.width // s.heads),
    lambda s, x: (x.shape[0], -1, s.heads, s.width // s.heads),
], ids=["all", "rest"])  # fmt: skip
def test_a_width_that_is_divided_by_heads_is_set_with_them(sizes):
    class Heads(nn.Module):
        def __init__(self):
            super().__init__()
            self.width, self.heads = 16, 4
            self.a, self.head = nn.Linear(8, 16), nn.Linear(16, 3)

        def forward(self, x):
            y = self.a(x).cos().view(*sizes(self, x))
            return self.head((y * y.sum(-1, keepdim=True).sigmoid()).flatten(2))

    plan, small = check(Heads(), steps())
    assert not plan.code and (small.heads, small.width) == (2, 8)


@pytest.mark.parametrize("copied", [
    lambda y: torch.empty_like(y).copy_(y), lambda y: torch.zeros_like(y).copy_(y.cos()),
    lambda y: y.new_zeros(y.shape).copy_(y[:1]), lambda y: y.clone().copy_(y.mean(0)),
], ids=["empty", "zeros", "row", "over"])  # fmt: skip
def test_copies_have_the_channels_of_what_they_copy(copied):
    net = Net(
        lambda s, x: s.head(copied(s.a(x).sigmoid())), a=nn.Linear(5, 8), head=nn.Linear(8, 3)
    )
    plan, small = check(net, rows())
    assert small.a.out_features == 4


@pytest.mark.parametrize("kind", [nn.Conv1d, nn.ConvTranspose1d])
def test_a_gate_of_one_channel_is_not_the_number_in_its_filter(kind):
    gate = nn.Sequential(nn.Conv1d(16, 1, 1), nn.GELU(), kind(1, 1, 1), nn.Sigmoid())
    net = Net(lambda s, x: s.b(s.gate(h := s.a(x)) * h), a=nn.Conv1d(3, 16, 1), gate=gate,
              b=nn.Conv1d(16, 2, 1))  # fmt: skip
    check(net, drawn(2, 3, 5))


def test_states_in_a_list_are_those_in_a_tuple():
    def forward(s, x):
        h = torch.zeros(1, x.shape[0], 8, dtype=x.dtype)
        return s.b(s.lstm(x, [h, h])[0])

    plan, small = check(
        Net(forward, lstm=nn.LSTM(3, 8, batch_first=True), b=nn.Linear(8, 2)), drawn(2, 5, 3)
    )
    assert small.lstm.hidden_size == 4


@pytest.mark.filterwarnings("ignore:.*non-tuple sequence.*")
def test_a_list_of_slices_is_an_index_by_dimensions():
    net = Net(lambda s, x: s.b(s.a(x).sigmoid()[[slice(None), slice(1, 4)]]), a=nn.Linear(3, 8),
              b=nn.Linear(8, 2))  # fmt: skip
    plan, small = check(net, drawn(2, 5, 3))
    assert small.a.out_features == 4


@pytest.mark.parametrize("dims", [1, ([2], [0]), ([-1], [-2])])
def test_tensordot_reads_and_makes_as_a_matrix_does(dims):
    net = Net(lambda s, x: s.b(torch.tensordot(s.a(x).sigmoid(), s.w, dims=dims).sigmoid()),
              a=nn.Linear(3, 8), b=nn.Linear(12, 2))  # fmt: skip
    net.w = nn.Parameter(torch.randn(8, 12))
    plan, small = check(net, drawn(2, 5, 3))
    assert small.w.shape == (4, 6)


def test_looking_at_training_mode_leaves_flags_of_buffers_alone():
    class Marks(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b = nn.Linear(3, 8), nn.Linear(8, 2)
            self.register_buffer("zero", torch.zeros(()))

        def forward(self, x):
            if self.training:
                self.zero.requires_grad_()
            return self.b(self.a(x).view(-1, 8).sigmoid()) + self.zero

    net = Marks().eval()
    fxprune.prune(net, torch.ones(2, 3))
    assert not net.zero.requires_grad


@pytest.mark.parametrize("scaled", [
    lambda y, g: y / g, lambda y, g: y * g.log(), lambda y, g: y * g[:, 1:].rsqrt(),
    lambda y, g: y / (g[:, 1:] - g[:, :-1]),
])  # fmt: skip
def test_parameters_of_which_a_mask_would_make_infinity_stay(scaled):
    def forward(s, x):
        return s.o(scaled(s.a(x)[..., None], s.g).flatten(1))

    torch.manual_seed(0)
    g = nn.Parameter(torch.rand(8, 4).cumsum(1) + 0.5)
    width = scaled(torch.ones(2, 8, 1), g).flatten(1).shape[1]
    net = Net(forward, a=nn.Linear(3, 8), g=g, o=nn.Linear(width, 2))
    plan, _ = check(net, torch.randn(2, 3, dtype=torch.float64), shrinks=False)
    assert "makes no finite number of masked ones" in dict(plan.skipped)["a"]


def test_the_last_but_one_is_a_place_and_no_size_to_work_out():
    class Inner(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b = nn.Linear(5, 12), nn.Linear(10, 3)

        def forward(self, x):
            return self.b(self.a(x).sigmoid()[:, 1:-1])

    for scores in (torch.arange(12.0), 12 - torch.arange(12.0)):
        plan, small = check(Inner(), rows(), importance={"a": scores})
        assert small.a.out_features == 6


@pytest.mark.parametrize("layer", ["lstm", "attention"])
def test_a_layer_of_one_unit_is_planned_again(layer):
    def forward(s, x):
        h = s.a(x)
        y, _ = s.m(h) if layer == "lstm" else s.m(h, h, h)
        return s.c(h), s.b(y)

    body = {"lstm": nn.LSTM(8, 4, num_layers=2, batch_first=True, bidirectional=True),
            "attention": nn.MultiheadAttention(8, 2, batch_first=True)}[layer]  # fmt: skip
    net = Net(forward, a=nn.Linear(8, 8), m=body, c=nn.Linear(8, 3), b=nn.Linear(8, 3))
    settings = {"sparsity": 0.9, "attention": "head_dim"}
    _, small = check(net, steps(), **settings)
    check(small, steps(), shrinks=False, **settings)


@pytest.mark.parametrize("start", [torch.ones_like, torch.zeros_like])
def test_what_varies_with_the_batch_is_written_beside_what_does_not(start):
    def forward(s, x):
        y = s.a(x) * (x.numel() / len(x) / 10)
        z = start(y)
        z[:, :4], z[:, 4:] = y[:, 4:], y[:, :4].sigmoid()
        return s.b(z)

    check(Net(forward, a=nn.Linear(5, 8), b=nn.Linear(8, 3)), rows())


class SharedBias(nn.Module):
    """Two layers with one bias; or one of whose bias the code makes more."""

    def __init__(self, how):
        super().__init__()
        self.a, self.c, self.how = nn.Linear(5, 8), nn.Linear(5, 8), how
        self.m, self.n, self.out = nn.Linear(8, 6), nn.Linear(8, 6), nn.Linear(12, 3)
        if how == "tied":
            self.n.bias = self.m.bias

    def forward(self, x):
        g, h = self.c(x).sigmoid(), self.m(self.a(x).sigmoid())
        if self.how == "function":
            g = F.linear(g, self.n.weight, self.m.bias)
        else:
            g = self.n(g) if self.how == "tied" else self.n(g) * self.m.bias
        return self.out(torch.cat([h, g], 1))


@pytest.mark.parametrize("how", ["tied", "function", "read"])
def test_a_bias_that_others_read_takes_no_constant(how):
    plan, small = check(SharedBias(how), rows(), ignore=["m", "n"])
    assert ("m", "no bias can take the constant: dropped") in plan.notes
    assert small.a.out_features == 4


def test_a_weight_that_others_read_carries_no_constants_in_a_column():
    def forward(s, x):
        y = s.m(s.a(x)).sigmoid()
        return s.b(F.conv_transpose1d(y, s.m.weight, padding=1))

    net = Net(forward, a=nn.Conv1d(6, 6, 1), m=nn.Conv1d(6, 8, 3, padding=1),
              b=nn.Conv1d(6, 3, 1))  # fmt: skip
    check(net, steps(9))
    plan = fxprune.plan(net, steps(9), exact=True)
    assert ("m", "its weight is used twice: constants dropped") in plan.notes


@pytest.mark.parametrize("weight", [lambda s: s.w, lambda s: s.b(s.w)], ids=["own", "computed"])
def test_a_linear_function_with_a_single_row_makes_no_dimension(weight):
    def forward(s, x):
        return s.head(F.linear(s.a(x).sigmoid(), weight(s)))

    net = Net(forward, a=nn.Linear(8, 12), w=parameter(12), b=nn.Linear(12, 12),
              head=nn.Linear(6, 3))  # fmt: skip
    plan, small = check(net, steps())
    assert small.a.out_features == 6


@pytest.mark.parametrize("out_channels", [8, 16])
def test_a_convolution_of_groups_that_is_not_called_tells_its_widths(out_channels, tmp_path):
    def build():
        def forward(s, x):
            y = s.a(x).sigmoid().transpose(1, 2)
            taps = s.conv.weight.squeeze(1)  # as a kernel for depthwise convolutions takes them
            y = y.repeat_interleave(len(taps) // y.shape[1], 1)
            return s.head(F.conv1d(y, taps[:, None], groups=y.shape[1]).transpose(1, 2))

        conv = nn.Conv1d(8, out_channels, 3, groups=8, bias=False)
        return Net(forward, a=nn.Linear(8, 8), conv=conv, head=nn.Linear(out_channels, 3))

    _, small = check(build(), steps())
    conv = small.conv
    assert conv.weight.shape == (out_channels // 2, 1, 3)
    if out_channels == 8:
        assert (conv.in_channels, conv.out_channels, conv.groups) == (4, 4, 4)
    fxprune.save(small, tmp_path / "small.safetensors")
    again = fxprune.load(build().double().eval(), tmp_path / "small.safetensors")
    assert difference(run(small, steps()), run(again, steps())) == 0


@pytest.mark.parametrize("repeated", [
    lambda y, n: y.repeat(n, 1), lambda y, n: torch.tile(y, (n, 1)), lambda y, n: y.chunk(n)[0],
    lambda y, n: y[:, :, None].repeat(1, 1, n).flatten(1)[:, : y.shape[1]],
    lambda y, n: torch.cat(y.chunk(n, 1)[::-1], 1),
], ids=["repeat", "tile", "chunk", "repeat channels", "chunk channels"])  # fmt: skip
def test_how_often_may_be_told_by_a_tensor(repeated):
    net = Net(lambda s, x: s.head(repeated(s.a(x["x"]), x["n"])), a=nn.Linear(5, 8),
              head=nn.Linear(8, 3))  # fmt: skip
    plan, small = check(net, ({"x": rows(), "n": torch.tensor(2)},), shrinks=False)
    assert small.a.out_features in (4, 8)


@pytest.mark.parametrize("kind", [nn.GRU, nn.LSTM, nn.RNN])
def test_gates_of_a_single_unit_take_constants_each_its_own(kind):
    def forward(s, x):
        return s.b(s.m(s.a(x).sigmoid())[0])

    net = Net(forward, a=nn.Linear(8, 6), m=kind(6, 1, batch_first=True, bidirectional=True),
              b=nn.Linear(2, 3))  # fmt: skip
    plan, small = check(net, steps())
    assert small.m.input_size == 3 and not plan.notes


def test_an_outer_product_is_zero_where_a_factor_is():
    net = Net(lambda s, x: s.b(s.a(x).sigmoid() @ torch.outer(s.p, s.q)), a=nn.Linear(5, 8),
              p=parameter(8), q=parameter(6), b=nn.Linear(6, 3))  # fmt: skip
    plan, small = check(net, rows())
    assert small.a.out_features == 4 and small.b.in_features == 3


def test_a_convolution_of_one_channel_has_a_single_unit():
    """As in efficient channel attention, where it slides over the channels of the others."""

    def run(s, x):
        y = s.a(x)
        return s.b(y * s.one(y.mean((2, 3))[:, None]).mT[..., None])

    one = nn.Conv1d(1, 1, 3, padding=1)
    net = Net(run, a=nn.Conv2d(3, 8, 1), one=one, b=nn.Conv2d(8, 4, 1))
    skipped = dict(fxprune.plan(net, image().float()).skipped)
    assert skipped["one"] == "it has a single unit, and one has to stay"
    assert skipped["a"].startswith("a convolution slides over them")


def test_a_group_that_is_left_to_its_carriers_is_left_whole_biases_too():
    def forward(s, x):
        a, b = s.a(x).chunk(2, 1)
        a, b = torch.cat([s.m(b), a], 1).chunk(2, 1)
        y = torch.stack([F.leaky_relu(a, 0.1), s.n(b)], 2).flatten(1, 2)
        return s.b(F.linear(F.gelu(y).movedim(1, -1), s.made(s.w).view(6, 4)))

    torch.manual_seed(0)
    net = Net(forward, a=nn.Conv2d(3, 4, 1), m=nn.Conv2d(2, 2, 3, padding=1),
              n=nn.Conv2d(2, 2, 3, padding=1, bias=False), w=parameter(3),
              made=nn.Linear(3, 24), b=nn.Linear(6, 3))  # fmt: skip
    x = torch.randn(2, 3, 6, 6, dtype=torch.float64)
    check(net, x)
    plan = fxprune.plan(net, x, exact=True)
    assert "exact=True would keep each of its masked channels" in str(plan)


def test_a_tensor_that_is_taken_as_a_plain_number_is_no_obstacle():
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.gate, self.out = nn.Linear(6, 8), nn.Linear(8, 4), nn.Linear(8, 2)

        def forward(self, x):
            h = torch.relu(self.a(x))
            chosen = F.one_hot(self.gate(h).argmax(-1), torch.tensor(4))
            return self.out(h) * chosen.sum(-1, keepdim=True)

    small = fxprune.prune(Net(), torch.randn(2, 6))
    assert small.a.out_features == 4
