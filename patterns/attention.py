"""Attention: y = softmax(q kᵀ / √d) v, head by head."""

from __future__ import annotations

import dis
from types import FunctionType

import torch
from torch import fx

from fxprune.patterns.matmul import product
from fxprune.rules.channels import Channels, remap
from fxprune.rules.registry import register


def same_scale(call, new):
    """The scale, which the width of a head may have made, stays what it was."""
    width, given = call.recorded(0, "query").shape[-1], call.recorded(6, "scale")
    if given is not None:
        return {(6, "scale"): given}
    return {} if call.channels(0, "query").shape[-1] == width else {(6, "scale"): width**-0.5}


@register("scaled_dot_product_attention", resize=same_scale)
def attention(a, call):
    """q and k share their head dimension's units, all of them share heads."""
    given = [(0, "query"), (1, "key"), (2, "value")]
    q, k, v = (call.channels(*place) for place in given)
    if call.kwargs.get("enable_gqa"):
        heads, *own = (call.recorded(*place).shape[-3] for place in given)
        k, v = (repeated(a, call, x, heads, n) for x, n in zip((k, v), own, strict=True))
    mask = call.arg(3, "attn_mask")
    return mix(a, call, q, k, v, [] if mask is None else [a.channels(mask)])


@register(torch.ops.higher_order.flex_attention)
def flex_attention(a, call):
    """What ``flex_attention`` calls: functions change scores, or leave them out. Whole heads go:
    the scale is a number by now that their width has made."""
    if any(user.args[1] != 0 for user in call.node.users):  # sums of weights, for what joins parts
        return a.unknown(call)
    q, k, v = (call.channels(i, name) for i, name in enumerate(("query", "key", "value")))
    q, k = (a.freeze_dims(x, [3], f"{call.name} makes its scale of them", call) for x in (q, k))
    heads, own = (call.recorded(i, "").shape[1] for i in (0, 1))
    if tells_heads_apart(a, call):
        q, k, v = (
            a.freeze_dims(x, [1], f"a function of {call.name} tells heads apart", call)
            for x in (q, k, v)
        )
    if heads != own:
        k, v = (repeated(a, call, x, heads, own) for x in (k, v))
    return mix(a, call, q, k, v), *(Channels(spec.shape) for spec in call.spec[1:])


def tells_heads_apart(a, call):
    """Whether the mask has more than one head, or a function may read the number of a head."""
    _, _, _, score, mask, *_ = call.node.args
    if any(isinstance(t, Channels) and t.shape[1] > 1 for t in call.args[4]):
        return True
    functions = [
        a.trace.constants.get(str(f.target)) if isinstance(f, fx.Node) else f
        for f in (score, mask[-1])
    ]  # fmt: skip
    return any(map(reads, functions, (2, 1)))  # of (score, batch, head, …), of (batch, head, …)


def reads(function, position):
    """Whether a function may read an argument."""
    code = function.__code__ if isinstance(function, FunctionType) else None
    if code is None or code.co_argcount <= position:
        return True
    name = code.co_varnames[position]
    used = (i.argval for i in dis.get_instructions(code))
    return any(name == n or (isinstance(n, tuple) and name in n) for n in used)


def repeated(a, call, x, heads, own):
    """Heads of keys or values, each as often as queries share it."""
    at, times = len(x.shape) - 3, heads // own
    shape = (*x.shape[:at], x.shape[at] * times, *x.shape[at + 1 :])
    return a.move(call, x, lambda t: t.repeat_interleave(times, at), shape, touched=[at])


def mix(a, call, q, k, v, masks=()):
    rank = len(q.shape)
    scores = product(a, call, q, turned(k, rank))
    scores = a.meet(call, [scores, *masks], None, scores.shape)
    scores = a.freeze_dims(scores, [rank - 1], "softmax mixes them", call)
    return a.averaged(product(a, call, scores, v), v, rank - 2)


def turned(x, rank):
    order = {d: d for d in range(rank - 2)} | {rank - 2: rank - 1, rank - 1: rank - 2}
    return remap(x, order, (*x.shape[:-2], x.shape[-1], x.shape[-2]))
