"""Normalisations: y = (x - mean) / std · γ + β, over a batch, a channel, a group or all."""

from __future__ import annotations

import torch
from fxprune.patterns.linear import along
from torch import nn

from fxprune.channels import remap
from fxprune.registry import register


def per_channel(a, call, x, names, function, dim=1):
    """Vectors over the channels: each is one more operand that shares their units."""
    roles = {"weight": "scale", "bias": "shift"}
    given = {
        key: along(t, dim, x)
        for key, value in names.items()
        if (t := call.tensor(value, {roles.get(key, "stat"): (0,)})) is not None
    }

    def constants(tensors):
        return function(tensors[0], **dict(zip(given, tensors[1:], strict=True)))

    return a.meet(call, [x, *given.values()], constants, x.shape)


def normaliser(eps):
    """What becomes of a constant map: without running statistics its own mean is taken off."""

    def normalise(t, mean=None, var=None, weight=None, bias=None):
        t = torch.zeros_like(t) if mean is None else (t - mean) / torch.sqrt(var + eps)
        t = t if weight is None else t * weight
        return t if bias is None else t + bias

    return normalise


def batch(a, call, x, names, eps):
    if len(x.shape) < 2:
        x = a.freeze_dims(x, range(len(x.shape)), "batch norm of one sample", call)
    own = a.freeze_dims(x, [0, *range(2, len(x.shape))], "batch norm averages over them", call)

    return per_channel(a, call, own, names, normaliser(eps))


def norm_width(m, new):
    return {"num_features": new.input[1]}


@register(nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm, kind="norm",
        attributes=norm_width, absorb="running_mean")  # fmt: skip
def batch_norm(a, call):
    names = {"mean": "running_mean", "var": "running_var", "weight": "weight", "bias": "bias"}
    return batch(a, call, call.channels(), names, call.module.eps)


@register("batch_norm", kind="norm")
def batch_norm_function(a, call):
    """F.batch_norm and torch.batch_norm order their arguments differently."""
    by_name = {"mean": (1, "running_mean"), "var": (2, "running_var")}
    order = [("weight", 3), ("bias", 4)]
    if len(call.args) == 9:  # torch.batch_norm(input, weight, bias, mean, var, …)
        names = dict(zip(("weight", "bias", "mean", "var"), call.args[1:5], strict=True))
        eps = call.args[7]
    else:
        names = {key: call.arg(*place) for key, place in by_name.items()}
        names |= {key: call.arg(i, key) for key, i in order}
        eps = call.arg(7, "eps", 1e-5)
    return batch(a, call, call.channels(), names, eps)


@register(
    nn.InstanceNorm1d, nn.InstanceNorm2d, nn.InstanceNorm3d, kind="norm", attributes=norm_width
)
def instance_norm(a, call):
    x = call.channels()
    m = call.module
    names = {"weight": "weight", "bias": "bias"}
    if m.track_running_stats:
        names |= {"mean": "running_mean", "var": "running_var"}
    unbatched = len(x.shape) == (2 if isinstance(m, nn.InstanceNorm1d) else
                                 3 if isinstance(m, nn.InstanceNorm2d) else 4)  # fmt: skip
    return instances(a, call, x, names, m.eps, 0 if unbatched else 1)


def instances(a, call, x, names, eps, dim=1):
    rest = [d for d in range(len(x.shape)) if d != dim]
    own = a.through_window(a.freeze_dims(x, rest, "instance norm averages over them", call))

    return per_channel(a, call, own, names, normaliser(eps), dim)


@register("instance_norm", kind="norm")
def instance_norm_function(a, call):
    names = {"weight": call.arg(3, "weight"), "bias": call.arg(4, "bias")}
    return instances(a, call, call.channels(), names, 1e-5)


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
    return layer(a, call, call.channels(), call.module.normalized_shape, "weight", "bias")


@register("layer_norm", kind="layernorm", resize=layer_size)
def layer_norm_function(a, call):
    shape = call.arg(1, "normalized_shape")
    return layer(a, call, call.channels(), shape, call.arg(2, "weight"), call.arg(3, "bias"))


@register(nn.RMSNorm, kind="layernorm", attributes=layer_width)
def rms_norm(a, call):
    return layer(a, call, call.channels(), call.module.normalized_shape, "weight", None)


@register("rms_norm", kind="layernorm", resize=layer_size)
def rms_norm_function(a, call):
    shape = call.arg(1, "normalized_shape")
    return layer(a, call, call.channels(), shape, call.arg(2, "weight"), None)


def group(a, call, x, groups, weight, bias):
    """Each group of channels is one sample: groups keep equally many, and see fewer."""
    x = a.freeze_dims(x, [0, *range(2, len(x.shape))], "group norm averages over them", call)
    width = x.shape[1]
    if call.node.meta["spec"].shape[1] > groups:
        parts = a.view(call, remap(x, {1: 0}, (width,)), (groups, width // groups))
        for axis in parts.touching([0]):
            a.hold(axis, [0])
        for axis in x.axes:
            a.approximate(axis, call)
    given = {
        role: along(t, 1, x)
        for value, role in ((weight, "scale"), (bias, "shift"))
        if (t := call.tensor(value, {role: (0,)})) is not None
    }
    y = a.meet(call, [x, *given.values()], None, x.shape)
    return a.emit(y, [1], given.get("shift"), known="scale" in given)


def group_width(m, new):
    width = new.input[1]
    groups = width if m.num_groups == m.num_channels else m.num_groups
    return {"num_channels": width, "num_groups": groups}


def group_count(call, new):
    """F.group_norm of groups of one channel has as many groups as channels."""
    whole = call.node.meta["spec"].shape[1] == call.arg(1, "num_groups")
    return {(1, "num_groups"): new.result[1]} if whole else {}


@register(nn.GroupNorm, kind="norm", attributes=group_width)
def group_norm(a, call):
    m = call.module
    return group(a, call, call.channels(), m.num_groups, "weight", "bias")


@register("group_norm", kind="norm", resize=group_count)
def group_norm_function(a, call):
    groups = call.arg(1, "num_groups")
    return group(a, call, call.channels(), groups, call.arg(2, "weight"), call.arg(3, "bias"))
