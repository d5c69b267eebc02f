"""Ops that move elements: the same elements, in another order or under another shape."""

from __future__ import annotations

from torch import Size, nn
from torch.nn import functional as F

from fxprune.channels import Channels, remap
from fxprune.registry import register


def sizes_of(call, position=1, name="shape"):
    """The sizes among a call's arguments, given one by one or as one sequence."""
    value = call.arg(position, name, call.kwargs.get("size"))
    if isinstance(value, (tuple, list, Size)):
        return list(value)
    return list(call.args[position:])


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
    y = a.view(call, x, call.shape)
    return hold_literals(a, call, y, call.literal_sizes())


def hold_literals(a, call, y, literal):
    for axis in y.axes:
        fixed = [d for d in axis.dims if d in literal]
        if len(axis.dims) > 1 and len(fixed) < len(axis.dims):
            a.hold(axis, fixed, rather=True)
    return y


@register("view_as", "reshape_as", "flatten", "ravel", kind="flatten")
@register(nn.Flatten, kind="flatten")
def flatten(a, call):
    return a.view(call, call.channels(), call.shape)


def new_unflatten(call, new):
    dim = call.arg(1, "dim") % len(call.channels().shape)
    count = len(call.arg(2, "sizes"))
    return {(2, "sizes"): tuple(new.result[dim : dim + count])}


@register("unflatten", kind="flatten", resize=new_unflatten)
def unflatten(a, call):
    return a.view(call, call.channels(), call.shape)


def unflattened(m, new):
    dim = m.dim % len(new.input)
    return {"unflattened_size": tuple(new.result[dim : dim + len(m.unflattened_size)])}


@register(nn.Unflatten, kind="flatten", attributes=unflattened)
def unflatten_module(a, call):
    return a.view(call, call.channels(), call.shape)


def reorder(a, call, order):
    """Result dimension i is dimension order[i] of x."""
    x = call.channels()
    shape = tuple(x.shape[d] for d in order)
    return remap(x, {d: i for i, d in enumerate(order)}, shape)


@register("permute", kind="permute")
def permute(a, call):
    rank = len(call.channels().shape)
    return reorder(a, call, [d % rank for d in sizes_of(call, 1, "dims")])


@register("transpose", "swapaxes", "swapdims", kind="permute")
def transpose(a, call):
    rank = len(call.channels().shape)
    first = call.arg(1, "dim0", call.kwargs.get("axis0"))
    second = call.arg(2, "dim1", call.kwargs.get("axis1"))
    order = list(range(rank))
    order[first], order[second] = order[second], order[first]
    return reorder(a, call, [d % rank for d in order])


@register("t", "T", "mT", "adjoint", "H", "mH", kind="permute")
def matrix_transpose(a, call):
    rank = len(call.channels().shape)
    order = list(range(rank))
    if rank >= 2:
        order = order[::-1] if call.word == "T" else [*order[:-2], order[-1], order[-2]]
    return reorder(a, call, order)


@register("movedim", "moveaxis", kind="permute")
def movedim(a, call):
    import torch

    rank = len(call.channels().shape)
    probe = torch.empty(tuple(range(2, rank + 2)), device="meta")
    moved = torch.movedim(probe, call.arg(1, "source"), call.arg(2, "destination"))
    return reorder(a, call, [n - 2 for n in moved.shape])


@register("unsqueeze", "squeeze", kind="permute")
def squeeze(a, call):
    """Dimensions of size 1 come or go."""
    return a.view(call, call.channels(), call.shape)


def new_expand(call, new):
    return with_sizes(call, new.result, 1, "sizes")


@register("expand", "broadcast_to", resize=new_expand)
def expand(a, call):
    return spread(call)


@register("expand_as")
def expand_as(a, call):
    return spread(call)


def spread(call):
    x, shape = call.channels(), call.shape
    by = len(shape) - len(x.shape)
    return remap(x, {d: d + by for d in range(len(x.shape))}, shape)


@register("repeat", "tile")
def repeat(a, call):
    x = call.channels()
    times = sizes_of(call, 1, "repeats" if call.word == "repeat" else "dims")
    times = [1] * (len(x.shape) - len(times)) + times
    by = len(times) - len(x.shape)
    wide = remap(x, {d: d + by for d in range(len(x.shape))}, (1,) * by + x.shape)
    shape = tuple(n * t for n, t in zip(wide.shape, times, strict=True))
    return a.move(call, wide, lambda t: t.repeat(times), shape)


@register("repeat_interleave")
def repeat_interleave(a, call):
    x, times, dim = call.channels(), call.arg(1, "repeats"), call.arg(2, "dim")
    if not isinstance(times, int) or dim is None:
        return a.unknown(call)
    dim %= len(x.shape)
    shape = tuple(n * times if d == dim else n for d, n in enumerate(x.shape))
    return a.move(call, x, lambda t: t.repeat_interleave(times, dim), shape)


@register("flip")
def flip(a, call):
    dims = sizes_of(call, 1, "dims")
    return a.move(call, call.channels(), lambda t: t.flip(dims))


@register("roll")
def roll(a, call):
    """Along channels a shift by a number of slices means another shift once slices are gone."""
    x, dims = call.channels(), call.arg(2, "dims", ())
    dims = [dims] if isinstance(dims, int) else list(dims)
    if not dims:
        return a.unknown(call)
    return a.freeze_dims(x, [d % len(x.shape) for d in dims], "they are rolled by a number", call)


@register("pixel_shuffle")
@register(nn.PixelShuffle)
def pixel_shuffle(a, call):
    x = call.channels()
    factor = call.module.upscale_factor if call.module else call.arg(1, "upscale_factor")
    return a.move(
        call, x, lambda t: F.pixel_shuffle(t, factor), touched=range(len(x.shape) - 3, len(x.shape))
    )


@register("pixel_unshuffle")
@register(nn.PixelUnshuffle)
def pixel_unshuffle(a, call):
    x = call.channels()
    factor = call.module.downscale_factor if call.module else call.arg(1, "downscale_factor")
    return a.move(
        call, x, lambda t: F.pixel_unshuffle(t, factor),
        touched=range(len(x.shape) - 3, len(x.shape)),
    )  # fmt: skip


@register("channel_shuffle", "native_channel_shuffle")
@register(nn.ChannelShuffle)
def channel_shuffle(a, call):
    """(g, C/g) becomes (C/g, g): groups keep equally many."""
    x = call.channels()
    groups = call.module.groups if call.module else call.arg(1, "groups")
    width = x.shape[1]
    cut = (x.shape[0], groups, width // groups, *x.shape[2:])
    parts = hold_literals(a, call, a.view(call, x, cut), {1})
    order = {0: 0, 1: 2, 2: 1, **{d: d for d in range(3, len(cut))}}
    turned = remap(parts, order, (cut[0], cut[2], cut[1], *cut[3:]))
    return a.view(call, turned, x.shape)
