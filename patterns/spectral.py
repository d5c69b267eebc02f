"""Fourier transforms over positions, and complex numbers."""

from __future__ import annotations

import torch

from fxprune.rules.channels import Channels
from fxprune.rules.registry import register

ONE = ("fft", "ifft", "rfft", "irfft", "hfft", "ihfft")
SEVERAL = {"2": (-2, -1), "n": None}  # dimensions that are gone over where none are given


def transform(a, call, dims):
    """Sums over positions, each channel by itself; zeros stay zeros."""
    x = call.channels()
    dims = range(len(x.shape)) if dims is None else [dims] if isinstance(dims, int) else dims
    x = a.freeze_dims(x, [d % len(x.shape) for d in dims], f"{call.word} mixes them", call)
    y = a.meet(call, [x], lambda t: torch.where(t[0] == 0, 0.0, torch.nan), x.shape)
    return Channels(call.shape, y.axes)


@register(*(f"fft_{name}" for name in ONE))
def fourier(a, call):
    """y[k] = Σⱼ x[j] exp(-2πi jk / n) along one dimension."""
    return transform(a, call, call.arg(2, "dim", -1))


@register(*(f"fft_{name}{end}" for name in ONE for end in SEVERAL))
def fourier_over_several(a, call):
    """The same along several dimensions."""
    return transform(a, call, call.arg(2, "dim", SEVERAL[call.word[-1]]))


@register("view_as_complex")
def view_as_complex(a, call):
    """y = x[…, 0] + i x[…, 1]."""
    x = call.channels()
    x = a.freeze_dims(x, [len(x.shape) - 1], "they are real and imaginary parts", call)
    return Channels(x.shape[:-1], tuple(map(a.reduced, x.axes)))


@register("view_as_real")
def view_as_real(a, call):
    """y[…, 0] + i y[…, 1] = x."""
    x = call.channels()
    return Channels((*x.shape, 2), tuple(map(a.reduced, x.axes)))


@register("complex", "polar", "real", "imag", "angle", "conj", "conj_physical", "resolve_conj")
def parts(a, call):
    """y = f(x, …), element by element."""
    return a.meet(call, [a.channels(v) for v in call.inputs])
