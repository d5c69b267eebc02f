"""Convolutions: y[o] = Σᵢ W[o, i] * x[i] + b[o], per group of channels."""

from __future__ import annotations

import torch
from torch import nn

from fxprune.patterns.linear import add_bias
from fxprune.rules.call import Named
from fxprune.rules.channels import Channels, remap
from fxprune.rules.registry import register


def convolve(a, call, x, weight, bias, groups, *, transposed, border, moves=True):
    """Each group's input channels are read by its filters; filters make the result's channels.

    ``groups`` is how many there were when the run was recorded; ``moves``: it strides or pads."""
    shape = call.shape
    if isinstance(weight, str):
        weight = a.member(call, weight)
    w_shape = weight_shape(a, weight)
    old = weight.spec.shape if isinstance(weight, Named) else call.recorded(1, "weight").shape
    kernel = w_shape[2:]
    weight = a.kernel(call, weight, range(2, len(w_shape)))
    if isinstance(weight, Channels):  # computed in the forward, with an axis on every dimension
        mixed = [axis for axis in weight.axes if len(axis.dims) > 1]  # they make and read at once
        weight = a.freeze_dims(
            weight, [d for axis in mixed for d in axis.dims], "its filters are cut across", call
        )
        for axis in weight.touching([1 if transposed else 0]):
            a.makes(axis)
    i, o = (0, 1) if transposed else (1, 0)  # the dimensions of the weight that read, and make
    channel = len(x.shape) - len(kernel) - 1
    others = [d for d in range(len(x.shape)) if d != channel]
    beside = x.touching(others)
    apart = beside and all(channel not in axis.dims for axis in beside)
    if apart and not moves and {*kernel} == {1} and groups == 1:
        # A linear layer at each place: what lies beside its channels may be channels, too.
        w = call.tensor(weight, {"out": (o,), "in": (i,)}, w_shape)
        w = remap(w, {0: 0, 1: 1}, w_shape[:2])
        y = a.contract(call, x, w, [(channel, i)], [], {d: d for d in others}, {o: channel}, shape)
        return add_bias(a, call, y, bias, channel)
    x = a.freeze_dims(x, others, "a convolution slides over them or they are its batch", call)
    if groups == 1:
        w_in = call.tensor(weight, {"in": (i,)}, w_shape)
        w_out = call.tensor(weight, {"out": (o,)}, w_shape)
        a.consume(call, x, w_in, [(channel, i)], border)
        y = made_by(remap(w_out, {o: channel}, shape))
    else:
        # The model as it is tells what kind it is: a group may be left with one channel.
        before = old[0] // groups, old[1]
        whole = a.are_groups_whole(call)
        if whole or 1 in before:  # groups can go as a whole
            named = isinstance(weight, Named)
            groups = a.groups_of(weight, groups) if named else w_shape[0] // before[0]
        view = groups, w_shape[0] // groups, *w_shape[1:]
        one = before[i] == 1, before[o] == 1
        made = of_groups(a, call, x, weight, view, (channel, i + 1, o + 1), one, border, whole)
        y = remap(a.view(call, made, (made.shape[0] * made.shape[1],)), {0: channel}, shape)
    return add_bias(a, call, y, bias, channel)


def of_groups(a, call, x, weight, view, dims, one, border, whole):
    """(groups, channels that each makes), from a weight seen as (groups, …).

    ``dims`` are that of the channels in ``x``, and those of the weight that read and make;
    ``one`` tells whether a group reads one channel, and whether it makes one;
    ``whole``: it goes with all that it reads and makes, as the head of an attention does."""
    channel, i, o = dims
    parts = (view[0], view[i])
    taken = a.view(call, x, (*x.shape[:channel], *parts, *x.shape[channel + 1 :]))

    def filters():
        w = call.tensor(weight, {"out": tuple(sorted((0, o)))}, view)
        return remap(w, {0: 0, o: 1}, (view[0], view[o]))

    made = filters()
    if one[0]:  # depthwise: a group is one channel with its filters
        taken = remap(taken, {channel: 0}, (view[0], 1))
        computed = isinstance(weight, Channels)
        met = a.meet(call, [made, taken], zero_by_one if computed else None, made.shape)
        # Filters of one channel are told apart by their own labels, in the order they have now.
        own = a.emit(filters(), (0, 1), None)
        return met if computed else own  # whose removed slices are masked
    w_in = call.tensor(weight, {"in": tuple(sorted((0, i)))}, view)
    a.consume(call, taken, w_in, [(channel, 0), (channel + 1, i)], border)
    if one[1]:  # a group goes with its one filter
        taken = remap(taken, {channel: 0, channel + 1: 1}, parts)
        a.meet(call, [made, taken], None, parts)
        return made
    a.in_groups(call, [*made.axes, *taken.touching([channel])])
    if whole:
        groups = [
            a.tie(call, axis, [d]) for x, d in ((made, 0), (w_in, 0), (taken, channel))
            for axis in x.touching([d])
        ]  # fmt: skip
        a.meet(call, [Channels(parts[:1], (axis.on((0,)),)) for axis in groups], None, parts[:1])
        return made
    for axis in [*made.axes, *w_in.axes]:  # every group keeps equally many channels
        a.hold(axis, [0])
    for axis in taken.touching([channel]):
        a.hold(axis, [channel])
    return made


def made_by(filters):
    """A result by its channels: what one filter of one number is, it is not."""
    return Channels(filters.shape, filters.axes)


def zero_by_one(said):
    """What a product says where one factor is zero; else it is not known."""
    return torch.where((said[0] == 0) | (said[1] == 0), 0.0, torch.nan)


def weight_shape(a, weight):
    """The weight's shape at the widths of this pass."""
    return a.tensor_shape(weight) if isinstance(weight, Named) else weight.shape


def border_of(transposed, padding, mode, kernel):
    """Where zero padding or a transposed stride keeps a constant from staying one."""
    if transposed:
        return "pattern" if any(k > 1 for k in kernel) else ""
    if mode != "zeros" or padding == "valid":
        return ""
    padded = isinstance(padding, str) or any(p > 0 for p in as_tuple(padding))
    return "padding" if padded else ""


def as_tuple(value):
    return tuple(value) if isinstance(value, (tuple, list)) else (value,)


def widths(m, new):
    view = new.views["weight"]
    groups, first, second = (1, *view[:2]) if m.groups == 1 else view[:3]
    if m.groups > 1 and len(view) == m.weight.dim():  # other code reads it, and not in groups
        if m.weight.shape[0] != m.groups:
            return {}
        groups, first, second = view[0], 1, view[1]  # each row is one
    reads, makes = (first, second) if m.transposed else (second, first)
    return {
        "in_channels": reads * groups,
        "out_channels": makes * groups,
        "groups": groups,
    }


@register(
    nn.Conv1d, nn.Conv2d, nn.Conv3d, nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d,
    kind="conv", attributes=widths, bias=True,
)  # fmt: skip
def conv_module(a, call):
    """y[o] = Σᵢ W[o, i] * x[i] + b[o], in each group of channels."""
    m = call.module
    border = border_of(m.transposed, m.padding, m.padding_mode, m.kernel_size)
    return convolve(
        a, call, call.channels(), "weight", "bias", m.groups, transposed=m.transposed,
        border=border, moves=strides_or_pads(m.stride, m.padding),
    )  # fmt: skip


def strides_or_pads(stride, padding):
    return {*as_tuple(stride)} != {1} or (padding != "valid" and any(map(bool, as_tuple(padding))))


def new_groups(position, transposed=False):
    """For a call whose groups are an argument: groups of one channel or filter can go."""

    def resize(call, new):
        if call.recorded(position, "groups", 1) == 1:
            return {}
        shape = weight_shape(call.algebra, call.arg(1, "weight"))
        channel = len(new.result) - len(shape) + 1
        whole = new.result[channel] if transposed else call.channels().shape[channel]
        return {(position, "groups"): whole // shape[1]}

    return resize


@register("conv1d", "conv2d", "conv3d", kind="conv", bias=(2, "bias"), resize=new_groups(6))
def conv_function(a, call):
    """y[o] = Σᵢ W[o, i] * x[i] + b[o], with the weight as an argument."""
    weight = call.arg(1, "weight")
    border = border_of(False, call.arg(4, "padding", 0), "zeros", ())
    return convolve(
        a, call, call.channels(), weight, call.arg(2, "bias"), call.recorded(6, "groups", 1),
        transposed=False, border=border,
        moves=strides_or_pads(call.arg(3, "stride", 1), call.arg(4, "padding", 0)),
    )  # fmt: skip


@register("conv_transpose1d", "conv_transpose2d", "conv_transpose3d", kind="conv", bias=(2, "bias"),
    resize=new_groups(6, transposed=True))  # fmt: skip
def conv_transpose_function(a, call):
    """y[o] = Σᵢ W[i, o] *ᵀ x[i] + b[o]."""
    weight = call.arg(1, "weight")
    border = border_of(True, 0, "zeros", weight_shape(a, weight)[2:])
    return convolve(
        a, call, call.channels(), weight, call.arg(2, "bias"), call.recorded(6, "groups", 1),
        transposed=True, border=border,
    )  # fmt: skip


@register("convolution")
def aten_convolution(a, call):
    """aten's one form of all of them."""
    transposed, weight = call.arg(6, "transposed"), call.arg(1, "weight")
    border = border_of(transposed, call.arg(4, "padding"), "zeros", weight_shape(a, weight)[2:])
    return convolve(
        a, call, call.channels(), weight, call.arg(2, "bias"), call.recorded(8, "groups"),
        transposed=transposed, border=border,
    )  # fmt: skip
