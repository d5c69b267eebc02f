"""Recurrent layers and cells: hidden units go with their gates, columns and states, exactly."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence

import fxprune
from fxprune.patterns.unrolling import reads
from fxprune.rules.registry import for_function

from .oracle import check

HIDDEN = 6


def steps(n=5, c=4, batch=2):
    generator = torch.Generator().manual_seed(1)
    return torch.randn(batch, n, c, dtype=torch.float64, generator=generator)


class Layer(nn.Module):
    """A layer between two linear ones, in every way to start it and to go on."""

    def __init__(self, kind, layers, both, projected, batch_first, bias, start, goes_on):
        super().__init__()
        extra = {"proj_size": 4} if projected and issubclass(kind, nn.LSTM) else {}
        self.inp = nn.Linear(4, 6)
        self.rnn = kind(6, HIDDEN, layers, bias=bias, batch_first=batch_first, bidirectional=both,
                        **extra)  # fmt: skip
        self.out_size = extra.get("proj_size", HIDDEN)
        self.rows, self.hidden = layers * (2 if both else 1), HIDDEN
        wide = self.out_size * (2 if both else 1)
        self.norm, self.out = nn.LayerNorm(wide), nn.Linear(wide, 3)
        self.h0 = nn.Parameter(torch.randn(self.rows, 1, self.out_size))
        self.c0 = nn.Parameter(torch.randn(self.rows, 1, HIDDEN))
        self.start, self.goes_on = start, goes_on

    def state(self, x):
        b = x.shape[0]
        if self.start == "none":
            return None
        if self.start == "parameter":
            h, c = (t.expand(-1, b, -1).contiguous() for t in (self.h0, self.c0))
        else:
            sizes = [(self.rows, b, n) for n in (self.out_size, self.hidden)]
            make = torch.zeros if self.start == "zeros" else x.new_zeros
            h, c = (make(size, dtype=x.dtype) for size in sizes)
        return (h, c) if isinstance(self.rnn, nn.LSTM) else h

    def forward(self, x):
        y = torch.sigmoid(self.inp(x))
        if self.goes_on == "packed":
            y = pack_padded_sequence(y, torch.tensor([5, 3]), batch_first=True)
        elif not self.rnn.batch_first:
            y = y.transpose(0, 1)
        out, state = self.rnn(y, self.state(x))
        h = state[0] if isinstance(state, tuple) else state
        if self.goes_on == "packed":
            return self.out(pad_packed_sequence(out, batch_first=True)[0])
        if self.goes_on == "state":
            return self.out(torch.cat([h[-2], h[-1]], 1) if self.rnn.bidirectional else h[-1])
        out = out if self.rnn.batch_first else out.transpose(0, 1)
        if self.goes_on == "norm":
            return self.out(self.norm(out))
        return self.out(out[:, -1] if self.goes_on == "last" else out)


@settings(max_examples=max(60, settings.default.max_examples // 8))
@given(
    kind=st.sampled_from([nn.LSTM, nn.GRU, nn.RNN]), layers=st.integers(1, 3),
    both=st.booleans(), projected=st.booleans(), batch_first=st.booleans(), bias=st.booleans(),
    start=st.sampled_from(["none", "zeros", "new", "parameter"]),
    goes_on=st.sampled_from(["linear", "norm", "last", "state", "packed"]),
)  # fmt: skip
def test_43_and_44_layers_of_every_kind(**settings):
    check(Layer(**settings), steps())


@pytest.mark.parametrize("goes_on", ["linear", "norm", "last", "state", "packed"])
@pytest.mark.parametrize("kind", [nn.LSTM, nn.GRU])
def test_43_half_of_the_units_go_with_what_feeds_and_what_follows(kind, goes_on):
    _, small = check(Layer(kind, 2, True, False, True, True, "zeros", goes_on), steps())
    assert small.rnn.hidden_size == small.out_size == 3
    assert small.rnn.input_size == 3 and small.out.in_features == 6


class Stepwise(nn.Module):
    """A cell in a Python loop."""

    def __init__(self, kind, start):
        super().__init__()
        self.inp, self.cell, self.out = nn.Linear(4, 6), kind(6, 8), nn.Linear(8, 3)
        self.first, self.start = nn.Parameter(torch.randn(8)), start

    def forward(self, x):
        h = {
            "none": lambda: None,
            "zeros": lambda: x.new_zeros(x.shape[0], self.cell.hidden_size),
            "literal": lambda: torch.zeros(len(x), 8, dtype=x.dtype),
            "parameter": lambda: self.first.expand(x.shape[0], -1),
        }[self.start]()
        lstm = isinstance(self.cell, nn.LSTMCell)
        state, found = (h, h) if lstm and h is not None else h, []
        for step in torch.sigmoid(self.inp(x)).unbind(1):
            state = self.cell(step, state)
            found.append(state[0] if lstm else state)
        return self.out(torch.stack(found, 1))


@pytest.mark.parametrize("start", ["none", "zeros", "literal", "parameter"])
@pytest.mark.parametrize("kind", [nn.LSTMCell, nn.GRUCell, nn.RNNCell], ids=lambda k: k.__name__)
def test_43_cells_in_a_loop(kind, start):
    plan, small = check(Stepwise(kind, start), steps())
    assert (small.cell.input_size, small.cell.hidden_size) == (3, 4)
    assert not plan.notes


def of_its_own(kind):
    """A class with a forward of its own, which goes on to that of ``kind``."""

    class Own(kind):
        def forward(self, input, hx=None):
            return super().forward(input, hx)

    return Own


@pytest.mark.parametrize("kind", [nn.LSTM, nn.GRU, nn.RNN])
@pytest.mark.parametrize("start, goes_on", [
    ("none", "linear"), ("parameter", "state"), ("zeros", "packed"),
])  # fmt: skip
@pytest.mark.parametrize(
    "layers, both, bias", [(1, False, True), (2, True, True), (2, True, False)]
)
def test_a_layer_with_a_forward_of_its_own_is_pruned_as_one_without(
    kind, start, goes_on, layers, both, bias
):
    shapes = []
    for each in (kind, of_its_own(kind)):
        torch.manual_seed(0)
        model = Layer(each, layers, both, kind is nn.LSTM, True, bias, start, goes_on)
        plan, small = check(model, steps())
        shapes.append([p.shape for p in small.parameters()])
        assert isinstance(small.rnn, each) and small.rnn.hidden_size == HIDDEN // 2
    assert shapes[0] == shapes[1]
    said = any(why.startswith("no bias can take") for _, why in plan.notes)
    assert said == (not bias)


@pytest.mark.parametrize("kind", [nn.LSTMCell, nn.GRUCell, nn.RNNCell])
@pytest.mark.parametrize("start", ["none", "zeros"])
def test_a_cell_with_a_forward_of_its_own_is_pruned_as_one_without(kind, start):
    plan, small = check(Stepwise(of_its_own(kind), start), steps())
    assert small.cell.hidden_size == 4 and not plan.code


def test_a_layer_whose_weights_are_computed_stays_whole():
    class Dropped(nn.LSTM):
        def forward(self, x):
            zeros = x.new_zeros(1, x.shape[0], self.hidden_size)
            weights = [w * 0.9 for w in self._flat_weights]
            return torch.lstm(x, (zeros, zeros), weights, True, 1, 0.0, False, False, True)

    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.rnn, self.out = Dropped(4, 6, batch_first=True), nn.Linear(6, 3)

        def forward(self, x):
            return self.out(self.rnn(x)[0])

    plan, small = check(Net(), steps(), shrinks=False)
    assert "its weights are computed" in " ".join(why for _, why in plan.skipped)


def test_a_state_of_fixed_width_is_named_as_what_a_deep_layer_stays_for():
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.rnn, self.out = nn.LSTM(4, 8, 2, batch_first=True), nn.Linear(8, 3)

        def forward(self, x, start):
            h = start.expand(self.rnn.num_layers, -1, -1).contiguous()
            return self.out(self.rnn(x, (h, torch.zeros_like(h)))[0])

    start = torch.randn(2, 8, dtype=torch.float64)
    plan, small = check(Net(), (steps(), start), shrinks=False)
    assert dict(plan.skipped)["rnn"] == "it meets a tensor of fixed width in rnn"


def test_43_attention_over_the_states():
    class Attends(nn.Module):
        def __init__(self):
            super().__init__()
            self.rnn, self.score = nn.LSTM(4, 8, batch_first=True), nn.Linear(8, 1)
            self.out = nn.Linear(8, 3)

        def forward(self, x):
            y, _ = self.rnn(x)
            w = torch.softmax(self.score(torch.tanh(y)), 1)
            return self.out((w.transpose(1, 2) @ y).squeeze(1))

    _, small = check(Attends(), steps())
    assert small.rnn.hidden_size == 4


def test_a_call_that_lays_weights_in_one_block_of_memory_is_none_of_the_graph():
    """As recurrent layers do on a GPU; here another call stands for it."""
    assert for_function(torch._cudnn_rnn_flatten_weight).kind == "unseen"

    class Calls(nn.Module):
        def __init__(self):
            super().__init__()
            self.a = nn.Linear(4, 3)

        def forward(self, x):
            torch.histc(self.a.weight)
            return self.a(x)

    model, x = Calls().eval(), torch.randn(2, 4)
    assert "histc" in fxprune.trace(model, x).code
    with fxprune.patterns(fxprune.pattern("histc", rule=lambda a, call: None, kind="unseen")):
        assert "histc" not in fxprune.trace(model, x).code


def by_cells(rnn, x, state, level, back):
    """What a level of a layer says after each step of one sequence, cell by cell, and what it reads
    then: (inputs, states)."""
    ways = range(2 if rnn.bidirectional else 1)
    for i in range(level + 1):
        said, inputs = [], x
        for way in ways:
            cell = getattr(nn, f"{rnn.mode.partition('_')[0]}Cell")(x.shape[1], rnn.hidden_size)
            cell = cell.double()
            for name, p in cell.named_parameters():
                tail = "_reverse" if way else ""
                p.data = getattr(rnn, f"{name}_l{i}{tail}").data
            row = i * len(ways) + way
            h = tuple(s[row] for s in state) if isinstance(state, tuple) else state[row]
            found = []
            for step in x.flip(0) if way else x:
                h = cell(step[None], h)
                found.append(h[0] if isinstance(h, tuple) else h)
            said.append(torch.cat(found[::-1] if way else found))
        x = torch.cat(said, 1)
    own = said[back]
    return inputs, own[1:] if back else own[:-1]  # the first step reads the initial state


@pytest.mark.parametrize("kind", [nn.LSTM, nn.GRU, nn.RNN])
@pytest.mark.parametrize("way", ["packed", "steps first", "batch first"])
def test_what_inner_weights_read_is_what_cells_read_one_by_one(kind, way):
    torch.manual_seed(0)
    rnn = kind(4, 3, 2, bidirectional=True, batch_first=way != "steps first").double().eval()
    x, lengths = steps(5, 4, 3), [3, 5, 2] if way == "packed" else [5, 5, 5]
    state = [torch.randn(4, 3, 3, dtype=torch.float64) for _ in range(2)]
    state = tuple(state) if kind is nn.LSTM else state[0]
    given = x if way != "steps first" else x.transpose(0, 1)
    if way == "packed":
        given = pack_padded_sequence(x, torch.tensor(lengths), True, enforce_sorted=False)
    for level in (0, 1):
        for back in (False, True):
            found = [
                reads(
                    rnn, f"weight_{part}_l{level}{'_reverse' if back else ''}", (given, state), {}
                )
                for part in ("ih", "hh")
            ]
            rows = [
                by_cells(rnn, x[i, :n], tuple(s[:, i : i + 1] for s in state)
                         if kind is nn.LSTM else state[:, i : i + 1], level, back)
                for i, n in enumerate(lengths)
            ]  # fmt: skip
            for one, wanted in zip(found, zip(*rows, strict=True), strict=True):
                one, wanted = one.reshape(-1, one.shape[-1]), torch.cat(wanted)
                assert one.shape == wanted.shape  # the same rows, in whatever order
                assert torch.allclose(one.t() @ one, wanted.t() @ wanted)
                assert torch.allclose(one.sum(0), wanted.sum(0))
