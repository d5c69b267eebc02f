"""What is known of the operands of one call, where their slices meet: arrays of constants (rows,
...) over the dimensions that they share.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from ..rules.channels import Axis, Channels, followed


class Met:
    """Args:
    operands: channels of equal rank that meet along ``dims`` of a result of that ``shape``.
    touched: the axes of each that lie there.
    """

    def __init__(
        self,
        operands: Sequence[Channels],
        touched: Sequence[Sequence[Axis]],
        dims: tuple[int, ...],
        shape: Sequence[int],
    ) -> None:
        self.dims, self.shape = dims, shape
        self.sizes = [shape[d] for d in dims]
        size = math.prod(self.sizes)
        self.laid = [
            followed(laid_along(x, axes, dims), size)
            for x, axes in zip(operands, touched, strict=True)
        ]
        self.rows = max([a.shape[0] for a in self.laid])
        self._blind = [a.isnan() if _may_have_nan(a) else None for a in self.laid]
        some = [b for b in self._blind if b is not None]
        self.unknown = self._wide(functools.reduce(torch.logical_or, some)) if some else None

    def _wide(self, array: Tensor) -> Tensor:
        return array.expand(self.rows, *self.sizes)

    def zeros(self, touched: Sequence[Sequence[Axis]], *, first: bool) -> Tensor | None:
        """Where a factor is zero the product is, whatever the other factor is. ``first``: of a
        quotient, where that alone decides."""
        deciding = list(zip(self.laid, touched, strict=True))[: 1 if first else None]
        factors = [a == 0 for a, axes in deciding if len(axes) == 1]
        return self._wide(functools.reduce(torch.logical_or, factors)) if factors else None

    def given(self, *, zero: Sequence[bool] = ()) -> list[Tensor]:
        """What a function gets: copies, for it may write to them, and they may be the model's own.
        Numbers that are not known are zeros, and so are all of an operand where ``zero``."""
        given = [
            self._wide(a).clone() if b is None else self._wide(a).masked_fill(b, 0.0)
            for a, b in zip(self.laid, self._blind, strict=True)
        ]
        none = zero or [False] * len(given)
        return [torch.zeros_like(t) if z else t for t, z in zip(given, none, strict=True)]

    def apply(
        self,
        function: Callable[[Sequence[Tensor]], Tensor],
        given: Sequence[Tensor],
        *,
        together: bool,
    ) -> Tensor:
        return _called(function, given, self.dims, self.shape, together)

    def makes_worse(self, row: Tensor) -> bool:
        """Whether the first row of a result is NaN somewhere, or infinite though nothing of which
        it was made is; but where it was not known."""
        finite = functools.reduce(torch.logical_and, [t[0].isfinite() for t in self.given()])
        wrong = row.isnan() | (row.isinf() & finite)
        return bool((wrong if self.unknown is None else wrong & ~self.unknown[0]).any())

    def zeros_that_stay(self, result: Tensor) -> Tensor:
        """What is known of a result where nothing is sure but that zeros make zeros."""
        arrays = (*self.given(), result)
        return zero_or_nan(functools.reduce(torch.logical_and, [t == 0 for t in arrays]))


def may_be_known(x: Channels, axes: Sequence[Axis]) -> bool:
    return all([a.constant is not None for a in axes]) if axes else x.scalar is not None


def zero_or_nan(zero: Tensor) -> Tensor:
    return torch.zeros(zero.shape, dtype=torch.float64).masked_fill_(~zero, torch.nan)


def laid_along(x: Channels, axes: Sequence[Axis], dims: tuple[int, ...]) -> Tensor:
    """What is known of an operand, behind its rows laid out over ``dims``."""
    if not axes:
        value = torch.nan if x.scalar is None else x.scalar
        return torch.full((1,) * (1 + len(dims)), value, dtype=torch.float64)
    first, *others = (axis.says(dims) for axis in axes)
    for said in others:  # of several axes, which only another operand joins: what they agree on
        first = torch.where(first == said, first, torch.nan)
    return first


def _may_have_nan(values: Tensor) -> bool:
    """True wherever one is NaN; rarely (infinities of both signs) where none is. Behind a norm none
    is, and a sum is cheap."""
    return math.isnan(values.sum().item())


def _called(
    function: Callable[[Sequence[Tensor]], Tensor],
    arrays: Sequence[Tensor],
    dims: Sequence[int],
    shape: Sequence[int],
    together: bool,
) -> Tensor:
    """A function of tensors on arrays (rows, ...) over ``dims`` of them: on all rows at once, along
    a dimension of size 1 that is free, or on one after the other."""
    rows, sizes = len(arrays[0]), arrays[0].shape[1:]
    rank = range(len(shape))
    at = next((d for d in rank if d not in dims), None) if rows > 1 else None
    if rows > 1 and (at is None or not together):
        if not together and all(bool((t == t[:1]).all()) for t in arrays):
            one = [t[:1] for t in arrays]
            return _called(function, one, dims, shape, together).expand(rows, *sizes)
        each = (
            _called(function, [t[i : i + 1] for t in arrays], dims, shape, together)
            for i in range(rows)
        )
        return torch.cat(list(each))
    before = 0 if at is None else sum(d < at for d in dims)
    laid = [shape[d] if d in dims else rows if d == at else 1 for d in rank]
    given = [(t.movedim(0, before) if before else t).reshape(laid) for t in arrays]
    result = function(given).double()
    if list(result.shape) != laid:
        result = result[tuple([slice(None) if d in dims or d == at else slice(1) for d in rank])]
        result = result.expand(laid)
    if before:
        return result.reshape([*sizes[:before], rows, *sizes[before:]]).movedim(before, 0)
    return result.reshape(rows, *sizes)
