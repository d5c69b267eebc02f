"""Functions that cache what they make of sizes."""

from __future__ import annotations

import functools
import subprocess
import sys

import pytest
import torch
from torch import nn

import fxprune
from fxprune.tracing import caches

from .oracle import check
from .test_trace import Net

X = torch.linspace(-2, 2, 60, dtype=torch.float64).sin().reshape(2, 5, 6)


@functools.cache
def parts(width, count):
    return width // count


class Halves:
    @staticmethod
    @functools.cache
    def of(shape):
        return shape[-1] // 2

    @functools.lru_cache(maxsize=8)  # noqa: B019
    def twice(self, width):
        return 2 * width


HALVES = Halves()


def heads(forward):
    torch.manual_seed(0)
    return Net(lambda s, x: s.b(forward(s, torch.sigmoid(s.a(x)))), a=nn.Linear(6, 8),
               b=nn.Linear(8, 3)).double()  # fmt: skip


@pytest.mark.parametrize("forward", [
    lambda s, y: y.unflatten(-1, (2, parts(y.shape[-1], 2))).flip(-2).flatten(-2),
    lambda s, y: torch.cat([y[..., : Halves.of(y.shape)].exp(), y[..., Halves.of(y.shape) :]], -1),
    lambda s, y: y.unflatten(-1, (2, HALVES.twice(y.shape[-1]) // 4)).flip(-2).flatten(-2),
])  # fmt: skip
def test_a_cached_function_is_followed_whatever_was_asked_before(forward):
    model = heads(forward)
    model(X)  # plain numbers are in the cache
    for _ in range(2):
        plan, small = check(model, X)
        assert small.a.out_features == 4 and not plan.code


def test_caches_are_what_they_were_when_the_model_has_run():
    before = parts, Halves.__dict__["of"], Halves.__dict__["twice"]
    parts.cache_clear()
    fxprune.trace(heads(lambda s, y: y[..., : parts(y.shape[-1], 1)]), X)
    assert (parts, Halves.__dict__["of"], Halves.__dict__["twice"]) == before
    assert parts.cache_info().currsize == 0  # nothing traced is kept
    with pytest.raises(fxprune.InputError), caches.passed_by():
        assert parts is not before[0] and parts(6, 3) == 2 and parts.cache_info().currsize == 1
        fxprune.trace(heads(lambda s, y: 1 / 0), X)
    assert parts is before[0]


def attention(s, x):
    from einops import rearrange, reduce

    q, k, v = (rearrange(t, "b n (h d) -> b h n d", h=2) for t in s.qkv(x).chunk(3, -1))
    y = rearrange((q @ k.transpose(-1, -2)).softmax(-1) @ v, "b h n d -> b n (h d)")
    return s.b(reduce(s.o(y), "b n c -> b c", "mean"))


def test_einops_is_followed_to_other_batch_sizes():
    pytest.importorskip("einops")
    torch.manual_seed(0)
    model = Net(attention, qkv=nn.Linear(6, 24), o=nn.Linear(8, 8), b=nn.Linear(8, 3)).double()
    model(X)
    plan, small = check(model, X)
    assert small.qkv.out_features == 12 and small(X[:1].repeat(5, 2, 1)).shape == (5, 3)


def test_einops_layers_are_followed():
    layers = pytest.importorskip("einops.layers.torch")
    torch.manual_seed(0)
    model = nn.Sequential(
        layers.Rearrange("b c (h x) (w y) -> b (h w) (x y c)", x=3, y=3), nn.Linear(27, 8),
        nn.SiLU(), layers.Rearrange("b (h w) c -> b c h w", h=3), nn.Conv2d(8, 4, 1),
        layers.Reduce("b c h w -> b c", "mean"),
    ).double()  # fmt: skip
    _, small = check(model, torch.randn(2, 3, 9, 9, dtype=torch.float64))
    assert small[1].out_features == 4 and small(torch.randn(5, 3, 9, 9).double()).shape == (5, 4)


def test_looking_for_caches_asks_nothing_of_what_lies_in_modules():
    code = (
        "import sys, types\n"
        "from fxprune.tracing import caches\n"
        "class Shy:\n"
        "    def __getattr__(self, name): raise RuntimeError(name)\n"
        "    __class__ = property(lambda self: 1 / 0)\n"
        "m = types.ModuleType('shy'); m.value = Shy(); m.kind = type('K', (), {'v': Shy()})\n"
        "m.kind.__module__ = 'shy'\n"
        "sys.modules['shy'] = m; sys.modules['none'] = None; sys.modules['odd'] = Shy()\n"
        "with caches.passed_by(): pass\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


@pytest.mark.parametrize("kept", ["attribute", "dictionary"])
def test_numbers_that_a_model_keeps_of_another_recording_are_plain(kept):
    """In caches that cannot be seen from a module."""
    known = {}

    def half(width):
        return known.setdefault(width, width // 2)

    ask = functools.lru_cache(lambda width: width // 2) if kept == "attribute" else half
    model = heads(lambda s, y: torch.cat([y[..., : ask(y.shape[-1])].exp(), y[..., 4:]], -1))
    for _ in range(2):
        check(model, X, shrinks=False)


def test_a_buffer_that_a_method_registers_anew_for_longer_inputs_stays():
    class Grows(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b, self.longest = nn.Linear(3, 8), nn.Linear(8, 2), 0
            self.register_buffer("rates", torch.rand(8))
            self.grow(4)

        def grow(self, length):
            self.longest = length
            table = torch.outer(torch.arange(length), self.rates).cos()
            self.register_buffer("table", table, persistent=False)

        def forward(self, x):
            if x.shape[1] > self.longest:
                self.grow(x.shape[1])
            return self.b(self.a(x) * self.table[: x.shape[1]])

    model = Grows().eval()
    plan = fxprune.plan(model, torch.randn(2, 4, 3))
    assert dict(plan.skipped)["a"] == "the model writes to it as it runs"
