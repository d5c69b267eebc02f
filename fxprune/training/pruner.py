"""Pruning in the middle of training: the model shrinks in place, and its optimizers with it."""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from difflib import get_close_matches
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from ..budgets.budget import Budget
from ..choosing.owed import Owed, Widths, since
from ..choosing.scope import MOST
from ..choosing.settings import Settings, checked
from ..errors import ModelError, PlanError, PruningWarning, SettingError, warn
from ..importance import resolve
from ..importance.named import check_lasting
from ..modules.beside import models_beside
from ..modules.given import Rising, check_flag, is_whole
from ..modules.inspecting import count_parameters, modules_of, read_attribute
from ..modules.running import on_cpu
from ..modules.usable import check_model
from ..parametrized.mask import is_masked
from ..planning.make import plan
from ..planning.pruning_plan import PruningPlan
from ..proving.proof import prove
from ..records import chosen
from ..records.indices import Malformed
from ..relating.fold import Folds
from ..replaying.kept_indices import composed, same_indices
from ..rewriting.optimizer_state import check_optimizers, cuts, install, regroup
from ..rewriting.rewrite import Journal, apply_with_journal, make_parameter, undoing
from ..saving.restoring import restore
from ..schedules import shares

_SETTINGS = [*inspect.signature(plan).parameters][2:]


@dataclass(frozen=True)
class PrunerStep:
    """What one step of a :class:`Pruner` has come to.

    Attributes:
        sparsity: the share of the units that there were at first which are gone.
        parameters: numbers in the model's parameters.
        widths: units left of each group that can lose any, by its first layer.
    """

    sparsity: float
    parameters: int
    widths: dict[str, int]


class Pruner:
    """Prunes a model while it trains, step by step, in place::

        pruner = fxprune.Pruner(model, x, optimizer=optimizer, sparsity=0.5, steps=5)
        for i, (inputs, labels) in enumerate(batches):
            ...
            optimizer.step()
            if i % 100 == 99:
                pruner.step()

    The parameters stay the same objects and get smaller tensors, so they keep their place in the
    groups of the optimizers, and whatever refers to them still works: learning rate schedules,
    gradient scalers, averages. What the optimizers hold of each parameter is cut by the same
    indices, so training goes on as if the units had never been there. An exception leaves
    everything as it was.

    Args:
        model: it shrinks in place.
        example_input: a tensor, a tuple of positional or a mapping of keyword arguments.
        optimizer: one :class:`torch.optim.Optimizer` or a list of them. States in the shape of
            their parameter are cut, and those over some of its dimensions where it is sure which;
            states of another shape stay as they are, with a :class:`fxprune.PruningWarning`.
        schedule: ``"cubic"`` (fast at first: Zhu & Gupta, arXiv 1710.01878), ``"linear"`` or
            ``"once"``: how the sparsity gets to ``sparsity``, in ``steps`` steps. Or the
            sparsities themselves: a function of the number of the step (1, 2, …;
            :mod:`fxprune.schedules` has some), or a sequence, whose last one stays.
        steps: how many calls of :meth:`step` it takes to the final sparsity; by default 1.
        also: models of the same kind that shrink as ``model`` does: averages of it, bare or
            wrapped (:class:`torch.optim.swa_utils.AveragedModel`). Constants of each are its own.
        verify: prove each step, as :func:`fxprune.prune` does, before anything changes.
        settings: those of :func:`fxprune.plan`, used at each step for a new plan of the model as it
            is. A sparsity counts the units that a group had before the first step; with a ``scope``
            in which groups lose more or less, it is what all have lost together. With a ``target``
            the reduction follows the schedule: half of it is done where the schedule has half of
            its sparsity.

    Attributes:
        kept: for each tensor that has changed, ``{dim: LongTensor}`` of the indices that are left
            of those before the first step; see :attr:`fxprune.PruningPlan.kept`.
        history: a :class:`PrunerStep` for each step.
        plan: the :class:`fxprune.PruningPlan` of the last step that removed something; None before
            it, and after loading.

    Raises:
        PruningError: a setting, the model, the input or an optimizer cannot be used.
    """

    @on_cpu()
    def __init__(
        self,
        model: nn.Module,
        example_input: Any,
        *,
        optimizer: Any = None,
        schedule: str | Callable[[int], float] | Sequence[float] = "cubic",
        steps: int | None = None,
        also: Iterable[nn.Module] | nn.Module | None = None,
        verify: bool = True,
        **settings: Any,
    ) -> None:
        check_model(model, example_input)
        if is_masked(model):
            raise ModelError("a masked model cannot be pruned in place; plan.apply(model) first")
        settings = _checked(settings)
        check_flag("verify", verify)
        self.model, self.example_input, self.verify = model, example_input, verify
        self.settings = settings
        self.steps, self._last, self._share = shares(schedule, steps, settings)
        if self.steps != 1:
            check_lasting(settings.get("importance", "l2"), widths=True)
        self.optimizers = check_optimizers(optimizer, model)
        self.also = models_beside(also, model)
        self.kept: dict[str, dict[int, Tensor]] = {}
        self.history: list[PrunerStep] = []
        self.plan: PruningPlan | None = None
        self._choices: list[dict[str, Any] | None] = []
        self._asked: list[float] = []  # for which sparsity each step was made
        self._rising = Rising()
        first = self._plan_nothing()
        self._widths, target = Widths(first), settings.get("target")
        self._budget = target and Budget(target, first._trace, first._relations, example_input)

    def _plan_nothing(self) -> PruningPlan:
        """What groups there are; it costs no data, and says early what cannot be."""
        calibrated = "calibration" in self.settings
        plain = {
            name: value for name, value in self.settings.items()
            if name != "target" and not (calibrated and name.startswith("calibration"))
        }  # fmt: skip
        if calibrated and plain.get("importance") == "reconstruction":
            plain |= {"importance": "l2", "scope": "local"}
        elif not isinstance(plain.get("importance"), str):  # it may look at data
            plain["importance"] = "l2"
        sparsity = plain.get("sparsity")
        nothing = dict.fromkeys(sparsity, 0.0) if isinstance(sparsity, Mapping) else 0.0
        return plan(self.model, self.example_input, **plain | {"sparsity": nothing})

    @property
    def sparsity(self) -> float:
        """The share of the units of all groups that can lose any which are gone."""
        return self._widths.sparsity

    @on_cpu()
    def step(self) -> float:
        """Prune to the next sparsity of the schedule; to be called after a step of the optimizer.

        Gradients that are there are cut like their parameters. Steps after the last one do nothing.

        Returns:
            The sparsity reached.

        Raises:
            PruningError: and nothing has changed.
        """
        with torch.inference_mode(False):  # what is made there cannot be trained
            return self._step()

    def _step(self) -> float:
        number = len(self.history) + 1
        asked, made, choice = self._asks(number), self._planned(number), None
        if made is not None and made.kept:
            kept = self._composed(made, self.kept)
            what = chosen.as_json(made, with_example=False)
            if self.verify:
                for model in self._models:
                    small, _ = apply_with_journal(
                        made, model, inplace=False, folds=self._folds(made, model)
                    )
                    prove(made, model, small, self.example_input)
            with undoing() as journal:
                folds = [self._folds(made, model) for model in self._models]
                biases = self._commit(made, folds, {}, journal)
            choice = {"chosen": what, "biases": biases}
            self.kept, self.plan = kept, made
            self._widths = self._widths.after(made)
        self._choices.append(choice)
        self._asked.append(asked)
        left = count_parameters(self.model)
        self.history.append(PrunerStep(self.sparsity, left, self._widths.by_name()))
        return self.sparsity

    @property
    def _models(self) -> list[nn.Module]:
        return [self.model, *self.also]

    def _folds(self, made: PruningPlan, model: nn.Module) -> Folds | None:
        return made._folds if model is self.model else None  # others have constants of their own

    def _asks(self, number: int) -> float:
        """For which sparsity a step is made; where that is not one number, which share of it."""
        return self._share(number) * (1.0 if isinstance(self._last, Mapping) else self._last)

    def _planned(self, number: int) -> PruningPlan | None:
        """A new plan for the model as it is; None where nothing has to go."""
        share, before = self._share(number), self._share(number - 1) if number > 1 else 0.0
        self._rising.see(number, share)
        settings = dict(self.settings)
        if not share or (self._budget and share <= before):
            return None
        last, scope = self._last, settings.get("scope", "local")
        bounds = {"max_sparsity": None if scope == "local" else MOST} | settings
        for name in {"max_sparsity", "min_width"} & bounds.keys():
            if bounds[name] is not None:
                settings[name] = Owed(bounds[name], self._widths, 0.0)
        if self._budget:
            settings["target"] = self._budget.target.towards(self._budget.original, share)
        elif scope == "local":
            wanted = _each(last, lambda s: s * share)
            settings["sparsity"] = Owed(wanted, self._widths, before / share)
        else:  # the groups have lost more or less so far, and go on so
            settings["sparsity"] = _each(last, lambda s: since(s * share, s * before))
        with warnings.catch_warnings(record=True) as caught:
            made = plan(self.model, self.example_input, **settings)
        # Where less than a unit has to go, that is all right, unless none ever goes.
        silent = not made.kept and bool(self.kept or self._share(number + 1) > share)
        for message in caught:
            if not issubclass(message.category, PruningWarning):
                place = message.filename, message.lineno
                warnings.warn_explicit(message.message, message.category, *place)
            elif not silent:
                warn(str(message.message))
        return made

    def _composed(
        self, made: PruningPlan, kept: dict[str, dict[int, Tensor]]
    ) -> dict[str, dict[int, Tensor]]:
        return kept | {
            name: composed(kept.get(name, {}), dims, read_attribute(self.model, name).shape[0])
            for name, dims in made.kept.items()
            if name in self._widths.tensors  # not a bias that was made since
        }

    def _commit(
        self,
        made: PruningPlan,
        folds: Sequence[Folds | None],
        biases: Mapping[str, Sequence[int]],
        journal: Journal,
    ) -> dict[str, list[int]]:
        """Every model and optimizer changes. All models get the biases that any gets, with zeros
        where it has no constant to move; returns their shapes."""
        found = cuts(made, self.model, self.optimizers)
        before = [dict(model.named_parameters()) for model in self._models]
        for model, fold in zip(self._models, folds, strict=True):
            apply_with_journal(made, model, inplace=True, folds=fold, journal=journal)
        new = {name: list(shape) for name, shape in biases.items()}
        for model, known in zip(self._models, before, strict=True):
            own = model.named_parameters()
            new |= {name: list(p.shape) for name, p in own if name not in known}
        for model in self._models:
            there = dict(model.named_parameters())
            for name in new.keys() - there.keys():
                make_parameter(model, name, new[name], journal)
        install(found, journal)
        regroup(self.optimizers, self.model, before[0], journal)
        return new

    def state_dict(self) -> dict[str, Any]:
        """The choices of each step, without weights: loading it makes a fresh model as small.
        It can be read with ``torch.load(weights_only=True)``."""
        kept = {name: dict(dims) for name, dims in self.kept.items()}
        history = [asdict(step) for step in self.history]
        asked = list(self._asked)
        return {"choices": list(self._choices), "history": history, "kept": kept, "asked": asked}

    @on_cpu()
    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Make the model, which is as it was before the first step, as small as the saved one was,
        in place, with the optimizers and averages. Its weights are then those that it had; load the
        state dicts of the model and of the optimizers after this. Another schedule or sparsity than
        the saved one had is a warning, and what the next steps go by.

        Raises:
            PlanError: the state is of another model; nothing has changed.
        """
        if self.history:
            raise SettingError("load into a new Pruner, of the model before the first step")
        if not isinstance(state, dict) or state.keys() != self.state_dict().keys():
            raise PlanError("this is no state of Pruner.state_dict()")
        try:
            history = [PrunerStep(**step) for step in state["history"]]
            choices, asked = list(state["choices"]), [float(share) for share in state["asked"]]
            left = {
                name: {dim: torch.as_tensor(indices) for dim, indices in dict(dims).items()}
                for name, dims in dict(state["kept"]).items()
            }
        except (TypeError, ValueError) as error:
            raise PlanError(f"this is no state of Pruner.state_dict(): {error}") from error
        if not len(history) == len(choices) == len(asked):
            raise PlanError(
                f"this is no state of Pruner.state_dict(): it has {len(history)} steps, and "
                f"choices of {len(choices)}"
            )
        own = [self._asks(number + 1) for number in range(len(asked))]
        if not np.allclose(own, asked):
            then, now = (", ".join(f"{share:.3g}" for share in some) for some in (asked, own))
            warn(
                f"the saved steps were made for sparsities of {then}, and by this Pruner's "
                f"settings they would be {now}: the next step goes by these"
            )
        kept: dict[str, dict[int, Tensor]] = {}
        widths = self._widths
        try:
            with torch.inference_mode(False), undoing() as journal:
                for choice in choices:
                    if choice is None:
                        continue
                    made = self._restored(choice)
                    kept = self._composed(made, kept)
                    folds = [Folds() for _ in self._models]  # constants come with the weights
                    self._commit(made, folds, choice["biases"], journal)
                    widths = widths.after(made)
                same = kept.keys() == left.keys()
                if not same or not all(same_indices(kept[name], left[name]) for name in kept):
                    raise PlanError("other channels are left than were then")
        except (PlanError, Malformed) as error:
            raise PlanError(
                f"the pruner's state was saved for another model, or with other patterns: {error}. "
                "Build the model as it was before anything was pruned, and give the same settings"
            ) from error
        self.kept, self._widths = kept, widths
        self.history, self._choices, self._asked = history, choices, asked

    def _restored(self, choice: Any) -> PruningPlan:
        """A plan that was made before, for the model as it is now, whose weights do not matter."""
        form = isinstance(choice, dict) and choice.keys() == {"chosen", "biases"}
        if not form or not isinstance(choice["biases"], dict):
            raise Malformed("a step is recorded in a way that nobody knows")
        modules = modules_of(self.model)
        for name, shape in choice["biases"].items():
            path, _, key = str(name).rpartition(".")
            sizes = isinstance(shape, (list, tuple)) and all(is_whole(n) and n > 0 for n in shape)
            if not sizes or path not in modules or key not in modules[path]._parameters:
                raise Malformed(f"no step makes a bias {name!r} of shape {shape!r}")
        found = chosen.Chosen.from_json(choice["chosen"])
        found.check(self.model)
        patterns = self.settings.get("patterns", ())
        return restore(self.model, found, self.example_input, patterns=patterns, folding=False)

    def __repr__(self) -> str:
        of = "" if self.steps is None else f" of {self.steps}"
        done = min(len(self.history), self.steps or len(self.history))
        return (
            f"Pruner({type(self.model).__name__}, step {done}{of}, "
            f"{self.sparsity:.1%} of the units gone, {count_parameters(self.model):,} parameters)"
        )


def _each(
    sparsity: float | Mapping[Any, float], function: Callable[[float], float]
) -> float | dict[Any, float]:
    if isinstance(sparsity, Mapping):
        return {key: function(value) for key, value in sparsity.items()}
    return function(sparsity)


def _checked(settings: dict[str, Any]) -> dict[str, Any]:
    """The settings of a plan, for more plans than one."""
    for name in settings:
        if name not in _SETTINGS:
            near = get_close_matches(name, _SETTINGS, 1)
            hint = f"did you mean {near[0]}?" if near else f"there are {', '.join(_SETTINGS)}"
            raise SettingError(f"{name} is no setting of a plan; {hint}")
    resolve(settings.get("importance", "l2"))
    given = {f.name: settings[f.name] for f in fields(Settings) if f.name in settings}
    checked(Settings(**given))
    if isinstance(settings.get("calibration"), Iterator):
        raise SettingError(
            "calibration is an iterator, and every step goes through it: pass a list, or a "
            "DataLoader"
        )
    return {
        name: tuple(value) if isinstance(value, Iterator) else value
        for name, value in settings.items() if value is not None
    }  # fmt: skip
