"""A plan again, from what it has chosen: the model is recorded anew, and nothing is scored."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np
import torch
from torch import nn

from ..choosing.settings import Settings
from ..errors import InputError, PlanError, SettingError
from ..modules import tree
from ..modules.inspecting import device_of
from ..planning.make import make_plan
from ..planning.planner import Planner
from ..planning.pruning_plan import PruningPlan
from ..records import example as examples
from ..records.chosen import Chosen, main_dtype
from ..relating import groups
from ..relating.fold import Folds
from ..rules.pattern_types import Pattern

# How units were chosen is over, and nothing asks for it.
UNKNOWN: Any = dict.fromkeys(("sparsity", "ignore", "importance", "scope", "round_to"))

Reason = tuple[str, str | None, np.ndarray | None]


class Restorer(Planner):
    """Removes what was chosen before."""

    def __init__(
        self,
        *given: Any,
        chosen: Chosen,
        folding: bool,
        reasons: list[Reason],
    ) -> None:
        super().__init__(*given)
        self.restored, self.folding, self.reasons = chosen, folding, reasons

    def _divide(self, s: float | None = None) -> None:
        """Nothing is asked of a group."""

    def _ask(self) -> None:
        flags = self.restored.flags(self.relations)
        self.removed, self.known = flags["removed"], flags
        self.asked = {}
        for group, (name, frozen, scores) in zip(self.groups, self.reasons, strict=False):
            if name != self.name(group):
                break
            group.frozen = group.frozen or frozen
            if scores is not None and len(scores) == len(group.units):
                self.scores[id(group)] = scores

    def _stays(self, group: groups.Group) -> np.ndarray | None:
        stays = ~self.known["removed"][group.units]
        return None if stays.all() else stays

    def _follow_constants(self) -> bool:
        self.silent, self.carriers = (self.known[key].copy() for key in ("silent", "carriers"))
        self.folds = Folds()
        if self.folding:
            self.folds = self._folded(self._heard())
        return True

    def _freeze_classes(self, classes: np.ndarray, reason: str, where: str, line: str) -> None:
        raise PlanError(
            f"the plan does not fit this {type(self.trace.model).__name__}, whose code goes "
            f"another way: {reason} ({where}). Pass the example input of then as example_input=, "
            "or make a new plan"
        )


def restore(
    model: nn.Module,
    chosen: Chosen,
    example_input: Any = None,
    *,
    patterns: Iterable[Pattern] = (),
    folding: bool = True,
    reasons: list[Reason] | None = None,
) -> PruningPlan:
    """The plan for ``model`` that removes what was chosen.

    Args:
        example_input: what the model runs on; by default one like that of then.
        folding: whether the plan is to be applied to a model whose values count.
        reasons: for each group its name, why it stays, and how its units scored.

    Raises:
        PlanError: it does not fit the model.
    """
    given = example_input is not None
    if not given:
        example_input = _example(model, chosen)

    def planner(*args: Any) -> Restorer:
        return Restorer(*args, chosen=chosen, folding=folding, reasons=reasons or [])

    settings = Settings(
        **UNKNOWN, bias=chosen.bias, exact=chosen.exact, attention=chosen.attention,
        outputs=chosen.outputs,
    )  # fmt: skip
    try:
        return make_plan(
            model, example_input, settings, patterns, planner, masked=chosen.masked, heard=folding
        )
    except InputError as error:
        if given:
            raise
        raise PlanError(
            f"{type(model).__name__} does not run on an input that is made up after the one of "
            "then; pass example_input="
        ) from error
    except SettingError as error:
        raise PlanError(f"the plan does not fit the model: {error}") from error


def _example(model: nn.Module, chosen: Chosen) -> Any:
    if chosen.example is None:
        raise PlanError(
            "the example input of then is too large or too special to be in the file, and "
            f"{type(model).__name__} has to run once; pass example_input="
        )
    args, kwargs = examples.from_json(chosen.example, device_of(model))
    dtype: Any = getattr(torch, main_dtype(model) or "float32")

    def cast(t: torch.Tensor) -> torch.Tensor:
        return t.to(dtype) if t.dtype == chosen.dtype else t

    args, kwargs = tree.map_tensors((args, kwargs), cast)
    return kwargs or args
