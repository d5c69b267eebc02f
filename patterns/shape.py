"""Ops that move elements: the same elements, in another order or under another shape."""

from __future__ import annotations

import math

import torch
from torch import Size, nn

from fxprune.rules.call import Named, Turned
from fxprune.rules.channels import Channels, remap
from fxprune.rules.registry import register
from fxprune.rules.shapes import reshape_groups


def sizes_of(call, name):
    """The numbers behind a call's tensor, given one by one or as one sequence."""
    value = call.arg(1, name, call.kwargs.get("size"))
    return list(value if isinstance(value, (tuple, list, Size)) else call.args[1:])


def given(call, first=1):
    """The sizes that the code gives, from argument ``first`` on, as numbers and nodes."""
    named = call.node.kwargs
    sizes = call.node.args[first:] or tuple([named["size"]] if "size" in named else named.values())
    return sizes[0] if sizes and isinstance(sizes[0], (tuple, list)) else sizes


def with_sizes(call, new, position=1, name="shape"):
    """The size arguments, in the layout of the call, as they have to be."""
    value = call.arg(position, name, call.kwargs.get("size"))
    if isinstance(value, (tuple, list, Size)):
        return {(position, name if name in call.kwargs else "size"): tuple(new)}
    return {(position + i, ""): n for i, n in enumerate(new)}


def new_view(call, new):
    return with_sizes(call, new.result) if not is_cast(call) else {}


def is_cast(call):
    value = call.arg(1, "dtype")
    return value is not None and not isinstance(value, (int, tuple, list, Channels))


@register("view", "reshape", "unsafe_view", kind="flatten", resize=new_view)
def view(a, call):
    """Dimensions that the code sizes by a literal keep their number of slices where they can."""
    x = call.channels()
    if is_cast(call):
        return a.unknown(call)
    laid_out_by_input(a, call, x)
    y = a.view(call, x, call.shape)
    return hold_literals(a, call, y, call.literal_sizes())


def laid_out_by_input(a, call, x):
    """Channels that another size of the input would put elsewhere: (b, h·w, c) as (b, c, h, w)."""
    numbers, shape = given(call), call.shape
    varies = [a.varies(number) for number in numbers]
    for old, new in reshape_groups(x.shape, shape) if any(varies) or -1 in numbers else ():
        taken = any(varies[d] for d in new)  # or it goes into the size that the code leaves open
        other = {d for d in new if varies[d] or (numbers[d] == -1 and not taken)}
        begins = {math.prod(shape[d] for d in new[i:]): i for i in reversed(range(len(new) + 1))}
        for axis in x.touching(old) if other else ():
            joined = axis.units.unique().numel() < axis.units.numel()  # with positions, already
            if axis.blank or joined or len(axis.dims) > 1:
                continue
            low = math.prod(x.shape[d] for d in old if d > axis.dims[0])
            high = low * x.shape[axis.dims[0]]
            top, end = begins.get(high), begins.get(low)
            if top is not None and end is not None:  # cut in parts, each of which has its place
                continue
            if not all(
                (top is not None and other.isdisjoint(new[top:cut]))
                or (end is not None and other.isdisjoint(new[cut:end]))
                for size, cut in begins.items() if low < size < high
            ):  # fmt: skip
                a.freeze(axis, f"{call.name} lays them out by sizes of the input", call)


def hold_literals(a, call, y, literal):
    for axis in y.axes:
        fixed = [d for d in axis.dims if d in literal]
        if len(axis.dims) > 1 and len(fixed) < len(axis.dims):
            a.hold(axis, fixed, rather=True)
    return y


@register("view_as", "reshape_as", kind="flatten")
def view_as(a, call):
    """The same elements under the shape of another tensor, which keeps as many slices."""
    other = call.channels(1, "other")
    y = a.view(call, call.channels(), call.shape)
    a.meet(call, [y, other], shape=call.shape)
    return y


@register("flatten", "ravel", kind="flatten")
@register(nn.Flatten, kind="flatten")
def flatten(a, call):
    """The same elements in their order: y.reshape(-1) = x.reshape(-1)."""
    return a.view(call, call.channels(), call.shape)


def new_unflatten(call, new):
    dim = call.arg(1, "dim") % len(call.channels().shape)
    count = len(call.arg(2, "sizes"))
    return {(2, "sizes"): tuple(new.result[dim : dim + count])}


def unflattened(m, new):
    dim = m.dim % len(new.input)
    return {"unflattened_size": tuple(new.result[dim : dim + len(m.unflattened_size)])}


@register("unflatten", kind="flatten", resize=new_unflatten)
@register(nn.Unflatten, kind="flatten", attributes=unflattened)
def unflatten(a, call):
    """One dimension as several, elements in their order."""
    return a.view(call, call.channels(), call.shape)


def reorder(a, call, order):
    """Result dimension i is dimension order[i] of x."""
    given = call.inputs[0]
    if isinstance(given, Named) and a.decide(call, lambda: is_for_products(a, call, given)):
        return Turned(given.name, call.spec, given, tuple(order))
    x = call.channels()
    shape = tuple(x.shape[d] for d in order)
    return remap(x, {d: i for i, d in enumerate(order)}, shape)


def is_for_products(a, call, given):
    """Whether a stack of matrices is turned for products alone."""
    readers = [a.trace.pattern(user) for user in call.node.users]
    products = all(pattern is not None and pattern.kind == "matmul" for pattern in readers)
    return products and len(given.shape) > 2 and not isinstance(given, Turned)


@register("permute", kind="permute")
def permute(a, call):
    """y[i₀, i₁, …] = x[…] with dimension order[k] of x as dimension k of y."""
    rank = len(call.inputs[0].shape)
    return reorder(a, call, [d % rank for d in sizes_of(call, "dims")])


@register("transpose", "swapaxes", "swapdims", kind="permute")
def transpose(a, call):
    """Two dimensions change places."""
    rank = len(call.inputs[0].shape)
    if not rank:
        return call.channels()
    first = call.arg(1, "dim0", call.kwargs.get("axis0"))
    second = call.arg(2, "dim1", call.kwargs.get("axis1"))
    order = list(range(rank))
    order[first], order[second] = order[second], order[first]
    return reorder(a, call, [d % rank for d in order])


@register("t", "T", "mT", "adjoint", "H", "mH", kind="permute")
def matrix_transpose(a, call):
    """y[…, j, i] = x[…, i, j]; T turns all dimensions round."""
    rank = len(call.inputs[0].shape)
    order = list(range(rank))
    if rank >= 2:
        order = order[::-1] if call.word == "T" else [*order[:-2], order[-1], order[-2]]
    return reorder(a, call, order)


@register("movedim", "moveaxis", kind="permute")
def movedim(a, call):
    """Dimensions move to new places, the others close up."""
    rank = len(call.inputs[0].shape)
    probe = torch.empty(tuple(range(2, rank + 2)), device="meta")
    moved = torch.movedim(probe, call.arg(1, "source"), call.arg(2, "destination"))
    return reorder(a, call, [n - 2 for n in moved.shape])


def new_squeeze(call, new):
    """What has a single channel left is not squeezed: the dimensions by name, where it would."""
    given, old = call.arg(1, "dim"), new.before
    if 1 not in {n for n, before in zip(new.result, call.spec.shape, strict=True) if n != before}:
        return {}
    asked = range(len(old)) if given is None else given if isinstance(given, tuple) else [given]
    return {(1, "dim"): tuple(d for d in asked if old[d] == 1)}


@register("squeeze", kind="permute", resize=new_squeeze)
@register("unsqueeze", kind="permute")
def squeeze(a, call):
    """Dimensions of size 1 come or go."""
    return a.view(call, call.channels(), call.shape)
