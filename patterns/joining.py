"""Ops that put tensors together: cat and stack."""

from __future__ import annotations

from dataclasses import replace

import torch

from fxprune.rules.channels import Axis, Channels, followed, remap
from fxprune.rules.registry import register
from fxprune.rules.shapes import broadcast_shape


@register("cat", "concat", "concatenate", kind="cat")
def cat(a, call):
    """Along channels: one array after the other. Along another dimension operands share units."""
    parts = [a.channels(v) for v in call.arg(0, "tensors")]
    parts = [p for p in parts if p.shape != (0,)] or parts[:1]  # which go with any shape
    dim = call.arg(1, "dim", 0) % len(parts[0].shape)
    # Of an empty one other dimensions are minded, where no axis lies over these and the joined one.
    across = {d for p in parts for axis in p.touching([dim]) for d in axis.dims}
    parts = [p for p in parts if p.shape[dim] or (p.axes and not p.touching(across))] or parts[:1]
    parts = beside_heads(a, call, parts, dim)
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
    met = a.meet(call, others, same_in_all, broadcast_shape([o.shape for o in others]))
    axes = list(met.axes)
    parts = [p for p in parts if p.shape[dim]] or parts[:1]
    if any(p.axis(dim) for p in parts):
        axis = end_to_end(a, call, parts, dim)
        if axis is not None:
            axes.append(axis)
    return Channels(tuple(shape), tuple(sorted(axes, key=lambda x: x.dims)))


def beside_heads(a, call, parts, dim):
    """Parts, of which those put before and behind slices of heads, and without channels of their
    own along ``dim``, have slices of each head there: a column of ones beside the values, say."""
    own = [i for i, p in enumerate(parts) if (axis := p.axis(dim)) and not axis.blank]
    cut = [axis for i in own for axis in parts[i].touching([dim]) if axis.dims != (dim,)]
    ends = [range(own[0]), range(own[-1] + 1, len(parts))] if cut else []
    if not any(ends):
        return parts
    heads = cut[0]
    amounts = tuple(sum(parts[i].shape[dim] for i in end) for end in ends)
    found, at = list(parts), heads.dims.index(dim)
    for end, put in zip(ends, a.put_around(call, heads, dim, amounts, 0.0), strict=True):
        start = 0
        for i in end:
            n = parts[i].shape[dim]
            part = replace(put, units=put.units.narrow(at, start, n))
            if put.constant is not None:
                part = part.saying(put.constant.narrow(at + 1, start, n))
            found[i], start = of_heads(a, call, parts[i], part), start + n
    return found


def of_heads(a, call, part, slices):
    """``part``, which holds the ``slices`` of each head: it has none, or is as wide as there are
    heads."""
    inside = [axis for axis in part.axes if set(axis.dims) <= set(slices.dims)]
    space = tuple(n if d in slices.dims else 1 for d, n in enumerate(part.shape))
    mine = Channels(space, tuple(inside), part.scalar)
    met = a.meet(call, [Channels(space, (slices,)), mine], lambda said: said[1], space)
    rest = [axis for axis in part.axes if axis not in inside]
    return part.with_axes(sorted((*met.axes, *rest), key=lambda axis: axis.dims))


def end_to_end(a, call, parts, dim):
    """One axis of the parts' labels along ``dim``, rigid parts as slices that stay."""
    ends = [p.axis(dim) for p in parts]
    dims = tuple(sorted({d for axis in ends if axis is not None for d in axis.dims}))
    units = []
    for p, axis in zip(parts, ends, strict=True):
        sizes = [p.shape[d] for d in dims]
        if axis is None:
            units.append(torch.zeros(sizes, dtype=torch.int64))
        else:
            units.append(axis.over(dims).expand(sizes))
    at = dims.index(dim)
    # Zeros stand around a part, not around all alike.
    border = any(axis is not None and axis.border for axis in ends)
    mixed = border and len(parts) > 1
    constant = None
    if any(axis is not None and axis.constant is not None for axis in ends):
        said = [constants(axis, u.shape, dims, mixed) for axis, u in zip(ends, units, strict=True)]
        size = sum(u.numel() for u in units)
        said = [followed(c, size) for c in said]
        rows = max(map(len, said))
        constant = torch.cat([c.expand(rows, *c.shape[1:]) for c in said], at + 1)
    result = Axis(dims, torch.cat(units, at), constant, border and not mixed)
    a.rectangle(result, call)
    return result


def with_ends(a, call, x, dim, before, behind):
    """``x`` between slices that are before and behind it along ``dim``."""
    parts = []
    for axis in (before, x.axis(dim), behind):
        if width := axis.units.size(axis.dims.index(dim)):
            shape = tuple(width if d == dim else n for d, n in enumerate(x.shape))
            parts.append(Channels(shape, (axis,)))
    shape = tuple(sum(p.shape[d] for p in parts) if d == dim else n for d, n in enumerate(x.shape))
    joined = end_to_end(a, call, parts, dim)
    return Channels(shape, tuple(joined if dim in axis.dims else axis for axis in x.axes))


def constants(axis, sizes, dims, mixed):
    """What a part says over ``dims``, of these sizes; none but 0 where zeros stand around it."""
    if axis is None:
        return torch.full((1, *sizes), torch.nan, dtype=torch.float64)
    said = axis.says(dims)
    if mixed and axis.border:
        said = torch.where(said == 0, 0.0, torch.nan)
    return said.expand(len(said), *sizes)


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
    alike = len(set(shared)) > 1 or not labelled or a.are_tied(call)
    if alike or a.decide(call, lambda: are_alike(parts)):
        met = a.meet(call, parts, same_in_all, parts[0].shape)
        return remap(met, {d: d + (d >= dim) for d in range(rank)}, shape)
    raised = [a.view(call, p, (*p.shape[:dim], 1, *p.shape[dim:])) for p in parts]
    axis = end_to_end(a, call, [with_dim(r, dim) for r in raised], dim)
    if axis is not None:
        a.hold(axis, [dim])
        a.stacked(call, axis, dim)
    return Channels(shape, () if axis is None else (axis,))


def are_alike(parts):
    """Whether the same channels lie in all parts, as in the rows of one tensor."""
    first = parts[0].axes
    return all(
        len(p.axes) == len(first)
        and all(torch.equal(a.units, b.units) for a, b in zip(p.axes, first, strict=True))
        for p in parts
    )


def same_in_all(said):
    """What all parts say; nothing is known where they say different things."""
    return torch.where(torch.stack([t == said[0] for t in said]).all(0), said[0], torch.nan)


def with_dim(x, dim):
    """The one axis of ``x`` spread over ``dim``, of size 1, too."""
    axes = []
    for axis in x.axes:
        dims = tuple(sorted((*axis.dims, dim)))
        constant = None if axis.constant is None else axis.says(dims)
        axes.append(Axis(dims, axis.over(dims), constant, axis.border))
    return Channels(x.shape, tuple(axes))


@register("broadcast_tensors")
def broadcast_tensors(a, call):
    """Each operand in the shape of all."""
    operands = [v if isinstance(v, Channels) else a.channels(v) for v in call.inputs]
    return tuple(
        a.meet(call, [x, *(o for o in operands if o is not x)], lambda t: t[0]) for x in operands
    )
