"""Tensors by the types of old, which PyTorch does not tell of, and tensors that hold sizes."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import fxprune

from .oracle import check, difference, run
from .test_constructs import Net


def drawn(*shape):
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize("filled", [
    lambda h: torch.FloatTensor(h.size()).fill_(0.3),
    lambda h: torch.FloatTensor(h.shape).fill_(0.3), lambda h: torch.BoolTensor(h.size()).fill_(1),
    lambda h: torch.Tensor(h.shape[1:]).fill_(0.3), lambda h: h.new(h.size()).fill_(0.3),
    lambda h: h.new(h.shape[1:]).fill_(0.3),
], ids=["float", "shape", "flags", "Tensor", "new", "new of a part"])  # fmt: skip
def test_old_types_of_tensors_take_sizes_for_sizes(filled):
    net = Net(lambda s, x: s.head((s.a(x) * filled(s.a(x))).sigmoid()),
              a=nn.Conv1d(3, 8, 3, padding=1), head=nn.Conv1d(8, 2, 1))  # fmt: skip
    seen = []
    net.a.register_forward_hook(lambda m, args, y: seen.append(filled(y).shape))
    check(net, drawn(2, 3, 8), shrinks=False)
    assert seen[0][-2:] == (8, 8)


@torch.jit.script
def gated(h, width):
    n = width[0]
    return torch.tanh(h[:, :n]) * torch.sigmoid(h[:, n:])


def gated_by_number(h, width):
    n = width[0].item()
    return torch.tanh(h[:, :n]) * torch.sigmoid(h[:, n:])


def in_rows(h, sizes):
    return torch.tanh(h[:, : sizes[0][1]]) * torch.sigmoid(h[:, sizes[1, 0] :])


@pytest.mark.parametrize("gate", [
    lambda s, h: gated(h, torch.IntTensor([s.width])),
    lambda s, h: gated(h, torch.LongTensor((s.width,))),
    lambda s, h: gated(h, torch.tensor([s.width])),
    lambda s, h: gated_by_number(h, torch.as_tensor([s.width])),
    lambda s, h: in_rows(h, torch.IntTensor([[1, s.width], [h.shape[1] // 2, 0]])),
], ids=["IntTensor", "tuple", "tensor", "item", "rows"])  # fmt: skip
def test_halves_by_a_width_in_a_tensor_are_cut_with_it(gate):
    """As in WaveGlow and VITS."""
    net = Net(lambda s, x: s.head(gate(s, s.a(x)) + s.b(x)), a=nn.Conv1d(3, 16, 3, padding=1),
              b=nn.Conv1d(3, 8, 1), head=nn.Conv1d(8, 2, 1))  # fmt: skip
    net.width = 8
    x = drawn(2, 3, 9)
    plan, small = check(net, x)
    assert small.b.out_channels == 4
    assert small.a.out_channels == 8
    graph = fxprune.prune(net.double(), x, as_graph=True)
    assert difference(run(graph, x[:1]), run(small, x[:1])) < 1e-9


def test_old_types_are_themselves_while_a_model_runs():
    seen = []

    def forward(s, x):
        h = s.a(x)
        seen.append(isinstance(h, torch.FloatTensor) or not isinstance(h, torch.DoubleTensor))
        whole = h.type(torch.LongTensor).type_as(h) + torch.ByteTensor([1, 2, 3, 4])
        return s.head(whole.sigmoid() * h.type(torch.DoubleTensor))

    net = Net(forward, a=nn.Linear(3, 4), head=nn.Linear(4, 2))
    kinds = torch.FloatTensor, torch.LongTensor
    check(net, drawn(2, 3), shrinks=False)
    assert not any(seen)
    assert kinds == (torch.FloatTensor, torch.LongTensor)
