"""Linear layers: y[..., o] = Σᵢ W[o, i] x[..., i] + b[o]."""

from __future__ import annotations

from torch import nn

from fxprune.rules.call import Named
from fxprune.rules.channels import remap
from fxprune.rules.registry import register


def dense(a, call, x, weight, bias):
    """W's columns read x's last dimension, its rows make the result's."""
    last = len(x.shape) - 1
    free = {d: d for d in range(last)}
    if len(getattr(weight, "shape", ())) == 1:  # a single row, of which no dimension is made
        w = call.tensor(weight, {"in": (0,)})
        y = a.contract(call, x, w, [(last, 0)], [], free, {}, x.shape[:-1])
        return y if bias is None else a.meet(call, [y, a.channels(bias)], lambda t: t[0] + t[1])
    w = call.tensor(weight, {"out": (0,), "in": (1,)})
    shape = (*x.shape[:-1], w.shape[0])
    y = a.contract(call, x, w, [(last, 1)], [], free, {0: last}, shape)
    return add_bias(a, call, y, bias, last)


def add_bias(a, call, y, bias, dim):
    """y + b along one dimension; what is added to a removed channel is what it then says."""
    b = call.tensor(bias, {"shift": (0,)})
    if b is None:
        return y
    return a.meet(call, [y, along(b, dim, y)], lambda t: t[0] + t[1], y.shape)


def along(vector, dim, x):
    """A vector laid along one dimension of ``x``, to meet it there."""
    return remap(vector, {0: dim}, tuple([n if d == dim else 1 for d, n in enumerate(x.shape)]))


def widths(m, new):
    out_features, in_features = new.views["weight"]
    return {"out_features": out_features, "in_features": in_features}


@register(nn.Linear, kind="linear", attributes=widths, bias=True)
def linear_module(a, call):
    """y[..., o] = Σᵢ W[o, i] x[..., i] + b[o]."""
    return dense(a, call, call.channels(), "weight", "bias")


@register("linear", kind="linear", bias=(2, "bias"))
def linear_function(a, call):
    """y[..., o] = Σᵢ W[o, i] x[..., i] + b[o], with the weight as an argument."""
    return dense(a, call, call.channels(), call.arg(1, "weight"), call.arg(2, "bias"))


@register("addmm", kind="linear", bias=(0, "input"))
def addmm(a, call):
    """β b + α x W: with β = α = 1, aten's form of a linear layer."""
    x, w = a.channels(call.arg(1, "mat1")), turned(a, call, call.arg(2, "mat2"))
    y = a.contract(call, x, w, [(1, 0)], [], {0: 0}, {1: 1}, (x.shape[0], w.shape[1]))
    beta, alpha = weights_of_terms(call)
    call.factor = alpha / beta if beta else 0.0
    b = call.arg(0, "input")
    if isinstance(b, Named) and b.spec.shape == w.shape[1:]:
        b = along(call.tensor(b, {"shift": (0,)}), 1, y)
    return a.meet(call, [a.channels(b), y], lambda t: beta * t[0] + alpha * t[1], y.shape)


def weights_of_terms(call):
    """(β, α) of β b + α x W."""
    return call.kwargs.get("beta", 1), call.kwargs.get("alpha", 1)


def turned(a, call, w):
    """A matrix that x is multiplied with from the left: as a parameter, its rows read."""
    if isinstance(w, Named) and len(w.spec.shape) == 2:
        return call.tensor(w, {"in": (0,), "out": (1,)})
    return a.channels(w)
