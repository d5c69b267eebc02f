"""Compositions that random programs have found to break earlier versions, each made small; under
the oracles."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import fxprune

from .oracle import awake, check, difference, run
from .test_constructs import Net, image, sequence

pytestmark = pytest.mark.filterwarnings("ignore::fxprune.PruningWarning")


def rows(n=4, width=5):
    return torch.randn(
        n, width, dtype=torch.float64, generator=torch.Generator().manual_seed(width)
    )


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
    with torch.no_grad():
        assert small.eval()(steps()).shape == (2, 6, 3)


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
    assert "makes NaN of masked ones" in dict(plan.skipped)["w"]


def test_channels_along_the_width_of_an_image_are_no_places_to_slide_over():
    def forward(s, x):
        y = F.unfold(s.mix(s.stem(x)), 2, stride=2)
        return s.head(F.fold(y, (8, 4), 2, stride=2))

    net = Net(forward, stem=nn.Conv2d(3, 4, 1), mix=nn.Linear(8, 4), head=nn.Conv2d(4, 2, 1))
    plan, small = check(net, image())
    assert small.stem.out_channels == 2 and small.mix.out_features == 4
