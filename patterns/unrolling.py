"""What the inner weights of a recurrent layer read in a call: the layer run one level at a time."""

from __future__ import annotations

import re
from typing import Any

import torch
from torch import nn
from torch.nn.utils.rnn import PackedSequence, pad_packed_sequence

KINDS = (nn.LSTM, nn.GRU, nn.RNN)


def reads(m, name, args, kwargs):
    """Of an input weight, what the level below says; of a recurrent one, what its own level said
    the step before."""
    found: Any = re.fullmatch(r"weight_(ih|hh)_l(\d+)(_reverse)?", name)
    if found is None or getattr(m, "proj_size", False):
        return None
    kind, level, back = found[1], int(found[2]), found[3] is not None
    given: Any = dict(zip(("input", "hx"), args, strict=False)) | kwargs
    y = given["input"]
    for i in range(level + (kind == "hh")):
        y, _ = one_level(m, i)(y, part_of(given.get("hx"), m, i))
    if kind == "ih":
        return y.data
    packed = isinstance(y, PackedSequence)
    if packed:
        y, lengths = pad_packed_sequence(y, batch_first=True)
    elif not m.batch_first and y.dim() == 3:
        y = y.transpose(0, 1)
    y = y[..., m.hidden_size :] if back else y[..., : m.hidden_size]
    past = y[..., 1:, :] if back else y[..., :-1, :]  # the last one is read by no step
    if not packed:
        return past
    steps = torch.arange(past.shape[1])
    return past[steps < lengths[:, None] - 1]


def one_level(m, level):
    """A layer of one level with the weights of one of ``m``'s."""
    cls = next(kind for kind in KINDS if isinstance(m, kind))
    weight: Any = getattr(m, f"weight_ih_l{level}")
    more = {"nonlinearity": m.nonlinearity} if cls is nn.RNN else {}
    one = cls(weight.shape[1], m.hidden_size, bias=m.bias, batch_first=m.batch_first,
              bidirectional=m.bidirectional, device=weight.device, dtype=weight.dtype,
              **more)  # fmt: skip
    for key, parameter in one.named_parameters():
        parameter.data = getattr(m, key.replace("_l0", f"_l{level}")).detach()
    return one


def part_of(state, m, level):
    """The initial state of one level."""
    if state is None:
        return None
    ways = 2 if m.bidirectional else 1
    cut = slice(level * ways, (level + 1) * ways)
    return tuple(s[cut] for s in state) if isinstance(state, tuple) else state[cut]
