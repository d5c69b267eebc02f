"""Where the code itself sends channels at the new widths.

A shuffle written as view, transpose, view sends a channel where its position says, so which
channels go through which layers depends on which are kept. This walk runs the rules at the new
widths with anonymous slots; a slot's *kind* is the set of parameter axes it reaches, and as many
units of each kind have to be kept as there are slots of it.
"""

from __future__ import annotations

from collections import Counter

import numpy as np
import torch

from .call import Call, Named, Roles
from .channels import FROZEN, Axis, Channels
from .discover import Relations, components_of
from .replay import Replay

Kind = tuple[tuple[int, int], ...]  # (index of a parameter axis, number of slices in it), sorted


class Slots(Replay):
    """The trace at its new widths, for slots that are not yet any particular channel."""

    def _start(self) -> None:
        self._first: dict[int, int] = {}
        self._joins: list[tuple[np.ndarray, np.ndarray]] = []
        self._next = FROZEN + 1
        for source in self._relations.sources:
            self._first[source.first] = self._next
            self._next += self.order[source.first].numel()

    def source(self, value: Named, roles: Roles, view: tuple[int, ...] | None) -> Channels:
        x = super().source(value, roles, view)
        axes = []
        for axis in x.axes:
            assert axis.source is not None
            first, shape = self._first[axis.source.first], axis.units.shape
            units = torch.arange(first, first + axis.units.numel()).reshape(shape)
            axes.append(Axis(axis.dims, units))
        return Channels(x.shape, tuple(axes))

    def join(self, a: Axis, b: Axis, call: Call) -> None:
        self.join_whole(a, b.units, call)

    def join_whole(self, axis: Axis, head: torch.Tensor, call: Call) -> None:
        if axis.units.shape == head.shape:
            self._joins.append((axis.units.reshape(-1).numpy(), head.reshape(-1).numpy()))

    def kinds(self) -> Counter[Kind]:
        """How many slots there are of each kind."""
        empty = np.zeros(0, dtype=np.int64)
        left = np.concatenate([empty, *(a for a, _ in self._joins)])
        right = np.concatenate([empty, *(b for _, b in self._joins)])
        real = (left != FROZEN) & (right != FROZEN)
        classes = components_of(left[real], right[real], self._next)
        spans = [
            classes[first : first + self.order[source.first].numel()]
            for source in self._relations.sources
            for first in [self._first[source.first]]
        ]
        return Counter(_kinds(spans).values())


def kinds_of_units(relations: Relations) -> dict[int, Kind]:
    """The kind of each unit class of the model as it is."""
    return _kinds([relations.of(source).reshape(-1) for source in relations.sources])


def _kinds(spans: list[np.ndarray]) -> dict[int, Kind]:
    found: dict[int, list[tuple[int, int]]] = {}
    for i, span in enumerate(spans):
        for unit, count in zip(*np.unique(span, return_counts=True), strict=True):
            found.setdefault(int(unit), []).append((i, int(count)))
    return {unit: tuple(kind) for unit, kind in found.items()}
