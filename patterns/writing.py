"""Writing to parts of a tensor by position."""

from __future__ import annotations

import operator

import numpy as np
import torch
from torch import fx

from fxprune.patterns.indexing import (
    as_tuple,
    is_data,
    is_full,
    is_mask,
    is_read_in_part,
    masked_dims,
    new_index,
    per_dim,
    pick,
    where_masked,
)
from fxprune.patterns.joining import with_ends
from fxprune.patterns.selecting import beside
from fxprune.rules.call import Named
from fxprune.rules.channels import Axis, Channels, remap
from fxprune.rules.registry import register
from fxprune.tracing.trace import after_write, set_item


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
        x = laid_together(a, call, x, met, call.node.args[1])
    if not isinstance(value, Channels):
        value = Channels((), scalar=a.number_given(call, 2, "value"))
    y = a.overlaid(x, value, by_numbers(x, index))
    some = [dim for _, dim, item in per_dim(x, index) if not is_full(item)]
    return y.told_apart(some if written is None else range(len(y.shape)))


def laid_together(a, call, x, met, index):
    """Where slices of ``x`` are alike along dimensions that what is written has one axis over, they
    are its slices from then on; those before and behind them, of each head, go with the head.

    ``index`` is that of the code: in it sizes are nodes."""
    items = per_dim(x, fx.node.map_arg(index, lambda n: n.meta["spec"]))
    if any(dim is None or not isinstance(item, (int, slice)) for _, dim, item in items):
        return x
    left = [dim for _, dim, item in items if not isinstance(item, int)]
    parts = {dim: item for _, dim, item in items if not is_full(item)}
    given = {dim: item for _, dim, item in per_dim(x, index)}
    for axis in met.axes:
        dims = tuple(left[d] for d in axis.dims)
        alike = {d for other in x.axes if other.blank for d in other.dims}
        some = [d for d in dims if d in parts]
        if len(dims) == 1 or not alike >= set(dims) or len(some) > 1:
            continue
        laid = Axis(dims, axis.units)
        if some:
            if not is_run(parts[some[0]]) or is_read_in_part(a, given[some[0]]):
                continue
            laid = between(a, call, x, laid, some[0], parts[some[0]])
        others = [other for other in x.axes if set(dims).isdisjoint(other.dims)]
        x = x.with_axes(sorted([*others, laid], key=lambda each: each.dims))
    return x


def is_run(part):
    """Whether a slice is one of numbers, without a step."""
    ends = part.start, part.stop
    return part.step in (None, 1) and all(end is None or isinstance(end, int) for end in ends)


def between(a, call, x, axis, dim, part):
    """``axis``, which is written to a ``part`` of ``x`` along ``dim``, between slices of each head
    of which nothing is known."""
    whole = call.recorded(0, "input").shape[dim]
    start, stop, _ = part.indices(whole)
    around = a.put_around(call, axis, dim, (start, whole - stop), None)
    width = axis.units.size(axis.dims.index(dim))
    shape = tuple(width if d == dim else n for d, n in enumerate(x.shape))
    return with_ends(a, call, Channels(shape, (axis,)), dim, *around).axes[0]


@register(after_write)
def written_to(a, call):
    """A tensor after a call has written to what shares its memory: to a part of it, say."""
    x, write = a.forget(call.channels()), call.node.args[1]
    if write.op == "call_method" and str(write.target).endswith("_"):
        part, met = write.args[0], a.values[write]
        if part.target is operator.getitem and part.args[0] is call.node.args[0]:
            x = laid_together(a, call, x, met, part.args[1])
    return x.told_apart(range(len(x.shape)))


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
