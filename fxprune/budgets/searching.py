"""Which units go for a budget: a search over one number, how much all groups lose, then unit by
unit.

A candidate costs as much as counting it: units are scored once, and nothing is pruned to see.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cached_property

import numpy as np

from ..choosing.select import Choice, keep_count
from ..choosing.target import CLOSE, Measure

_FINE = 1e-3  # relative distance at which single units are not worth the search
_HALVINGS = 24
_SWAPS = 50  # single steps at most, after the search
_AHEAD = 4  # wider widths that are tried, where a wider one can be faster
_ROUNDS = 8  # of trying them

Levels = tuple[int, ...]  # of each group, how many units it is asked to lose


@dataclass
class Options:
    """One group's choices, by how many of its units are to go.

    Args:
        choice: its units, their scores, and what has to stay equal.
        step: the numbers of channels that stay are multiples of this.
        rungs: numbers of units that may stay; all of them where it is empty.
    """

    choice: Choice
    step: int = 1
    rungs: Sequence[int] = ()
    _kept: dict[int, np.ndarray] = field(default_factory=dict, repr=False)

    @property
    def width(self) -> int:
        return len(self.choice.units)

    @cached_property
    def counts(self) -> np.ndarray:
        """How many units stay at each level."""
        every = np.arange(self.width + 1) / max(self.width, 1)
        return self.choice.kept_counts(every, self.step)

    def level(self, fraction: float) -> int:
        """How many units go for a fraction; with rungs, down to the next that stays above."""
        kept = max(keep_count(self.width, fraction), int(np.isposinf(self.choice.scores).sum()))
        if self.rungs:
            kept = min((r for r in self.rungs if r >= kept), default=self.width)
        return self.width - kept

    def kept(self, level: int) -> np.ndarray:
        """For each unit whether it stays."""
        if level not in self._kept:
            fraction = level / self.width
            self._kept[level] = (
                self.choice.keep(fraction, self.step) if level else np.ones(self.width, dtype=bool)
            )
        return self._kept[level]

    def next(self, level: int, by: int, most: int, *, between: bool = False) -> int | None:
        """The next level at which more units (``by`` 1) or fewer (-1) go than at this one;
        ``between``: also where there is no rung."""
        count = self.counts[level]
        while 0 <= (level := level + by) <= most:
            if self.rungs and not between and self.width - level not in self.rungs:
                continue
            if (self.counts[level] - count) * by < 0:
                return level
        return None

    def margin(self, level: int) -> float:
        """The score of the unit that would go next, relative to the mean: groups are compared."""
        return float(self._prices[min(level, self.width - 1)])

    @cached_property
    def _prices(self) -> np.ndarray:
        scores = np.sort(self.choice.scores)
        finite = scores[np.isfinite(scores)]  # infinite: it stays, whatever that costs
        return scores / max(abs(finite.mean()) if len(finite) else 1.0, 1e-30)


class Search:
    """Args:
    measure: what a choice leaves.
    goal: what is to be left.
    size: number of unit classes.
    options: of each group.
    fractions: what each group loses for a number in [0, 1), in the order of ``options``.
    """

    def __init__(
        self,
        measure: Measure,
        goal: float,
        size: int,
        options: list[Options],
        fractions: Callable[[float], list[float]],
    ) -> None:
        self.measure, self.goal, self.size = measure, goal, size
        self.options, self.fractions = options, fractions
        self.is_dear = any(option.rungs for option in options)  # a cost is measured
        self.between = False  # whether widths between the rungs are tried
        self._found: dict[Levels, float] = {}
        self.most = self.levels(1 - 1e-9)
        self.least = self.cost(self.most)

    def levels(self, knob: float) -> Levels:
        return tuple(o.level(f) for o, f in zip(self.options, self.fractions(knob), strict=True))

    def kept(self, levels: Levels) -> np.ndarray:
        """By unit class."""
        kept = np.ones(self.size, dtype=bool)
        for option, level in zip(self.options, levels, strict=True):
            kept[option.choice.units] = option.kept(level)
        return kept

    def cost(self, levels: Levels) -> float:
        if levels not in self._found:
            self._found[levels] = self.measure(self.kept(levels))
        return self._found[levels]

    def off(self, levels: Levels) -> float:
        return abs(self.cost(levels) - self.goal)

    def run(self) -> Levels:
        """The levels that come nearest to the goal."""
        nothing = (0,) * len(self.options)
        if self.cost(nothing) <= self.goal:
            return nothing
        if self.least >= self.goal:
            return self.most
        above, below = self._halve(nothing)
        levels = min(self._between(above, below), key=self.off)
        if not self.is_dear:
            return self._finish(levels)
        found = []
        for _ in range(_ROUNDS):
            found.append(self._widen(levels))
            if found[-1] == levels:
                if self.between or self.off(levels) <= CLOSE * self.goal:
                    break
                self.between = True
            levels = self._finish(found[-1])  # what was won is given back to other groups
        return min(found, key=self.off)

    def _widen(self, levels: Levels, *groups: int) -> Levels:
        """No width that is as slow as a wider one: each group takes the widest that costs no more
        than what it has."""
        for i in groups or range(len(levels)):
            option = self.options[i]
            level, slower = levels[i], 0  # widths since the last that was not
            while slower < _AHEAD:
                wider = option.next(level, -1, self.most[i])
                if wider is None:
                    break
                level = wider
                moved = (*levels[:i], level, *levels[i + 1 :])
                slower += 1
                if self.cost(moved) <= self.cost(levels):
                    levels, slower = moved, 0
        return levels

    def _halve(self, above: Levels) -> tuple[Levels, Levels]:
        """Neighbours on the staircase of the one number, above the goal and below."""
        low, high, below = 0.0, 1 - 1e-9, self.most
        for _ in range(_HALVINGS):
            middle = (low + high) / 2
            found = self.levels(middle)
            if self.cost(found) > self.goal:
                low, above = middle, found
            else:
                high, below = middle, found
            if above == below or self.off(found) <= _FINE * self.goal:
                break
        return above, below

    def _between(self, above: Levels, below: Levels) -> tuple[Levels, Levels]:
        """On the way from one to the other, the units of lowest score first."""
        steps = []
        for i, (start, stop) in enumerate(zip(above, below, strict=True)):
            level, option = start, self.options[i]
            while level < stop and (after := option.next(level, 1, stop)) is not None:
                steps.append((option.margin(level), i, after))
                level = after
        steps.sort()

        def at(count: int) -> Levels:
            found = list(above)
            for _, i, level in steps[:count]:
                found[i] = max(found[i], level)
            return tuple(found)

        low, high = 0, len(steps)
        while high - low > 1:
            middle = (low + high) // 2
            low, high = (middle, high) if self.cost(at(middle)) > self.goal else (low, middle)
        return at(low), at(high)

    def _finish(self, levels: Levels) -> Levels:
        """Single steps of single groups, as long as one comes nearer: of those that come near
        enough, the one that costs the lowest score. Then steps there and back of two groups."""
        for _ in range(_SWAPS):
            if self.off(levels) <= _FINE * self.goal:
                break
            by = 1 if self.cost(levels) > self.goal else -1
            found = self._steps(levels, by)
            nearer = found and min(found)[0] < self.off(levels)
            if not nearer and not self.is_dear and self.off(levels) > CLOSE * self.goal:
                back = [moved for *_, moved in self._steps(levels, -by)]
                found = [step for moved in back for step in self._steps(moved, by)]
                nearer = found and min(found)[0] < self.off(levels)
            if not nearer:
                break
            levels = min(found)[2]
        return levels

    def _steps(self, levels: Levels, by: int) -> list[tuple[float, float, Levels]]:
        """A step of each group: how far off it comes, its score, and the levels then."""
        found = []
        for i in range(len(levels)):
            moved = self._step(levels, i, by)
            if moved != levels:
                score = by * self.options[i].margin(min(levels[i], moved[i]))
                found.append((max(self.off(moved), _FINE * self.goal), score, moved))
        return found

    def _step(self, levels: Levels, i: int, by: int) -> Levels:
        """Of one group; where costs are measured, to a width that no wider one beats."""
        level = levels[i]
        for _ in range(_AHEAD if self.is_dear else 1):
            after = self.options[i].next(level, by, self.most[i], between=self.between)
            if after is None:
                break
            level = after
            moved = (*levels[:i], level, *levels[i + 1 :])
            if self.is_dear:
                moved = self._widen(moved, i)
            if moved != levels:
                return moved
        return levels
