"""The slices of parameters that go with the units of a group: what criteria look at."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from ..rules.channels import SourceAxis

_PIECE = 2**17  # elements


@dataclass(frozen=True)
class Slices:
    """The slices of one parameter that belong to a group.

    Attributes:
        name: of the parameter in the model.
        role: what the slices do: ``out`` makes a channel, ``in`` reads it, ``scale`` and ``shift``
            act on it (a norm's; a bias, in whatever form, is a ``shift``), ``stat`` is measured
            from it, ``bare…`` is anything else.
        tensor: the parameter with the slices' dimensions first; no copy. Of complex numbers, their
            absolute values.
        rank: how many dimensions those are.
        units: array (n,), the index of the unit that each row belongs to, -1 where it stays.
        count: number of units.
        first: a number that tells this axis of this parameter from all others.
    """

    name: str
    role: str
    tensor: Tensor
    rank: int
    units: np.ndarray
    count: int
    first: int = 0
    # By order: the rows that a layer has for several groups are measured once.
    _norms: dict[float, Tensor] = field(default_factory=dict, repr=False)

    def among(self, index: np.ndarray, count: int) -> Slices:
        """The slices as those of a group: ``index`` says which of its units each unit is, or -1."""
        return Slices(
            self.name, self.role, self.tensor, self.rank, index[self.units], count, self.first,
            self._norms,
        )  # fmt: skip

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
        if order == math.inf:
            return self.weights.abs().amax(1)
        if not rest:
            return self.tensor.abs().reshape(-1)
        if self.tensor.is_contiguous():  # so each row is
            dtype = torch.promote_types(self.tensor.dtype, torch.float32)
            return torch.linalg.vector_norm(self.tensor, order, rest, dtype=dtype).reshape(-1)
        # As it lies in memory, so that whole runs are added: first the dimensions outside of all
        # others, then the rest of them. In pieces, for the whole would not stay in the cache.
        lies = sorted(range(self.tensor.dim()), key=self.tensor.stride, reverse=True)
        seen = self.tensor.permute(lies)
        summed = [i for i, d in enumerate(lies) if d in rest]
        outer = [i for n, i in enumerate(summed) if i == summed[0] + n]
        pieces = max(1, min(seen.numel() // _PIECE, seen.size(outer[0])))
        total: Tensor | None = None
        for part in seen.tensor_split(pieces, outer[0]):
            part = part.float() if part.dtype.itemsize < 4 else part
            powers = part.square() if order == 2 else part.abs() ** order
            powers = powers.sum(outer, keepdim=True)
            total = powers if total is None else total + powers
        assert total is not None
        if len(outer) < len(summed):
            total = total.sum(summed[len(outer) :], keepdim=True)
        back = total.permute([lies.index(d) for d in range(total.dim())])
        return (back ** (1 / order)).reshape(-1)

    def total(self, rows: Tensor) -> np.ndarray:
        """Sum over the rows of each unit: array (count,)."""
        return self.summed(rows.detach().double().cpu().numpy())

    def largest(self, rows: Tensor) -> np.ndarray:
        """Largest over the rows of each unit: array (count,); -inf where it has none."""
        found = np.full(self.count + 1, -np.inf)
        np.maximum.at(found, self.units + 1, rows.detach().double().cpu().numpy())
        return found[1:]

    def sizes(self) -> np.ndarray:
        """Number of elements of each unit: array (count,)."""
        return self.summed(None) * (self.tensor.numel() // len(self.units))

    def summed(self, values: np.ndarray | None) -> np.ndarray:
        """Sum of one value a row, or of ones, over the rows of each unit; -1 has the first bin."""
        return np.bincount(self.units + 1, values, self.count + 1)[1:]


def summed(group: list[Slices], values: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Of ``values``, one for each row of all ``group``, the sum over the rows of each unit, and
    their number of elements: arrays (count,)."""
    units = np.concatenate([s.units for s in group]) + 1
    elements = [s.tensor.numel() // max(1, len(s.units)) for s in group]
    sizes = np.repeat(np.array(elements, dtype=float), [len(s.units) for s in group])
    count = group[0].count + 1
    return np.bincount(units, values, count)[1:], np.bincount(units, sizes, count)[1:]


def slices(tensor: Tensor, axis: SourceAxis, units: np.ndarray, count: int) -> Slices:
    """The rows of ``tensor`` along ``axis``, each with the one of ``count`` units it belongs to."""
    seen = axis.slices(tensor.detach())
    seen = seen.abs() if seen.is_complex() else seen
    return Slices(axis.name, axis.role, seen, len(axis.dims), units.reshape(-1), count, axis.first)
