"""Attributes that no code of the run reads, and that tell whoever uses the model its widths."""

import functools
import types

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import fxprune

from .oracle import awake, check


class Backbone(nn.Module):
    def __init__(self, inner: int = 8):
        super().__init__()
        self.num_features, self.embed_dim, self.patch_size, self.in_channels = 8, inner, 8, 3
        self.a, self.b = nn.Conv2d(3, inner, 1), nn.Conv2d(inner, 8, 1)

    def forward(self, x):
        return torch.sigmoid(self.b(torch.sigmoid(self.a(x))))


class Classifier(nn.Module):
    def __init__(self, inner: int = 8):
        super().__init__()
        self.num_features = 8
        self.body, self.head = Backbone(inner), nn.Conv2d(8, 5, 1)

    def forward(self, x):
        return self.head(self.body(x))


X = torch.rand(2, 3, 8, 8, dtype=torch.float64)


def test_a_width_that_no_code_reads_is_told_truly_at_every_level():
    small = fxprune.prune(awake(Classifier(16)), X)
    assert (small.num_features, small.body.num_features, small.body.embed_dim) == (4, 4, 8)
    assert small.body.in_channels == 3


def test_attributes_are_told_in_the_same_order_every_time():
    model = awake(Classifier(16))
    orders = {tuple(fxprune.plan(model, X).attributes) for _ in range(8)}
    assert len(orders) == 1


def test_a_name_that_is_no_width_keeps_its_value():
    assert fxprune.prune(awake(Classifier()), X).body.patch_size == 8


def test_where_two_layers_of_that_width_come_to_differ_nothing_is_told():
    small = fxprune.prune(awake(Classifier()), X, sparsity={"*a": 0.25, "*b": 0.5})
    assert (small.body.a.out_channels, small.body.b.out_channels) == (6, 4)
    assert (small.body.num_features, small.num_features) == (8, 4)


class Stage(nn.Module):
    """Goes by whether its widths are one, as Hiera's blocks do."""

    def __init__(self, dim: int, dim_out: int) -> None:
        super().__init__()
        self.dim, self.wide = dim, dim_out
        self.a, self.proj = nn.Linear(dim, dim_out), nn.Linear(dim, dim_out)

    def forward(self, x):
        y = torch.sigmoid(self.a(x))
        return y + (self.proj(x) if self.dim != self.wide else x)


def test_a_width_that_the_code_asks_about_is_not_set_beside_another_that_is_not():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 8), Stage(8, 8), Stage(8, 12), nn.Linear(12, 3)).double()
    plan, small = check(model, torch.randn(2, 6, dtype=torch.float64))
    assert small[1].a.in_features == 4 and not {"1.dim", "2.dim"} & set(plan.attributes)


def decorated(forward):
    @functools.wraps(forward)
    def call(*args, **kwargs):
        return forward(*args, **kwargs)

    return call


class Halves(nn.Module):
    """Attention whose sizes are products and sums of attributes, in code that cannot be changed."""

    def __init__(self, config):
        super().__init__()
        self.config, self.shared, self.size = config, config.shared, 3
        self.qkv = nn.Linear(12, (config.heads + 2 * self.shared) * 3)
        self.out = nn.Linear(config.heads * 3, 12)

    @decorated
    def forward(self, x, seen):
        y, n, kv = self.qkv(x), self.config.heads * self.size, self.shared * self.size
        parts = (y[..., :n], y[..., n : n + kv], y[..., n + kv :])
        q, k, v = (t.view(*x.shape[:-1], -1, self.size).transpose(1, 2) for t in parts)
        seen.keys = k
        y = F.scaled_dot_product_attention(q, k, v, enable_gqa=True)
        return self.out(y.transpose(1, 2).reshape(*x.shape[:-1], -1))


@pytest.mark.parametrize("shared", [2, 4])
def test_attributes_that_a_size_is_a_product_of_are_set_where_no_code_can_be_written(shared):
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            config = types.SimpleNamespace(heads=4, shared=shared)
            self.layers = nn.ModuleList(Halves(config) for _ in range(2))
            self.head = nn.Linear(12, 3)

        def forward(self, x):
            seen = types.SimpleNamespace()
            for layer in self.layers:
                x = x + layer(x, seen)
            return self.head(x)

    torch.manual_seed(0)
    plan, small = check(Net(), torch.randn(2, 5, 12, dtype=torch.float64))
    assert not plan.code
    assert [layer.shared for layer in small.layers] == [shared // 2] * 2
    assert (small.layers[0].config.heads, small.layers[1].size) == (2, 3)
