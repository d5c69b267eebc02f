"""Labels of slices, and which of them are joined.

Joins are kept as arrays and solved at once (connected components): no loop runs over channels.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

import numpy as np
import torch
from torch import Tensor

from ..rules.channels import (
    FROZEN,
    SourceAxis,
    components_of,
    distinct,
    renumbered,
    without_repeats,
)
from .relations import Bin


class Labels:
    """One label for each slice of each parameter axis (``sources``), and for slices of none."""

    def __init__(self) -> None:
        self.sources: list[SourceAxis] = []
        self._starts: list[int] = []  # first label of each
        self._ends: list[int] = []  # the label behind its last
        self.count = FROZEN + 1
        self._joins: list[tuple[np.ndarray, np.ndarray]] = []
        self._whole: dict[int, SourceAxis] = {}  # by where the labels of a parameter's axis lie
        self._same: list[tuple[int, int]] = []  # first labels of two that are joined one by one
        # Of other arrays, by id, the axis that each was joined to first.
        self._met: dict[int, tuple[Tensor, SourceAxis]] = {}

    def fresh(self, n: int) -> Tensor:
        """Labels of ``n`` slices that no parameter has a part in."""
        self.count += n
        return torch.arange(self.count - n, self.count)

    def add(self, axis: SourceAxis) -> None:
        """A parameter's axis, whose first label is the next one (``count``)."""
        self.count += axis.size
        self.sources.append(axis)
        self._starts.append(axis.first)
        self._ends.append(self.count)
        self._note(axis)

    def set_role(self, index: int, role: str) -> None:
        self.sources[index] = replace(self.sources[index], role=role)
        self._note(self.sources[index])

    def _note(self, axis: SourceAxis) -> None:
        self._whole[axis.labels().data_ptr()] = axis

    def join(self, a: Tensor, b: Tensor) -> tuple[np.ndarray, np.ndarray]:
        """Two arrays of labels, slice by slice; the two as they are kept."""
        one, other = self._axis(a), self._axis(b)
        left = a.reshape(-1).numpy() if one is None else one.numbers
        right = b.reshape(-1).numpy() if other is None else other.numbers
        first, second = one or self._first_met(a, other), other or self._first_met(b, one)
        if first is None or second is None:
            self._joins.append((left, right))
        else:
            self._same.append((first.first, second.first))
        return left, right

    def _axis(self, units: Tensor) -> SourceAxis | None:
        """The parameter's axis whose labels these are, one after the other."""
        axis = self._whole.get(units.data_ptr())
        whole = axis is not None and units.numel() == axis.size and units.is_contiguous()
        return axis if whole else None

    def _first_met(self, units: Tensor, axis: SourceAxis | None) -> SourceAxis | None:
        """The axis that an array was joined to before, which can stand for it where it meets
        another one; None where it meets an axis for the first time, or none."""
        if axis is None:
            return None
        if id(units) not in self._met:
            self._met[id(units)] = units, axis
            return None
        return self._met[id(units)][1]

    def freeze(self, units: Tensor) -> None:
        labels = units.reshape(-1).numpy()
        self._joins.append((labels, np.full(len(labels), FROZEN)))

    def owners_of(self, units: Tensor) -> np.ndarray:
        """The parameter axes, by their numbers, that some labels are of; -1 among them where one is
        of none."""
        labels = units.reshape(-1).numpy()
        at = np.searchsorted(np.array(self._starts, dtype=np.int64), labels, side="right") - 1
        ends = np.array([*self._ends, 0])  # for -1 the last
        return distinct(np.where(labels < ends[at], at, -1))

    def owners(self) -> np.ndarray:
        """For each label the parameter axis that it is of, by its number; -1 for those of none."""
        owners = np.full(self.count, -1)
        for i, source in enumerate(self.sources):
            owners[source.first : source.first + source.size] = i
        return owners

    def joined(self) -> tuple[np.ndarray, np.ndarray]:
        """(class of each label, whether each class was joined to what stays)."""
        classes = same = self._one_by_one()
        empty = np.zeros(0, dtype=np.int64)
        left = np.concatenate([empty, *(a for a, _ in self._joins)])
        right = np.concatenate([empty, *(b for _, b in self._joins)])
        real = (left != FROZEN) & (right != FROZEN)
        if real.any():
            classes = components_of(same[left[real]], same[right[real]], self.count)[same]
        classes = renumbered(classes)
        frozen = np.zeros(int(classes.max()) + 1, dtype=bool)
        frozen[classes[np.maximum(left[~real], right[~real])]] = True
        frozen[classes[FROZEN]] = True
        return classes, frozen

    def _one_by_one(self) -> np.ndarray:
        """For each label the lowest that it is joined to where whole axes are, slice by slice: most
        are, and no search over all labels is needed for them."""
        leader = {source.first: source.first for source in self.sources}

        def led(first: int) -> int:
            while leader[first] != first:
                leader[first] = first = leader[leader[first]]
            return first

        for pair in self._same:
            low, high = sorted(map(led, pair))
            leader[high] = low
        same = np.arange(self.count)
        for source in self.sources:
            first = led(source.first)
            if first != source.first:
                same[source.first : source.first + source.size] = same[first : first + source.size]
        return same

    def groups(self, natural: np.ndarray, owners: np.ndarray, bins: Iterable[Bin]) -> np.ndarray:
        """Group of each class: classes made by one producer, or balanced with each other.

        A layer that reads (or normalises) the channels of several producers does not couple them.
        """
        made = np.zeros(int(natural.max()) + 1, dtype=bool)
        out = np.array([*(s.role == "out" for s in self.sources), False])[owners]
        made[natural[out]] = True
        links = [_chained(owners, natural, out)]
        links.append(_chained(owners, natural, (owners >= 0) & ~made[natural]))
        rows = [distinct(bin_.rows[bin_.rows > 0]) - 1 for bin_ in bins]
        links += [(row[:-1], row[1:]) for row in rows]
        left, right = (np.concatenate(sides) for sides in zip(*links, strict=True))
        return components_of(left, right, len(made)).astype(np.int64)

    def members(self, owners: np.ndarray, group_of: np.ndarray) -> np.ndarray:
        """Which groups have slices in which axes, the last axis first."""
        owned, last = owners >= 0, len(self.sources) - 1
        size = int(group_of.max()) + 1
        keys = distinct(without_repeats((last - owners[owned]) * size + group_of[owned]))
        return np.stack([keys % size, last - keys // size], 1)


def _chained(
    owners: np.ndarray, natural: np.ndarray, chosen: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """The classes of each axis' chosen labels, one after the other, in pairs."""
    labels = np.flatnonzero(chosen)
    left, right = labels[:-1], labels[1:]
    same = owners[left] == owners[right]
    return natural[left[same]], natural[right[same]]
