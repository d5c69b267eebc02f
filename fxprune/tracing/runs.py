"""Further runs of the model that is recorded, for what one run does not tell: what its code does in
training mode, and at other lengths of the input."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn

from ..errors import PruningError
from ..modules import tree
from ..modules.running import bind_inputs
from .record import record
from .trace import Trace

_LONG = 16  # a length from which on half of it will do: less to compute, and no table is too short


class OtherRuns:
    """Each is made once, when it is asked for. See :func:`~fxprune.tracing.record.record`."""

    def __init__(self, model: nn.Module, example_input: Any, only: Any = None) -> None:
        self._model, self._example, self._only = model, example_input, only

    @cached_property
    def training(self) -> Trace | None:
        """In training mode; None where the model does not run so."""
        return self._run(self._example, training=True)

    @cached_property
    def lengths(self) -> list[Trace]:
        """With another batch, and with each other length that the input has and the model takes
        another of."""
        runs = map(self._run, _at_other_lengths(self._example))
        return [run for run in runs if run is not None]

    def _run(self, example: Any, *, training: bool = False) -> Trace | None:
        try:
            return record(self._model, example, self._only, training=training)
        except PruningError:
            return None


def _at_other_lengths(example: Any) -> Iterator[Any]:
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
