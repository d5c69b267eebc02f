"""Further runs of the model that is recorded, for what one run does not tell: what its code does in
training mode, and at other lengths of the input."""

from __future__ import annotations

from functools import cached_property
from typing import Any

from torch import nn

from ..modules.other_lengths import at_other_lengths
from .record import record_another
from .trace import Trace


class OtherRuns:
    """Each is made once, when it is asked for: :func:`~fxprune.tracing.record.record_another`."""

    def __init__(self, model: nn.Module, example_input: Any, only: Any = None) -> None:
        self._model, self._example, self._only = model, example_input, only

    @cached_property
    def training(self) -> Trace | None:
        """In training mode; None where the model does not run so."""
        return record_another(self._model, self._example, self._only, training=True)

    @cached_property
    def lengths(self) -> list[Trace]:
        """With another batch, and with each other length that the input has and the model takes
        another of."""
        inputs = at_other_lengths(self._example)
        runs = (record_another(self._model, each, self._only) for each in inputs)
        return [run for run in runs if run is not None]
