"""A plan that was made before, on another copy of the model: what goes is known, not chosen."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from . import groups
from .errors import PlanError
from .fold import Folds
from .pattern_types import Pattern
from .planner import Planner
from .planning import make_plan
from .pruning_plan import PruningPlan
from .settings import Settings

OTHER = (
    "was saved for another model, or with other settings of attention, outputs or patterns: build "
    "the model as it was before anything was pruned, and give the same settings"
)


def chosen(plan: PruningPlan) -> dict[str, Any]:
    """What a plan has chosen, as numbers and tensors."""
    flags = {"removed": plan._removed, "carriers": plan._carriers}
    found = {key: torch.from_numpy(np.flatnonzero(flag)) for key, flag in flags.items()}
    return {"units": len(plan._removed), **found}


def plan_again(
    model: nn.Module,
    example_input: Any,
    choice: dict[str, Any],
    settings: Settings,
    patterns: Iterable[Pattern],
) -> PruningPlan:
    """The plan that made ``choice``, for a model of the same shapes with any weights. It has no
    constants to move: they are in the weights that will be loaded."""

    def flags(size: int, units: Tensor) -> np.ndarray:
        found = np.zeros(size, dtype=bool)
        found[units.numpy()] = True
        return found

    class Replanner(Planner):
        def _ask(self) -> None:
            size = len(self.removed)
            if size != choice["units"]:
                raise PlanError(f"the pruner's state {OTHER}")
            self.carriers = flags(size, choice["carriers"])
            self._gone = flags(size, choice["removed"])

        def _stays(self, group: groups.Group) -> np.ndarray | None:
            return ~self._gone[group.units]

        def _follow_constants(self) -> bool:
            self.folds = Folds()
            return True

    return make_plan(model, example_input, settings, patterns, Replanner)
