"""An example input at other lengths, for what one run on it does not show."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from . import tree
from .running import bind_inputs

_LONG = 16  # a length from which on half of it will do: less to compute, and no table is too short


def at_other_lengths(example: Any) -> Iterator[Any]:
    """The input with another batch, and with another of each other length that its tensors have;
    not all are any that the model takes."""
    given = bind_inputs(example)
    shapes = [t.shape for t in tree.tensors(given)]
    batches = {shape[0] for shape in shapes[:1] if shape}
    lengths = dict.fromkeys(size for shape in shapes for size in shape[1:])
    for length, is_batch in (*((n, True) for n in batches), *((n, False) for n in lengths)):

        def other(value: Any, length: int = length, is_batch: bool = is_batch) -> Any:
            if not isinstance(value, Tensor):
                return tree.rebuild(value, other)
            for dim in range(value.dim()):
                if value.shape[dim] == length and (dim == 0) == is_batch:
                    value = _resized(value, dim)
            return value

        args, kwargs = other(given)
        yield kwargs or args


def _resized(value: Tensor, dim: int) -> Tensor:
    """Half of it, or the same twice: numbers that the code divides lengths by go into these."""
    length = value.shape[dim]
    if length >= _LONG and length % 2 == 0:
        return value.narrow(dim, 0, length // 2)
    return torch.cat([value, value], dim)
