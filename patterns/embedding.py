"""Embeddings: rows of a table, picked by index; the row's entries are channels."""

from __future__ import annotations

from torch import nn

from fxprune.channels import Channels, remap
from fxprune.registry import register


def look_up(a, call, weight):
    w = call.tensor(weight, {"bare": (0,), "out": (1,)})
    w = a.freeze_dims(w, [0], "rows of an embedding are picked by index", call)
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


@register("embedding", kind="embedding")
def embedding_function(a, call):
    """F.embedding(index, weight); aten orders them the other way."""
    first, second = call.inputs[:2]
    is_table = not isinstance(first, Channels) and first.spec.dtype.is_floating_point
    return look_up(a, call, first if is_table else second)
