"""Embeddings: rows of a table, picked by index; the row's entries are channels."""

from __future__ import annotations

from torch import nn

from fxprune.rules.channels import Channels, remap
from fxprune.rules.registry import register


def look_up(a, call, index, weight):
    """Channels of the index are told apart behind it, too."""
    w = table(a, call, weight)
    x = a.forget(a.channels(index))
    rank = len(x.shape)
    y = remap(w, {1: rank}, (*x.shape, w.shape[1]))
    return y.with_axes((*x.axes, *y.axes))


def bag(a, call, index, weight):
    w = table(a, call, weight)
    others = [v for v in call.inputs if v is not weight]  # offsets and weights of rows, too
    a.freeze_all(others, f"{call.name} sums the rows that they pick", call)
    return remap(w, {1: 1}, (call.shape[0], w.shape[1]))


def table(a, call, weight):
    w = call.tensor(weight, {"bare": (0,), "out": (1,)})
    w = a.freeze_dims(w, [0], "rows of an embedding are picked by index", call)
    if isinstance(weight, Channels):  # computed in the forward
        for axis in w.touching([1]):
            a.makes(axis)
    return w


def width(m, new):
    return {"embedding_dim": new.views["weight"][1]}


@register(nn.Embedding, nn.EmbeddingBag, kind="embedding", attributes=width)
def embedding_module(a, call):
    """y[…, c] = W[index[…], c]."""
    if call.module.max_norm is not None:
        return a.unknown(call)
    several = isinstance(call.module, nn.EmbeddingBag)
    return (bag if several else look_up)(a, call, call.inputs[0], "weight")


def is_table(x):
    return not isinstance(x, Channels) and x.spec.dtype.is_floating_point


@register("embedding", kind="embedding")
def embedding_function(a, call):
    """F.embedding(index, weight); aten orders them the other way."""
    first, second = call.inputs[:2]
    return look_up(a, call, *((second, first) if is_table(first) else (first, second)))


@register("embedding_bag", kind="embedding")
def bag_function(a, call):
    """F.embedding_bag(index, weight): sums or means of rows; aten's form returns more."""
    first, second = call.inputs[:2]
    return a.unknown(call) if is_table(first) else bag(a, call, first, second)
