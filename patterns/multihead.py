"""``nn.MultiheadAttention``: projections to heads, attention, and a projection back."""

from __future__ import annotations

import torch
from torch import nn

from fxprune.patterns.attention import mix
from fxprune.patterns.linear import dense
from fxprune.patterns.multihead_forward import narrow_attention
from fxprune.rules.channels import Channels, remap
from fxprune.rules.registry import register


def widths(m, new):
    embed, inner = new.views["out_proj.weight"]
    heads = new.views["in_proj_weight" if m.in_proj_weight is not None else "v_proj_weight"][-3]
    found = {"embed_dim": embed, "num_heads": heads, "out_proj.in_features": inner,
             "out_proj.out_features": embed}  # fmt: skip
    if m.in_proj_weight is not None:
        query = new.views["in_proj_weight"][-1]
        found |= {"kdim": query, "vdim": query}
    else:
        query = new.views["q_proj_weight"][-1]
        found |= {"kdim": new.views["k_proj_weight"][-1], "vdim": new.views["v_proj_weight"][-1]}
    if {inner, query, heads * m.head_dim} != {embed}:
        # Without the flag, encoder layers would call a kernel that takes one width only.
        found |= {"forward": narrow_attention, "_qkv_same_embed_dim": False}
    elif m.batch_first and heads % 2 > m.num_heads % 2:
        # An encoder that was made for even numbers hands it nested tensors, which its own forward
        # does not take with an odd one.
        found["forward"] = narrow_attention
    return found


def reads(m, name, args, kwargs):
    """The heads' results, which the projection back reads: the layer with nothing in its place."""
    if name != "out_proj.weight":
        return None
    weight, bias = m.out_proj.weight, m.out_proj.bias
    eye = torch.eye(weight.shape[1], dtype=weight.dtype, device=weight.device)
    nothing = {"out_proj.weight": eye}
    if bias is not None:
        nothing["out_proj.bias"] = torch.zeros_like(eye[0])
    return torch.func.functional_call(m, nothing, args, kwargs)[0]


@register(nn.MultiheadAttention, kind="attention", attributes=widths, bias=True, reads=reads,
        forward=narrow_attention)  # fmt: skip
def multihead(a, call):
    """y = Wₒ · concat over heads of softmax(q kᵀ / √d) v; q, k, v = W x + b."""
    m = call.module
    if m.in_proj_bias is None and m.out_proj.bias is None:
        call.factor = 0.0  # PyTorch's fast path takes both biases or none
    inputs = [call.channels(i, name) for i, name in enumerate(("query", "key", "value"))]
    last = len(inputs[0].shape) - 1
    inputs = [a.freeze_dims(x, range(last), "attention runs along them", call) for x in inputs]
    # What a mask cannot cut stays: the sizes of the other dimension are worked out.
    wide = m.out_proj.weight.shape[1] // m.num_heads  # head_dim is not set by cutting
    by_heads = a.attention == "heads" if min(m.num_heads, wide) > 1 else m.num_heads > 1
    cut = (-1, wide) if by_heads else (m.num_heads, -1)  # one of a kind cannot be lost
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
    for given in (mask, call.arg(3, "key_padding_mask")):
        a.freeze_all([given], f"it is a mask of {call.name}", call)
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
    """Whether anything comes of the second result; its mean over heads may go nowhere, too."""
    readers = [u for u in node.users if not (u.op == "call_function" and u.args[1:] == (0,))]
    return any(map(leads_on, readers)) or (bool(readers) and not averages(node))


def averages(node):
    return node.kwargs.get("average_attn_weights", node.args[6] if len(node.args) > 6 else True)


def leads_on(node):
    """Whether a result depends on a node, or something is written with it."""
    waiting, seen = [node], {node}
    while waiting:
        current = waiting.pop()
        if current.op == "output" or str(current.target).endswith("_"):
            return True
        waiting += current.users.keys() - seen
        seen.update(current.users)
    return False


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
