"""Attention: y = softmax(q kᵀ / √d) v, head by head."""

from __future__ import annotations

from fxprune.patterns.matmul import product
from fxprune.rules.channels import remap
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
