"""Embeddings: rows of a table, picked by index; the row's entries are channels."""

from __future__ import annotations

from torch import nn

from fxprune.channels import Channels, remap
from fxprune.registry import register


def look_up(a, call, weight):
    w = call.tensor(weight, {"bare": (0,), "out": (1,)})
    w = a.freeze_dims(w, [0], "rows of an embedding are picked by index", call)
    if isinstance(weight, Channels):  # computed in the forward
        for axis in w.touching([1]):
            a.makes(axis)
    rank = len(call.shape)
    shape = (*call.shape[:-1], w.shape[1])
    return remap(w, {1: rank - 1}, shape)


def width(m, new):
    return {"embedding_dim": new.views["weight"][1]}


@register(nn.Embedding, nn.EmbeddingBag, kind="embedding", attributes=width)
def embedding_module(a, call):
    """y[…, c] = W[index[…], c]."""
    if call.module.max_norm is not None:
        return a.unknown(call)
    return look_up(a, call, "weight")


def is_table(x):
    return not isinstance(x, Channels) and x.spec.dtype.is_floating_point


@register("embedding", kind="embedding")
def embedding_function(a, call):
    """F.embedding(index, weight); aten orders them the other way."""
    first, second = call.inputs[:2]
    return look_up(a, call, first if is_table(first) else second)


@register("embedding_bag", kind="embedding")
def bag_function(a, call):
    """F.embedding_bag(index, weight): sums or means of rows; aten's form returns more."""
    first, second = call.inputs[:2]
    return a.unknown(call) if is_table(first) else look_up(a, call, second)
