"""Writing to parts of a tensor by position."""

from __future__ import annotations

import numpy as np
import torch

from fxprune.patterns.indexing import (
    as_tuple,
    is_data,
    is_full,
    is_mask,
    masked_dims,
    new_index,
    per_dim,
    pick,
    where_masked,
)
from fxprune.patterns.selecting import beside
from fxprune.rules.call import Named
from fxprune.rules.channels import Axis, Channels, remap
from fxprune.rules.registry import register
from fxprune.tracing.trace import set_item


def set_masked(a, call, x, rank, written):
    """A number goes wherever the mask is set; a tensor's rows to the positions it picks."""
    if written is None:
        mask = a.channels(as_tuple(call.arg(1, "index"))[0])
        wide = remap(mask, {d: d for d in range(rank)}, mask.shape + (1,) * (len(x.shape) - rank))
        return a.forget(a.meet(call, [x, wide], None, x.shape))
    rest = x.shape[rank:]
    rows = written.shape[0] if len(written.shape) > len(rest) else 1
    part = where_masked(a, call, x, range(rank), (rows, *rest))
    a.meet(call, [part, written], None, part.shape)
    return a.forget(x)


def standing_for(index):
    """An index whose tensors are zeros: which positions they hold does not matter for shapes."""

    def stand_in(item):
        if isinstance(item, (Channels, Named)):
            return torch.zeros(item.shape, dtype=torch.int64)
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
        met = a.meet(call, [part, written], None, shape)
        x = laid_together(x, met, per_dim(x, index))
    if not isinstance(value, Channels):
        value = Channels((), scalar=a.number_given(call, 2, "value"))
    y = a.overlaid(x, value, by_numbers(x, index))
    some = [dim for _, dim, item in per_dim(x, index) if not is_full(item)]
    return y.told_apart(some if written is None else range(len(y.shape)))


def laid_together(x, met, items):
    """Where slices of ``x`` are alike along dimensions that what is written has one axis over, they
    are its slices from then on."""
    if any(dim is None or not isinstance(item, (int, slice)) for _, dim, item in items):
        return x
    left = [dim for _, dim, item in items if not isinstance(item, int)]
    full = {dim for _, dim, item in items if is_full(item)}
    for axis in met.axes:
        dims = tuple(left[d] for d in axis.dims)
        alike = {d for other in x.axes if other.blank for d in other.dims}
        if len(dims) > 1 and alike & full >= set(dims):
            others = [other for other in x.axes if set(dims).isdisjoint(other.dims)]
            x = x.with_axes(sorted([*others, Axis(dims, axis.units)], key=lambda each: each.dims))
    return x


def by_numbers(x, index):
    """The index dimension by dimension, None where data are in it."""
    items = [(dim, item) for _, dim, item in per_dim(x, index)]
    data = any(is_data(item) or isinstance(item, np.ndarray) for _, item in items)
    return None if data else items


@register("index_add", "index_copy")
def index_add(a, call):
    """Rows of another tensor are added to, or put in the place of, rows of x."""
    x, dim, source = call.channels(), call.arg(1, "dim"), a.channels(call.arg(3, "source"))
    return put_beside(a, call, [x, source], dim)


@register("scatter_add", "scatter_reduce", "scatter")
def scatter(a, call):
    """y[index[i, j], j] takes what source[i, j] is; the index says so along all dimensions."""
    x, dim, index = call.channels(), call.arg(1, "dim"), call.arg(2, "index")
    source = call.arg(3, "src", call.kwargs.get("value"))
    if not isinstance(index, Channels):
        return a.unknown(call)
    parts = [x, index, *([a.channels(source)] if isinstance(source, (Channels, Named)) else [])]
    return put_beside(a, call, parts, dim)


def put_beside(a, call, parts, dim):
    """The first of ``parts``, where the others are written along ``dim``."""
    if not parts[0].shape:
        return a.unknown(call)
    met = beside(a, call, parts, dim, f"positions that are data are written in {call.name}")
    return a.forget(Channels(parts[0].shape, met.axes))


@register("copy")
def copy(a, call):
    """y = what is copied, in the shape of x."""
    x, source = call.channels(), call.channels(1, "src")
    met = a.meet(call, [x, source], None, x.shape)
    return a.overlaid(met, source, by_numbers(met, ...))
