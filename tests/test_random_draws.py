"""Models that draw random numbers as they run: fewer channels draw others."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import fxprune
from fxprune.proving.random_draws import Settled

from .oracle import awake
from .test_trace import Net

X = torch.linspace(-2, 2, 24, dtype=torch.float64).sin().reshape(4, 6)


def always_dropped(s, x):
    return s.b(F.dropout(F.silu(s.a(x)), 0.3, training=True))


def dropped_by_hand(s, x):
    y = F.silu(s.a(x))
    return s.b(y * (torch.rand_like(y) > 0.3))


def autoencoder(s, x):
    y = F.silu(s.a(x))
    mean, deviation = s.mean(y), s.deviation(y).exp()
    return s.b(mean + deviation * torch.randn_like(deviation))


def dropped_by_shape(s, x):
    y = F.silu(s.a(x))
    return s.b(y * (torch.rand(y.shape, dtype=y.dtype) > 0.3))


def noise_of_stated_sizes(s, x):
    y = F.silu(s.a(x))
    noise = torch.randn(x.shape[0], 8, dtype=x.dtype)
    return s.b(s.mean(y) + s.deviation(y).exp() * noise)


def latent(draw):
    def forward(s, x):
        y = F.silu(s.a(x))
        return s.b(draw(s.mean(y), s.deviation(y).exp()))

    return forward


def noise_of(fill):
    return latent(lambda mean, deviation: mean + deviation * fill(torch.empty_like(mean)))


DISTRIBUTIONS = [
    latent(lambda *moments: torch.distributions.Normal(*moments).rsample()),
    latent(lambda *moments: torch.distributions.Normal(*moments).sample((3,)).mean(0)),
    latent(lambda *moments: torch.distributions.Laplace(*moments).rsample()),
    latent(torch.normal), latent(lambda mean, deviation: torch.normal(mean, 2.0) * deviation),
    latent(lambda mean, _: mean + torch.normal(0.0, 1.0, (len(mean), 8), dtype=mean.dtype)),
    latent(lambda mean, _: mean + torch.normal(0.0, 1.0, size=mean.shape, dtype=mean.dtype)),
    noise_of(lambda t: t.normal_()), noise_of(lambda t: t.uniform_(-1, 1)),
    noise_of(lambda t: t.exponential_()), noise_of(lambda t: t.bernoulli_(0.3)),
]  # fmt: skip
RANDOM = [
    always_dropped, dropped_by_hand, autoencoder, dropped_by_shape, noise_of_stated_sizes,
    *DISTRIBUTIONS,
]  # fmt: skip


def net(forward):
    torch.manual_seed(0)
    layers = {k: nn.Linear(8, 8) for k in ("mean", "deviation")}
    return awake(Net(forward, a=nn.Linear(6, 8), b=nn.Linear(8, 3), **layers))


@pytest.mark.parametrize("forward", RANDOM)
def test_a_model_that_draws_for_each_channel_is_compared_by_the_mean_of_what_it_draws(forward):
    model = net(forward)
    with pytest.warns(fxprune.PruningWarning, match="draws random numbers as it runs"):
        small = fxprune.prune(model, X)
    assert small.a.out_features == 4 and small.b.in_features == 4


@pytest.mark.parametrize("forward", RANDOM)
def test_a_difference_that_is_no_chance_is_still_found(forward):
    model = net(forward)
    plan = fxprune.plan(model, X)
    small = plan.apply(model)
    with torch.no_grad():
        small.a.weight[0, 0] += 0.1
    with pytest.raises(fxprune.ProofError, match="differs from the masked one"):
        fxprune.proving.proof.prove(plan, model, small, X)


def test_draws_are_their_mean_inside_and_all_else_is_as_it_was():
    x = torch.arange(1.0, 7).reshape(2, 3) / 7
    with torch.no_grad(), Settled(0.5) as mode:
        assert torch.equal(x.sin(), x.sin()) and not mode.drawn
        assert torch.allclose(F.dropout(x, 0.3, True), x) and mode.drawn
        assert torch.equal(torch.bernoulli(x), x)
        assert (torch.empty(5).bernoulli_() == 0.5).all()
        assert (torch.randn_like(x) == 0.5).all() and (torch.empty(3).uniform_() == 0.5).all()
        assert torch.equal(torch.normal(x, 2 * x), x + 0.5 * 2 * x)
        assert (torch.empty(3).normal_(1.0, 4.0) == 3.0).all()
        assert sorted(torch.randperm(4).tolist()) == [0, 1, 2, 3]


@pytest.mark.parametrize("draw", [
    lambda y, g: y + torch.randn(8, generator=g, dtype=y.dtype),
    lambda y, g: y + torch.normal(0.0, 1.0, (8,), generator=g, dtype=y.dtype),
    lambda y, g: y + torch.empty_like(y).normal_(generator=g),
    lambda y, g: y + torch.empty(8, dtype=y.dtype).uniform_(generator=g),
])  # fmt: skip
def test_draws_of_a_generator_that_the_model_makes_are_no_noise(draw):
    model = net(lambda s, x: s.b(draw(F.silu(s.a(x)), torch.Generator().manual_seed(0))))
    assert "a" in dict(fxprune.plan(model, X).skipped)


def test_draws_of_no_generator_are_noise():
    def forward(s, x):
        return s.b(F.silu(s.a(x)) + torch.randn(x.shape[0], 8, generator=None, dtype=x.dtype))

    with pytest.warns(fxprune.PruningWarning, match="draws random numbers"):
        assert fxprune.prune(net(forward), X).a.out_features == 4


def test_compact_compares_such_a_model_in_the_same_way():
    model = net(always_dropped)
    with torch.no_grad():
        model.a.weight[:3] = 0
    with pytest.warns(fxprune.PruningWarning, match="draws random numbers as it runs"):
        assert fxprune.compact(model, X).a.out_features == 5


def noise_from_zero_to_one(s, x):
    y = F.silu(s.a(x))
    noise = torch.rand_like(y)
    noise = noise - noise.min()
    return s.b(y * (noise / noise.max()))


def test_draws_that_cannot_be_one_number_are_named_where_nothing_can_be_compared():
    with pytest.raises(fxprune.ProofError, match=r"draws random numbers.*verify=False"):
        fxprune.prune(net(noise_from_zero_to_one), X)
    small = fxprune.prune(net(noise_from_zero_to_one), X, verify=False)
    assert small.a.out_features == 4


@pytest.mark.parametrize(
    "draw",
    [lambda h: F.alpha_dropout(h, 0.3, True), lambda h: F.rrelu(h, training=True)],
)
def test_draws_that_change_what_removed_channels_say_are_named(draw):
    model = net(lambda s, x: s.b(draw(s.a(x))))
    with pytest.raises(fxprune.ProofError, match=r"differs from the masked one.*draws random"):
        fxprune.prune(model, X)
