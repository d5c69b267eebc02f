"""Writing to parts of a tensor by position."""

from __future__ import annotations

import torch
from fxprune.patterns.indexing import (
    as_tuple,
    is_data,
    is_mask,
    masked_dims,
    new_index,
    per_dim,
    pick,
    where_masked,
)

from fxprune.call import Named
from fxprune.channels import Channels, remap
from fxprune.recording import set_item
from fxprune.registry import register


def set_masked(a, call, x, rank, written):
    """A number goes wherever the mask is set; a tensor's rows to the positions it picks."""
    if written is None:
        mask = a.channels(as_tuple(call.arg(1, "index"))[0])
        wide = remap(mask, {d: d for d in range(rank)}, mask.shape + (1,) * (len(x.shape) - rank))
        return a.forget(a.meet(call, [x, wide], None, x.shape))
    rest = x.shape[rank:]
    rows = written.shape[0] if len(written.shape) > len(rest) else 1
    part = where_masked(a, call, x, rank, (rows, *rest))
    a.meet(call, [part, written], None, part.shape)
    return a.forget(x)


def standing_for(index):
    """An index whose tensors are zeros: which positions they hold does not matter for shapes."""

    def stand_in(item):
        if isinstance(item, (Channels, Named)):
            shape = item.spec.shape if isinstance(item, Named) else item.shape
            return torch.zeros(shape, dtype=torch.int64)
        return item

    return tuple(map(stand_in, index)) if isinstance(index, tuple) else stand_in(index)


@register(set_item, resize=new_index)
def setitem(a, call):
    """What is written shares its units with where it is written."""
    x, index, value = call.channels(), call.arg(1, "index"), call.arg(2, "value")
    written = a.channels(value) if isinstance(value, (Channels, Named)) else None
    rank = masked_dims(call)
    if rank:
        return set_masked(a, call, x, rank, written)
    masks = [n for n in call.node.all_input_nodes[1:] if n is not call.node.args[2] and is_mask(n)]
    reason = f"positions that are data are written in {call.name}"
    for _, dim, item in per_dim(x, index):
        if masks or (isinstance(item, slice) and is_data(item)):
            a.freeze_all([x, written], reason, call)
            return a.forget(x)
        if is_data(item):
            x = a.freeze_dims(x, [dim], reason, call)
    shape = tuple(torch.empty(x.shape, device="meta")[standing_for(index)].shape)
    part = pick(a, call, x, index, shape)
    a.distinguish(part)
    if written is not None:
        a.meet(call, [part, written], None, shape)
    return a.forget(x)


@register("index_add", "index_copy")
def index_add(a, call):
    """Rows of another tensor are added to, or put in the place of, rows of x."""
    x, dim, source = call.channels(), call.arg(1, "dim"), a.channels(call.arg(3, "source"))
    reason = f"positions that are data are written in {call.name}"
    return put_beside(a, call, [x, source], dim, reason)


@register("scatter_add", "scatter_reduce", "scatter")
def scatter(a, call):
    """y[index[i, j], j] takes what source[i, j] is; the index says so along all dimensions."""
    x, dim, index = call.channels(), call.arg(1, "dim"), call.arg(2, "index")
    source = call.arg(3, "src", call.kwargs.get("value"))
    if not isinstance(index, Channels):
        return a.unknown(call)
    parts = [x, index, *([a.channels(source)] if isinstance(source, (Channels, Named)) else [])]
    reason = f"positions that are data are written in {call.name}"
    return put_beside(a, call, parts, dim, reason)


def put_beside(a, call, parts, dim, reason):
    """The first of ``parts``, where the others are written along ``dim``: they stand beside it, and
    may end before it along other dimensions."""
    x = parts[0]
    dim %= len(x.shape)
    short = {d for t in parts for d, n in enumerate(t.shape) if n != x.shape[d]}
    apart = a.decide(call, lambda: {dim, *short})
    parts = [a.freeze_dims(t, apart, reason, call) for t in parts]
    met = a.meet(call, [Channels(without(t, apart), t.axes) for t in parts])
    return a.forget(Channels(x.shape, met.axes))


def without(x, dims):
    """Its shape, with one slice along ``dims``."""
    return tuple(1 if d in dims else n for d, n in enumerate(x.shape))


@register("copy")
def copy(a, call):
    """y = what is copied, in the shape of x."""
    x, source = call.channels(), call.channels(1, "src")
    return a.meet(call, [x, source], lambda t: torch.broadcast_tensors(*t)[1], x.shape)
