"""Arrays of many layers, one after the other, for what is done to all of them at once."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

import numpy as np
import torch
from torch import Tensor


class SideBySide:
    """Args:
    shapes: of the layers' arrays.
    """

    def __init__(self, shapes: Sequence[Sequence[int]]) -> None:
        self._shapes = shapes
        self._sizes = [math.prod(shape) for shape in shapes]

    def put(self, arrays: Iterable[Tensor]) -> Tensor:
        """One array from those of the layers."""
        return torch.cat([array.reshape(-1) for array in arrays])

    def put_rows(self, arrays: Sequence[Tensor]) -> Tensor:
        """Arrays (rows, ...), with as many rows as any has."""
        rows = max(map(len, arrays))
        return torch.cat([a.reshape(len(a), -1).expand(rows, -1) for a in arrays], 1)

    def parts(self, flat: Tensor) -> list[Tensor]:
        """Those of the layers again, in their shapes."""
        parts = zip(flat.split(self._sizes), self._shapes, strict=True)
        return [part.reshape(shape) for part, shape in parts]

    def any(self, flat: Tensor) -> list[bool]:
        """For each layer whether one of its flags is set."""
        ends = np.cumsum(self._sizes)
        seen = np.concatenate([[0], np.cumsum(flat.numpy())])
        return (seen[ends] > seen[ends - self._sizes]).tolist()
