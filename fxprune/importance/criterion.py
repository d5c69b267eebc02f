"""What a criterion is: something configured that gives each unit of a group a score."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any, ClassVar

import numpy as np

from ..errors import SettingError
from ..relating.relations import Relations
from ..rules.channels import SourceAxis
from ..tracing.trace import Trace
from .reduction import NORMALIZE, REDUCE, Member, check_choice, combined, normalized
from .slices import Slices

Importance = Callable[[list[Slices]], Any]


class Unscored(Exception):
    """A criterion has nothing to say of a group, which then stays whole; the text is the reason."""


@dataclass
class Context:
    """What a criterion that needs data can look at; ``axes`` are those of the groups it scores."""

    trace: Trace
    relations: Relations
    axes: Sequence[SourceAxis]
    example_input: Any

    def classes(self, axis: SourceAxis) -> np.ndarray:
        """The unit class of each slice of an axis: (n,); 0 stays."""
        return self.relations.of(axis).reshape(-1)


@dataclass
class Measured:
    """What data has told, for axes by number (``Slices.first``): one value a slice, (n,), and for
    how much each of these counts."""

    values: Mapping[int, np.ndarray]
    sizes: Mapping[int, np.ndarray]

    def of(self, s: Slices) -> Member:
        values, sizes = (s.summed(kind[s.first]) for kind in (self.values, self.sizes))
        return Member(values, sizes, s.role == "out")


@dataclass(frozen=True, kw_only=True, eq=False, repr=False)
class Criterion:
    """Scores units by all slices that go with them, in every layer that they are coupled with.

    Args:
        reduce: how the layers' values become one. ``"mean"`` takes all slices as if they were one
            tensor, ``"sum"`` adds them up, ``"max"`` and ``"prod"`` take the largest and the
            geometric mean of the layers' own means, ``"first"`` only looks at the first layer that
            makes the unit (or, where a criterion looks at readers, the first that reads it).
        normalize: what the scores of a group are divided by, for scopes in which groups compete:
            their ``"mean"``, ``"max"`` or ``"sum"``; ``"size"``, the number of weights that go with
            a unit, without biases and statistics; ``"std"`` subtracts the mean and divides by the
            standard deviation.
    """

    without: ClassVar[tuple[str, ...]] = ()  # arguments that mean nothing here
    reduce: str = "mean"
    normalize: str | None = None

    def __post_init__(self) -> None:
        for name, usual in (("reduce", "mean"), ("normalize", None)):
            if name in self.without and getattr(self, name) != usual:
                raise SettingError(f"{type(self).__name__} has no {name}")
        check_choice("reduce", self.reduce, REDUCE)
        check_choice("normalize", self.normalize, NORMALIZE)

    def __repr__(self) -> str:
        """What is not by default; functions by name."""
        given = {f.name: getattr(self, f.name) for f in fields(self) if f.repr}
        defaults = {f.name: f.default for f in fields(self)}
        shown = [
            f"{name}={getattr(value, '__name__', None) or repr(value)}"
            for name, value in given.items() if value is not defaults[name]
        ]  # fmt: skip
        return f"{type(self).__name__}({', '.join(shown)})"

    @property
    def unitwise(self) -> bool:
        """Whether a unit's score hangs on its own slices alone: then one call scores all groups."""
        return False

    def prepare(self, context: Context) -> Importance:
        """What scores groups of a model: the criterion itself, unless it needs data."""
        return self

    def __call__(self, group: list[Slices], data: Measured | None = None) -> np.ndarray:
        """One score a unit: array (count,)."""
        # Biases and means are not lost with their units: they are folded into the layers behind
        # (where not, as those of recurrent layers, they count as little: see relating.biases).
        lost = [s for s in group if s.role not in ("shift", "stat")]
        count = group[0].count
        scores = self.score(lost, count, data)
        if self.normalize is None:
            return scores
        return normalized(scores, self.normalize, sum((s.sizes() for s in lost), np.zeros(count)))

    def score(self, group: list[Slices], count: int, data: Measured | None) -> np.ndarray:
        """Scores before they are normalised, by the slices that are lost with the units."""
        return combined(self.members(group, data), self.reduce, count)

    def members(self, group: list[Slices], data: Measured | None) -> list[Member]:
        raise NotImplementedError

    def measured(self, data: Measured | None) -> Measured:
        if data is None:
            name = type(self).__name__
            raise SettingError(f"{name} needs data: pass it as importance= to fxprune.plan")
        return data
