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
        scores: importance of each, higher stays; what has an infinite one stays in any case.
        bins: arrays (rows, n) of unit classes; each row of one array keeps equally many slices.
            Class 0 stands for slices that stay.
        covers: arrays of unit classes of which at least one has to stay.
        layers: for each layer that makes the units the unit class of each of its channels; where
            there are none, each unit is a channel of one layer. Widths are rounded by it.
        carried: for each unit whether it stayed masked before, beside those that were kept: as many
            will, and count where widths are rounded.
        kinds: a number for each unit. Units of one kind compete, and of each kind the same fraction
            goes: what a head says is no measure for a slice of a state that the same layer makes.
    """

    units: np.ndarray
    scores: np.ndarray
    bins: Sequence[np.ndarray]
    covers: Sequence[np.ndarray]
    layers: Sequence[np.ndarray] = ()
    carried: np.ndarray | None = None
    kinds: np.ndarray | None = None

    def keep(self, sparsity: float, round_to: int = 1) -> np.ndarray:
        """True for each unit that stays when the fraction ``sparsity`` of them goes; where every
        layer has to have a multiple of ``round_to`` channels, or all of them, more may stay."""
        kept = np.ones(len(self.units), dtype=bool)
        for part in self._parts:
            kept[part.members] = part.keep(sparsity, round_to)
        if kept.all() or round_to == 1:
            return kept
        channels = self._channels
        if _are_rounded(channels @ kept + channels @ self._carried, channels, round_to):
            return kept
        whole = self._part(np.arange(len(kept)), [*self.bins, self.units[None]], self._covers)
        return whole.search(sparsity, round_to)

    def is_rounded(self, kept: np.ndarray, round_to: int) -> bool:
        """Whether every layer that loses any keeps a multiple of so many channels."""
        return round_to == 1 or _are_rounded(self._channels @ kept, self._channels, round_to)

    def step(self, round_to: int) -> int:
        """``round_to`` in units, which may be several channels each."""
        return 1 if round_to == 1 else _step(self._channels[:, None], round_to)

    def kept_counts(self, sparsity: np.ndarray, round_to: int = 1) -> np.ndarray:
        """How many units :meth:`keep` leaves at each of some fractions, with those that stay masked
        where widths are rounded; where bins cross, about."""
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
    def _carried(self) -> np.ndarray:
        found = self.carried
        return np.zeros(len(self.units), dtype=bool) if found is None else found

    @cached_property
    def _channels(self) -> np.ndarray:
        """(layers, units): how many channels of each layer go with each unit."""
        if not self.layers:
            return np.ones((1, len(self.units)), dtype=np.int64)
        place, n = _places(self.units), len(self.units) + 1
        counts = [np.bincount(place(layer) + 1, minlength=n)[1:] for layer in self.layers]
        return np.unique(counts, axis=0)

    @cached_property
    def _covers(self) -> list[np.ndarray]:
        place = _places(self.units)
        return [at for c in self.covers if (at := place(c)).min() >= 0]

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
        return [
            self._part(np.flatnonzero(inside), [self.bins[b] for b in sorted(bins)], self._covers)
            for inside, bins in found if inside.any()
        ]  # fmt: skip

    def _part(self, members: np.ndarray, bins: list[np.ndarray], covers: list[np.ndarray]) -> _Part:
        if len(members) == len(self.units):  # they are all
            own = covers
        else:
            inside = np.full(len(self.units), -1)
            inside[members] = np.arange(len(members))
            own = [at for c in covers if (at := inside[c]).min() >= 0]
        return _Part(
            members, self.units[members], self.scores[members], bins, own,
            self._carried[members], lambda: self._channels[:, members],
            None if self.kinds is None else self.kinds[members],
        )  # fmt: skip


@dataclass
class _Part:
    members: np.ndarray
    units: np.ndarray
    scores: np.ndarray
    bins: list[np.ndarray]
    covers: list[np.ndarray]  # positions among the units
    carried: np.ndarray
    count: Callable[[], np.ndarray]  # gives what :attr:`channels` is, where widths are rounded
    kinds: np.ndarray | None = None

    def keep(self, sparsity: float, round_to: int) -> np.ndarray:
        partition = self._partition
        if partition is None:
            return self.search(sparsity, round_to)
        kept = np.zeros(len(self.units), dtype=bool)
        count = self._row_count(partition, sparsity, round_to)
        best = self._order(count) if len(partition) == 1 else None
        if best is None:
            best = np.argsort(-self.scores[partition], axis=1, kind="stable")
        kept[np.take_along_axis(partition, best[:, :count], 1)] = True
        if self._covered(kept) and self._rounded(kept, round_to):
            return kept
        bins = self.bins or [self.units[None, :]]  # as many as asked for, some of every cover
        return replace(self, bins=bins).search(sparsity, round_to)

    def kept_counts(self, sparsity: np.ndarray, round_to: int) -> np.ndarray:
        partition = self._partition
        if partition is not None:
            return len(partition) * self._row_counts(partition, sparsity, round_to)
        rows, length = self.bins[0].shape
        step = round_to // math.gcd(round_to, rows)
        share = keep_counts(length, sparsity, step) / length
        return np.ceil(share * len(self.units) - 1e-9).astype(np.int64)

    def _order(self, count: int) -> np.ndarray | None:
        """The units (1, n), those first of which ``count`` stay: the best of each kind, as many as
        their share is. None where all are of one kind."""
        if self.kinds is None or self.bins or (self.kinds == self.kinds[0]).all():
            return None
        _, kind, sizes = np.unique(self.kinds, return_inverse=True, return_counts=True)
        least = np.bincount(kind, np.isposinf(self.scores)).astype(int)
        order = np.lexsort((-self.scores, kind))  # one kind after the other, the best first
        rank = np.empty(len(order), dtype=int)
        rank[order] = np.arange(len(order)) - np.repeat(np.cumsum(sizes) - sizes, sizes)
        stays = rank < _shares(sizes, least, count)[kind]
        return np.lexsort((-self.scores, ~stays))[None]

    def _row_counts(self, rows: np.ndarray, sparsity: np.ndarray, round_to: int) -> np.ndarray:
        """How many units stay in each of some rows, masked ones counted, at each of some
        fractions."""
        least = max(int(np.isposinf(self.scores)[rows].sum(1).max()), 1)
        least += self._beside(rows, round_to)
        return keep_counts(rows.shape[1], sparsity, self._step(rows, round_to), least)

    def _row_count(self, rows: np.ndarray, sparsity: float, round_to: int) -> int:
        """How many stay that are not masked."""
        found, width = int(self._row_counts(rows, np.array(sparsity), round_to)), rows.shape[1]
        return found - self._beside(rows, round_to) if found < width else width

    def _beside(self, rows: np.ndarray, round_to: int) -> int:
        """How many units of each row stay masked, where they count in a multiple."""
        return int(self.carried[rows].sum(1).max()) if self._step(rows, round_to) > 1 else 0

    def _step(self, rows: np.ndarray, round_to: int) -> int:
        return 1 if round_to == 1 else _step(self.channels[:, rows], round_to)

    @cached_property
    def channels(self) -> np.ndarray:
        """(layers, units): how many channels of each layer go with each unit."""
        return self.count()

    def _rounded(self, kept: np.ndarray, round_to: int) -> bool:
        if round_to == 1 or kept.all():
            return True
        left = self.channels @ kept + self.channels @ self.carried
        return _are_rounded(left, self.channels, round_to)

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

    def search(self, sparsity: float, round_to: int) -> np.ndarray:
        """By an integer programme."""
        stays = np.isposinf(self.scores)
        finite = self.scores[np.isfinite(self.scores)]
        low, high = (finite.min(), finite.max()) if len(finite) else (0.0, 0.0)
        # Of what has to stay, or to go, whatever the others are.
        beyond = max(high - low, abs(high), abs(low)) or 1.0
        scores = np.clip(self.scores, low - beyond, high + beyond)
        spread = scores.max() - min(scores.min(), 0.0)
        gain = scores / spread if spread > 0 else np.ones(len(self.units))
        lengths = [rows.shape[1] for rows in self.bins]
        goal = self._goals(sparsity, round_to, stays)
        kept = self._solve(gain, goal, goal, stays, round_to)
        if kept is None:  # no choice gives every row its count: as near as can be from above
            nearest = -np.ones(len(self.units)) + 1e-3 * gain
            kept = self._solve(nearest, goal, lengths, stays, round_to)
        return np.ones(len(self.units), dtype=bool) if kept is None else kept

    def _goals(self, sparsity: float, round_to: int, stays: np.ndarray) -> list[int]:
        """Slices that are to be kept in each row, by bin."""
        counts, fixed, bins = self._rows
        place, goals = _places(self.units), []
        for b, rows in enumerate(self.bins):
            at = place(rows)
            if (at >= 0).all():
                goals.append(self._row_count(at, sparsity, round_to))
                continue
            least = int((counts[bins == b] @ stays + fixed[bins == b]).max())
            step = round_to // math.gcd(round_to, len(rows))
            goals.append(keep_count(rows.shape[1], sparsity, step, max(least, 1)))
        return goals

    def complete(self, kept: np.ndarray) -> np.ndarray:
        lengths = [rows.shape[1] for rows in self.bins]
        cost = -np.ones(len(self.units))
        result = self._solve(cost, [1] * len(lengths), lengths, kept)
        return np.ones(len(self.units), dtype=bool) if result is None else result

    def _solve(self, gain, low, high, forced, round_to=1) -> np.ndarray | None:
        """Units that gain most, those that are ``forced`` among them, with each bin's row totals
        equal, from ``low`` to ``high``, and each layer's rounded."""
        from scipy.optimize import Bounds, LinearConstraint, milp

        n, m = len(self.units), len(self.bins)
        counts, fixed, bins = self._rows
        total_of = (bins[:, None] == np.arange(m)).astype(float)
        matrix = np.concatenate([counts, -total_of], axis=1)
        lower, upper = np.concatenate([forced, low]), np.concatenate([np.ones(n), high])
        parts = [(matrix, -fixed, -fixed)]
        if self.covers:
            cover = np.zeros((len(self.covers), n + m))
            for row, at in zip(cover, self.covers, strict=True):
                row[at] = 1
            parts.append((cover, np.ones(len(cover)), np.full(len(cover), np.inf)))
        if round_to > 1:  # k · round_to channels of a layer, and the rest with all of these only
            layers, none = self.channels, np.zeros((len(self.channels), m))
            (most, rest), one = np.divmod(layers.sum(1), round_to), np.eye(len(layers))
            held = -(layers @ self.carried)
            widths = np.concatenate([layers, none, -round_to * one, -rest * one], axis=1)
            alone = np.concatenate([0 * layers, none, one, -most * one], axis=1)
            wider = [(0, 0), (0, 2 * len(one))]
            parts = [(np.pad(a, wider), low, high) for a, low, high in parts]
            parts += [(widths, held, held), (alone, np.zeros(len(one)), np.full(len(one), np.inf))]
            lower = np.concatenate([lower, np.minimum(most, 1), (most == 0) & (rest > 0)])
            upper = np.concatenate([upper, most, rest > 0])
        extra = len(lower) - n
        # Mostly the answer in fractions has none, and it is found in a tenth of the time.
        for whole in (False, True):
            result = milp(
                np.concatenate([-gain, np.zeros(extra)]),
                integrality=np.full(n + extra, int(whole)),
                bounds=Bounds(lower, upper),
                constraints=[LinearConstraint(*part) for part in parts],
                options={"presolve": whole, "mip_rel_gap": _GAP, "time_limit": _SECONDS},
            )
            if result.x is None or np.abs(result.x - result.x.round()).max() < _ROUNDING:
                break
        return None if result.x is None else result.x[:n] > 0.5


def _shares(sizes: np.ndarray, least: np.ndarray, count: int) -> np.ndarray:
    """``count`` as whole numbers, as near to the same fraction of all ``sizes`` as these can be;
    what at ``least`` has to be of some is taken from all others."""
    exact, free = sizes * (count / sizes.sum()), np.ones(len(sizes), dtype=bool)
    while (short := free & (exact < least)).any():
        free &= ~short
        exact = np.where(free, 0.0, least)
        if free.any():
            exact[free] = sizes[free] * ((count - exact.sum()) / sizes[free].sum())
    found = np.floor(exact + 1e-9).astype(int)
    found[np.argsort(found - exact, kind="stable")[: count - int(found.sum())]] += 1
    return found


def _places(units: np.ndarray) -> Callable[[np.ndarray], np.ndarray]:
    """Where unit classes are among ``units``; -1 for those that are not."""
    place = np.full(int(units.max()) + 2, -1)
    place[units] = np.arange(len(units))
    return lambda classes: place[np.minimum(classes, len(place) - 1)]


def keep_count(width: int, sparsity: float, step: int = 1, least: int = 1) -> int:
    """How many of ``width`` units stay: at least one, and a multiple of ``step`` if that is fewer.

    The number that goes is ``sparsity · width`` rounded to the nearest, halves in favour of
    keeping.
    """
    return int(keep_counts(width, np.array(sparsity, dtype=float), step, least))


def keep_counts(width: int, sparsity: np.ndarray, step: int = 1, least: int = 1) -> np.ndarray:
    """:func:`keep_count` for each of some fractions."""
    kept = np.maximum(width - np.ceil(sparsity * width - 0.5 - 1e-9), least)
    return np.minimum(np.ceil(kept / step) * step, width).astype(np.int64)


def _step(channels: np.ndarray, round_to: int) -> int:
    """What the number of units kept in each of some rows has to be a multiple of, for each layer to
    keep a multiple of channels (layers, rows, units)."""
    alike = (channels.min(2) == channels.max(2)).all(1)
    apart = np.gcd.reduce(channels.reshape(len(channels), -1), axis=1)
    wide = np.where(alike, channels[:, :, 0].sum(1), apart)
    return int(np.lcm.reduce(round_to // np.gcd(round_to, wide)))


def _are_rounded(left: np.ndarray, channels: np.ndarray, round_to: int) -> bool:
    """Whether what is left of each layer is a multiple, or all of its channels (layers, units)."""
    return bool(((left % round_to == 0) | (left == channels.sum(1))).all())
