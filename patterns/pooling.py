"""Pooling and resizing: windows over positions, each channel by itself."""

from __future__ import annotations

from torch import nn
from torch.nn import functional as F

from fxprune.patterns.convolution import as_tuple
from fxprune.patterns.joining import with_ends
from fxprune.rules.channels import Channels
from fxprune.rules.registry import register

MAX = (nn.MaxPool1d, nn.MaxPool2d, nn.MaxPool3d)
AVERAGE = (nn.AvgPool1d, nn.AvgPool2d, nn.AvgPool3d)
ADAPTIVE = (nn.AdaptiveAvgPool1d, nn.AdaptiveAvgPool2d, nn.AdaptiveAvgPool3d,
            nn.AdaptiveMaxPool1d, nn.AdaptiveMaxPool2d, nn.AdaptiveMaxPool3d,
            nn.FractionalMaxPool2d, nn.FractionalMaxPool3d)  # fmt: skip


def windows(a, call, x, dims, *, constant=True):
    """Channels pass; positions become other positions. A constant map stays what it is."""
    x = a.freeze_dims(x, dims, "a window slides over them", call)
    x = a.through_window(x) if constant else a.forget(x)
    if isinstance(call.spec, (tuple, list)):
        return tuple(Channels(shape, x.axes) for shape in call.shapes)
    return Channels(call.shape, x.axes)


def spatial(call):
    """How many dimensions the windows have, by the name of the class or function: …pool2d."""
    word = call.word
    return next(int(c) for c in word if c.isdigit())


def pool(a, call, *, slid=None, constant=True):
    """Over the last dimensions; ``slid`` are those along which the windows slide, if not all."""
    x = call.channels()
    slid = range(spatial(call)) if slid is None else slid
    first = len(x.shape) - spatial(call)
    return windows(a, call, x, [first + d for d in slid], constant=constant)


def slid_along(call):
    """The dimensions along which a window is more than each place by itself."""
    m, dims = call.module, range(spatial(call))
    if isinstance(call.spec, (tuple, list)):  # it also tells where in all of them it found what
        return dims

    def of(position, name):  # 0 where it is not said
        value = as_tuple((call.arg(position, name) if m is None else getattr(m, name)) or 0)
        return value * len(dims) if len(value) == 1 else value

    size, stride, padding = of(1, "kernel_size"), of(2, "stride"), of(3, "padding")
    return [d for d in dims if (size[d], stride[d] or size[d], padding[d]) != (1, 1, 0)]


@register(*MAX, kind="pool")
@register("max_pool1d", "max_pool2d", "max_pool3d", kind="pool")
def max_pool(a, call):
    """Padding of a max is -∞: a constant stays one."""
    return pool(a, call, slid=slid_along(call))


@register("max_pool1d_with_indices", "max_pool2d_with_indices", "max_pool3d_with_indices",
    "adaptive_max_pool1d", "adaptive_max_pool2d", "adaptive_max_pool3d", kind="pool")  # fmt: skip
@register(*ADAPTIVE, kind="pool")
@register("adaptive_avg_pool1d", "adaptive_avg_pool2d", "adaptive_avg_pool3d", kind="pool")
def unpadded_pool(a, call):
    """Adaptive windows have no padding, that of a max is -∞: a constant stays one."""
    return pool(a, call)


def average(a, call, padding, counts_padding, divisor):
    y = pool(a, call, slid=slid_along(call), constant=divisor is None)
    padded = any(p > 0 for p in (padding if isinstance(padding, (tuple, list)) else (padding,)))
    return a.bordered(y) if padded and counts_padding else y


@register(*AVERAGE, kind="pool")
def average_pool(a, call):
    """y[c] = mean of x[c] in a window."""
    m = call.module
    return average(a, call, m.padding, m.count_include_pad, getattr(m, "divisor_override", None))


@register("avg_pool1d", "avg_pool2d", "avg_pool3d", kind="pool")
def average_pool_function(a, call):
    """y[c] = mean of x[c] in a window."""
    padding, counted = call.arg(3, "padding", 0), call.arg(5, "count_include_pad", True)
    return average(a, call, padding, counted, call.arg(6, "divisor_override"))


@register(nn.LPPool1d, nn.LPPool2d, kind="pool")
@register("lp_pool1d", "lp_pool2d", kind="pool")
def power_pool(a, call):
    """y[c] = (Σ x[c]^p in a window)^(1/p)."""
    return pool(a, call, constant=False)


@register(nn.Upsample, nn.UpsamplingNearest2d, nn.UpsamplingBilinear2d, kind="resize")
@register("interpolate", "upsample", "upsample_nearest", "upsample_bilinear", kind="resize")
def interpolate(a, call):
    """Weights of neighbours sum to one."""
    x = call.channels()
    return windows(a, call, x, range(2, len(x.shape)))


@register("grid_sample", kind="resize")
def grid_sample(a, call):
    """y[c] = x[c] at positions that another tensor holds."""
    x, grid = call.channels(), call.channels(1, "grid")
    grid = a.freeze_dims(grid, range(1, len(grid.shape)), "positions are read from it", call)
    x = a.freeze_dims(x, range(2, len(x.shape)), "a window slides over them", call)
    # Heads may have been put into the batch: then those of the grid go with them.
    ones = (1,) * (len(x.shape) - 2)
    whole, batch = Channels((*x.shape[:2], *ones), x.axes), (grid.shape[0], 1, *ones)
    x = a.meet(call, [whole, Channels(batch, grid.axes)], None, whole.shape)
    return windows(a, call, x, [], constant=False)


@register(nn.MaxUnpool1d, nn.MaxUnpool2d, nn.MaxUnpool3d, kind="pool")
@register("max_unpool1d", "max_unpool2d", "max_unpool3d", kind="pool")
def unpool(a, call):
    """y[c] = x[c] at the positions that a pooling has told, and zeros elsewhere."""
    first = a.channels(call.inputs[0])
    x, at = (
        a.freeze_dims(a.channels(t), range(2, len(first.shape)), "a window slides over them", call)
        for t in call.inputs[:2]
    )
    met = a.meet(call, [x, at], lambda t: t[0], x.shape)
    return a.bordered(windows(a, call, met, []))


PADS = (
    nn.ZeroPad1d, nn.ZeroPad2d, nn.ZeroPad3d, nn.ConstantPad1d, nn.ConstantPad2d, nn.ConstantPad3d,
    nn.ReflectionPad1d, nn.ReflectionPad2d, nn.ReflectionPad3d, nn.ReplicationPad1d,
    nn.ReplicationPad2d, nn.ReplicationPad3d, nn.CircularPad1d, nn.CircularPad2d, nn.CircularPad3d,
)  # fmt: skip


def pad(a, call, amounts, numbers, mode, value):
    """Along channels a pad is slices of its own; around positions it is a border."""
    x = call.channels()
    rank = len(x.shape)
    dims = [rank - 1 - i // 2 for i, n in enumerate(amounts) if n]
    if mode != "constant":
        return windows(a, call, a.freeze_dims(x, dims, "they are padded", call), dims)
    value = 0.0 if value is None else value

    labelled = {d for axis in x.axes for d in axis.dims}
    wider = a.decide(call, lambda: widened(a, x, amounts, numbers))

    def padded(t):  # slices of which nothing is known but that they are there stay
        stiff = labelled.difference(wider)
        inside = [n if rank - 1 - i // 2 in stiff else 0 for i, n in enumerate(amounts)]
        return F.pad(t, inside, value=value if t.is_floating_point() else 0)

    for dim in wider:
        around = a.put_around(call, x.axis(dim), dim, at_ends(amounts, rank, dim), value)
        x = with_ends(a, call, x, dim, *around)
    y = a.move(call, x, padded, call.shape, touched=(set(dims) & labelled).difference(wider))
    if a.is_unsure(call):  # other inputs may be padded where this one is not
        return a.forget(y)
    if set(dims) <= labelled:
        return y
    return a.bordered(y) if value == 0 else a.forget(y)


def widened(a, x, amounts, numbers):
    """Dimensions of channels that get as many slices for every input; of those that one channel
    dimension was cut in (heads and their slices), where it is one alone."""
    rank, found = len(x.shape), []
    for axis in x.axes:
        dims = [dim for dim in axis.dims if any(at_ends(amounts, rank, dim))]
        if len(dims) != 1 or axis.blank:
            continue
        before, behind = at_ends(amounts, rank, dims[0])
        fixed = not any(map(a.varies, at_ends(numbers, rank, dims[0])))
        if before >= 0 and behind >= 0 and fixed:
            found += dims
    return found


def at_ends(amounts, rank, dim):
    """Of what is put around a tensor, that before and behind ``dim``."""
    at = 2 * (rank - 1 - dim)
    return tuple(amounts[at : at + 2]) if at < len(amounts) else (0, 0)


def new_amounts(amounts, new):
    """What is to be put around a tensor: of slices that are channels, those that stay."""
    rank, found = len(new.before), list(amounts)
    for dim in range(rank):
        before, behind = at_ends(amounts, rank, dim)
        left = new.keep_of_result(dim) if min(before, behind) >= 0 < before + behind else None
        if left is not None:
            end = len(left) - behind
            at = 2 * (rank - 1 - dim)
            found[at : at + 2] = left.before(before), left.before(len(left)) - left.before(end)
    return tuple(found)


def new_padding(module, new):
    return {"padding": new_amounts(module.padding, new)}


@register(*PADS, kind="pad", attributes=new_padding)
def pad_module(a, call):
    """y[c] = x[c] with values put around it."""
    m = call.module
    name = type(m).__name__
    mode = "constant" if name.startswith(("Zero", "Constant")) else "edge"
    return pad(a, call, list(m.padding), list(m.padding), mode, getattr(m, "value", 0.0))


def new_pad(call, new):
    return {(1, "pad"): new_amounts(call.recorded(1, "pad"), new)}


@register("pad", "constant_pad_nd", kind="pad", resize=new_pad)
def pad_function(a, call):
    """x with values put around it, positions or channels."""
    amounts = call.recorded(1, "pad")
    numbers = call.node.args[1] if len(call.node.args) > 1 else call.node.kwargs["pad"]
    mode = call.arg(2, "mode", "constant")
    if not isinstance(mode, str):  # aten: constant_pad_nd(x, pad, value)
        return pad(a, call, amounts, numbers, "constant", mode)
    return pad(a, call, amounts, numbers, mode, call.arg(3, "value", 0.0))


@register(F.unfold, nn.Unfold, kind="pool")
def unfold(a, call):
    """y[c · k + j, l] = x[c] at place j of the l-th window of k places."""
    m = call.module
    kernel = pair(call.arg(1, "kernel_size") if m is None else m.kernel_size)
    padding = pair(call.arg(3, "padding", 0) if m is None else m.padding)
    x, places = call.channels(), kernel[0] * kernel[1]
    x = a.through_window(a.freeze_dims(x, [-1, -2], "a window slides over them", call))
    channel = len(x.shape) - 3
    shape = (*x.shape[:channel], x.shape[channel] * places, call.node.meta["spec"].shape[-1])
    flat = Channels((*x.shape[: channel + 1], 1), x.axes)
    y = a.move(call, flat, lambda t: t.repeat_interleave(places, channel), shape, touched=[channel])
    return a.bordered(y) if any(padding) else y


@register(F.fold, nn.Fold)
def fold(a, call):
    """y[c] = the sum of x[c · k + j] wherever place j of a window of k places lies."""
    m = call.module
    kernel = pair(call.arg(2, "kernel_size") if m is None else m.kernel_size)
    x, places = call.channels(), kernel[0] * kernel[1]
    x = a.freeze_dims(x, [-1], "a window slides over them", call)
    rest, channel = x.shape[:-2], len(x.shape) - 2
    parts = a.view(call, x, (*rest, x.shape[channel] // places, places, x.shape[-1]))
    y = a.reduce(call, parts, [channel + 1], False)
    size = call.node.meta["spec"].shape[-2:]
    return a.forget(Channels((*rest, y.shape[channel], *size), y.axes))


def pair(value):
    return (value, value) if isinstance(value, int) else tuple(value)
