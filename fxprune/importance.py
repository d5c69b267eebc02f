"""How much a unit matters: a score for each, over all slices that go with it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor

from .channels import SourceAxis
from .errors import SettingError

_PIECE = 2**20  # elements


@dataclass(frozen=True)
class Slices:
    """The slices of one parameter that belong to a group.

    Attributes:
        name: of the parameter in the model.
        role: what the slices do: ``out`` makes a channel, ``in`` reads it; see the glossary.
        tensor: the parameter with the slices' dimensions first; no copy.
        rank: how many dimensions those are.
        units: array (n,), the index of the unit that each row belongs to, -1 where it stays.
        count: number of units.
    """

    name: str
    role: str
    tensor: Tensor
    rank: int
    units: np.ndarray
    count: int
    # By order: the rows that a layer has for several groups are measured once.
    _norms: dict[float, Tensor] = field(default_factory=dict, repr=False)

    def among(self, index: np.ndarray, count: int) -> Slices:
        """The slices as those of a group: ``index`` says which of its units each unit is, or -1."""
        return Slices(
            self.name, self.role, self.tensor, self.rank, index[self.units], count, self._norms
        )

    @property
    def weights(self) -> Tensor:
        """Tensor (n, m), one row a slice."""
        return self.tensor.reshape(len(self.units), -1)

    def norms(self, order: float) -> Tensor:
        """The norm of each row: Tensor (n,)."""
        if order not in self._norms:
            self._norms[order] = self._measure(order)
        return self._norms[order]

    def _measure(self, order: float) -> Tensor:
        rest = tuple(range(self.rank, self.tensor.dim()))
        if not rest:
            return self.tensor.abs().reshape(-1)
        # In pieces along the longest dimension: the whole at once would not stay in the cache.
        longest = max(rest, key=self.tensor.size)
        pieces = max(1, self.tensor.numel() // _PIECE)
        total: Tensor | None = None
        for part in self.tensor.tensor_split(pieces, longest):
            part = part.float() if part.dtype.itemsize < 4 else part
            powers = (part.square() if order == 2 else part.abs() ** order).sum(rest)
            total = powers if total is None else total + powers
        assert total is not None
        return (total ** (1 / order)).reshape(-1)

    def total(self, rows: Tensor) -> np.ndarray:
        """Sum over the rows of each unit: array (count,)."""
        return self._sum(rows.detach().double().cpu().numpy())

    def sizes(self) -> np.ndarray:
        """Number of elements of each unit: array (count,)."""
        return self._sum(None) * (self.tensor.numel() // len(self.units))

    def _sum(self, values: np.ndarray | None) -> np.ndarray:
        """Sum of one value a row, or of ones, over the rows of each unit; -1 has the first bin."""
        return np.bincount(self.units + 1, values, self.count + 1)[1:]


Importance = Callable[[list[Slices]], Any]


def slices(tensor: Tensor, axis: SourceAxis, units: np.ndarray, count: int) -> Slices:
    """The rows of ``tensor`` along ``axis``, each with the one of ``count`` units it belongs to."""
    seen = axis.slices(tensor.detach())
    return Slices(axis.name, axis.role, seen, len(axis.dims), units.reshape(-1), count)


def l1(group: list[Slices]) -> np.ndarray:
    """Mean absolute weight of a unit over all its coupled slices (Li et al., arXiv 1608.08710)."""
    return _mean(group, lambda s: s.norms(1))


def l2(group: list[Slices]) -> np.ndarray:
    """Root mean square weight over all coupled slices (Fang et al., arXiv 2301.12900)."""
    return np.sqrt(_mean(group, lambda s: s.norms(2) ** 2))


def random(group: list[Slices]) -> np.ndarray:
    """Random scores, from numpy's generator seeded by the group's names: the same every time."""
    seed = [ord(c) for s in group for c in s.name]
    return np.random.default_rng(seed).random(group[0].count)


def fpgm(group: list[Slices]) -> np.ndarray:
    """Sum of distances to the other units: filters near the geometric median go first.

    He et al., "Filter Pruning via Geometric Median", arXiv 1811.00250; over all slices that make
    the unit.
    """
    made = [s for s in group if s.role == "out"] or group
    squared = np.zeros((made[0].count, made[0].count))
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


def _mean(group: list[Slices], row_score: Callable[[Slices], Tensor]) -> np.ndarray:
    total, size = np.zeros(group[0].count), np.zeros(group[0].count)
    for s in group:
        if s.role in ("shift", "stat"):
            continue  # a bias is not lost with its unit: it is folded
        total += s.total(row_score(s))
        size += s.sizes()
    return total / np.maximum(size, 1)


NAMED: dict[str, Importance] = {"l1": l1, "l2": l2, "random": random, "fpgm": fpgm}


def resolve(importance: str | Importance) -> Importance:
    """A criterion by name, or a callable as it is."""
    if callable(importance):
        return importance
    if importance == "reconstruction":  # and where no layer that reads the units was seen
        return l2
    if importance not in NAMED:
        known = ", ".join([*sorted(NAMED), "reconstruction"])
        raise SettingError(
            f"importance={importance!r} is unknown; use one of {known} or a callable that takes a "
            "list of fxprune.importance.Slices and returns one score a unit"
        )
    return NAMED[importance]


def scores(importance: Importance, group: list[Slices], name: str) -> np.ndarray:
    """One number for each unit of a group; ``name`` is the group's in messages."""
    try:
        found = importance(group)
    except Exception as error:  # whatever the user's own function raises
        raise SettingError(
            f"importance raised {type(error).__name__} for group {name!r}: {error}"
        ) from error
    return check(found, group[0].count, name)


def check(scores: Any, count: int, name: str) -> np.ndarray:
    """Scores as a float array of the right length."""
    if isinstance(scores, Tensor):
        scores = scores.detach().cpu().numpy()
    try:
        array = np.asarray(scores, dtype=np.float64)
    except (TypeError, ValueError) as error:
        raise SettingError(
            f"importance returned {type(scores).__name__} for group {name!r}; it has to return one "
            "number a unit"
        ) from error
    if array.shape != (count,):
        raise SettingError(
            f"importance returned shape {array.shape} for group {name!r}; it has {count} units"
        )
    if np.isnan(array).any():
        raise SettingError(f"importance returned NaN for group {name!r}: do its weights hold NaN?")
    return array
