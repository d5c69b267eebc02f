"""Labels over several dimensions, of which a rectangle has to remain: (some heads) × (some
dimensions of each)."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from ..rules.channels import Axis, distinct_rows, varying
from .relations import Bin


@dataclass
class Rectangle:
    """``held`` dimensions do not shrink; those of ``rather`` neither, where something else can."""

    units: Tensor
    where: str
    held: set[int] = field(default_factory=set)
    rather: set[int] = field(default_factory=set)

    def is_stuck(self, classes: np.ndarray) -> bool:
        """Whether units lie along held dimensions only: none can go, and some could till now.

        Args:
            classes: unit class of each label; 0 stays.
        """
        units = self._in(classes)
        dims = varying(units)
        return bool(dims) and set(dims) <= self.held | self.rather and bool((units > 0).any())

    def bin(self, classes: np.ndarray) -> Bin | None:
        """How it may shrink: one dimension gives, each slice along the others loses equally many.
        None where units lie along one dimension only, or all slices are the same."""
        units = self._in(classes)
        dims = varying(units)
        if len(dims) < 2:
            return None
        free = [d for d in dims if d not in self.held | self.rather] or list(dims)
        rows = max((_along(units, d) for d in free), key=_leeway)
        return Bin(rows, self.where) if len(rows) > 1 else None

    def _in(self, classes: np.ndarray) -> Tensor:
        return torch.from_numpy(classes[self.units.numpy()])


def _along(units: Tensor, dim: int) -> np.ndarray:
    return distinct_rows(units.movedim(dim, -1).reshape(-1, units.size(dim)).numpy())


def _leeway(rows: np.ndarray) -> tuple[int, int]:
    """How many units the row has that has the fewest; how many slices a row has."""
    ordered = np.sort(rows, axis=1)
    return int((np.diff(ordered, axis=1) != 0).sum(1).min()), rows.shape[1]


class Rectangles:
    """One for each array of labels; the arrays stay alive, as they go by their identity."""

    def __init__(self) -> None:
        self._by_units: dict[int, Rectangle] = {}

    def __iter__(self) -> Iterator[Rectangle]:
        return iter(self._by_units.values())

    def get(self, axis: Axis) -> Rectangle | None:
        return self._by_units.get(id(axis.units))

    def of(self, axis: Axis, where: str) -> Rectangle:
        """That of an axis; made, and told ``where`` it is cut, where there is none."""
        if id(axis.units) not in self._by_units:
            self._by_units[id(axis.units)] = Rectangle(axis.units, where)
        return self._by_units[id(axis.units)]

    def hold(self, axis: Axis, dims: Iterable[int], where: str, *, rather: bool) -> None:
        rectangle = self.of(axis, where)
        held = {i for i, d in enumerate(axis.dims) if d in set(dims)}
        if rather:
            rectangle.rather |= held
        else:
            rectangle.held |= held
