"""Batch and instance norms: y = (x - mean) / std · γ + β, each channel by itself."""

from __future__ import annotations

import torch
from torch import nn

from fxprune.patterns.linear import along
from fxprune.rules.registry import register


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

    operands = [x, *given.values()]
    scale = given["weight"].axes if "weight" in given else ()
    if a.masks_scales and [own.source.role for own in scale if own.source] == ["scale"]:
        # x · 0 + β, whatever x is.
        y = a.emit(a.meet(call, operands, None, x.shape), [dim], given.get("bias"))
    else:
        y = a.meet(call, operands, constants, x.shape)
    return a.standardised(call, y, given.get("bias"), given.get("weight"), given.get("var"))


def normaliser(eps, running=True):
    """What becomes of a constant map: without running statistics its own mean is taken off."""

    def normalise(t, mean=None, var=None, weight=None, bias=None):
        known = running and mean is not None
        t = (t - mean) / torch.sqrt(var + eps) if known else torch.zeros_like(t)
        t = t if weight is None else t * weight
        return t if bias is None else t + bias

    return normalise


def averaged(a, call, x, dims, why, counts):
    """``x``, whose statistics along ``dims`` are taken: for good where it ``counts`` in eval mode,
    too. Fewer channels are another mean then (of what a standardised weight reads, mostly)."""
    if counts:
        counted = [axis for axis in x.touching(dims) if set(axis.dims) <= set(dims)]
        for axis in counted:
            a.approximate(axis, call)
        dims = set(dims).difference(*(axis.dims for axis in counted))
    return a.freeze_dims(x, dims, why, call)


def batch(a, call, x, names, eps, counts=False):
    """``counts``: its statistics are those of ``x``, in eval mode, too."""
    if len(x.shape) < 2:
        x = a.freeze_dims(x, range(len(x.shape)), "batch norm of one sample", call)
    over = [0, *range(2, len(x.shape))]
    own = averaged(a, call, x, over, "batch norm averages over them", counts)

    return per_channel(a, call, own, names, normaliser(eps, not counts))


def norm_width(m, new):
    own = [view[0] for view in new.views.values() if view]
    if own:
        return {"num_features": own[0]}
    dim = channel_dim(m, len(new.input))  # it says nothing where it is not what comes in
    said = new.before[dim] == m.num_features if new.input else False
    return {"num_features": new.input[dim]} if said else {}


def channel_dim(m, rank):
    """Where channels lie; instance norms also take an input that is no batch."""
    alone = {2: nn.InstanceNorm1d, 3: nn.InstanceNorm2d, 4: nn.InstanceNorm3d}.get(rank)
    return 0 if alone is not None and isinstance(m, alone) else 1


@register(nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm, kind="norm",
        attributes=norm_width, absorb="running_mean")  # fmt: skip
def batch_norm(a, call):
    """y[c] = (x[c] - mean[c]) / √(var[c] + ε) · γ[c] + β[c]."""
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
    return batch(a, call, call.channels(), names, eps, call.arg(5, "training", False))


@register(
    nn.InstanceNorm1d, nn.InstanceNorm2d, nn.InstanceNorm3d, kind="norm", attributes=norm_width
)
def instance_norm(a, call):
    """y[c] = (x[c] - mean of x[c]) / std of x[c] · γ[c] + β[c]."""
    x = call.channels()
    m = call.module
    names = {"weight": "weight", "bias": "bias"}
    if m.track_running_stats:
        names |= {"mean": "running_mean", "var": "running_var"}
    counts, dim = not m.track_running_stats, channel_dim(m, len(x.shape))
    return instances(a, call, x, names, normaliser(m.eps), counts, dim)


def instances(a, call, x, names, function, counts, dim=1):
    x = a.freeze_dims(x, range(dim), "instance norm averages over them", call)
    over = range(dim + 1, len(x.shape))
    own = averaged(a, call, x, over, "instance norm averages over them", counts)

    return per_channel(a, call, a.through_window(own), names, function, dim)


@register("instance_norm", kind="norm")
def instance_norm_function(a, call):
    """y[c] = (x[c] - mean of x[c]) / std of x[c] · γ[c] + β[c]."""
    places = {"mean": (1, "running_mean"), "var": (2, "running_var"),
              "weight": (3, "weight"), "bias": (4, "bias")}  # fmt: skip
    names = {key: call.arg(*place) for key, place in places.items()}
    counts = call.arg(5, "use_input_stats", True)
    function = normaliser(call.arg(7, "eps", 1e-5), not counts)
    return instances(a, call, call.channels(), names, function, counts)
