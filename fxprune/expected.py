"""The second walk on draws: what removed channels said in the mean, as far as norms tell.

Whatever goes into a batch norm, what comes out has mean β and standard deviation |γ| over the
data of training. So a removed channel said β + γ·z with a z of which these two moments are known,
and the layers behind read the mean of act(β + γ·z), where a mask says act(β). z is taken for normal
here, as in data-free estimates of what batch norm layers emit (Nagel et al., arXiv 1906.04721,
section 4.2.1).

The walk follows :data:`DRAWS` values of each constant at once: the means of z in as many parts of
equal probability. The mean of a function that is linear inside each part is then exact, so that of
ReLU is but for one part; Gauss-Hermite nodes are for smooth functions, and twice as far off there.
Each norm takes them in another order (a Latin hypercube, McKay et al. 1979), so that the branches
of a sum count as independent.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from statistics import NormalDist
from typing import Any

import numpy as np
import torch
from torch import Tensor

from .call import Call
from .channels import FROZEN, Axis, Channels, SourceAxis
from .constants import Constants, or_nan

DRAWS = 16


def expect(constants: Constants) -> None:
    """Have what a walk read tell the mean and the variance of its channels."""
    axes = (axis for norm in constants.norms.values() for axis in norm.y.axes)
    if not any(bool(constants.removed(axis.units).any()) for axis in axes):
        return
    walk = Expected(constants)
    walk.run()
    for read, drawn in zip(constants.reads, walk.reads, strict=True):
        values = walk.values_of(drawn.constant)
        unknown = torch.isnan(drawn.constant)
        read.mean = values.mean(0).masked_fill_(unknown, torch.nan)
        # Tensor.var is slow along the first of the dimensions.
        read.variance = (values - read.mean).square_().mean(0)


def normal_points(count: int) -> Tensor:
    """The mean of a standard normal variable in each of ``count`` parts of equal probability."""
    normal = NormalDist()
    edges = [normal.inv_cdf(i / count) for i in range(1, count)]
    heights = np.array([0.0, *map(normal.pdf, edges), 0.0])
    return torch.from_numpy(-count * np.diff(heights))


class Expected(Constants):
    """Constants are numbers of entries here, so channels move as they always do, and functions are
    called on the values. 0 is zero, NaN none, -n the n-th plain number, n the n-th with draws."""

    def __init__(self, plain: Constants) -> None:
        super().__init__(*plain.given, attention=plain.attention)
        self.every = plain.every
        self._plainly = plain
        self._plain = _Table(1)
        self._drawn = _Table(DRAWS)
        self._points = normal_points(DRAWS)
        self._order = np.random.default_rng(0)

    def values_of(self, entries: Tensor) -> Tensor:
        """(draws, ...): what entries hold, with one draw where all are plain numbers."""
        index = entries.nan_to_num().long()
        plain = self._plain.at(-index)
        if not bool((index > 0).any()):
            return plain
        return self._drawn.at(index).add_(plain)  # of which one is zero

    def _entries(self, values: Tensor) -> Tensor:
        """Entries that hold ``values`` (draws, ...); NaN where one of them is none."""
        sign, table = (-1, self._plain) if len(values) == 1 else (1, self._drawn)
        entries = sign * table.add(values.reshape(len(values), -1)).reshape(values.shape[1:])
        size = torch.linalg.vector_norm(values, torch.inf, 0)  # NaN and infinite where one is
        entries.masked_fill_(size == 0, 0.0)
        return entries.masked_fill_(~size.isfinite(), torch.nan)

    # -- where numbers come from ----------------------------------------------------------------

    def born(self, axis: SourceAxis, units: Tensor) -> Tensor:
        values = super().born(axis, units)
        if axis.role in ("in", "out") or not axis.is_whole:
            return values  # 0 and NaN are their own entries
        return self._entries(values[None])

    def blank(self, call: Call, value: float | None) -> Channels:
        x = super().blank(call, value)
        if value is None:
            return x
        axes = (replace(a, constant=self._entries(or_nan(a)[None])) for a in x.axes)
        return replace(x, axes=tuple(axes))

    def emitted(
        self, call: Call, x: Channels, dims: Sequence[int], find: Callable[[bool], Tensor]
    ) -> Channels:
        return super().emitted(call, x, dims, lambda silent: self._entries(find(silent)[None]))

    def move(self, *args: Any, **kwargs: Any) -> Channels:
        """What an op fills in is no entry; it belongs to no unit."""
        x = super().move(*args, **kwargs)
        axes = (
            replace(a, constant=torch.where(a.units == FROZEN, torch.nan, a.constant))
            if a.constant is not None else a
            for a in x.axes
        )  # fmt: skip
        return replace(x, axes=tuple(axes))

    def meet_constants(self, call, operands, touched, dims, shape, function):
        if function is not None:
            free = (
                [d for d in range(len(shape)) if d not in dims] if function == call.replay else []
            )
            function = partial(self._each, function, [bool(axes) for axes in touched], free)
        return super().meet_constants(call, operands, touched, dims, shape, function)

    def _each(
        self, function: Callable, entries: list[bool], free: list[int], tensors: Sequence[Tensor]
    ) -> Tensor:
        """A function on every draw of those of its arguments that are entries: at once along one of
        the ``free`` dimensions, of size 1, where it is elementwise."""
        values = [
            self.values_of(t) if is_entry else t[None]
            for t, is_entry in zip(tensors, entries, strict=True)
        ]
        draws = max(map(len, values))
        if draws > 1 and free:
            d = free[0]
            found = function([v.movedim(0, d).squeeze(d + 1) for v in values]).double()
            return self._entries(found.unsqueeze(d + 1).movedim(d, 0))
        each = [function([v[min(i, len(v) - 1)] for v in values]).double() for i in range(draws)]
        return self._entries(torch.stack(each))

    # -- where draws come from ------------------------------------------------------------------

    def apply(self, call: Call) -> Any:
        norm = self._plainly.norms.get(call.node)
        if norm is None or self._plainly.values[call.node] is not norm.y:
            return super().apply(call)
        # Whatever goes in, this comes out.
        return self._draw(norm.y, norm.mean, norm.deviation, lambda c: self._entries(c[None]))

    def standardised(self, call, y, mean, deviation, variance):
        return self._draw(y, mean, deviation, lambda constant: constant)

    def _draw(
        self,
        y: Channels,
        mean: Channels | None,
        deviation: Channels | None,
        entries: Callable[[Tensor], Tensor],
    ) -> Channels:
        points = self._points[torch.from_numpy(self._order.permutation(DRAWS))]
        axes = []
        for axis in y.axes:
            shift, scale = self._unmasked(mean, axis, 0.0), self._unmasked(deviation, axis, 1.0)
            constant = or_nan(axis)
            says = ~self.removed(axis.units) | ~(constant.isnan() | self.is_silent(axis.units))
            if shift is None or scale is None or not bool(says.any()):
                constant = entries(constant)
            else:
                laid = points.reshape(-1, *[1] * scale.dim())
                drawn = self._entries(torch.add(shift, scale * laid))
                whole = bool(says.all())
                constant = drawn if whole else torch.where(says, drawn, entries(constant))
            axes.append(replace(axis, constant=constant))
        return replace(y, axes=tuple(axes))

    def _unmasked(self, vector: Channels | None, axis: Axis, absent: float) -> Tensor | None:
        """A norm's own values on the slices of ``axis``, as they are without a mask; None where
        the model computes them."""
        if vector is None:
            return torch.full(axis.units.shape, absent, dtype=torch.float64)
        own = vector.touching(axis.dims)
        if len(own) != 1 or own[0].source is None:
            return None
        source = own[0].source
        values = source.rows(self.read(source.name).double().cpu()).reshape(own[0].units.shape)
        return own[0].over(axis.dims, values).expand(axis.units.shape)


class _Table:
    """Rows of numbers, the first of them zeros; room for more is made in large steps."""

    def __init__(self, width: int) -> None:
        self._rows = torch.zeros(1024, width, dtype=torch.float64)
        self._count = 1

    def add(self, values: Tensor) -> Tensor:
        """Where ``values`` (width, n) are from now on: (n,)."""
        first, self._count = self._count, self._count + values.shape[1]
        if self._count > len(self._rows):
            rows, self._rows = self._rows, self._rows.new_empty(4 * self._count, len(values))
            self._rows[:first] = rows[:first]
        self._rows[first : self._count] = values.T
        return torch.arange(first, self._count, dtype=torch.float64)

    def at(self, index: Tensor) -> Tensor:
        """(width, ...): the values that are there; 0 where ``index`` is below 0."""
        found = self._rows.index_select(0, index.clamp(min=0).reshape(-1))
        return found.T.reshape(-1, *index.shape)
