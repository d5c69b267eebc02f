"""Criteria that look at nothing but weights."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import torch

from ..errors import SettingError
from .criterion import Criterion, Measured, Unscored
from .reduction import Member
from .slices import Slices, summed


@dataclass(frozen=True, kw_only=True, eq=False, repr=False)
class Magnitude(Criterion):
    """The size of a unit's weights: (mean of |w|ⁿ over all slices)^(1/n).

    Order 1 over the filters of one convolution is from Li et al., "Pruning Filters for Efficient
    ConvNets" (arXiv 1608.08710); order 2 over all coupled slices from Fang et al., "DepGraph"
    (arXiv 2301.12900).

    Args:
        order: n, any positive number; ``math.inf`` for the largest weight of each layer.
        reduce, normalize: see :class:`Criterion`; ``reduce="sum"`` with order n is the Lₙ norm of
            everything that goes with the unit.
    """

    order: float = 2

    def __post_init__(self) -> None:
        super().__post_init__()
        number = isinstance(self.order, (int, float)) and not isinstance(self.order, bool)
        if not number or not self.order > 0:
            raise SettingError(f"order={self.order!r} is no positive number")

    @property
    def _adds_up(self) -> bool:
        """Whether all slices count as if they were of one layer."""
        return self.reduce in ("mean", "sum") and self.order != math.inf

    @property
    def unitwise(self) -> bool:  # a class that builds on this one may do anything
        return type(self) is Magnitude and self._adds_up and self.normalize is None

    def members(self, group: list[Slices], data: Measured | None) -> list[Member]:
        if self._adds_up and group:
            rows = [s.norms(self.order).cpu() for s in group]
            return [Member(*summed(group, torch.cat(rows).double().numpy() ** self.order))]
        return [self._member(s) for s in group]

    def _member(self, s: Slices) -> Member:
        makes = s.role == "out"
        if self.order == math.inf:
            largest = s.largest(s.norms(self.order))
            return Member(np.maximum(largest, 0), np.isfinite(largest).astype(float), makes)
        return Member(s.total(s.norms(self.order) ** self.order), s.sizes(), makes)

    def score(self, group: list[Slices], count: int, data: Measured | None) -> np.ndarray:
        found = super().score(group, count, data)
        if self.order == 2:
            return np.sqrt(found)
        return found if self.order in (1, math.inf) else found ** (1 / self.order)


@dataclass(frozen=True, kw_only=True, eq=False, repr=False)
class LAMP(Magnitude):
    """A unit's share of the squared weights that are at least as large: mᵤ / Σ (m_v: m_v ≥ mᵤ).

    m is the mean squared weight (or |w|ⁿ) over all coupled slices. The best unit of every group
    has the score 1, so groups of all sizes can compete (``scope="global"``), and none goes as a
    whole. For single weights: Lee et al., "Layer-adaptive Sparsity for the Magnitude-based
    Pruning" (arXiv 2010.07611).
    """

    def score(self, group: list[Slices], count: int, data: Measured | None) -> np.ndarray:
        size = super().score(group, count, data)
        size = size if self.order == math.inf else size**self.order
        order = np.argsort(size, kind="stable")
        above = np.cumsum(size[order][::-1])[::-1]
        scores = np.empty(count)
        scores[order] = size[order] / np.where(above > 0, above, 1.0)
        return scores


@dataclass(frozen=True, kw_only=True, eq=False, repr=False)
class FPGM(Criterion):
    """Sum of the distances to the other units: those near the geometric median go first, for the
    others can stand for them. Distances are Euclidean, over all slices that make the units, those
    of depthwise convolutions among them.

    He et al., "Filter Pruning via Geometric Median" (arXiv 1811.00250). It has no ``reduce``.
    """

    without = ("reduce",)

    def score(self, group: list[Slices], count: int, data: Measured | None) -> np.ndarray:
        made = [s for s in group if s.role == "out"] or group
        squared = np.zeros((count, count))
        for s in made:
            inside = s.units >= 0
            order = np.argsort(s.units[inside], kind="stable")
            rows = s.weights[torch.from_numpy(np.flatnonzero(inside)[order])].double()
            units, starts = np.unique(s.units[inside][order], return_index=True)
            if not len(units) or len(rows) % len(units):
                continue  # slices that do not pair off between units say nothing of their distance
            if np.any(np.diff(starts) != len(rows) // len(units)):
                continue
            flat = rows.reshape(len(units), -1)
            squared[np.ix_(units, units)] += torch.cdist(flat, flat).square().cpu().numpy()
        return np.sqrt(squared).sum(1)


@dataclass(frozen=True, kw_only=True, eq=False, repr=False)
class BNScale(Criterion):
    """The mean |γ| of the norms that scale a unit; where no norm does, the group stays whole.

    Liu et al., "Learning Efficient Convolutional Networks through Network Slimming" (arXiv
    1708.06519), for models trained with an L1 penalty on γ.
    """

    def members(self, group: list[Slices], data: Measured | None) -> list[Member]:
        scales = [s for s in group if s.role == "scale"]
        found = [Member(s.total(s.norms(1)), s.sizes()) for s in scales]
        if not found or not np.any([m.sizes > 0 for m in found], axis=0).all():
            raise Unscored("no norm with a scale stands behind it, and bn_scale ranks by that")
        return found


@dataclass(frozen=True, kw_only=True, eq=False, repr=False)
class Random(Criterion):
    """Random scores: the baseline that every criterion has to beat. The same at every call.

    Args:
        seed: of numpy's generator, together with the names of the group's parameters.
    """

    without = ("reduce", "normalize")
    seed: int | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.seed is not None and (type(self.seed) is not int or self.seed < 0):
            raise SettingError(f"seed={self.seed!r} is no integer from 0")

    def __call__(self, group: list[Slices], data: Measured | None = None) -> np.ndarray:
        seed = [ord(c) for s in group for c in s.name]
        if self.seed is not None:
            seed = [self.seed, *seed]
        return np.random.default_rng(seed).random(group[0].count)
