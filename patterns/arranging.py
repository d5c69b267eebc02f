"""Ops that repeat slices or put them in another order: expand, flip, pixel and channel shuffle."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import fx, nn
from torch.nn import functional as F

from fxprune.patterns.shape import given, hold_literals, sizes_of, with_sizes
from fxprune.rules.channels import Axis, Channels, remap
from fxprune.rules.registry import register
from fxprune.rules.shapes import with_rank
from fxprune.tracing.trace import is_size


def new_expand(call, new):
    return with_sizes(call, new.result, 1, "sizes")


@register("expand", "broadcast_to", resize=new_expand)
def expand(a, call):
    """y[i, j] = x[0, j]: slices of size 1 are repeated."""
    y = alike(call, spread(call), widths_read(a, call))
    return repeated_by_a_number(a, call, y)


@register("expand_as")
def expand_as(a, call):
    """y[i, j] = x[0, j], to the shape of another tensor."""
    other = call.channels(1, "other")
    return alike(call, spread(call), [(other, d) for d in range(len(other.shape))])


def spread(call):
    x, shape = call.channels(), call.shape
    by = len(shape) - len(x.shape)
    return remap(x, {d: d + by for d in range(len(x.shape))}, shape)


def widths_read(a, call):
    """For each size that the call is given, the value and the dimension whose width it is, where
    the code has read it from a tensor; None elsewhere."""
    read = []
    for number in given(call):
        source, dim = number.args if is_size(number) else (None, 0)
        x = a.values.get(source)
        read.append((x, dim % len(x.shape)) if isinstance(x, Channels) else None)
    return read


def repeated_by_a_number(a, call, y):
    """One slice that the code repeats as often as it says in a number: as often as what it meets
    has slices."""
    numbers, old = given(call), call.recorded(0, "input").shape
    by, behind = len(y.shape) - len(old), len(y.shape) - len(numbers)
    dims = [
        d for d in range(max(behind, 0), len(y.shape))
        if (d < by or old[d - by] == 1) and not y.axis(d) and not a.varies(numbers[d - behind])
    ]  # fmt: skip
    return with_blank(a, call, y, dims)


def with_blank(a, call, y, dims):
    """Slices along ``dims`` that are all alike, beside the channels that ``y`` has."""
    axes = (*y.axes, *a.blank(call, None, dims).axes) if dims else y.axes
    return y.with_axes(sorted(axes, key=lambda axis: axis.dims))


def alike(call, y, widths):
    """One slice of what is repeated, as often as another tensor has slices: they go with these."""
    old = call.recorded(0, "input").shape  # of several slices one may be left
    by = len(y.shape) - len(old)
    repeated = [d < by or old[d - by] == 1 for d in range(len(y.shape))]
    axes = []
    for d, read in enumerate(widths):
        axis = read and read[0].axis(read[1])
        if not axis:
            continue
        at = range(d, d + len(axis.dims))  # one that was cut in parts: side by side, as there
        sizes = y.shape[d : at.stop]
        if (
            widths[d : at.stop] == [(read[0], dim) for dim in axis.dims]
            and all(repeated[d : at.stop]) and tuple(axis.units.shape) == sizes
        ):  # fmt: skip
            axes.append(replace(axis.saying(None), dims=tuple(at), source=None))
    return y.with_axes(sorted((*y.axes, *axes), key=lambda axis: axis.dims)) if axes else y


def told(call, times):
    """How often each dimension is repeated; what a tensor says of it as it said when recorded."""
    old, new = call.recorded(0, "input").shape, call.spec.shape
    sizes = zip(times[::-1], new[::-1], (*old[::-1], *[1] * len(times)), strict=False)
    return [n if isinstance(n, int) else now // max(was, 1) for n, now, was in sizes][::-1]


def new_repeat(call, new):
    """As often as before, but for one slice, which is there as often as what it meets."""
    x, numbers = call.channels(), given(call)
    by = len(numbers) - len(x.shape)
    needed = told(call, [n.meta["spec"] if isinstance(n, fx.Node) else n for n in numbers])
    for d in range(len(needed)):
        if d < by or x.shape[d - by] == 1:
            needed[d] = new.result[d - len(numbers)]
    return with_sizes(call, needed, 1, "repeats" if call.word == "repeat" else "dims")


@register("repeat", "tile", resize=new_repeat)
def repeat(a, call):
    """y[i] = x[i mod n]: all slices, then all again."""
    x = call.channels()
    times = told(call, sizes_of(call, "repeats" if call.word == "repeat" else "dims"))
    times = [1] * (len(x.shape) - len(times)) + times
    wide = with_rank(x, len(times))
    shape = tuple(n * t for n, t in zip(wide.shape, times, strict=True))
    y = a.move(call, wide, lambda t: t.repeat(times), shape)
    widths = widths_read(a, call)
    y = alike(call, y, [None] * (len(shape) - len(widths)) + widths)
    return repeated_by_a_number(a, call, y)


def new_repeat_interleave(call, new):
    x, times, dim = call.channels(), call.arg(1, "repeats"), call.arg(2, "dim")
    if not isinstance(times, int) or dim is None:
        return {}
    found = {}
    if x.axis(dim) is None and x.shape[dim]:
        found[1, "repeats"] = new.result[dim] // x.shape[dim]
    if call.arg(3, "output_size") is not None:  # a width like any other
        found[3, "output_size"] = new.result[dim]
    return found


@register("repeat_interleave", resize=new_repeat_interleave)
def repeat_interleave(a, call):
    """y[i] = x[i div k]: each slice k times; what has no channels as often as what it meets has."""
    x, times, dim = call.channels(), call.arg(1, "repeats"), call.arg(2, "dim")
    if not isinstance(times, int) or dim is None:
        return a.unknown(call)
    dim %= len(x.shape)
    shape = tuple(n * times if d == dim else n for d, n in enumerate(x.shape))
    # At the new widths it may be once: one head is left, say.
    several = a.decide(call, lambda: times > 1 and not any(map(a.varies, given(call))))
    if x.axis(dim) is None and several:
        y = with_blank(a, call, Channels(call.shape, x.axes), [dim])
        for axis in y.touching([dim]) if x.shape[dim] > 1 else ():  # of each slice as many
            a.hold(Axis((0, 1), axis.units.reshape(x.shape[dim], -1)), [0])
        return y
    return a.move(call, x, lambda t: t.repeat_interleave(times, dim), shape)


@register("flip")
def flip(a, call):
    """y[i] = x[n - 1 - i]."""
    dims = sizes_of(call, "dims")
    if not all(isinstance(d, int) for d in dims):
        return a.unknown(call)
    return a.move(call, call.channels(), lambda t: t.flip(dims))


@register("roll")
def roll(a, call):
    """Along channels a shift by a number of slices means another shift once slices are gone."""
    x, dims = call.channels(), call.arg(2, "dims", ())
    dims = [dims] if isinstance(dims, int) else list(dims)
    if not dims:
        return a.unknown(call)
    return a.freeze_dims(x, [d % len(x.shape) for d in dims], "they are rolled by a number", call)


@register(torch.Tensor.unfold)
def windows(a, call):
    """y[..., l, ..., k] = x[..., l·step + k, ...]: windows along one dimension, laid out last."""
    x = call.channels()
    dim = call.arg(1, "dimension") % max(len(x.shape), 1)
    x = a.freeze_dims(x, [dim], "windows of a stated size are taken there", call)
    return remap(x, {d: d for d in range(len(x.shape)) if d != dim}, call.shape)


@register("pixel_shuffle")
@register(nn.PixelShuffle)
def pixel_shuffle(a, call):
    """y[c, h·r + i, w·r + j] = x[c·r² + i·r + j, h, w]: r² slices are one unit."""
    x = call.channels()
    factor = call.module.upscale_factor if call.module else call.arg(1, "upscale_factor")
    places = range(len(x.shape) - 3, len(x.shape))
    y = a.move(call, x, lambda t: F.pixel_shuffle(t, factor), touched=places)
    return a.freeze_dims(y, places[1:], "channels become positions there", call)


@register("pixel_unshuffle")
@register(nn.PixelUnshuffle)
def pixel_unshuffle(a, call):
    """y[c·r² + i·r + j, h, w] = x[c, h·r + i, w·r + j]."""
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
