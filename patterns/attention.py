"""Attention: y = softmax(q kᵀ / √d) v, head by head."""

from __future__ import annotations

import torch
from fxprune.patterns.linear import dense
from fxprune.patterns.matmul import product
from torch import nn
from torch.nn import functional as F

from fxprune.channels import Channels, remap
from fxprune.registry import register


def same_scale(call, new):
    """The default scale reads the width of a head: it stays what it was."""
    width = call.node.args[0].meta["spec"].shape[-1]
    if call.channels().shape[-1] == width or call.kwargs.get("scale") is not None:
        return {}
    return {(6, "scale"): width**-0.5}


@register("scaled_dot_product_attention", resize=same_scale)
def attention(a, call):
    """q and k share their head dimension's units, all of them share heads."""
    q, k, v = (a.channels(value) for value in call.inputs[:3])
    if call.kwargs.get("enable_gqa"):
        k, v = (repeated(a, call, x, i) for i, x in ((1, k), (2, v)))
    masks = [a.channels(value) for value in call.inputs[3:]]
    return mix(a, call, q, k, v, masks)


def repeated(a, call, x, position):
    """Heads of keys or values, each as often as queries share it."""
    heads, own = (call.node.args[i].meta["spec"].shape[-3] for i in (0, position))
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


# -- nn.MultiheadAttention --------------------------------------------------------------------


def narrow_attention(
    self,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    key_padding_mask: torch.Tensor | None = None,
    need_weights: bool = True,
    attn_mask: torch.Tensor | None = None,
    average_attn_weights: bool = True,
    is_causal: bool = False,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """``nn.MultiheadAttention.forward`` for heads that together are not as wide as the embedding,
    or are narrower than when they were trained: ``head_dim`` sets the scale only."""
    if is_causal and attn_mask is None:
        raise RuntimeError("Need attn_mask if specifying the is_causal hint.")
    batched = query.dim() == 3
    if not batched:
        query, key, value = (t.unsqueeze(0) for t in (query, key, value))
    elif not self.batch_first:
        query, key, value = (t.transpose(0, 1) for t in (query, key, value))
    weights = (self.q_proj_weight, self.k_proj_weight, self.v_proj_weight)
    if self.in_proj_weight is not None:
        weights = self.in_proj_weight.chunk(3)
    biases = (None,) * 3 if self.in_proj_bias is None else self.in_proj_bias.chunk(3)
    q, k, v = (
        F.linear(x, w, b).unflatten(-1, (self.num_heads, -1)).transpose(1, 2)
        for x, w, b in zip((query, key, value), weights, biases, strict=True)
    )
    added = 0
    for token in (self.bias_k, self.bias_v), (0.0, 0.0) if self.add_zero_attn else (None, None):
        if token[0] is not None:
            k, v = (torch.cat([x, _token(x, t)], 2) for x, t in zip((k, v), token, strict=True))
            added += 1
    mask = None
    for given, shape in (
        (attn_mask, (1, 1, *q.shape[2:3], key.shape[1])),
        (key_padding_mask, (-1, 1, 1, key.shape[1])),
    ):
        if given is not None:
            if given.dim() == 3:
                shape = (-1, self.num_heads, *shape[2:])
            if given.dtype == torch.bool:
                given = torch.zeros_like(given, dtype=q.dtype).masked_fill_(given, float("-inf"))
            given = F.pad(given.reshape(shape), (0, added))
            mask = given if mask is None else mask + given
    dropout, scale = self.dropout if self.training else 0.0, self.head_dim**-0.5
    attended = None
    if need_weights:
        scores = q * scale @ k.transpose(-2, -1)
        attended = F.dropout((scores if mask is None else scores + mask).softmax(-1), dropout)
        y = attended @ v
        attended = attended.mean(1) if average_attn_weights else attended
        attended = attended if batched else attended.squeeze(0)
    else:
        y = F.scaled_dot_product_attention(q, k, v, mask, dropout, scale=scale)
    y = self.out_proj(y.transpose(1, 2).flatten(2))
    if not batched:
        return y.squeeze(0), attended
    return y if self.batch_first else y.transpose(0, 1), attended


def _token(x: torch.Tensor, token: torch.Tensor | float) -> torch.Tensor:
    """One more position for every head: learned, or zero."""
    shape = (1, x.shape[1], 1, x.shape[3])
    row = x.new_zeros(shape) if isinstance(token, float) else token.reshape(shape)
    return row.expand(x.shape[0], -1, -1, -1)


def widths(m, new):
    embed, inner = new.views["out_proj.weight"]
    heads = new.views["in_proj_weight" if m.in_proj_weight is not None else "v_proj_weight"][-3]
    found = {"embed_dim": embed, "num_heads": heads, "out_proj.in_features": inner,
             "out_proj.out_features": embed}  # fmt: skip
    if m.in_proj_weight is not None:
        found |= {"kdim": embed, "vdim": embed}
    else:
        found |= {"kdim": new.views["k_proj_weight"][-1], "vdim": new.views["v_proj_weight"][-1]}
    if inner != embed or inner != heads * m.head_dim:
        # Without the flag, encoder layers would call a kernel that takes one width only.
        found |= {"forward": narrow_attention, "_qkv_same_embed_dim": False}
    return found


@register(nn.MultiheadAttention, kind="attention", attributes=widths, bias=True,
        forward=narrow_attention)  # fmt: skip
def multihead(a, call):
    m = call.module
    inputs = [call.channels(i, name) for i, name in enumerate(("query", "key", "value"))]
    last = len(inputs[0].shape) - 1
    inputs = [a.freeze_dims(x, range(last), "attention runs along them", call) for x in inputs]
    # What a mask cannot cut stays: the sizes of the other dimension are worked out.
    cut = (-1, m.head_dim) if a.attention == "heads" else (m.num_heads, -1)
    q, k, v = projections(a, call, inputs, cut)
    tokens = [call.tensor(name, {"stat": (2, 3)}, call.view_of(name, (1, 1, *cut)))
              for name in ("bias_k", "bias_v") if getattr(m, name) is not None]  # fmt: skip
    tokens = [remap(t, {2: 0, 3: 2}, (t.shape[2], 1, t.shape[3])) for t in tokens]
    q, k, v = (
        remap(x, {0: 0, 1: 2}, (x.shape[0], n, x.shape[1]))
        for x, n in zip((q, k, v), (2, 3, 3), strict=True)
    )
    for x, token in zip((k, v), tokens, strict=False):
        a.meet(call, [x, token], None, x.shape)
    heads = [axis for x in (q, k, v) for axis in x.touching([0])]
    mask = call.arg(5, "attn_mask")
    if mask is not None and len(a.channels(mask).shape) == 3:
        for axis in heads:
            a.freeze(axis, f"a mask is given for every head of {call.name}", call)
    if call.spec[1] is not None and weights_used(call.node):
        for axis in heads:
            a.freeze(axis, f"the attention weights of {call.name} are used", call)
    if tokens or m.add_zero_attn:
        v = a.forget(v)
    y = mix(a, call, q, k, v)
    flat = a.view(call, remap(y, {0: 1, 1: 0, 2: 2}, (2, y.shape[0], y.shape[2])),
                  (2, y.shape[0] * y.shape[2]))  # fmt: skip
    z = dense(a, call, flat, "out_proj.weight", "out_proj.bias")
    z = remap(z, {1: last}, (*inputs[0].shape[:-1], z.shape[1]))
    return z, None if call.spec[1] is None else Channels(call.spec[1].shape)


def weights_used(node):
    """Whether anything reads the second result."""
    return any(not (user.op == "call_function" and user.args[1:] == (0,)) for user in node.users)


def projections(a, call, inputs, cut) -> list[Channels]:
    """(heads, head dim) of q, k and v."""
    m = call.module
    bias = None
    if m.in_proj_bias is not None:
        bias = call.tensor("in_proj_bias", {"shift": (0, 1, 2)},
                           call.view_of("in_proj_bias", (3, *cut)))  # fmt: skip
        hold_parts(a, bias)
    if m.in_proj_weight is not None:
        view = call.view_of("in_proj_weight", (3, *cut, inputs[0].shape[-1]))
        w = call.tensor("in_proj_weight", {"out": (0, 1, 2), "in": (3,)}, view)
        for x in {id(v): x for v, x in zip(call.inputs, inputs, strict=False)}.values():
            a.consume(call, x, w, [(len(x.shape) - 1, 3)])
        rows = remap(w, {0: 0, 1: 1, 2: 2}, view[:3])
        hold_parts(a, rows)
        rows = add(a, call, rows, bias)
        return [part(a, call, rows, i) for i in range(3)]
    made: list[Channels] = []
    for i, (x, letter) in enumerate(zip(inputs, "qkv", strict=True)):
        name = f"{letter}_proj_weight"
        w = call.tensor(name, {"out": (0, 1), "in": (2,)},
                        call.view_of(name, (*cut, x.shape[-1])))  # fmt: skip
        a.consume(call, x, w, [(len(x.shape) - 1, 2)])
        one = remap(w, {0: 0, 1: 1}, w.shape[:2])
        made.append(add(a, call, one, None if bias is None else part(a, call, bias, i)))
    return made


def add(a, call, made, bias):
    return made if bias is None else a.meet(call, [made, bias], lambda t: t[0] + t[1], made.shape)


def hold_parts(a, x):
    """q, k and v keep equally many."""
    for axis in x.touching([0]):
        a.hold(axis, [0])


def part(a, call, x, i):
    return a.move(call, x, lambda t: t.select(0, i), x.shape[1:], touched=[0])
