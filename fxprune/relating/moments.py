"""The rows of a constant: what a masked slice says, and what it said in the mean, as norms tell.

Whatever goes into a batch norm, what comes out has mean β and standard deviation |γ| over the
data of training. So a removed channel said β + γ·z with a z of which these two moments are known,
and the layers behind read the mean of act(β + γ·z), where a mask says act(β). z is taken for normal
here, as in data-free estimates of what batch norm layers emit (Nagel et al., arXiv 1906.04721,
section 4.2.1).

:data:`DRAWS` values of each constant are followed at once: the means of z in as many parts of
equal probability. The mean of a function that is linear inside each part is then exact, so that of
ReLU is but for one part; Gauss-Hermite nodes are for smooth functions, and twice as far off there.
Each norm takes them in another order (a Latin hypercube, McKay et al. 1979), so that the branches
of a sum count as independent.
"""

from __future__ import annotations

from statistics import NormalDist
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

DRAWS = 16


def normal_points(count: int) -> Tensor:
    """The mean of a standard normal variable in each of ``count`` parts of equal probability."""
    normal = NormalDist()
    edges = [normal.inv_cdf(i / count) for i in range(1, count)]
    heights = np.array([0.0, *map(normal.pdf, edges), 0.0])
    return torch.from_numpy(-count * np.diff(heights))


class Moments(NamedTuple):
    """Of channels over the data of training; NaN where not known."""

    mean: Tensor
    variance: Tensor


class Masked:
    """One row: what the masked model says.

    Constants are (rows, ...), or (1, ...) where all their rows are the same.
    """

    def dead(self, values: Tensor) -> Tensor:
        """Of slices that say ``values`` (rows, ...) when they are dead, and else who knows what."""
        return values

    def scale(self, values: Tensor) -> Tensor:
        """Of a norm's scale (1, ...), which masks set to zero."""
        return torch.zeros_like(values)

    def moments(self, constant: Tensor, dead: Tensor) -> Moments | None:
        """Of slices of which some are dead."""
        return None


class Drawn(Masked):
    """A row for the mask, one a draw, and one that is NaN where no norm knows what a slice says."""

    def __init__(self) -> None:
        self._points = normal_points(DRAWS).numpy()
        self._order = np.random.default_rng(0)
        self._unknown = torch.zeros(DRAWS + 2, dtype=torch.float64)
        self._unknown[-1] = torch.nan  # of the living
        self._kept = torch.ones(DRAWS + 2, dtype=torch.float64)
        self._kept[0] = 0.0

    def dead(self, values: Tensor) -> Tensor:
        return values + _column(self._unknown, values)

    def scale(self, values: Tensor) -> Tensor:
        return _column(self._kept, values) * values

    def points(self) -> Tensor:
        """Of one norm, for :meth:`standardised`."""
        points = np.zeros(DRAWS + 2)
        points[1:-1] = self._points[self._order.permutation(DRAWS)]
        return torch.from_numpy(points)

    def standardised(
        self, points: Tensor, constant: Tensor, mean: Tensor, deviation: Tensor
    ) -> Tensor:
        """Of slices with this mean and this deviation over the data of training."""
        drawn = (_real(deviation) * _column(points, constant)).add_(_real(mean))
        drawn[0] = constant[0]
        return drawn

    def moments(self, constant: Tensor, dead: Tensor) -> Moments:
        draws = constant[1:-1] if constant.shape[0] > 1 else constant
        living = constant[-1]
        first = draws[0]
        off = draws - first  # 0 where all are the same, which no rounding is to blur
        mean = off.mean(0)
        variance = (off - mean).square_().mean(0)
        unknown = ~(first + variance).isfinite() | (~dead & living.isnan())
        return Moments(
            (first + mean).masked_fill_(unknown, torch.nan),
            variance.masked_fill_(unknown, torch.nan),
        )


def _column(row: Tensor, values: Tensor) -> Tensor:
    return row.reshape(-1, *[1] * (values.dim() - 1))


def _real(values: Tensor) -> Tensor:
    """What a norm's vector is without a mask."""
    return values[1 if values.shape[0] > 1 else 0]
