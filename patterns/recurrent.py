"""Recurrent layers: the gates' rows of one hidden unit go together, and what reads it back.

A masked unit has zero weights and zero biases, and emits zero from a zero state.
"""

from __future__ import annotations

from torch import nn

from fxprune.patterns.joining import end_to_end, stack_parts
from fxprune.patterns.unrolling import reads
from fxprune.rules.channels import Channels, remap
from fxprune.rules.registry import register

GATES = {nn.LSTM: 4, nn.GRU: 3, nn.RNN: 1, nn.LSTMCell: 4, nn.GRUCell: 3, nn.RNNCell: 1}


def sizes(m, new):
    found = {
        "input_size": new.views["weight_ih_l0"][2],
        "hidden_size": new.views["weight_ih_l0"][1],
    }
    if m.proj_size:
        found["proj_size"] = new.views["weight_hr_l0"][0]
        if found["proj_size"] >= found["hidden_size"]:
            new.refuse("weight_ih_l0", "PyTorch takes projections to fewer channels only")
    return found


def refresh(m):
    """The layer keeps a list of its own of the weights, in one block of memory on a GPU."""
    m._flat_weights = [getattr(m, name) for name in m._flat_weights_names]
    m.flatten_parameters()


@register("cudnn_rnn_flatten_weight", kind="unseen")
def in_one_block(a, call):
    """Weights as they are, in other memory: a graph does not have it."""


@register(nn.LSTM, nn.GRU, nn.RNN, kind="lstm", attributes=sizes, bias=True, refresh=refresh,
        reads=reads)  # fmt: skip
def recurrent(a, call):
    """h[t] = f(W x[t] + U h[t - 1] + b): all gates of a hidden unit, and what reads it back."""
    m, x = call.module, call.arg(0, "input")
    packed = not isinstance(x, Channels)
    if packed:
        x, *lengths = x
    last = len(x.shape) - 1
    x = a.freeze_dims(x, range(last), "a recurrent layer runs along them", call)
    tails = ["", "_reverse"] if m.bidirectional else [""]
    cells, outs, inputs = [], [], x
    for layer in range(m.num_layers):
        ends = []
        for tail in tails:
            cell, out = one_layer(a, call, inputs, f"_l{layer}{tail}")
            cells.append(cell)
            ends.append(out)
        outs += ends
        inputs = along_last(a, call, ends, x.shape[:-1])
    # One hidden_size serves every layer and direction: they keep equally many units each.
    states = [stack_parts(a, call, outs, 0)]
    if m.mode == "LSTM":
        states.append(stack_parts(a, call, cells, 0))
    state_spec = call.spec[1][0] if m.mode == "LSTM" else call.spec[1]
    batch = state_spec.shape[1:-1]
    states = [remap(s, {0: 0, 1: 1 + len(batch)}, (s.shape[0], *batch, s.shape[1])) for s in states]
    given = call.arg(1, "hx")
    for state, s in zip(
        given if isinstance(given, (tuple, list)) else [given], states, strict=False
    ):
        if state is not None:
            state = a.channels(state)
            a.meet(call, [s, state], None, s.shape)
            a.needs_zero(call, state, [len(s.shape) - 1])
    result = (inputs, *lengths) if packed else inputs
    return result, tuple(states) if m.mode == "LSTM" else states[0]


@register(nn.LSTMCell, nn.GRUCell, nn.RNNCell, kind="lstm", bias=True,
        attributes=lambda m, new: {"input_size": new.views["weight_ih"][2],
                                   "hidden_size": new.views["weight_ih"][1]})  # fmt: skip
def cell(a, call):
    """One step: the state that goes in and the one that comes out have the cell's units."""
    x = call.channels()
    last = len(x.shape) - 1
    x = a.freeze_dims(x, range(last), "a recurrent layer runs along them", call)
    units, _ = one_layer(a, call, x, "")
    wide = remap(units, {0: last}, (*x.shape[:last], units.shape[0]))
    lstm = isinstance(call.module, nn.LSTMCell)
    given = call.arg(1, "hx")
    for state in given if isinstance(given, (tuple, list)) else [given]:
        if state is not None:
            state = a.channels(state)
            a.meet(call, [wide, state], None, wide.shape)
            a.needs_zero(call, state, [last])
    return (wide, wide) if lstm else wide


def one_layer(a, call, x, tail):
    """(cell units, output units) of one layer in one direction, as vectors."""
    m = call.module
    gates = next(n for kind, n in GATES.items() if isinstance(m, kind))
    ih = call.view_of(f"weight_ih{tail}", (gates, -1, x.shape[-1]))
    cell = vector(call.tensor(f"weight_ih{tail}", {"out": (1,)}, ih), 1)
    reads = call.tensor(f"weight_ih{tail}", {"in": (2,)}, ih)
    a.consume(call, x, reads, [(len(x.shape) - 1, 2)])
    back = call.view_of(f"weight_hh{tail}", (gates, ih[1], -1))
    parts = [vector(call.tensor(f"weight_hh{tail}", {"out": (1,)}, back), 1)]
    for name in ("bias_ih", "bias_hh"):
        b = call.tensor(f"{name}{tail}", {"out": (1,)}, (gates, ih[1]))
        if b is not None:
            a.adds(b)
            parts.append(vector(b, 1))
    cell = a.emit(a.meet(call, [cell, *parts], None), (0,), None)
    out = cell
    if getattr(m, "proj_size", 0):
        projection = call.tensor(f"weight_hr{tail}", {"in": (1,)})
        a.consume(call, cell, projection, [(0, 1)])
        out = vector(call.tensor(f"weight_hr{tail}", {"out": (0,)}), 0)
    a.consume(call, out, call.tensor(f"weight_hh{tail}", {"in": (2,)}, back), [(0, 2)])
    return cell, out


def vector(x, dim):
    return remap(x, {dim: 0}, (x.shape[dim],))


def along_last(a, call, ends, lead):
    """The directions' units, one after the other, on the last dimension."""
    rank = len(lead)
    width = sum(e.shape[0] for e in ends)
    axis = end_to_end(a, call, ends, 0) if any(e.axes for e in ends) else None
    flat = Channels((width,), () if axis is None else (axis,))
    return remap(flat, {0: rank}, (*lead, width))


@register("pack_padded_sequence")
def pack(a, call):
    """The steps of all sequences, one after the other: (steps, channels)."""
    x = call.channels()
    last = len(x.shape) - 1
    x = a.freeze_dims(x, range(last), "a recurrent layer runs along them", call)
    data, lengths = a.rigid_result(call)
    return remap(x, {last: 1}, (*data.shape[:1], x.shape[last])), lengths


@register("pad_packed_sequence")
def pad(a, call):
    """The sequences again, filled up to the longest."""
    x = call.channels()
    padded, lengths = a.rigid_result(call)
    rank = len(padded.shape)
    y = remap(x, {1: rank - 1}, (*padded.shape[:-1], x.shape[1]))
    return a.bordered(y) if call.arg(3, "padding_value", 0.0) == 0 else a.forget(y), lengths
