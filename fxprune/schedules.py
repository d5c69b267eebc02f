"""How sparsity grows while a model trains, and masks that follow it: of entries, or of units."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from itertools import pairwise
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from .choosing.settings import by_name
from .errors import PlanError, PruningError, SettingError
from .importance import Slices, changed
from .importance.named import check_lasting
from .masking import methods
from .masking.leftovers import made_plain, pruned_names, sparsified_names
from .masking.plan_masks import keep_masks, put_masks
from .masks import apply, global_unstructured, identity, places
from .modules.beside import models_beside
from .modules.given import Rising, check_flag, check_function, falls, is_number, is_whole
from .modules.inspecting import dotted, shape_of
from .modules.usable import check_model
from .parametrized.mask import mask_of, masked_names
from .planning.make import plan
from .planning.pruning_plan import PruningPlan
from .relating.fold import Folds

Schedule = Callable[[int], float]


def one_shot(sparsity: float, *, at: int = 0) -> Schedule:
    """0 before step ``at``, ``sparsity`` from then on. Schedulers count steps from 1."""
    _check_fraction(sparsity)
    _check_step("at", at)
    return lambda step: sparsity if step >= at else 0.0


def linear(sparsity: float, steps: int, *, start: float = 0.0, after: int = 0) -> Schedule:
    """``start`` until step ``after``, then ``steps`` equal steps to ``sparsity``."""
    return _growing(sparsity, steps, start, after, lambda share: share)


def cubic(sparsity: float, steps: int, *, start: float = 0.0, after: int = 0) -> Schedule:
    """As :func:`linear`, but fast at first, slow at the end (Zhu & Gupta, arXiv 1710.01878)."""
    return _growing(sparsity, steps, start, after, lambda share: 1 - (1 - share) ** 3)


def _growing(
    sparsity: float, steps: int, start: float, after: int, shape: Callable[[float], float]
) -> Schedule:
    _check_fraction(sparsity)
    _check_fraction(start, "start")
    _check_step("after", after)
    if not is_number(steps) or steps < 1:
        raise SettingError(f"steps={steps!r} is no number from 1 on")
    if start > sparsity:
        raise SettingError(
            f"start={start!r} is more than sparsity={sparsity!r}, and nothing that is gone comes "
            "back: a schedule rises, or stays"
        )

    def schedule(step: int) -> float:
        share = min(max((step - after) / steps, 0.0), 1.0)
        return start + (sparsity - start) * shape(share)

    return schedule


def _check_fraction(value: Any, name: str = "sparsity") -> None:
    if not is_number(value) or not 0 <= value <= 1:
        raise SettingError(f"{name}={value!r} is not in [0, 1]")


def _check_step(name: str, value: Any) -> None:
    if not is_number(value):
        raise SettingError(f"{name}={value!r} is no number of a step")


def _check_schedule(schedule: Any) -> None:
    wanted = "of the step, such as schedules.cubic(0.5, steps=10)"
    check_function("schedule", schedule, wanted)


def _asked(schedule: Schedule, step: int) -> Any:
    """What a schedule says of a step."""
    try:
        return schedule(step)
    except PruningError:
        raise
    except Exception as error:  # whatever the user's own function raises
        raise SettingError(
            f"schedule raised {type(error).__name__} for step {step}: {error}"
        ) from error


_NAMED: dict[str, Callable[[int], Schedule]] = {
    "once": lambda steps: one_shot(1.0, at=1),
    "linear": lambda steps: linear(1.0, steps),
    "cubic": lambda steps: cubic(1.0, steps),
}


def shares(
    schedule: Any, steps: int | None, settings: dict[str, Any]
) -> tuple[int | None, float | Mapping[Any, float], Schedule]:
    """What :class:`fxprune.Pruner` is told: how many steps there are, None where that is not known;
    a sparsity, and its share at each."""
    if isinstance(schedule, str):
        if schedule not in _NAMED:
            known = ", ".join(map(repr, _NAMED))
            raise SettingError(f"schedule={schedule!r} is unknown; use {known} or sparsities")
        last = settings.get("sparsity", 0.5)
        _check_fractions(last.values() if isinstance(last, Mapping) else [last])
        steps = 1 if steps is None else steps
        if not is_whole(steps) or steps < 1:
            raise SettingError(f"steps={steps!r} is not a positive integer")
        if steps > 1 and schedule == "once":
            raise SettingError(f"steps={steps}: schedule='once' takes one step")
        return steps, last, _NAMED[schedule](steps)
    for name, value in {"steps": steps, **settings}.items():
        if name in ("steps", "sparsity", "target") and value is not None:
            raise SettingError(f"{name}={value!r}: the schedule says that itself")
    if callable(schedule):

        def checked(number: int) -> float:
            _check_fractions([share := _asked(schedule, number)])
            return share

        return None, 1.0, checked
    if not isinstance(schedule, Sequence) or not len(schedule):
        raise SettingError(f"schedule={schedule!r} is no name, function or sequence of sparsities")
    values = tuple(schedule)
    _check_fractions(values)
    if any(falls(before, after) for before, after in pairwise(values)):
        raise SettingError(
            f"schedule={schedule!r} falls, and nothing that is gone comes back: give sparsities "
            "that rise, or stay"
        )
    return len(values), 1.0, lambda number: values[min(number, len(values)) - 1]


def _check_fractions(values: Iterable[Any]) -> None:
    for value in values:
        if not is_number(value) or not 0 <= float(value) < 1:
            raise SettingError(f"sparsity={value!r} is not a fraction in [0, 1)")


class MaskScheduler:
    """Masks that grow with a schedule::

        scheduler = MaskScheduler([(model.fc, "weight")], cubic(0.9, steps=20))
        for epoch in range(20):
            train(model)
            scheduler.step()

    Args:
        parameters: ``(module, name)`` of each tensor to mask.
        schedule: step -> sparsity: :func:`one_shot`, :func:`linear`, :func:`cubic` or any function.
        method: ``f(scores, keep, amount) -> keep`` of :mod:`.masking.methods`; by default the
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
        self.parameters = places(parameters)
        _check_schedule(schedule)
        check_function("method", method, "f(scores, keep, amount)")
        check_flag("together", together)
        self.schedule, self.method, self.together = schedule, method, together
        self.steps, self._rising = 0, Rising()

    @property
    def sparsity(self) -> float:
        """The share of entries that are masked now."""
        keeps = [mask_of(module, name) for module, name in self.parameters]
        return 1 - sum(int(k.sum()) for k in keeps) / sum(k.numel() for k in keeps)

    def step(self) -> float:
        """Mask what is missing to the next sparsity of the schedule; returns the one reached."""
        wanted = _next(self)
        if self.together:
            amount = _more(self.sparsity, wanted)
            global_unstructured(self.parameters, amount, self.method)
        else:
            for module, name in self.parameters:
                amount = _more(1 - float(mask_of(module, name).double().mean()), wanted)
                apply(module, name, partial(self.method, amount=amount))
        self.steps += 1
        return self.sparsity

    def state_dict(self) -> dict[str, Any]:
        """How far it is; the masks are in the model's own state dict."""
        return {"steps": self.steps}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on where another one was; after this the model's state dict fits the model."""
        self.steps = _checked_state(self, state)["steps"]
        for module, name in self.parameters if self.steps else ():
            identity(module, name)

    def __repr__(self) -> str:
        return (
            f"MaskScheduler({len(self.parameters)} tensors, step {self.steps}, {self.sparsity:.1%})"
        )


def _next(scheduler: MaskScheduler | PlanScheduler) -> float:
    """The sparsity of the next step."""
    step = scheduler.steps + 1
    wanted = _asked(scheduler.schedule, step)
    _check_fraction(wanted)
    scheduler._rising.see(step, wanted)
    return wanted


def _checked_state(scheduler: MaskScheduler | PlanScheduler, state: Any) -> dict[str, Any]:
    known = scheduler.state_dict()
    same = isinstance(state, Mapping) and state.keys() == known.keys()
    if not same or not is_whole(state["steps"]) or state["steps"] < 0:
        raise PlanError(f"this is no state of {type(scheduler).__name__}.state_dict()")
    return dict(state)


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
    same objects, so the optimizer stays valid. What is masked stays masked, and emits its biases
    (with ``bias="drop"``, nothing); ``bias`` is ``"propagate"`` by default here. In ``plan.apply``
    padding continues these constants, and norms over channels count those that stay;
    :func:`fxprune.compact` changes no output, and keeps what that takes.

    Args:
        model: it gets the masks.
        example_input: a tensor, a tuple of positional or a mapping of keyword arguments.
        schedule: step -> the fraction of units that each group has lost.
        also: models of the same kind that get the masks of ``model``: averages of it, bare or
            wrapped (:class:`torch.optim.swa_utils.AveragedModel`). An average goes by the order of
            ``model.parameters()`` and of its buffers, which masks change.
        settings: those of :func:`fxprune.plan`, but ``sparsity``, ``target``, ``exact`` and
            ``calibration``.
    """

    def __init__(
        self,
        model: nn.Module,
        example_input: Any,
        schedule: Schedule,
        *,
        also: Iterable[nn.Module] | nn.Module | None = None,
        **settings: Any,
    ) -> None:
        check_model(model, example_input)
        _check_schedule(schedule)
        known = [k for k in inspect.signature(plan).parameters if k not in _NOT_IN_STEPS]
        stray = next((name for name in settings if name not in known[2:]), None)
        if stray is not None:
            why = _NOT_IN_STEPS.get(stray, f"is no setting; there are {', '.join(known[2:])}")
            raise SettingError(f"{stray}: {why}")
        if any(pruned_names(m) or sparsified_names(m) for m in model.modules()):
            raise SettingError(
                "the model has PyTorch masks on it: masks.from_torch_prune(model) first"
            )
        self.model, self.example_input, self.schedule = model, example_input, schedule
        self.also = models_beside(also, model)
        # Masks put on in training move no constant: what is masked emits its biases from then on.
        self.settings = {**settings, "bias": settings.get("bias") or "propagate"}
        for key in {"ignore", "min_width", "max_sparsity"} & self.settings.keys():
            self.settings[key] = by_name(self.settings[key], model)
        self._importance = self.settings.pop("importance", "l2")
        check_lasting(self._importance)
        if self._importance == "reconstruction":
            raise SettingError(
                "importance='reconstruction' chooses by calibration=, and that is for pruning "
                "without training; use another one here, such as 'l2' or Wanda(batches)"
            )
        self._gone: dict[str, np.ndarray] = {}  # units that are masked, by group
        self._plan: PruningPlan | None = None
        self.steps, self._rising = 0, Rising()

    @property
    def plan(self) -> PruningPlan | None:
        """The :class:`PruningPlan` of what is masked; None where nothing is."""
        if self._plan is None and self._gone:  # resumed
            self._plan = self._planned(_asked(self.schedule, self.steps))
        return self._plan

    @property
    def sparsity(self) -> float:
        """The share of the units of all groups that can lose any which are masked now."""
        gone = list(self._gone.values())
        return sum(int(g.sum()) for g in gone) / max(1, sum(len(g) for g in gone))

    def step(self) -> float:
        """Mask what is missing to the next sparsity of the schedule; returns the one reached."""
        wanted = _next(self)
        if wanted or self._gone:
            self._plan = made = self._planned(wanted)
            dropped = made._folds if made.settings.bias == "drop" else Folds()
            self._put(keep_masks(made, dropped))
        self.steps += 1
        return self.sparsity

    def _put(self, keeps: dict[str, Tensor]) -> None:
        for model in [self.model, *self.also]:
            put_masks(model, keeps)

    def _planned(self, wanted: float) -> PruningPlan:
        """A plan on the weights as they are, by which those units go first that have gone."""
        asked: list[str] = []

        def lower(found: np.ndarray, group: list[Slices]) -> np.ndarray:
            key = ", ".join(f"{s.name} {s.role}" for s in group)
            asked.append(key)
            return np.where(self._gone.get(key, False), -np.inf, found)

        plain = made_plain(self.model)
        score = changed(self._importance, lower)
        made = plan(plain, self.example_input, sparsity=wanted, importance=score, **self.settings)
        scored = [group for group in made.groups if group.importance is not None]
        for key, group in zip(asked, scored, strict=True):
            gone = self._gone.setdefault(key, np.zeros(group.width, dtype=bool))
            gone[group.removed.numpy()] = True
        return made

    def state_dict(self) -> dict[str, Any]:
        """How far it is and what is masked; the weights are in the model's state dict."""
        gone = {key: torch.from_numpy(mask.copy()) for key, mask in self._gone.items()}
        keeps = {
            dotted(path, name): mask_of(module, name).cpu()
            for path, module in self.model.named_modules() for name in masked_names(module)
        }  # fmt: skip
        return {"steps": self.steps, "gone": gone, "masks": keeps}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Put the saved masks on; after this the model's state dict fits. Make the optimizer before
        this call: masks change the order of ``model.parameters()``."""
        state = _checked_state(self, state)
        masks, gone = state["masks"], state["gone"]
        if not all(isinstance(m, Mapping) and _are_tensors(m.values()) for m in (masks, gone)):
            raise PlanError("this is no state of PlanScheduler.state_dict()")
        for name, mask in masks.items():
            if shape_of(self.model, name) != tuple(mask.shape):
                raise PlanError(
                    f"the state has a mask of shape {tuple(mask.shape)} for {name}, and here that "
                    f"has {shape_of(self.model, name)}: the state is of another model"
                )
        self._put(masks)
        self.steps, self._plan = state["steps"], None
        self._gone = {key: mask.numpy().copy() for key, mask in gone.items()}

    def __repr__(self) -> str:
        return f"PlanScheduler({type(self.model).__name__}, step {self.steps}, {self.sparsity:.1%})"


def _are_tensors(values: Iterable[Any]) -> bool:
    return all(isinstance(value, torch.Tensor) for value in values)


_NOT_IN_STEPS = {
    **dict.fromkeys(("sparsity", "target"), "the schedule says how many units go"),
    "exact": "compact keeps what it takes for outputs to stay the same",
    **dict.fromkeys(
        ("calibration", "calibration_batches", "calibration_mode"),
        "it is for pruning without training; plan once more with it in the end",
    ),
}
