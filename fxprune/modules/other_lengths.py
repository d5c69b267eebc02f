"""An example input at other lengths, for what one run on it does not show."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from . import tree
from .running import bind_inputs

_LONG = 16  # a length from which on half of it will do: less to compute, and no table is too short


def with_another_batch(example: Any) -> Any:
    """The input with half of its batch, or with the same twice; None where it has none."""
    shapes = [t.shape for t in tree.tensors(bind_inputs(example))]
    return _at_another_length(example, shapes[0][0], batch=True) if shapes and shapes[0] else None


def at_other_lengths(example: Any) -> Iterator[Any]:
    """The input with another batch, and with another of each other length that its tensors have;
    not all are any that the model takes."""
    another = with_another_batch(example)
    if another is not None:
        yield another
    shapes = [t.shape for t in tree.tensors(bind_inputs(example))]
    for length in dict.fromkeys(size for shape in shapes for size in shape[1:]):
        yield _at_another_length(example, length, batch=False)


def _at_another_length(example: Any, length: int, *, batch: bool) -> Any:
    def other(value: Tensor) -> Tensor:
        for dim in range(value.dim()):
            if value.shape[dim] == length and (dim == 0) == batch:
                value = resized(value, dim)
        return value

    args, kwargs = tree.map_tensors(bind_inputs(example), other)
    return kwargs or args


def resized(value: Tensor, dim: int = 0) -> Tensor:
    """Half of it, or the same twice: numbers that the code divides lengths by go into these."""
    length = value.shape[dim]
    if length >= _LONG and length % 2 == 0:
        return value.narrow(dim, 0, length // 2)
    return torch.cat([value, value], dim)
