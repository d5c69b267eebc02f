"""Reductions: one value over whole dimensions."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import nn

from fxprune.rules.call import Named
from fxprune.rules.channels import Channels
from fxprune.rules.registry import register


def over(call, position, x):
    """The dimensions a reduction goes over; all of them where none is given (``unbiased``, a flag,
    stands in their place)."""
    dims = call.arg(position, "dim")
    if dims is None or isinstance(dims, bool) or (isinstance(dims, (tuple, list)) and not dims):
        return list(range(len(x.shape)))
    return [dims] if isinstance(dims, int) else list(dims)


def of_two(call):
    """Whether it is the larger or smaller of two tensors: ``torch.max(x, y)``."""
    return isinstance(call.arg(1, "other"), (Channels, Named))


def reduce(a, call, dim_at=1, keep_at=2):
    x = call.channels()
    if of_two(call):
        return a.elementwise(call)
    dims = over(call, dim_at, x)
    if isinstance(call.inputs[0], Named) and call.inputs[0].spec.dtype == torch.bool:
        x = a.freeze_dims(x, dims, f"{call.word} depends on which channels there are", call)
    keepdim = bool(call.arg(keep_at, "keepdim", False))
    y = a.reduce(call, x, dims, keepdim, adds=call.word == "sum")
    return y if not isinstance(call.spec, (tuple, list)) else tuple(y for _ in call.spec)


@register("mean", "amax", "amin", "max", "min", "median", kind="pool")
def level(a, call):
    """The mean, largest or smallest of a constant map is the constant."""
    x = call.channels()
    y = reduce(a, call)
    if not isinstance(y, Channels) or of_two(call):
        return y
    return a.levelled(x, y)


@register("sum", "nansum", "prod", "any", "all", "count_nonzero", kind="sum")
def total(a, call):
    """y = Σ x, or Π x, over dimensions."""
    return reduce(a, call)


@register("is_all_true", kind="check")
def checked(a, call):
    """What PyTorch's own checks of values ask, such as a distribution's: they raise or go on."""
    return Channels(call.shape)


@register("logsumexp", kind="sum")
def logsumexp(a, call):
    """y = log Σ exp(x) over dimensions: of zeros it is none."""
    return a.forget(reduce(a, call))


@register("norm", "linalg_vector_norm", "vector_norm", kind="sum")
def norm(a, call):
    """y = (Σ |x|^p)^(1/p) over dimensions."""
    return reduce(a, call, 2, 3)


@register("normalize", product="first")
def normalize(a, call):
    """y = x / ‖x‖ over dimensions."""
    x, dims = call.channels(), call.arg(2, "dim", 1)
    level = a.reduce(call, x, [dims] if isinstance(dims, int) else dims, True)
    return a.meet(call, [x, level], lambda t: t[0] / t[1], x.shape)


@register("cosine_similarity")
def cosine(a, call):
    """y = x · w / (‖x‖ ‖w‖) over one dimension."""
    x, w, dim = call.channels(0, "x1"), call.channels(1, "x2"), call.arg(2, "dim", 1)
    product = a.meet(call, [x, w], lambda t: t[0] * t[1])
    for each in (x, w):
        a.reduce(call, each, [dim], False)
    return a.reduce(call, product, [dim], False)


@register("var", "std", "var_mean", "std_mean", kind="sum")
def spread(a, call):
    """y = variance or deviation of x over dimensions."""
    return reduce(a, call, 1, 3)


@register("softmax", "log_softmax", "softmin", "gumbel_softmax", "cumsum", "cumprod",
    "logcumsumexp")  # fmt: skip
def across(a, call):
    """Every slice depends on all others: along channels, fewer of them are another function."""
    return across_dim(a, call, call.arg(1, "dim", -1))


@register("renorm")
def renorm(a, call):
    """y[i] = x[i] · min(1, r / ‖x[i]‖) for each slice i of one dimension."""
    x, dim = call.channels(), call.arg(2, "dim")
    others = [d for d in range(len(x.shape)) if d != dim % len(x.shape)]
    return a.forget(a.freeze_dims(x, others, f"{call.word} mixes its channels", call))


SUM_TO_ONE = ("softmax", "Softmax", "Softmax2d", "gumbel_softmax")


def across_dim(a, call, dim):
    x = call.channels()
    if not isinstance(dim, int) or not x.shape:  # a single number takes a dimension, too
        return a.unknown(call)
    dim %= len(x.shape)
    rest = a.forget(a.freeze_dims(x, [dim], f"{call.word} mixes its channels", call))
    return replace(rest, sums_to_one=dim if call.word in SUM_TO_ONE else None)


@register(nn.Softmax, nn.LogSoftmax, nn.Softmin)
def softmax_module(a, call):
    """y = exp(x) / Σ exp(x) over one dimension."""
    dim = call.module.dim
    return across_dim(a, call, -1 if dim is None else dim)


@register(nn.Softmax2d)
def softmax_2d(a, call):
    """y = exp(x) / Σ exp(x) over the channels."""
    return across_dim(a, call, -3)


@register(nn.LocalResponseNorm)
@register("local_response_norm")
def neighbours(a, call):
    """y[c] = x[c] / (k + α · mean of x² over channels near c)^β."""
    return across_dim(a, call, 1)


@register(nn.GLU, kind="act")
@register("glu", kind="act")
def glu(a, call):
    """First half times sigmoid of the second: i pairs with i + C/2."""
    x = call.channels()
    dim = (call.module.dim if call.module else call.arg(1, "dim", -1)) % len(x.shape)
    half = x.shape[dim] // 2
    shape = tuple(half if d == dim else n for d, n in enumerate(x.shape))
    first, second = (
        a.move(call, x, lambda t, s=s: t.narrow(dim, s, half), shape, touched=[dim])
        for s in (0, half)
    )
    return a.meet(call, [first, second], lambda t: t[0] * torch.sigmoid(t[1]), shape)
