"""Writes in place: what is written, also by way of a view, is what later readers of it get."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

import fxprune

from .oracle import awake, check, difference, run
from .test_trace import Net

pytestmark = pytest.mark.filterwarnings("ignore::fxprune.PruningWarning")

X = torch.randn(4, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(1))


def set_one(y):
    y[:, 2] = 3.0


def set_last(y):
    y[:, -1] = 3.0


def set_range(y):
    y[:, 2:4] = 3.0


def set_listed(y):
    y[:, [0, 3]] = 3.0


def set_by_value(y):
    y[y > 0.6] = 3.0


def set_row(y):
    y[0] = 3.0


def swap_halves(y):
    y[:, :4], y[:, 4:] = y[:, 4:].clone(), y[:, :4].clone()


WRITES = {
    "set one": set_one, "set last": set_last, "set range": set_range, "set listed": set_listed,
    "set by value": set_by_value, "set row": set_row, "swap halves": swap_halves,
    "add to half": lambda y: y[:, :4].add_(1), "scale one": lambda y: y.select(1, 1).mul_(5),
    "zero one": lambda y: y[:, 2].zero_(), "all, as a view": lambda y: y.view(-1).mul_(2),
    "all, into out": lambda y: torch.add(y, 1, out=y), "all": lambda y: y.sigmoid_(),
    "through two views": lambda y: y[:, 2:][:, :3].add_(1),
}  # fmt: skip


def network(write):
    def forward(s, x):
        y = torch.sigmoid(s.a(x))
        write(y)
        return s.b(y)

    torch.manual_seed(0)
    return awake(Net(forward, a=nn.Linear(6, 8), b=nn.Linear(8, 4)))


def importance(low):
    """The units that should go, by position among those that can."""
    return lambda group: [float(i not in low) for i in range(group[0].count)]


@pytest.mark.parametrize("name", WRITES)
def test_the_graph_makes_the_same_writes_on_other_inputs(name):
    model = network(WRITES[name])
    graph = fxprune.trace(model, X)
    assert difference(run(graph, X * 2 - 1), run(model, X * 2 - 1)) == 0


@pytest.mark.parametrize("name", WRITES)
@pytest.mark.parametrize("low", [(0, 1, 6, 7), (2, 5, 6, 7), (4, 5, 6, 7), (0, 1, 2, 3)], ids=str)
def test_whichever_channels_go_pruned_equals_masked_or_a_reason_says_why_none_go(name, low):
    model = network(WRITES[name])
    plan = fxprune.plan(model, X, importance=importance(low))
    small = plan.apply(model)
    assert difference(run(plan.mask(model), X), run(small, X)) < 1e-9
    assert small.a.out_features < 8 or "a" in dict(plan.skipped)


@pytest.mark.parametrize("name", WRITES)
def test_all_oracles_agree_about_writes(name):
    check(network(WRITES[name]), X, shrinks=False)


def test_writes_to_every_channel_leave_half_of_them():
    for name in ("all", "all, as a view", "all, into out", "set by value", "set row"):
        assert fxprune.prune(network(WRITES[name]), X).a.out_features == 4, name


def write_elsewhere(s, y, x):
    y[:, 2:6] = torch.tanh(s.c(x))


def write_some_rows(s, y, x):
    y[:2, 2:6] = 0.25


def write_a_number(s, y, x):
    y[..., ::2] = 3.0


def copy_another(s, y, x):
    y.copy_(torch.tanh(s.d(x)))


@pytest.mark.parametrize("write", [write_elsewhere, write_some_rows, write_a_number, copy_another],
    ids=lambda f: f.__name__)  # fmt: skip
@pytest.mark.parametrize("low", [(2, 3, 4, 5), (0, 2, 4, 6), (0, 1, 6, 7)], ids=str)
def test_what_removed_channels_say_goes_on_behind_a_write(write, low):
    def forward(s, x):
        y = torch.sigmoid(s.a(x))
        write(s, y, x)
        return s.b(y)

    torch.manual_seed(0)
    layers = {"c": nn.Linear(6, 4), "d": nn.Linear(6, 8)}
    model = awake(Net(forward, a=nn.Linear(6, 8), b=nn.Linear(8, 4), **layers))
    plan = fxprune.plan(model, X, importance=importance(low))
    masked, small = plan.mask(model), plan.apply(model)
    assert small.a.out_features < 8
    for x in (X, 2 * X - 1):
        assert difference(run(masked, x), run(small, x)) < 1e-9
    told = write is not write_some_rows or low != (2, 3, 4, 5)
    assert torch.equal(small.b.bias, model.b.bias) != told
    check(model, X, shrinks=False)


def test_of_two_channel_dimensions_one_is_written_by_number_and_the_other_as_a_whole():
    def forward(s, x):
        y = s.w(s.a(x))
        z = torch.zeros_like(y)
        z[:, 1], z[:, 3:5] = y[:, 1], 0.5
        return s.b(s.o(z + y))

    torch.manual_seed(0)
    net = Net(forward, a=nn.Conv1d(3, 6, 1), w=nn.Linear(5, 4), o=nn.Linear(4, 2),
              b=nn.Conv1d(6, 2, 1))  # fmt: skip
    _, small = check(net, torch.randn(2, 3, 5, dtype=torch.float64))
    assert small.w.out_features == 2 and small.a.out_channels < 6


@pytest.mark.parametrize("write", [
    lambda y, x: y[:, : x.shape[1]].copy_(x), lambda y, x: y[:, ::3].copy_(x),
    lambda y, x: y[:, 0].copy_(x[:, 0]),
])  # fmt: skip
def test_as_many_rows_as_the_input_has_are_no_width(write):
    """Positions that the example did not read have to stay for inputs that do."""

    def forward(s, x):
        x = s.l(x)
        b, t, d = x.shape
        y = x.new_zeros(b, 3 * t, d)
        write(y, x)
        return s.o(y + s.positions[:, : y.shape[1]])

    torch.manual_seed(0)
    positions = nn.Parameter(torch.randn(1, 40, 8))
    net = Net(forward, positions=positions, l=nn.Linear(3, 8), o=nn.Linear(8, 2))
    x = torch.randn(2, 4, 3, dtype=torch.float64)
    plan, small = check(net, x)
    assert small.positions.shape == (1, 40, 4)
    longer = torch.randn(2, 9, 3, dtype=torch.float64)
    assert difference(run(plan.mask(net), longer), run(small, longer)) < 1e-9


@pytest.mark.parametrize("made", [torch.zeros_like, lambda h: torch.full(h.shape, 0.5).double()])
def test_a_filled_tensor_says_its_number_to_heads(made):
    def forward(s, x):
        h = torch.sigmoid(s.a(x)).unflatten(-1, (2, 4))
        return s.b((h + made(h)).flatten(2))

    torch.manual_seed(0)
    x = torch.randn(3, 5, 3, dtype=torch.float64)
    check(Net(forward, a=nn.Linear(3, 8), b=nn.Linear(8, 2)), x)


@pytest.mark.parametrize("fill", [
    lambda t: t[..., :2].add_(1.5), lambda t: t.select(-1, 1).fill_(1.5),
    lambda t: t.index_fill_(-1, torch.tensor([0, 3]), 1.5), lambda t: t.__setitem__((..., 2), 1.5),
    lambda t: t.__setitem__((..., slice(2)), 1.5),
])  # fmt: skip
def test_a_tensor_that_is_filled_in_part_is_not_alike_any_more(fill):
    def forward(s, x):
        h = s.a(x).unflatten(-1, (2, 4))
        t = torch.zeros(*h.shape[:2], 2, 4, dtype=x.dtype)
        fill(t)
        return s.b((h + t).flatten(2))

    for seed in range(4):
        torch.manual_seed(seed)
        net = awake(Net(forward, a=nn.Linear(3, 8), b=nn.Linear(8, 4)))
        x = torch.randn(2, 5, 3, dtype=torch.float64)
        for bias in ("drop", "propagate"):  # units are not alike: to permute them is no oracle
            plan = fxprune.plan(net, x, attention="head_dim", bias=bias)
            assert difference(run(plan.mask(net), x), run(plan.apply(net), x)) < 1e-9


@pytest.mark.parametrize("attention", ["heads", "head_dim"])
def test_a_table_for_every_head_of_which_every_other_slice_is_written(attention):
    def forward(s, x):
        t = torch.zeros_like(torch.sigmoid(s.a(x)).unflatten(-1, (2, 4)))
        t[..., 1::2] = s.table[..., 1::2]
        return s.b(t.flatten(2))

    for seed in range(4):
        torch.manual_seed(seed)
        net = awake(Net(forward, a=nn.Linear(3, 8), b=nn.Linear(8, 2)))
        net.register_buffer("table", torch.rand(3, 5, 2, 4, dtype=torch.float64))
        x = torch.randn(3, 5, 3, dtype=torch.float64)
        plan = fxprune.plan(net, x, attention=attention)
        assert difference(run(plan.mask(net), x), run(plan.apply(net), x)) < 1e-9


def places(n):
    """Items of an index along a dimension of ``n`` slices."""
    bounds = st.one_of(st.none(), st.integers(-n + 1, n - 1))
    slices = st.builds(slice, bounds, bounds, st.sampled_from([None, 2, 3]))
    return st.one_of(st.just(slice(None)), slices, st.integers(-n, n - 1))


@settings(max_examples=settings.default.max_examples // 5)
@given(st.data())
def test_whatever_is_written_wherever(data):
    cut = data.draw(st.booleans(), "heads")
    shape = (3, 5, 2, 4) if cut else (3, 5, 8)
    index = tuple(data.draw(places(n), "place") for n in shape)
    value = data.draw(st.sampled_from(["number", "layer", "fixed", "itself"]), "value")
    base = data.draw(st.sampled_from(["zeros", "zeros_like", "clone", "layer"]), "base")
    added = data.draw(st.booleans(), "added")

    def forward(s, x):
        h, g = torch.sigmoid(s.a(x)).view(shape), torch.tanh(s.b(x)).view(shape)
        t = {"zeros": lambda: torch.zeros(shape, dtype=x.dtype), "clone": h.clone,
             "zeros_like": lambda: torch.zeros_like(h), "layer": lambda: g * 2}[base]()  # fmt: skip
        t[index] = {"number": 0.5, "layer": g[index], "fixed": s.fixed[index],
                    "itself": 2 * t[index]}[value]  # fmt: skip
        return s.o((h + t if added else t).flatten(2))

    torch.manual_seed(0)
    x = torch.randn(3, 5, 3, dtype=torch.float64)
    net = awake(Net(forward, a=nn.Linear(3, 8), b=nn.Linear(3, 8), o=nn.Linear(8, 2)))
    net.register_buffer("fixed", torch.rand(shape, dtype=torch.float64))
    how = {"attention": data.draw(st.sampled_from(["heads", "head_dim"]))} if cut else {}
    for bias in ("propagate", "drop"):
        plan = fxprune.plan(net, x, bias=bias, **how)
        assert difference(run(plan.mask(net), x), run(plan.apply(net), x)) < 1e-9


HEADS = {
    "whole": lambda y, b: written(torch.zeros(b, 4, 8), (slice(None),), y),
    "all dimensions": lambda y, b: written(y.new_empty(b, 4, 8), (Ellipsis,), y),
    "a step": lambda y, b: written(torch.zeros(3, b, 4, 8), (1,), y).sum(0),
    "a longer cache": lambda y, b: written(torch.zeros(b + 2, 4, 8), (slice(b),), y)[:b],
}


def written(z, index, y):
    z = z.to(y.dtype)
    z[index] = y
    return z


@pytest.mark.parametrize("attention", ["heads", "head_dim"])
@pytest.mark.parametrize("how", HEADS)
def test_heads_that_are_written_into_a_filled_tensor_are_its_channels(how, attention):
    def forward(s, x):
        y = torch.sigmoid(s.a(x)).view(-1, 4, 8)
        return s.b(HEADS[how](y, y.shape[0]).flatten(1))

    net = Net(forward, a=nn.Linear(5, 32), b=nn.Linear(32, 3))
    x = torch.randn(4, 5, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    plan, small = check(net, x, attention=attention)
    assert small.a.out_features == small.b.in_features == 16


@pytest.mark.parametrize("gated", [False, True])
def test_a_state_of_every_head_that_begins_with_zeros_loses_heads(gated):
    """A linear recurrence, as gated linear attention runs it step by step."""

    def forward(s, x):
        b = x.shape[0]
        k, v, g = (layer(x).view(b, 4, 8) for layer in (s.k, s.v, s.g))
        state = torch.zeros(b, 4, 8, 8, dtype=x.dtype)
        for _ in range(2):
            state = torch.sigmoid(g).unsqueeze(-1) * state if gated else state
            state = state + k.unsqueeze(-1) * v.unsqueeze(-2)
        return s.o(torch.einsum("bhk,bhkv->bhv", g, state).flatten(1))

    net = Net(
        forward, k=nn.Linear(5, 32), v=nn.Linear(5, 32), g=nn.Linear(5, 32), o=nn.Linear(32, 3)
    )
    x = torch.randn(4, 5, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    plan, small = check(net, x)
    assert small.k.out_features == small.v.out_features == small.o.in_features == 16
