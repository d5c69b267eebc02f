"""Losses and distances: tensors compared number by number, and one value over all of them."""

from __future__ import annotations

from torch import nn

from fxprune.rules.channels import remap
from fxprune.rules.registry import register


@register(nn.MSELoss, nn.L1Loss, nn.SmoothL1Loss, nn.HuberLoss)
@register("mse_loss", "l1_loss", "smooth_l1_loss", "huber_loss", "binary_cross_entropy",
    "binary_cross_entropy_with_logits", "soft_margin_loss")  # fmt: skip
def loss(a, call):
    """y = the mean or sum of l(x, t) over everything, or each of them."""
    each = a.meet(call, [a.channels(x) for x in call.inputs])
    if call.shape == each.shape:  # reduction="none"
        return each
    return a.reduce(call, each, range(len(each.shape)), False)


@register(nn.PairwiseDistance)
@register("pairwise_distance")
def pairwise(a, call):
    """y = ‖x − w + ε‖ over the last dimension."""
    apart = a.meet(call, [a.channels(x) for x in call.inputs])
    return a.reduce(call, apart, [-1], len(call.shape) == len(apart.shape))


@register("cdist")
def cdist(a, call):
    """y[i, j] = ‖x[i] − w[j]‖."""
    x, w = (a.channels(x) for x in call.inputs)
    (n, width), m = x.shape[-2:], w.shape[-2]
    rank, other = len(x.shape), len(w.shape)
    rows = remap(x, {d: d + (d == rank - 1) for d in range(rank)}, (*x.shape[:-1], 1, width))
    columns = remap(
        w, {d: d + (d >= other - 2) for d in range(other)}, (*w.shape[:-2], 1, m, width)
    )
    apart = a.meet(call, [rows, columns], shape=(*call.shape[:-2], n, m, width))
    return a.reduce(call, apart, [-1], False)
