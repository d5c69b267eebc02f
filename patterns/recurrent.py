"""Recurrent layers: the gates' rows of one hidden unit go together, and what reads it back.

A masked unit has zero weights and zero biases, and emits zero from a zero state.
"""

from __future__ import annotations

from torch import fx, nn

from fxprune.patterns.joining import end_to_end, stack_parts
from fxprune.patterns.unrolling import reads
from fxprune.rules.call import Named
from fxprune.rules.channels import Channels, remap
from fxprune.rules.registry import register

# One after the other in a layer's list of them; projections are last, and seldom there.
WEIGHTS = ("weight_ih", "weight_hh", "bias_ih", "bias_hh", "weight_hr")
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
    weights = [
        {name: f"{name}_l{level}{tail}" for name in WEIGHTS}
        for level in range(m.num_layers) for tail in tails
    ]  # fmt: skip
    state = call.spec[1][0] if m.mode == "LSTM" else call.spec[1]
    given = call.arg(1, "hx")
    y, states = levels(a, call, x, weights, gates_of(m), len(tails), given, state.shape[1:-1])
    result = (y, *lengths) if packed else y
    return result, tuple(states) if m.mode == "LSTM" else states[0]


def beside(node, weight):
    """Of a call of such a function: the bias that belongs to a weight."""
    given = [n for arg in node.args for n in (arg if isinstance(arg, (list, tuple)) else [arg])]
    at = next(i for i, n in enumerate(given) if getattr(n, "target", None) == weight)
    bias = given[at + 2] if at + 2 < len(given) else None
    return bias if isinstance(bias, fx.Node) and len(bias.meta["spec"].shape) == 1 else None


@register("lstm", "gru", "rnn_tanh", "rnn_relu", kind="lstm", bias=beside)
def recurrent_function(a, call):
    """The same as a function of a list of weights, which the forwards of the layers call: a layer
    of a class of its own goes on to them."""
    packed = isinstance(call.arg(3, ""), (list, tuple))  # lengths come before the states
    given, flat = call.arg(1 + packed, "hx"), call.arg(2 + packed, "params")
    count = call.arg(4 + packed, "num_layers")
    ways = 2 if call.arg(7 + packed, "bidirectional") else 1
    if not all(isinstance(w, Named) for w in flat):
        return a.unknown(call, "its weights are computed")
    each = len(flat) // (count * ways)
    names = [n for n in WEIGHTS if call.arg(3 + packed, "has_biases") or "bias" not in n][:each]
    weights = [dict(zip(names, flat[i : i + each], strict=True)) for i in range(0, len(flat), each)]
    x = call.channels()
    x = a.freeze_dims(x, range(len(x.shape) - 1), "a recurrent layer runs along them", call)
    gates = {"lstm": 4, "gru": 3}.get(call.word, 1)
    y, states = levels(a, call, x, weights, gates, ways, given, call.spec[1].shape[1:-1])
    return (y, *states)


def levels(a, call, x, weights, gates, ways, given, batch):
    """What a stack of layers makes of ``x``, and their states; one of ``weights`` for each level
    and direction."""
    cells, outs, inputs = [], [], x
    for first in range(0, len(weights), ways):
        ends = []
        for named in weights[first : first + ways]:
            cell, out = one_layer(a, call, inputs, named, gates)
            cells.append(cell)
            ends.append(out)
        outs += ends
        inputs = along_last(a, call, ends, x.shape[:-1])
    # One hidden_size serves every layer and direction: they keep equally many units each.
    states = [stack_parts(a, call, outs, 0)]
    if gates == GATES[nn.LSTM]:
        states.append(stack_parts(a, call, cells, 0))
    states = [remap(s, {0: 0, 1: 1 + len(batch)}, (s.shape[0], *batch, s.shape[1])) for s in states]
    for state, s in zip(
        given if isinstance(given, (tuple, list)) else [given], states, strict=False
    ):
        if state is not None:
            state = a.channels(state)
            a.meet(call, [s, state], None, s.shape)
            a.needs_zero(call, state, [len(s.shape) - 1])
    return inputs, states


@register(nn.LSTMCell, nn.GRUCell, nn.RNNCell, kind="lstm", bias=True,
        attributes=lambda m, new: {"input_size": new.views["weight_ih"][2],
                                   "hidden_size": new.views["weight_ih"][1]})  # fmt: skip
def cell(a, call):
    """One step: the state that goes in and the one that comes out have the cell's units."""
    x = call.channels()
    last = len(x.shape) - 1
    x = a.freeze_dims(x, range(last), "a recurrent layer runs along them", call)
    m = call.module
    weights = {name: name for name in WEIGHTS}
    return one_step(a, call, x, weights, gates_of(m), isinstance(m, nn.LSTMCell))


@register("lstm_cell", "gru_cell", "rnn_tanh_cell", "rnn_relu_cell", kind="lstm", bias=beside)
def cell_function(a, call):
    """The same as a function of the weights."""
    given = [call.arg(i, name) for i, name in enumerate(("w_ih", "w_hh", "b_ih", "b_hh"), 2)]
    if not all(w is None or isinstance(w, Named) for w in given):
        return a.unknown(call, "its weights are computed")
    x = call.channels()
    x = a.freeze_dims(x, range(len(x.shape) - 1), "a recurrent layer runs along them", call)
    gates = {"lstm_cell": 4, "gru_cell": 3}.get(call.word, 1)
    weights = dict(zip(WEIGHTS, given, strict=False))
    return one_step(a, call, x, weights, gates, call.word == "lstm_cell")


def one_step(a, call, x, weights, gates, lstm):
    """The states that a cell makes of ``x`` and of those it is given."""
    last = len(x.shape) - 1
    units, _ = one_layer(a, call, x, weights, gates)
    wide = remap(units, {0: last}, (*x.shape[:last], units.shape[0]))
    given = call.arg(1, "hx")
    for state in given if isinstance(given, (tuple, list)) else [given]:
        if state is not None:
            state = a.channels(state)
            a.meet(call, [wide, state], None, wide.shape)
            a.needs_zero(call, state, [last])
    return (wide, wide) if lstm else wide


def gates_of(m):
    return next(n for kind, n in GATES.items() if isinstance(m, kind))


def one_layer(a, call, x, weights, gates):
    """(cell units, output units) of one layer in one direction, as vectors."""
    ih = call.view_of(weights["weight_ih"], (gates, -1, x.shape[-1]))
    cell = vector(call.tensor(weights["weight_ih"], {"out": (1,)}, ih), 1)
    reads = call.tensor(weights["weight_ih"], {"in": (2,)}, ih)
    a.consume(call, x, reads, [(len(x.shape) - 1, 2)])
    back = call.view_of(weights["weight_hh"], (gates, ih[1], -1))
    parts = [vector(call.tensor(weights["weight_hh"], {"out": (1,)}, back), 1)]
    for name in ("bias_ih", "bias_hh"):
        b = call.tensor(weights.get(name), {"out": (1,)}, (gates, ih[1]))
        if b is not None:
            a.adds(b)
            parts.append(vector(b, 1))
    cell = a.emit(a.meet(call, [cell, *parts], None), (0,), None)
    out = cell
    projection = call.tensor(weights.get("weight_hr"), {"in": (1,)})
    if projection is not None:
        a.consume(call, cell, projection, [(0, 1)])
        out = vector(call.tensor(weights["weight_hr"], {"out": (0,)}), 0)
    a.consume(call, out, call.tensor(weights["weight_hh"], {"in": (2,)}, back), [(0, 2)])
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
