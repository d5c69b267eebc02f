"""Further runs of the model that is recorded, for what one run does not tell: what its code does in
training mode, and at other lengths of the input."""

from __future__ import annotations

from functools import cached_property
from typing import Any

from torch import nn

from ..errors import PruningError
from ..modules.other_lengths import at_other_lengths
from .record import record
from .trace import Trace


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
        runs = map(self._run, at_other_lengths(self._example))
        return [run for run in runs if run is not None]

    def _run(self, example: Any, *, training: bool = False) -> Trace | None:
        try:
            return record(self._model, example, self._only, training=training)
        except PruningError:  # code of an earlier pruning refuses other lengths by this one
            return None
