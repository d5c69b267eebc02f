"""Ops that put tensors together: cat and stack."""

from __future__ import annotations

import torch

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
    others = [
        Channels(
            tuple(1 if d == dim else n for d, n in enumerate(p.shape)),
            tuple(axis for axis in p.axes if dim not in axis.dims),
        )
        for p in parts
    ]
    met = a.meet(call, others, None, broadcast_shape([o.shape for o in others]))
    axes = list(met.axes)
    if any(p.axis(dim) for p in parts):
        axis = end_to_end(a, call, parts, dim)
        if axis is not None:
            axes.append(axis)
    return Channels(tuple(shape), tuple(sorted(axes, key=lambda x: x.dims)))


def end_to_end(a, call, parts, dim):
    """One axis of the parts' labels along ``dim``, rigid parts as slices that stay."""
    ends = [p.axis(dim) for p in parts]
    dims = tuple(sorted({d for axis in ends if axis is not None for d in axis.dims}))
    known = any(axis is not None and axis.constant is not None for axis in ends)
    units, constants, borders = [], [], []
    for p, axis in zip(parts, ends, strict=True):
        sizes = [p.shape[d] for d in dims]
        if axis is None:
            units.append(torch.zeros(sizes, dtype=torch.int64))
        else:
            units.append(axis.over(dims).expand(sizes))
        borders.append(axis is not None and axis.border)
        if known and axis is not None and axis.constant is not None:
            constants.append(axis.over(dims, axis.constant).expand(sizes))
        elif known:
            constants.append(torch.full(sizes, torch.nan, dtype=torch.float64))
    at = dims.index(dim)
    joined = torch.cat(units, at)
    mixed = any(borders) and len(parts) > 1  # zeros stand around a part, not around all alike
    if mixed and known:
        constants = [
            torch.where(c == 0, 0.0, torch.nan) if border else c
            for c, border in zip(constants, borders, strict=True)
        ]
    border = any(borders) and not mixed
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
