"""How sparsity grows while a model trains, and masks that follow it: of entries, or of units."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import nn

from . import mask_methods as methods
from .errors import SettingError
from .fold import Folds
from .importance import Importance, Slices, resolve, scores
from .leftovers import made_plain
from .mask import mask_of
from .masking import keep_masks, put_masks
from .masks import apply, global_unstructured, identity
from .planning import plan
from .pruning_plan import PruningPlan

Schedule = Callable[[int], float]


def one_shot(sparsity: float, *, at: int = 0) -> Schedule:
    """All at once, at step ``at``."""
    _fraction(sparsity)
    return lambda step: sparsity if step >= at else 0.0


def linear(sparsity: float, steps: int, *, start: float = 0.0, after: int = 0) -> Schedule:
    """From ``start`` to ``sparsity`` in ``steps`` equal steps, after the first ``after``."""
    return _growing(sparsity, steps, start, after, lambda share: share)


def cubic(sparsity: float, steps: int, *, start: float = 0.0, after: int = 0) -> Schedule:
    """Fast at first, then ever slower (Zhu & Gupta, arXiv 1710.01878)."""
    return _growing(sparsity, steps, start, after, lambda share: 1 - (1 - share) ** 3)


def _growing(
    sparsity: float, steps: int, start: float, after: int, shape: Callable[[float], float]
) -> Schedule:
    _fraction(sparsity)
    _fraction(start)
    if steps < 1:
        raise SettingError(f"steps={steps!r} is not 1 at least")

    def schedule(step: int) -> float:
        share = min(max((step - after) / steps, 0.0), 1.0)
        return start + (sparsity - start) * shape(share)

    return schedule


def _fraction(value: float) -> None:
    if not 0 <= value <= 1:
        raise SettingError(f"sparsity={value!r} is not in [0, 1]")


class MaskScheduler:
    """Masks that grow with a schedule::

        scheduler = MaskScheduler([(model.fc, "weight")], cubic(0.9, steps=20))
        for epoch in range(20):
            train(model)
            scheduler.step()

    Args:
        parameters: ``(module, name)`` of each tensor to mask.
        schedule: step -> sparsity: :func:`one_shot`, :func:`linear`, :func:`cubic` or any function.
        method: ``f(scores, keep, amount) -> keep`` of :mod:`fxprune.mask_methods`; by default the
            entries of smallest absolute value go.
        together: rank the entries of all tensors together, not each tensor by itself.
    """

    def __init__(
        self,
        parameters: Iterable[tuple[nn.Module, str]],
        schedule: Schedule,
        method: Callable[..., Any] = methods.smallest,
        *,
        together: bool = False,
    ) -> None:
        self.parameters = list(parameters)
        if not self.parameters:
            raise SettingError("MaskScheduler: no parameters were given")
        self.schedule, self.method, self.together = schedule, method, together
        self.steps = 0

    @property
    def sparsity(self) -> float:
        """The share of entries that are masked now."""
        keeps = [mask_of(module, name) for module, name in self.parameters]
        return 1 - sum(int(k.sum()) for k in keeps) / sum(k.numel() for k in keeps)

    def step(self) -> float:
        """Mask what is missing to the next sparsity of the schedule; returns the one reached."""
        self.steps += 1
        wanted = self.schedule(self.steps)
        _fraction(wanted)
        if self.together:
            amount = _more(self.sparsity, wanted)
            global_unstructured(self.parameters, amount, self.method)
            return self.sparsity
        for module, name in self.parameters:
            amount = _more(1 - float(mask_of(module, name).double().mean()), wanted)
            apply(module, name, partial(self.method, amount=amount))
        return self.sparsity

    def state_dict(self) -> dict[str, Any]:
        """How far it is; the masks are in the model's own state dict."""
        return {"steps": self.steps}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on where another one was; after this the model's state dict fits the model."""
        self.steps = int(state["steps"])
        for module, name in self.parameters:
            identity(module, name)

    def __repr__(self) -> str:
        return (
            f"MaskScheduler({len(self.parameters)} tensors, step {self.steps}, {self.sparsity:.1%})"
        )


def _more(now: float, wanted: float) -> float:
    """The share of what is left that has to go."""
    return min(max((wanted - now) / (1 - now), 0.0), 1.0) if now < 1 else 0.0


class PlanScheduler:
    """Whole units that are switched off, more of them with each step, while a model trains::

        scheduler = PlanScheduler(model, example_input, cubic(0.5, steps=20))
        for epoch in range(20):
            train(model)
            scheduler.step()
        small = scheduler.plan.apply(model)

    Each step plans anew on the weights as they are now, and masks in place: the parameters stay the
    same objects, so the optimizer stays valid. What is masked stays masked, and emits its biases.

    Args:
        model: it gets the masks.
        example_input: a tensor, a tuple of positional or a mapping of keyword arguments.
        schedule: step -> the fraction of units that each group has lost.
        settings: those of :func:`fxprune.plan`, but ``sparsity``.

    Attributes:
        plan: the last step's :class:`PruningPlan`, or None before the first.
    """

    def __init__(
        self, model: nn.Module, example_input: Any, schedule: Schedule, **settings: Any
    ) -> None:
        if "sparsity" in settings:
            raise SettingError("sparsity: the schedule says how many units go")
        self.model, self.example_input, self.schedule = model, example_input, schedule
        self.settings = settings
        self._importance: Importance = resolve(settings.pop("importance", "l2"))
        self._gone: dict[str, np.ndarray] = {}  # units that are masked, by group
        self.plan: PruningPlan | None = None
        self.steps = 0

    @property
    def sparsity(self) -> float:
        """The share of the units of all groups that can lose any which are masked now."""
        gone = list(self._gone.values())
        return sum(int(g.sum()) for g in gone) / max(1, sum(len(g) for g in gone))

    def step(self) -> float:
        """Mask what is missing to the next sparsity of the schedule; returns the one reached."""
        self.steps += 1
        self._mask(self.schedule(self.steps))
        return self.sparsity

    def _mask(self, wanted: float) -> None:
        _fraction(wanted)
        if wanted == 0 and not self._gone:
            return
        asked: list[str] = []

        def score(group: list[Slices]) -> np.ndarray:
            key = ", ".join(f"{s.name} {s.role}" for s in group)
            asked.append(key)
            found = scores(self._importance, group, key)
            gone = self._gone.get(key, np.zeros(len(found), dtype=bool))
            lowest = found.min() - np.ptp(found) - 1
            return np.where(gone, lowest, found)

        plain = made_plain(self.model)
        self.plan = plan(
            plain, self.example_input, sparsity=wanted, importance=score, **self.settings
        )
        scored = [group for group in self.plan.groups if group.importance is not None]
        for key, group in zip(asked, scored, strict=True):
            gone = self._gone.setdefault(key, np.zeros(group.width, dtype=bool))
            gone[group.removed.numpy()] = True
        put_masks(self.model, keep_masks(self.plan, Folds()))

    def state_dict(self) -> dict[str, Any]:
        """How far it is and which units are masked; the weights are in the model's state dict."""
        gone = {key: torch.from_numpy(mask.copy()) for key, mask in self._gone.items()}
        return {"steps": self.steps, "gone": gone}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on where another one was: masks the same units. After this the model's state dict
        fits the model."""
        self.steps = int(state["steps"])
        self._gone = {key: mask.numpy().copy() for key, mask in state["gone"].items()}
        if self.steps:
            self._mask(self.schedule(self.steps))

    def __repr__(self) -> str:
        return f"PlanScheduler({type(self.model).__name__}, step {self.steps}, {self.sparsity:.1%})"
