"""One score a unit, out of what each of the coupled layers says of it; and one scale for groups."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from typing import Any

import numpy as np

from ..errors import SettingError

REDUCE = ("mean", "max", "sum", "prod", "first")
NORMALIZE = (None, "mean", "max", "std", "sum", "size")


@dataclass
class Member:
    """What one layer says of a group's units.

    ``values`` (units,): the sum over the unit's slices there; ``sizes`` (units,): over how many
    elements (or slices, or 1) it was taken, 0 where the unit has no slice there. ``makes``: these
    slices make the units.
    """

    values: np.ndarray
    sizes: np.ndarray
    makes: bool = False

    def means(self, absent: float) -> np.ndarray:
        return np.where(self.sizes > 0, self.values / np.maximum(self.sizes, 1), absent)


def combined(members: Sequence[Member], how: str, count: int) -> np.ndarray:
    """One value a unit (count,).

    ``mean``: Σ values / Σ sizes, all slices as if they were one tensor; ``sum``: Σ values; ``max``
    and ``prod``: the largest and the geometric mean of the members' own means; ``first``: the mean
    of the first member that makes the unit, or else has it.
    """
    total, size = np.zeros(count), np.zeros(count)
    if how in ("mean", "sum"):
        for member in members:
            total += member.values
            size += member.sizes
        return total / np.maximum(size, 1) if how == "mean" else total
    if not members:
        return total
    if how == "max":
        largest = np.max([m.means(-np.inf) for m in members], 0)
        return np.where(np.isinf(largest), 0.0, largest)
    if how == "prod":
        with np.errstate(divide="ignore"):
            logs = sum(np.log(m.means(1.0)) for m in members)
        return np.exp(logs / np.maximum(sum(m.sizes > 0 for m in members), 1))
    for member in reversed(sorted(members, key=lambda m: not m.makes)):
        total = np.where(member.sizes > 0, member.means(0.0), total)
    return total


def normalized(scores: np.ndarray, how: str, sizes: np.ndarray) -> np.ndarray:
    """Scores of a group on a scale that other groups share; ``sizes``: parameters of each unit."""
    if not len(scores):
        return scores
    if how == "size":
        return scores / np.maximum(sizes, 1)
    if how == "std":
        spread = scores.std()
        return (scores - scores.mean()) / (spread if spread > 0 else 1.0)
    scale = float(getattr(scores, how)())  # mean, max or sum
    return scores / scale if scale else scores


def check_choice(name: str, value: Any, known: Sequence[Any]) -> None:
    if value not in known:
        near = get_close_matches(str(value), [k for k in known if k], 1)
        hint = f"; did you mean {near[0]!r}?" if near else ""
        raise SettingError(f"{name}={value!r} is none of {', '.join(map(repr, known))}{hint}")
