"""Kept indices in few bytes: a bit an index where they ascend, else four bytes each."""

from __future__ import annotations

import base64
import binascii
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import torch
from torch import Tensor


class Malformed(Exception):
    """What was read is nothing that fxprune has written."""


@dataclass(frozen=True)
class Indices:
    """Some of ``size`` old indices: ``bits``, or positions in an order of their own, in ``rows``
    (the groups of a grouped convolution) or, with 0 rows, in one."""

    size: int
    rows: int | None  # None for bits
    data: bytes

    @classmethod
    def of(cls, indices: Tensor, size: int) -> Indices:
        array = indices.cpu().numpy()
        if array.ndim == 1 and (np.diff(array) > 0).all():
            flags = np.zeros(size, dtype=bool)
            flags[array] = True
            return cls.of_flags(flags)
        return cls(size, 0 if array.ndim == 1 else len(array), array.astype("<i4").tobytes())

    @classmethod
    def of_flags(cls, flags: np.ndarray) -> Indices:
        return cls(flags.size, None, np.packbits(flags.reshape(-1)).tobytes())

    @property
    def flags(self) -> np.ndarray:
        """For each old index whether it is among them; of bits only."""
        packed = np.frombuffer(self.data, dtype=np.uint8)
        return np.unpackbits(packed, count=self.size).astype(bool)

    def array(self) -> np.ndarray:
        if self.rows is None:
            return np.flatnonzero(self.flags)
        array = np.frombuffer(self.data, dtype="<i4").astype(np.int64)
        return array.reshape(self.rows, -1) if self.rows else array

    def tensor(self) -> Tensor:
        return torch.from_numpy(self.array())

    @cached_property
    def count(self) -> int:
        """How many there are, of each row."""
        if self.rows is None:
            return int(self.flags.sum())
        return len(self.data) // 4 // max(1, self.rows)

    def to_json(self) -> list[Any]:
        return [self.size, self.rows, base64.b64encode(self.data).decode()]

    @classmethod
    def from_json(cls, value: Any) -> Indices:
        """Checked: as many as it takes, in range, none twice."""
        if not isinstance(value, list) or len(value) != 3:
            raise Malformed("a set of indices is not [size, rows, text]")
        size, rows, text = value
        for number in (size, rows if rows is not None else 0):
            if type(number) is not int or not 0 <= number < 2**31:
                raise Malformed(f"a set of indices has {number!r} for a size")
        try:
            data = base64.b64decode(text, validate=True)
        except (TypeError, ValueError, binascii.Error) as error:
            raise Malformed(f"a set of indices is not base64: {error}") from error
        found = cls(size, rows, data)
        if rows is None:
            if len(data) != -(-size // 8):
                raise Malformed(f"{len(data)} bytes for {size} bits")
            return found
        if len(data) % (4 * max(1, rows)):
            raise Malformed(f"{len(data)} bytes for indices in {rows} rows")
        ordered = np.sort(found.array().reshape(max(1, rows), -1), axis=1)
        if ordered.size and (ordered.min() < 0 or ordered.max() >= size):
            raise Malformed(f"indices from {ordered.min()} to {ordered.max()} of {size}")
        if (np.diff(ordered, axis=1) == 0).any():
            raise Malformed("an index stands twice in a set of kept ones")
        return found


class Table:
    """Each set once: those of one group are the same."""

    def __init__(self) -> None:
        self.sets: list[Indices] = []
        self._known: dict[Indices, int] = {}

    def add(self, indices: Indices) -> int:
        if indices not in self._known:
            self._known[indices] = len(self.sets)
            self.sets.append(indices)
        return self._known[indices]

    def to_json(self) -> list[Any]:
        return [indices.to_json() for indices in self.sets]
