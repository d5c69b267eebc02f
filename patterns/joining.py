"""Ops that put tensors together or take one apart."""

from __future__ import annotations

from itertools import accumulate

import torch

from fxprune.call import Named
from fxprune.channels import Axis, Channels, remap
from fxprune.layout import broadcast_shape
from fxprune.registry import register


@register("cat", "concat", "concatenate", kind="cat")
def cat(a, call):
    """Along channels: one array after the other. Along another dimension operands share units."""
    parts = [a.channels(v) for v in call.arg(0, "tensors")]
    parts = [p for p in parts if p.shape != (0,)]
    dim = call.arg(1, "dim", call.kwargs.get("axis", 0)) % len(parts[0].shape)
    parts = [p for p in parts if p.shape[dim]] or parts[:1]  # an empty one adds nothing
    shape = list(parts[0].shape)
    shape[dim] = sum(p.shape[dim] for p in parts)
    # Everything but the joined dimension meets as under broadcasting.
    along = [p.touching([dim]) for p in parts]
    others = [
        Channels(tuple(1 if d == dim else n for d, n in enumerate(p.shape)), p.without(gone).axes)
        for p, gone in zip(parts, along, strict=True)
    ]
    met = a.meet(call, others, None, broadcast_shape([o.shape for o in others]))
    axes = list(met.axes)
    if any(along):
        axis = end_to_end(a, call, parts, dim)
        if axis is not None:
            axes.append(axis)
    return Channels(tuple(shape), tuple(sorted(axes, key=lambda x: x.dims)))


def end_to_end(a, call, parts, dim):
    """One axis of the parts' labels along ``dim``, rigid parts as slices that stay."""
    dims = tuple(sorted({d for p in parts for axis in p.touching([dim]) for d in axis.dims}))
    units, constants, known, border = [], [], False, False
    for p in parts:
        sizes = [p.shape[d] for d in dims]
        axis = p.axis(dim)
        if axis is None:
            units.append(torch.zeros(sizes, dtype=torch.int64))
            constants.append(torch.full(sizes, torch.nan, dtype=torch.float64))
            continue
        units.append(axis.over(dims).expand(sizes))
        border = border or axis.border
        known = known or axis.constant is not None
        blank = torch.full(axis.units.shape, torch.nan, dtype=torch.float64)
        constant = blank if axis.constant is None else axis.constant
        constants.append(axis.over(dims, constant).expand(sizes))
    at = dims.index(dim)
    joined = torch.cat(units, at)
    result = Axis(dims, joined, torch.cat(constants, at) if known else None, border)
    a.rectangle(result, call)
    return result


@register("stack", kind="cat")
def stack(a, call):
    """A cat along a new dimension: each operand keeps its own units, equally many of them."""
    parts = [a.channels(v) for v in call.arg(0, "tensors")]
    return stack_parts(a, call, parts, call.arg(1, "dim", 0) % (len(parts[0].shape) + 1))


def stack_parts(a, call, parts, dim):
    rank = len(parts[0].shape)
    shape = (*parts[0].shape[:dim], len(parts), *parts[0].shape[dim:])
    labelled = sorted({d for p in parts for axis in p.axes for d in axis.dims})
    shared = [axis.dims for p in parts for axis in p.axes]
    if len(set(shared)) > 1 or not labelled:
        met = a.meet(call, parts, None, parts[0].shape)
        return remap(met, {d: d + (d >= dim) for d in range(rank)}, shape)
    raised = [a.view(call, p, (*p.shape[:dim], 1, *p.shape[dim:])) for p in parts]
    axis = end_to_end(a, call, [with_dim(r, dim) for r in raised], dim)
    if axis is not None:
        a.hold(axis, [dim])
    return Channels(shape, () if axis is None else (axis,))


def with_dim(x, dim):
    """The one axis of ``x`` spread over ``dim``, of size 1, too."""
    axes = []
    for axis in x.axes:
        dims = tuple(sorted((*axis.dims, dim)))
        constant = None if axis.constant is None else axis.over(dims, axis.constant)
        axes.append(Axis(dims, axis.over(dims), constant, axis.border))
    return Channels(x.shape, tuple(axes))


@register("chunk", kind="split")
def chunk(a, call):
    """Parts of one size, which the code computes from the width: they keep equally many."""
    x, dim = call.channels(), call.arg(2, "dim", 0)
    parts = len(call.spec)
    equal = len({s.shape[dim] for s in call.spec}) == 1
    return apart(a, call, x, dim, parts, equal)


def new_split(call, new):
    dim = call.arg(2, "dim", 0)
    sizes = [shape[dim] for shape in new.result]
    given = call.arg(1, "split_size_or_sections", call.kwargs.get("split_size"))
    if isinstance(given, int) and len(set(sizes[:-1])) <= 1 and sizes[-1] <= sizes[0]:
        return {(1, "split_size_or_sections"): sizes[0]}
    return {(1, "split_size_or_sections"): tuple(sizes)}


@register("split", "split_with_sizes", kind="split", resize=new_split)
def split(a, call):
    """Parts of stated sizes; where these are equal and computed, they stay equal."""
    x, dim = call.channels(), call.arg(2, "dim", 0)
    given = call.arg(1, "split_size_or_sections", call.kwargs.get("split_size"))
    equal = isinstance(given, int) and len({s.shape[dim] for s in call.spec}) == 1
    return apart(a, call, x, dim, len(call.spec), equal)


def places(call):
    """Where the parts end, or how many there are, and what the argument is called."""
    names = ("indices_or_sections", "indices", "sections", "tensor_indices_or_sections")
    name = next((n for n in names if n in call.kwargs), names[0])
    return call.arg(1, name), name


def new_tensor_split(call, new):
    dim = call.arg(2, "dim", 0)
    sizes = [shape[dim] for shape in new.result]
    given, name = places(call)
    if (
        isinstance(given, int)
        and sizes == sorted(sizes, reverse=True)
        and sizes[0] <= sizes[-1] + 1
    ):
        return {}  # what the code computes
    return {(1, name): tuple(accumulate(sizes[:-1]))}


@register("tensor_split", kind="split", resize=new_tensor_split)
def tensor_split(a, call):
    """Parts of nearly one size, or that end at stated places."""
    x, dim = call.channels(), call.arg(2, "dim", 0)
    given, _ = places(call)
    if isinstance(given, (Channels, Named)):
        return a.unknown(call)
    equal = isinstance(given, int) and len({s.shape[dim] for s in call.spec}) == 1
    return apart(a, call, x, dim, len(call.spec), equal)


def apart(a, call, x, dim, parts, equal):
    dim %= len(x.shape)
    axis = x.axis(dim)
    if axis is not None and equal and len(axis.dims) == 1:
        a.balance(axis, parts, call)
    ends, start = [], 0
    for shape in call.shapes:
        ends.append((start, start + shape[dim]))
        start += shape[dim]
    return tuple(
        a.move(call, x, lambda t, s=s, e=e: t.narrow(dim, s, e - s), shape, touched=[dim])
        for (s, e), shape in zip(ends, call.shapes, strict=True)
    )


@register("unbind", kind="split")
def unbind(a, call):
    x, dim = call.channels(), call.arg(1, "dim", 0) % len(call.channels().shape)
    shape = tuple(n for d, n in enumerate(x.shape) if d != dim)
    for axis in x.touching([dim]):
        a.hold(axis, [dim])
    return tuple(
        a.move(call, x, lambda t, i=i: t.select(dim, i), shape, touched=[dim])
        for i in range(x.shape[dim])
    )
