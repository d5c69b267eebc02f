"""Types and devices that a tensor tells are asked of it again; those that are written stay."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import fxprune

from .oracle import awake, difference, run
from .test_trace import Net

X = torch.randn(2, 4, 3, generator=torch.Generator().manual_seed(1))


def written_anew(count):
    """A net whose forward needs new code, in float32."""

    def forward(s, x):
        y = s.a(x).sigmoid().view(-1, x.shape[1], 8)
        return s.b(y).mul(2.0) + count(x).unsqueeze(-1)

    net = awake(Net(forward, a=nn.Linear(3, 8), b=nn.Linear(8, 2))).float()
    return net, fxprune.prune(net, X)


def of_input(x):
    return torch.arange(x.shape[1], device=x.device, dtype=x.dtype)


def by_name(x):
    kind, place = x.dtype, x.device
    return torch.arange(x.shape[1], device=place).to(kind)


def moved(x):
    return torch.arange(x.shape[1]).to(device=x.device, dtype=x.dtype)


def typed(x):
    return torch.arange(x.shape[1]).type(x.type())


def there_and_back(x):
    before = x.dtype
    return x.to(torch.float32).cumsum(1).to(before).mean(-1)


def of_another(x):
    return x.new_zeros(x.shape[1], dtype=x.cos().dtype)


@pytest.mark.parametrize("count", [of_input, by_name, moved, typed, there_and_back, of_another])
@pytest.mark.parametrize("kind", [torch.float64, torch.bfloat16])
def test_new_code_goes_by_the_type_of_what_it_gets(count, kind):
    net, small = written_anew(count)
    net, small, x = net.to(kind), small.to(kind), X.to(kind)
    assert small.a.out_features == 4 and net(x).dtype == kind
    assert small(x).dtype == kind


@pytest.mark.parametrize("count", [of_input, by_name, moved])
def test_new_code_goes_where_its_input_is(count):
    net, small = written_anew(count)
    assert small.to("meta")(X.to("meta")).is_meta


def single(x):
    seen = x.dtype  # that of the run, by chance
    return torch.arange(x.shape[1], dtype=torch.float32) + torch.zeros(1, dtype=seen)[0].item()


def by_a_name_of_its_own(x):
    kind = torch.float32
    return torch.arange(x.shape[1], dtype=kind) if x.dtype is not kind else x.mean(-1).to(kind)


@pytest.mark.parametrize("count", [single, by_a_name_of_its_own])
def test_a_type_that_is_written_stays(count):
    net = awake(Net(lambda s, x: s.a(x).mul(0).mean(-1) + count(x), a=nn.Linear(3, 8))).float()
    graph = fxprune.trace(net, X)
    assert graph.double()(X.double()).dtype == torch.float64  # of float64 and float32
    assert "float32" in graph.code


@pytest.mark.parametrize("count", [of_input, moved, there_and_back])
def test_graphs_go_by_the_type_of_what_they_get(count):
    net, _ = written_anew(count)
    graph = fxprune.prune(net, X, as_graph=True)
    assert difference(run(fxprune.prune(net, X), X), run(graph, X)) < 1e-6
    assert graph.bfloat16()(X.bfloat16()).dtype == torch.bfloat16
