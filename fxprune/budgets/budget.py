"""From a target to the units that go, and what the plan then comes to."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from .. import benchmarking
from ..choosing.target import CLOSE, Measure, Reached, Target, show
from ..errors import SettingError, warn
from ..relating.fold import Folds
from ..relating.relations import Relations
from ..tracing.trace import Trace
from .counting import Lengths, Term, multiply_accumulates, parameters, product_of
from .latency import Latency
from .searching import Options, Search

_NOTHING = {
    "params": "has no parameters",
    "macs": "has no multiply-accumulates that torch.utils.flop_counter knows, on example_input: "
    "its batch is empty, or its layers are single kernels (docs/budgets.md). Use params=",
    "latency": "takes no time, as the timer of its table says",
}
_RETRIES = 3  # of plans that come out otherwise than was foreseen: carriers, new biases


class Budget:
    """Args:
    target: what is to be left.
    example_input: that the trace was recorded with.
    """

    def __init__(
        self, target: Target, trace: Trace, relations: Relations, example_input: Any
    ) -> None:
        self.target, self.trace, self.relations = target, trace, relations
        self.example_input = example_input
        self.lengths = Lengths(relations)
        self.size = int(relations.classes.max(initial=0)) + 1
        self.measure: Any = self._measure()
        self.original = self.measure(np.ones(self.size, dtype=bool))
        if not self.original > 0:
            name, why = type(trace.model).__name__, _NOTHING[target.measure]
            raise SettingError(f"{target}: nothing is counted that could be less, for {name} {why}")
        self.goal = target.goal(self.original)
        self.carriers = np.zeros(self.size, dtype=bool)
        self.biases: list[Term] = []  # that folding has made
        self.correction = 0.0  # what was counted in the end, less what had been foreseen
        self.least = self.original
        self.coarse = target.measure == "latency"  # whether single units cannot go
        self._left = _RETRIES

    def _measure(self) -> Measure:
        given = self.trace, self.relations, self.lengths
        if self.target.measure == "params":
            return parameters(*given)
        if self.target.measure == "macs":
            return multiply_accumulates(*given, self.example_input)
        return Latency(*given, self.example_input, self.target.table)

    def cost(self, kept: np.ndarray) -> float:
        """With what folding adds."""
        found = self.measure(kept | self.carriers) + self.correction
        if self.biases and self.target.measure == "params":
            lengths = self.lengths.measure(kept | self.carriers)
            found += sum(t.factor * np.prod(lengths[list(t.lengths)]) for t in self.biases)
        return found

    def choose(
        self, options: Sequence[Options], fractions: Callable[[float], list[float]]
    ) -> list[np.ndarray]:
        """For each group, and each of its units, whether it stays."""
        if self.target.measure == "latency":
            options = [
                replace(o, rungs=self.measure.rungs(o.width, o.choice.step(o.step)))
                for o in options
            ]
        self.coarse |= any(o.choice.step(o.step) > 1 or o.choice.bins for o in options)
        search = Search(self.cost, self.goal, self.size, list(options), fractions)
        levels = search.run()
        self.least = search.least
        return [o.kept(level) for o, level in zip(options, levels, strict=True)]

    def is_met(self, removed: np.ndarray, carriers: np.ndarray, folds: Folds) -> bool:
        """Whether the plan comes to what was foreseen; what was not will be, next time."""
        foreseen = self.cost(~removed)
        self.carriers = carriers.copy()
        self.biases = [self._bias(s.path) for s in folds.shifts if not s.name]
        got = self.cost(~removed)
        self._left -= 1
        return abs(got - self.goal) <= max(CLOSE * self.goal, abs(foreseen - self.goal)) or (
            self._left < 0
        )

    def _bias(self, path: str) -> Term:
        """A bias that a layer gets: one number for each of its outputs."""
        axis = self.relations.maker(path)
        if axis is None:
            return Term(0.0, ())
        return product_of(zip(axis.shape, self.lengths.of(axis.labels()), strict=True))

    def reached(self, plan: Any) -> Reached:
        """What a plan comes to, with all that it folds."""
        self.carriers = plan._carriers
        self.biases = [self._bias(s.path) for s in plan._folds.shifts if not s.name]
        got = self.cost(~plan._removed)
        return Reached(self.target.measure, self.original, self.goal, got, self.least)

    def is_counted(self, plan: Any) -> bool:
        """Whether what was foreseen of an op that is not known well enough is so: the pruned model
        is run to see."""
        small = plan.apply(self.trace.model)
        off = benchmarking.macs(small, self.example_input) - self.reached(plan).got
        self.correction += off
        self._left -= 1
        return abs(off) <= CLOSE * self.goal or self._left < 0

    def tell(self, reached: Reached) -> None:
        """Warn where the target is not reached."""
        if abs(reached.error) <= CLOSE * (2 if self.coarse else 1):
            return
        least, most, asked, got = (
            show(reached.measure, v)
            for v in (reached.least, reached.original, reached.asked, reached.got)
        )
        if reached.asked >= reached.original:
            why = "the model is below it as it is, and nothing goes"
        elif reached.asked < reached.least:
            why = "no more channels can go (plan.skipped says why)"
        else:
            why = "the search, which does not try all widths, found none that come nearer"
        warn(
            f"the target of {asked} {reached.measure} is not reached: {why}. The plan leaves "
            f"{got}; within reach is {least} to {most}"
        )
