"""Types and devices that a tensor tells are asked of it again; those that are written stay."""

from __future__ import annotations

import sys

import pytest
import torch
from torch import nn

import fxprune

from .oracle import awake, difference, run
from .test_trace import Net

pytestmark = pytest.mark.usefixtures("from_the_graph")

told = pytest.mark.skipif(
    sys.version_info < (3, 11), reason="the code of Python 3.10 does not know its columns"
)
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


def made(n, device, dtype=None):
    return torch.arange(n, device=device).to(dtype)


def in_a_helper(x):
    return made(x.shape[1], x.device, dtype=x.dtype)


def in_a_chain(x):
    return (x
            .float()
            .mean(-1)
            .to(x.dtype))  # fmt: skip


def of_the_one_that_was_asked(x):
    keep, wide = x.dtype, x.float()
    least = torch.finfo(wide.dtype).min
    return wide.clamp(min=least).mean(-1).to(keep)


def in_pairs(x):
    n, kind = x.shape[1], x.dtype
    return torch.arange(n).to(kind)


@told
@pytest.mark.parametrize("count", [
    of_input, by_name, moved, typed, there_and_back, of_another, in_a_helper, in_a_chain,
    of_the_one_that_was_asked, in_pairs,
])  # fmt: skip
@pytest.mark.parametrize("kind", [torch.float64, torch.bfloat16])
def test_new_code_goes_by_the_type_of_what_it_gets(count, kind):
    net, small = written_anew(count)
    net, small, x = net.to(kind), small.to(kind), X.to(kind)
    assert small.a.out_features == 4 and net(x).dtype == kind
    assert small(x).dtype == kind


@told
@pytest.mark.parametrize("count", [of_input, by_name, moved])
def test_new_code_goes_where_its_input_is(count):
    net, small = written_anew(count)
    assert small.to("meta")(X.to("meta")).is_meta


UP = torch.float32


def cast(x, kind=torch.float32):
    return x.to(kind)


def written(x):
    return x.to(torch.float32)


def of_a_module(x):
    return x.to(UP)


def by_default(x):
    return cast(x)


def handed_to_a_helper(x):
    return cast(x, torch.float32)


def called_dtype(x):
    dtype = torch.float32
    return x.to(dtype)


def annotated(x):
    kind: torch.dtype = torch.float32
    return x.to(kind)


def paired(x):
    _, kind = 1, torch.float32
    return x.to(kind)


def in_a_closure(x):
    kind = torch.float32
    return (lambda t: t.to(kind))(x)


def promoted(x):
    return x.to(torch.promote_types(x.dtype, torch.float32))


def usual(x):
    return x.to(torch.get_default_dtype())


def looked_up(x):
    return x.to({"wide": torch.float32}["wide"])


@pytest.mark.parametrize("up", [
    written, of_a_module, by_default, handed_to_a_helper, called_dtype, annotated, paired,
    in_a_closure, promoted, usual, looked_up,
])  # fmt: skip
def test_a_type_that_is_written_stays(up):
    """What is computed in single precision for its range must not be in half."""

    def forward(s, x):
        keep = x.dtype
        y = up(s.a(x).view(-1, x.shape[1], 8))
        return s.b((y * torch.rsqrt((y * y).sum(1, keepdim=True))).to(keep))

    net = awake(Net(forward, a=nn.Linear(3, 8), b=nn.Linear(8, 2))).float()
    with torch.no_grad():
        net.a.weight.mul_(300)
    small = fxprune.prune(net, X, bias="drop")
    for each in (small, fxprune.prune(net, X, bias="drop", as_graph=True)):
        found = each.to(torch.float16)(X.half())
        assert found.dtype == torch.float16 and found.isfinite().all()
        assert (found - each.b.bias).abs().max() > 0.01


@told
@pytest.mark.parametrize("count", [of_input, moved, there_and_back])
def test_graphs_go_by_the_type_of_what_they_get(count):
    net, _ = written_anew(count)
    graph = fxprune.prune(net, X, as_graph=True)
    assert difference(run(fxprune.prune(net, X), X), run(graph, X)) < 1e-6
    assert graph.bfloat16()(X.bfloat16()).dtype == torch.bfloat16
