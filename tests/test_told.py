"""Integers that tensors tell calls: buffers, and what the input makes."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import fxprune

from .oracle import awake, check, masked_equals_pruned

pytestmark = pytest.mark.filterwarnings("ignore::fxprune.PruningWarning")

CALLS = {
    "transpose": lambda h, one: h.transpose(one, 2).exp().transpose(1, 2),
    "permute": lambda h, one: h.permute(0, one + 1, 1).permute(0, 2, 1),
    "pad": lambda h, one: F.pad(h, (0, 0, one, 0), value=0.5),
    "cat": lambda h, one: torch.cat([h, h.cos()], one),
    "stack": lambda h, one: torch.stack([h, h.cos()], one).sum(1),
    "softmax": lambda h, one: h.softmax(one),
    "sum": lambda h, one: h + h.sum(one, keepdim=True),
    "max": lambda h, one: h - h.max(one, keepdim=True)[0],
    "flip": lambda h, one: h.flip(one),
    "roll": lambda h, one: h.roll(1, one),
    "unbind": lambda h, one: torch.stack(h.unbind(one), 1),
    "movedim": lambda h, one: h.movedim(one, 2).movedim(2, 1),
    "normalize": lambda h, one: F.normalize(h, dim=one),
    "glu": lambda h, one: F.glu(torch.cat([h, h.cos()], -1), one + 1),
    "positions": lambda h, one: h[:, one : one + 3],
    "half of the channels": lambda h, one: torch.cat(
        [h[..., one * 4 :], h[..., : one * 4].cos()], -1),
    "their width": lambda h, one: h.view(2, -1, one * 8).cos(),
    "parts": lambda h, one: torch.cat([t.cos() for t in h.split(one * 4, -1)], -1),
    "a fixed width": lambda h, one: h * torch.full((one * 8,), 0.5, dtype=h.dtype),
}  # fmt: skip


class Net(nn.Module):
    def __init__(self, call, tell):
        super().__init__()
        self.a, self.b, self.c = nn.Linear(6, 8), nn.Linear(8, 8), nn.Linear(8, 3)
        self.call, self.tell = call, tell
        self.register_buffer("one", torch.tensor(1))

    def forward(self, x):
        h = F.silu(self.a(x))
        return self.c(F.silu(self.b(self.call(h, self.tell(self, x)))))


X = torch.linspace(-2, 3, 60, dtype=torch.float64).cos().reshape(2, 5, 6)


@pytest.mark.parametrize("call", CALLS.values(), ids=CALLS.keys())
def test_a_number_that_the_model_holds_is_that_number(call):
    _, small = check(Net(call, lambda net, x: net.one), X)
    assert small.a.out_features == 4
    assert small.b.out_features == 4


@pytest.mark.parametrize("call", CALLS.values(), ids=CALLS.keys())
def test_a_number_that_the_input_makes_is_no_literal_of_new_code(call):
    _, small = check(Net(call, lambda net, x: (x[0, 0, 0] > -9).long()), X)
    assert small.b.out_features == 4


@pytest.mark.parametrize(
    "call",
    [
        lambda h, n: torch.cat([h[..., n * 2 :], h[..., : n * 2].cos()], -1),
        lambda h, n: torch.cat([t.cos() * i for i, t in enumerate(h.split(n * 2, -1))], -1),
        lambda h, n: h.narrow(-1, n, 4).repeat(1, 1, 2),
        lambda h, n: h + h.select(-1, n)[..., None],
        lambda h, n: h.roll(n, -1),
        lambda h, n: h[:, n:],
        lambda h, n: h.flip(n),
    ],
)
def test_other_inputs_tell_other_numbers(call):
    model = Net(call, lambda net, x: 1 + (x[0, 0, 0] > 0).long())
    plan, small = check(model, X)
    masked_equals_pruned(plan, model, small, -X)


def test_so_does_a_counter_of_the_models_own():
    class Counts(Net):
        def forward(self, x):
            y = super().forward(x)
            self.one += 1
            return y

    def call(h, n):
        return torch.cat([h[..., n * 2 :], h[..., : n * 2].cos()], -1)

    model = awake(Counts(call, lambda net, x: net.one % 3))
    plan = fxprune.plan(model, X)
    assert "positions that are data" in dict(plan.skipped)["a"]
    assert int(model.one) == 1
