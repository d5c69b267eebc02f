"""What the engine does not work out again is what it would have found."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import fxprune
from fxprune.modules.inspecting import modules_of, named_tensors
from fxprune.replaying.replay import Replay
from fxprune.rules.channels import Channels

X = torch.randn(2, 3, 8, 8, generator=torch.Generator().manual_seed(0))


class Residual(nn.Module):
    """Adds, a cat, a grouped and a depthwise convolution, a tied layer and a flatten."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.norm = nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8)
        self.deep, self.wide = nn.Conv2d(8, 8, 3, padding=1, groups=8), nn.Conv2d(8, 8, 1)
        self.joined = nn.Conv2d(16, 12, 1, groups=2)
        self.head = nn.Linear(12 * 4, 5)

    def forward(self, x):
        x = F.relu(self.norm(self.stem(x)))
        y = F.silu(self.wide(F.silu(self.deep(x))))
        x = x + self.wide(y)
        x = self.joined(torch.cat([x, y], 1))
        return self.head(F.adaptive_avg_pool2d(x, 2).flatten(1))


class Shuffled(nn.Module):
    """Channels change places between groups: producers, or their readers, change their order."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Conv2d(3, 8, 1), nn.Conv2d(8, 8, 3, groups=2)
        self.norm, self.c = nn.BatchNorm2d(8), nn.Conv2d(8, 4, 1)

    def forward(self, x):
        n, _, h, w = (y := self.b(F.relu(self.a(x)))).shape
        y = y.view(n, 2, -1, h, w).transpose(1, 2).reshape(n, -1, h, w)
        return self.c(F.gelu(self.norm(y)))


def ready(kind):
    torch.manual_seed(0)
    net = kind().double().eval()
    for p in net.parameters():
        nn.init.normal_(p)
    return net


def from_the_start(plan) -> Replay:
    known = plan._replay
    replay = Replay(
        plan._trace, plan._relations, ~plan._removed | plan._carriers, known.attributes,
        known._orders, known._straighten,
    )  # fmt: skip
    replay.run()
    return replay


def assert_alike(short: Replay, full: Replay) -> None:
    shown = [[(f.words, f.line) for f in replay.faults()] for replay in (short, full)]
    assert shown[0] == shown[1] and full.module_sizes == short.module_sizes
    assert all(torch.equal(full.order[first], short.order[first]) for first in full.order)
    for node, value in full.values.items():
        other = short.values[node]
        assert type(value) is type(other)
        if isinstance(value, Channels):
            assert value.shape == other.shape
            pairs = zip(value.axes, other.axes, strict=True)
            assert all(a.dims == b.dims and torch.equal(a.units, b.units) for a, b in pairs)
        elif isinstance(value, (int, float)):
            assert value == other


@pytest.mark.parametrize("kind", [Residual, Shuffled])
def test_calls_that_are_passed_over_at_the_new_widths_would_come_out_the_same(kind):
    plan = fxprune.plan(ready(kind), X.double())
    assert len(plan._relations.plain) > 3
    plan._relations.plain = {}
    short = plan._replay
    assert short.faults() == []
    assert_alike(short, from_the_start(plan))


def test_a_rule_of_a_users_own_is_never_passed_over():
    """It may pick channels in a way that no word of the algebra tells of."""

    def double(x):
        return x * 2

    @fxprune.pattern(double)
    def rule(a, call):
        """y = 2 x."""
        return call.channels()

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Conv2d(3, 8, 1), nn.Conv2d(8, 4, 1)

        def forward(self, x):
            return self.b(double(self.a(x)))

    plan = fxprune.plan(ready(Net), X.double(), patterns=[rule])
    targets = {node.target for node in plan._trace.graph.nodes}
    passed = {node.target for node in plan._relations.plain}
    assert double in targets and double not in passed and passed >= {"a", "b"}


def test_modules_and_tensors_are_listed_as_pytorch_lists_them():
    net = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))
    net.append(net[0]).register_module("absent", None)
    net[0].bias = net[1].bias
    modules = modules_of(net)
    assert list(modules.items()) == list(net.named_modules(remove_duplicate=False))
    listed = [*net.named_parameters(), *net.named_buffers()]
    assert [(n, id(t)) for n, t in named_tensors(modules)] == [(n, id(t)) for n, t in listed]


class Attention(nn.Module):
    """The number of heads is read in three places, and the width of a head in two."""

    def __init__(self) -> None:
        super().__init__()
        self.heads, self.size = 4, 2
        self.qkv, self.out = nn.Linear(8, 24), nn.Linear(8, 8)

    def forward(self, x):
        x = x.flatten(2).transpose(1, 2)[..., :3].repeat(1, 1, 3)[..., :8]
        n, t, _ = x.shape
        q, k, v = self.qkv(x).view(n, t, 3, self.heads, self.size).permute(2, 0, 3, 1, 4)
        y = (q @ k.transpose(-1, -2)).div(self.size**0.5).softmax(-1) @ v
        return self.out(y.transpose(1, 2).reshape(n, t, self.heads * self.size))


@pytest.mark.parametrize("attention", ["heads", "head_dim"])
def test_a_replay_that_goes_on_with_other_attributes_is_one_from_the_start(attention):
    plan = fxprune.plan(ready(Attention), X.double(), attention=attention)
    assert plan._replay.attributes
    assert_alike(plan._replay, from_the_start(plan))
