"""Elementwise ops: y = f(x, …), operands meeting under broadcasting."""

from __future__ import annotations

from torch import nn

from fxprune.rules.channels import remap
from fxprune.rules.registry import register
from fxprune.rules.spec import Spec

ACTIVATIONS = (
    nn.ReLU, nn.ReLU6, nn.LeakyReLU, nn.ELU, nn.SELU, nn.CELU, nn.GELU, nn.SiLU, nn.Mish,
    nn.Sigmoid, nn.Tanh, nn.Softplus, nn.Softshrink, nn.Softsign, nn.Tanhshrink, nn.Hardshrink,
    nn.Hardsigmoid, nn.Hardswish, nn.Hardtanh, nn.LogSigmoid, nn.Threshold, nn.RReLU,
)  # fmt: skip
ACTIVATION_OPS = (
    "relu", "relu6", "leaky_relu", "elu", "selu", "celu", "gelu", "silu", "mish", "sigmoid", "tanh",
    "softplus", "softshrink", "softsign", "tanhshrink", "hardshrink", "hardsigmoid", "hardswish",
    "hardtanh", "logsigmoid", "threshold", "rrelu",
)  # fmt: skip
ARITHMETIC = (
    "floor_divide", "remainder", "fmod", "pow", "neg", "rtruediv", "rdiv", "rpow", "floordiv",
    "maximum", "minimum", "fmax", "fmin", "abs", "exp", "expm1", "log",
    "log1p", "log2", "log10", "sqrt", "rsqrt", "square", "sin", "cos", "erf", "sign", "floor",
    "ceil", "round", "reciprocal", "clamp", "clip", "clamp_min", "clamp_max", "where",
    "masked_fill", "lerp", "addcmul", "addcdiv", "nan_to_num", "eq", "ne", "lt", "le", "gt", "ge",
    "logical_and", "logical_or", "logical_not", "isnan", "isfinite", "atan2", "hypot",
)  # fmt: skip
# The same values: a copy, a cast, another device or memory layout; dropout, which is off.
SAME = (
    "contiguous", "clone", "detach", "to", "type", "type_as", "float", "double", "half", "bfloat16",
    "cpu", "cuda", "to_copy", "data", "requires_grad", "alias", "lift_fresh",
    "dropout", "dropout1d", "dropout2d", "dropout3d", "alpha_dropout", "feature_alpha_dropout",
)  # fmt: skip


@register(*ARITHMETIC)
@register("add", "sub", "iadd", "isub", "radd", "rsub", kind="add")
@register("mul", "imul", "rmul", product=True)
@register("div", "true_divide", "divide", "truediv", "itruediv", product="first")
def elementwise(a, call):
    """y = f(x, …), element by element, operands meeting under broadcasting."""
    return a.elementwise(call)


@register(*ACTIVATION_OPS, kind="act")
@register(*ACTIVATIONS, kind="act")
def activation(a, call):
    """y = f(x), element by element."""
    return a.elementwise(call)


@register(*SAME, kind="same")
@register(
    nn.Identity, nn.Dropout, nn.Dropout1d, nn.Dropout2d, nn.Dropout3d, nn.AlphaDropout,
    nn.FeatureAlphaDropout, kind="same",
)  # fmt: skip
def same(a, call):
    """y = x."""
    if not isinstance(call.spec, Spec):  # nn.Identity gives back a list, or nothing, too
        return call.arg(0, "input")
    x = call.channels()
    real = call.spec.dtype.is_floating_point and call.is_floating(flags=True)
    return x if real else a.forget(x)  # a cast to integers rounds


def slope_count(m, new):
    return {"num_parameters": new.views["weight"][0]}


@register(nn.PReLU, kind="act", attributes=slope_count)
def prelu(a, call):
    """y[c] = max(x[c], 0) + w[c] · min(x[c], 0)."""
    return slopes(a, call, "weight")


@register("prelu", kind="act")
def prelu_function(a, call):
    """y[c] = max(x[c], 0) + w[c] · min(x[c], 0), with the slopes as an argument."""
    return slopes(a, call, call.arg(1, "weight"))


def slopes(a, call, weight):
    """max(x, 0) + w · min(x, 0), with a slope a channel or one for all."""
    x = call.channels()
    w = call.tensor(weight, {"stat": (0,)})
    dim = 1 if len(x.shape) > 1 else 0
    wide = remap(w, {0: dim}, tuple(w.shape[0] if d == dim else 1 for d in range(len(x.shape))))
    return a.meet(call, [x, wide], lambda t: t[0].clamp(min=0) + t[1] * t[0].clamp(max=0), x.shape)
