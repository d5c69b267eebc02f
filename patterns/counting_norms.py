"""Norms over channels, which see fewer of them: layer, RMS and group norm."""

from __future__ import annotations

from torch import nn

from fxprune.patterns.linear import along
from fxprune.rules.channels import remap
from fxprune.rules.registry import register


def layer(a, call, x, normalised, weight, bias):
    """Over the last dimensions, channels among them: fewer channels are another mean and norm."""
    rank, over = len(x.shape), len(normalised)
    dims = list(range(rank - over, rank))
    for axis in x.touching(dims):
        if set(axis.dims) <= set(dims):
            a.approximate(axis, call)
        else:  # every head by itself
            x = a.freeze_dims(x, dims, "", call)
    roles = {"weight": "scale", "bias": "shift"}
    given = {}
    for key, value in (("weight", weight), ("bias", bias)):
        # A matrix of weights is per element, not per channel: each dimension is its own axis.
        axes = {roles[key]: (0,)} if over == 1 else {f"bare{d}": (d,) for d in range(over)}
        t = call.tensor(value, axes)
        if t is not None:
            given[key] = t
    y = a.meet(call, [x, *given.values()], None, x.shape)
    shift = given.get("bias")
    if shift is not None:
        shift = a.view(call, shift, (1,) * (rank - over) + shift.shape)
    # Without γ a masked channel is normalised like the others, and no constant.
    return a.emit(y, dims, shift, known="weight" in given)


def layer_width(m, new):
    return {"normalized_shape": tuple(new.input[len(new.input) - len(m.normalized_shape) :])}


def layer_size(call, new):
    over = len(call.arg(1, "normalized_shape"))
    return {(1, "normalized_shape"): list(new.result[len(new.result) - over :])}


@register(nn.LayerNorm, kind="layernorm", attributes=layer_width)
def layer_norm(a, call):
    """y[c] = (x[c] - mean over c) / std over c · γ[c] + β[c]."""
    return layer(a, call, call.channels(), call.module.normalized_shape, "weight", "bias")


@register("layer_norm", kind="layernorm", resize=layer_size)
def layer_norm_function(a, call):
    """y[c] = (x[c] - mean over c) / std over c · γ[c] + β[c]."""
    shape = call.arg(1, "normalized_shape")
    return layer(a, call, call.channels(), shape, call.arg(2, "weight"), call.arg(3, "bias"))


@register(nn.RMSNorm, kind="layernorm", attributes=layer_width)
def rms_norm(a, call):
    """y[c] = x[c] / √(mean over c of x² + ε) · γ[c]."""
    return layer(a, call, call.channels(), call.module.normalized_shape, "weight", None)


@register("rms_norm", kind="layernorm", resize=layer_size)
def rms_norm_function(a, call):
    """y[c] = x[c] / √(mean over c of x² + ε) · γ[c]."""
    shape = call.arg(1, "normalized_shape")
    return layer(a, call, call.channels(), shape, call.arg(2, "weight"), None)


def group(a, call, x, groups, weight, bias):
    """Each group of channels is one sample: groups keep equally many, and see fewer. Where channels
    go by whole groups, such as the heads before a norm of each, fewer groups are left."""
    x = a.freeze_dims(x, [0, *range(2, len(x.shape))], "group norm averages over them", call)
    width = x.shape[1]
    if not is_single(call, groups):
        groups = a.parts_left(call, 1, groups)
        parts = a.view(call, remap(x, {1: 0}, (width,)), (groups, width // groups))
        for axis in parts.touching([0]):
            a.hold(axis, [0], rather=True)
        for axis in x.axes:
            a.approximate(axis, call)
    given = {
        role: along(t, 1, x)
        for value, role in ((weight, "scale"), (bias, "shift"))
        if (t := call.tensor(value, {role: (0,)})) is not None
    }
    y = a.meet(call, [x, *given.values()], None, x.shape)
    return a.emit(y, [1], given.get("shift"), known="scale" in given)


def is_single(call, groups):
    """Whether each channel was a group of its own when the run was recorded."""
    return call.node.meta["spec"].shape[1] == call.recorded(1, "num_groups", groups)


def group_width(m, new):
    width = new.input[1]
    groups = width if m.num_groups == m.num_channels else new.parts(1, m.num_groups)
    return {"num_channels": width, "num_groups": groups}


def group_count(call, new):
    """F.group_norm has as many groups as channels are left of."""
    return {(1, "num_groups"): new.parts(1, call.recorded(1, "num_groups"))}


@register(nn.GroupNorm, kind="norm", attributes=group_width)
def group_norm(a, call):
    """y[g, c] = (x[g, c] - mean over c) / std over c · γ[g, c] + β[g, c]."""
    m = call.module
    return group(a, call, call.channels(), m.num_groups, "weight", "bias")


@register("group_norm", kind="norm", resize=group_count)
def group_norm_function(a, call):
    """y[g, c] = (x[g, c] - mean over c) / std over c · γ[g, c] + β[g, c]."""
    groups = call.recorded(1, "num_groups")
    return group(a, call, call.channels(), groups, call.arg(2, "weight"), call.arg(3, "bias"))
