"""Which units go: the lowest scores, where bins that have to stay equal allow it."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np

from ..rules.channels import distinct, distinct_rows

# Relative gap at which the search for the best balanced choice may stop.
_GAP = 1e-3
_SECONDS = 10.0
_ROUNDING = 1e-6  # of a solution in whole numbers


@dataclass
class Choice:
    """The question for one group.

    Args:
        units: the unit classes that may go.
        scores: importance of each, higher stays.
        bins: arrays (rows, n) of unit classes; each row of one array keeps equally many slices.
            Class 0 stands for slices that stay.
        covers: arrays of unit classes of which at least one has to stay.
    """

    units: np.ndarray
    scores: np.ndarray
    bins: Sequence[np.ndarray]
    covers: Sequence[np.ndarray]

    def keep(self, sparsity: float, round_to: int = 1) -> np.ndarray:
        """True for each unit that stays when the fraction ``sparsity`` of them goes."""
        kept = np.ones(len(self.units), dtype=bool)
        for part in self._parts:
            kept[part.members] = part.keep(sparsity, round_to)
        return kept

    def kept_counts(self, sparsity: np.ndarray, round_to: int = 1) -> np.ndarray:
        """How many units :meth:`keep` leaves at each of some fractions; where bins cross, about."""
        return sum(
            (part.kept_counts(sparsity, round_to) for part in self._parts),
            start=np.zeros(len(sparsity), dtype=np.int64),
        )

    def complete(self, kept: np.ndarray) -> np.ndarray:
        """The smallest balanced superset of the units in ``kept``."""
        result = kept.copy()
        for part in self._parts:
            if part.bins and not part.balanced(kept[part.members]):
                result[part.members] = part.complete(kept[part.members])
        return result

    @cached_property
    def _parts(self) -> list[_Part]:
        """Units that no bin couples are chosen apart from those that one does."""
        place = _places(self.units)
        rest = np.ones(len(self.units), dtype=bool)
        found: list[tuple[np.ndarray, list[int]]] = []  # units, and the bins that they are in
        for b, rows in enumerate(self.bins):
            inside = np.zeros_like(rest)
            at = place(rows.reshape(-1))
            inside[at[at >= 0]] = True
            rest &= ~inside
            bins, apart = [b], []
            for others, theirs in found:
                if (others & inside).any():
                    inside, bins = others | inside, theirs + bins
                else:
                    apart.append((others, theirs))
            found = [*apart, (inside, bins)]
        if rest.any():
            found.append((rest, []))
        covers = [at for c in self.covers if (at := place(c)).min() >= 0]
        return [
            self._part(np.flatnonzero(inside), [self.bins[b] for b in sorted(bins)], covers)
            for inside, bins in found if inside.any()
        ]  # fmt: skip

    def _part(self, members: np.ndarray, bins: list[np.ndarray], covers: list[np.ndarray]) -> _Part:
        if len(members) == len(self.units):  # they are all
            return _Part(members, self.units, self.scores, bins, covers)
        inside = np.full(len(self.units), -1)
        inside[members] = np.arange(len(members))
        own = [at for c in covers if (at := inside[c]).min() >= 0]
        return _Part(members, self.units[members], self.scores[members], bins, own)


@dataclass
class _Part:
    members: np.ndarray
    units: np.ndarray
    scores: np.ndarray
    bins: list[np.ndarray]
    covers: list[np.ndarray]  # positions among the units

    def keep(self, sparsity: float, round_to: int) -> np.ndarray:
        partition = self._partition
        if partition is None:
            return self._search(sparsity, round_to)
        kept = np.zeros(len(self.units), dtype=bool)
        step = round_to // math.gcd(round_to, len(partition))
        best = np.argsort(-self.scores[partition], axis=1, kind="stable")
        best = best[:, : keep_count(partition.shape[1], sparsity, step)]
        kept[np.take_along_axis(partition, best, 1)] = True
        if self._covered(kept):
            return kept
        bins = self.bins or [self.units[None, :]]  # as many as asked for, some of every cover
        return replace(self, bins=bins)._search(sparsity, round_to)

    def kept_counts(self, sparsity: np.ndarray, round_to: int) -> np.ndarray:
        partition = self._partition
        if partition is not None:
            step = round_to // math.gcd(round_to, len(partition))
            return len(partition) * keep_counts(partition.shape[1], sparsity, step)
        rows, length = self.bins[0].shape
        step = round_to // math.gcd(round_to, rows)
        share = keep_counts(length, sparsity, step) / length
        return np.ceil(share * len(self.units) - 1e-9).astype(np.int64)

    @cached_property
    def _partition(self) -> np.ndarray | None:
        """The rows of the bins as indices (rows, n), where they are one partition of the units."""
        if not self.bins:
            return np.arange(len(self.units))[None]
        first, *others = (distinct_rows(np.sort(rows, axis=1)) for rows in self.bins)
        at = _places(self.units)(first)
        if (at < 0).any() or len(distinct(at)) != at.size:
            return None
        return at if all(np.array_equal(first, rows) for rows in others) else None

    def _covered(self, kept: np.ndarray) -> bool:
        return all(kept[cover].any() for cover in self.covers)

    # -- crossing bins: an integer programme ------------------------------------------------------

    @cached_property
    def _rows(self) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """For each row of each bin: slices of each unit in it (rows, n), slices that stay, and the
        bin."""
        found = [distinct_rows(rows) for rows in self.bins]
        place, n = _places(self.units), len(self.units) + 1
        counts = []
        for rows in found:
            at = place(rows) + 1 + n * np.arange(len(rows))[:, None]  # what stays comes first
            counts.append(np.bincount(at.reshape(-1), minlength=n * len(rows)).reshape(-1, n))
        every = np.concatenate(counts)
        return every[:, 1:], every[:, 0], np.repeat(np.arange(len(found)), [*map(len, found)])

    def balanced(self, kept: np.ndarray) -> bool:
        counts, fixed, bins = self._rows
        totals = counts @ kept + fixed
        first = np.unique(bins, return_index=True)[1]
        return bool((totals == totals[first][bins]).all())

    def _search(self, sparsity: float, round_to: int) -> np.ndarray:
        finite = self.scores[np.isfinite(self.scores)]
        low, high = (finite.min(), finite.max()) if len(finite) else (0.0, 0.0)
        # Of what has to stay, or to go, whatever the others are.
        beyond = max(high - low, abs(high), abs(low)) or 1.0
        scores = np.clip(self.scores, low - beyond, high + beyond)
        spread = scores.max() - min(scores.min(), 0.0)
        gain = scores / spread if spread > 0 else np.ones(len(self.units))
        lengths = [rows.shape[1] for rows in self.bins]
        steps = [round_to // math.gcd(round_to, len(rows)) for rows in self.bins]
        goal = [keep_count(n, sparsity, step) for n, step in zip(lengths, steps, strict=True)]
        kept = self._solve(gain, goal, goal)
        if kept is None:  # no choice gives every row its count: as near as can be from above
            kept = self._solve(-np.ones(len(self.units)) + 1e-3 * gain, goal, lengths)
        return np.ones(len(self.units), dtype=bool) if kept is None else kept

    def complete(self, kept: np.ndarray) -> np.ndarray:
        lengths = [rows.shape[1] for rows in self.bins]
        cost = -np.ones(len(self.units))
        result = self._solve(cost, [1] * len(lengths), lengths, forced=kept)
        return np.ones(len(self.units), dtype=bool) if result is None else result

    def _solve(self, gain, low, high, forced=None) -> np.ndarray | None:
        """Units that gain most, with each bin's row totals equal, from ``low`` to ``high``."""
        from scipy.optimize import Bounds, LinearConstraint, milp

        n, m = len(self.units), len(self.bins)
        counts, fixed, bins = self._rows
        total_of = (bins[:, None] == np.arange(m)).astype(float)
        matrix = np.concatenate([counts, -total_of], axis=1)
        constraints = [LinearConstraint(matrix, -fixed, -fixed)]
        if self.covers:
            cover = np.zeros((len(self.covers), n + m))
            for row, at in zip(cover, self.covers, strict=True):
                row[at] = 1
            constraints.append(LinearConstraint(cover, 1, np.inf))
        lower = np.zeros(n) if forced is None else forced.astype(float)
        # Mostly the answer in fractions has none, and it is found in a tenth of the time.
        for whole in (False, True):
            result = milp(
                np.concatenate([-gain, np.zeros(m)]),
                integrality=np.full(n + m, int(whole)),
                bounds=Bounds(np.concatenate([lower, low]), np.concatenate([np.ones(n), high])),
                constraints=constraints,
                options={"presolve": whole, "mip_rel_gap": _GAP, "time_limit": _SECONDS},
            )
            if result.x is None or np.abs(result.x - result.x.round()).max() < _ROUNDING:
                break
        return None if result.x is None else result.x[:n] > 0.5


def _places(units: np.ndarray) -> Callable[[np.ndarray], np.ndarray]:
    """Where unit classes are among ``units``; -1 for those that are not."""
    place = np.full(int(units.max()) + 2, -1)
    place[units] = np.arange(len(units))
    return lambda classes: place[np.minimum(classes, len(place) - 1)]


def keep_count(width: int, sparsity: float, step: int = 1) -> int:
    """How many of ``width`` units stay: at least one, and a multiple of ``step`` if that is fewer.

    The number that goes is ``sparsity · width`` rounded to the nearest, halves in favour of
    keeping.
    """
    return int(keep_counts(width, np.array(sparsity, dtype=float), step))


def keep_counts(width: int, sparsity: np.ndarray, step: int = 1) -> np.ndarray:
    """:func:`keep_count` for each of some fractions."""
    kept = np.maximum(width - np.ceil(sparsity * width - 0.5 - 1e-9), 1)
    return np.minimum(np.ceil(kept / step) * step, width).astype(np.int64)
