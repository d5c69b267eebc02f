"""Functions that run under ``torch.vmap`` and ``torch.func.grad``: followed through the ops
beneath them, or in the way of what they read."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import fxprune

from .oracle import check, masked_equals_pruned


class Net(nn.Module):
    """Two layers with a function between them."""

    width = 8

    def __init__(self, between):
        super().__init__()
        self.a, self.b, self.c = nn.Linear(6, 8), nn.Linear(8, 8), nn.Linear(8, 3)
        self.between, self.size = between, 8

    def forward(self, x):
        return self.c(F.silu(self.b(self.between(self, F.silu(self.a(x))))))


def checked(model, x, other):
    """The pruned model, checked on another batch, too."""
    plan, small = check(model, x)
    masked_equals_pruned(plan, model, small, other)
    return small


def rows(n=4):
    return torch.randn(n, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(n))


FOLLOWED = {
    "an op": lambda net, h: torch.vmap(torch.sigmoid)(h),
    "several ops": lambda net, h: torch.vmap(lambda r: r.cos() * 2 + 1)(h),
    "one vmap in another": lambda net, h: torch.vmap(torch.vmap(torch.cos))(h),
    "along channels": lambda net, h: torch.vmap(torch.cos, in_dims=1, out_dims=1)(h),
    "two inputs": lambda net, h: torch.vmap(torch.mul)(h, h.cos()),
    "a tensor that it is not given": lambda net, h: (
        lambda other: torch.vmap(lambda r: r * other)(h))(h.mean(0).exp()),
    "its derivative": lambda net, h: torch.vmap(
        torch.vmap(torch.func.grad(lambda v: v.sin())))(h),
}  # fmt: skip


@pytest.mark.parametrize("between", FOLLOWED.values(), ids=FOLLOWED.keys())
def test_a_function_is_followed_through_the_ops_beneath_it(between):
    small = checked(Net(between), rows(), rows(7))
    assert small.a.out_features == 4
    assert small.b.out_features == 4


class Slope(nn.Module):
    """A layer reads how a network's output changes with what goes in."""

    def __init__(self, how, inner):
        super().__init__()
        self.inner = nn.Linear(6, 8) if inner else nn.Identity()
        self.net = nn.Sequential(nn.Linear(8 if inner else 6, 8), nn.Tanh(), nn.Linear(8, 1))
        self.a, self.b, self.how = nn.Linear(8 if inner else 6, 8), nn.Linear(8, 3), how

    def forward(self, x):
        return self.b(self.a(self.how(self.net, self.inner(x).cos())).tanh())


def pulled(net, x):
    y, pull = torch.func.vjp(net, x)
    return pull(torch.ones_like(y))[0]


def pulled_with_more(net, x):
    y, pull, more = torch.func.vjp(lambda z: (net(z), z * 2), x, has_aux=True)
    return pull(y, retain_graph=True)[0] * more


def jacobian(net, x):
    return torch.func.jacrev(lambda z: net(z).sum(0))(x)[0]


@pytest.mark.parametrize("inner", [False, True])
@pytest.mark.parametrize("how", [pulled, pulled_with_more, jacobian])
def test_what_vjp_and_jacrev_run_is_followed_and_what_they_derive_by_stays(how, inner):
    small = checked(Slope(how, inner), rows(), rows(7))
    assert small.net[0].out_features == small.a.out_features == 4
    assert not inner or small.inner.out_features == 8


def divided(net, h):
    return torch.vmap(lambda r: r / r.shape[-1])(h)


def added_up(net, h):
    return torch.vmap(lambda r: r + r.sum() / len(r))(h)


def by_attribute(net, h):
    return torch.vmap(lambda r: r.cos() / net.size)(h)


def shaped(net, h):
    return torch.vmap(lambda r: r.view(2, 4).flip(0).reshape(8))(h)


def filled(net, h):
    return torch.vmap(lambda r: r + torch.full((8,), 0.5, dtype=r.dtype))(h)


@pytest.mark.parametrize("between", [divided, added_up, by_attribute, shaped, filled])
def test_sizes_in_its_code_are_never_guessed(between):
    """Of what is asked of sizes inside, the ops know nothing: what is read there stays, or what
    goes stays right."""
    checked(Net(between), rows(), rows(7))


def test_layers_that_run_inside_stay_with_a_reason():
    net = Net(lambda net, h: torch.vmap(lambda r: net.b(r).cos())(h))
    check(net, rows(), shrinks=False)
    plan = fxprune.plan(net, rows())
    reason = next(g.frozen for g in plan.groups if g.name == "b")
    assert "vmap" in reason
    assert "test_transforms.py" in reason


class MaskedAttention(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner, self.q, self.kv = nn.Linear(6, 16), nn.Linear(16, 16), nn.Linear(16, 32)
        self.out, self.head = nn.Linear(16, 16), nn.Linear(16, 3)

    def forward(self, x, keep):
        b, n, _ = x.shape
        h = F.silu(self.inner(x))

        def seen(i, q, k):
            return (q >= k) & keep[i, k]

        mask = torch.vmap(seen, in_dims=(None, None, 0))
        mask = torch.vmap(mask, in_dims=(None, 0, None))
        mask = torch.vmap(mask, in_dims=(0, None, None))
        steps = torch.arange(n)
        k, v = self.kv(h).chunk(2, -1)
        q, k, v = (t.view(b, n, 4, 4).transpose(1, 2) for t in (self.q(h), k, v))
        y = F.scaled_dot_product_attention(q, k, v, mask(torch.arange(b), steps, steps)[:, None])
        return self.head(F.silu(self.out(y.transpose(1, 2).reshape(b, n, 16))))


def sequences(b=2, n=5):
    x = torch.randn(b, n, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(n))
    keep = torch.ones(b, n, dtype=torch.bool)
    keep[0, 2] = False
    return x, keep


def test_attention_under_a_mask_that_vmap_makes():
    small = checked(MaskedAttention(), sequences(), sequences(3, 7))
    assert small.q.out_features == 8


def test_no_graph_holds_what_a_function_has_read_in_one_run():
    with pytest.raises(fxprune.ModelError, match=r"under torch.vmap reads .*test_transforms.py"):
        fxprune.trace(MaskedAttention().double(), sequences())
    net = Net(lambda net, h: torch.vmap(torch.cos)(h)).double()
    graph = fxprune.trace(net, rows())
    torch.testing.assert_close(graph(rows(7)), net(rows(7)))


def test_what_cannot_be_followed_is_refused_with_its_line():
    def between(net, h):
        return torch.func.functionalize(torch.sin)(h)

    with pytest.raises(fxprune.ModelError, match=r"torch.func.*test_transforms"):
        fxprune.plan(Net(between), rows().float())
