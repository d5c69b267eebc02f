"""Planning: record a model, relate its channels, and let a planner choose."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import replace
from typing import Any, Literal

from torch import nn

from ..budgets.budget import Budget
from ..calibration.calibrate import calibrate, check_mode
from ..calibration.reconstruction import Reconstruction
from ..choosing.settings import Settings, check_names, checked, for_model
from ..choosing.target import Target
from ..errors import PatternError, PruningError, SettingError
from ..modules.batches import Batches, check_limit
from ..modules.running import on_cpu, uncollected
from ..modules.usable import check_model
from ..parametrized.weight_norm import parametrized
from ..relating.discover import discover
from ..relating.sayings import Telling
from ..relating.training_only import InTraining
from ..relating.unreached import beside_unreached
from ..rules.pattern_types import Pattern
from ..rules.registry import as_patterns, every, scope
from ..tracing import fusions
from ..tracing.cuts import Cuts
from ..tracing.fixed import Fixed
from ..tracing.record import record
from ..tracing.runs import OtherRuns
from .planner import Planner, StayAround
from .pruning_plan import PruningPlan


@on_cpu()
def plan(
    model: nn.Module,
    example_input: Any,
    *,
    sparsity: float | Mapping[Any, float] | None = None,
    target: Target | None = None,
    ignore: Iterable[Any] | str | type | nn.Module = (),
    importance: Any = "l2",
    scope: str = "local",
    min_width: Any = None,
    max_sparsity: Any = None,
    round_to: int | Literal["auto"] = 1,
    bias: str | None = None,
    exact: bool = False,
    attention: str = "heads",
    outputs: str | int | Iterable[str | int] | None = None,
    patterns: Iterable[Pattern] = (),
    calibration: Iterable[Any] | None = None,
    calibration_batches: int | None = None,
    calibration_mode: str = "sequential",
) -> PruningPlan:
    """Record ``model``, group its channels and choose which go. Nothing is changed.

    Args:
        model: any module that runs on ``example_input``.
        example_input: a tensor, a tuple of positional or a mapping of keyword arguments.
        sparsity: the fraction of units that each group loses, in [0, 1); or a mapping from module
            name (globs allowed), module or module type to a fraction. Each holds for all layers
            inside the module, and of several that match a layer the first counts. Layers that are
            coupled lose the least that is said of one. Layers that a mapping does not match stay
            whole, with all that is coupled to them. A layer whose inputs and outputs both lose s of
            their units keeps (1 - s)² of its parameters and multiply-accumulates. By default 0.5.
        target: how much is to be left, instead: ``fxprune.Target(params=0.5)``, ``macs`` or
            ``latency``. ``plan.target`` says what was asked and got.
        ignore: module names, globs, types or modules whose output channels all stay, and those of
            all layers inside them.
        importance: what scores units; the lowest go. A name (``"l2"``, ``"l1"``, ``"lamp"``,
            ``"fpgm"``, ``"bn_scale"``, ``"random"``), a criterion of :mod:`fxprune.importance`
            (``Taylor(batches, loss=...)``), a function of your own, or a mapping from group names
            or globs to these or to scores. With ``calibration``, ``"reconstruction"`` keeps the
            units from which the layers behind can best predict the others
            (:mod:`fxprune.calibration.reconstruction`).
        scope: ``"local"``: every group loses the same fraction. ``"global"``: all units are ranked
            together, and that fraction of all of them goes; with ``importance="reconstruction"``
            fractions are chosen for the least predicted error at the multiply-accumulates that
            ``"local"`` would leave. ``"isomorphic"``: units of groups of the same structure are
            ranked together (arXiv 2407.04616). Groups that a mapping of ``sparsity`` names lose its
            fraction in any case.
        min_width: no group is left with fewer units than this: a number of them, a fraction in
            (0, 1], or a mapping from module name, glob or type to one of these.
        max_sparsity: no group loses more than this fraction of its units; or such a mapping. By
            default 0.9, and any with ``scope="local"``.
        round_to: kept widths are multiples of this where they shrink at all; in channels of each
            layer, also where they go several at a time (heads). ``"auto"``: what suits the device
            (:func:`fxprune.choosing.rounding.preferred`).
        bias: what happens to the constant of a removed channel. ``"expected"``: its mean output,
            estimated from batch norms (:mod:`fxprune.relating.moments`), is added in the layers
            that read it, in the masked model, too. ``"propagate"``: what it outputs when it is
            masked, with its weights and the scales of its norms zero, is added. ``"drop"``: nothing
            is added, and with ``calibration`` predictions go into weights alone. By default
            ``"expected"``, with ``exact=True`` ``"propagate"``.
        exact: keep one masked channel as a carrier where zero padding would make a folded constant
            wrong at the border. It counts where widths are rounded.
        attention: cut attention into whole ``"heads"`` or into ``"head_dim"`` slices.
        outputs: which returned values have to keep their width: keys of a mapping or dataclass
            (``"logits"``) or positions in a tuple (``0``); by default all.
        patterns: made by :func:`fxprune.pattern`, which hold for this call only, before any others.
        calibration: an iterable of inputs without labels, or of ``(input, label)``, whose labels
            are not used. The outputs of removed channels are predicted from the kept ones, and
            folded into the layers that read them.
        calibration_batches: how many of them to take; by default all.
        calibration_mode: ``"sequential"`` goes through the layers one by one, each in the model
            pruned so far, with the activations of all batches in memory; ``"parallel"`` takes one
            batch after the other and every layer as if it were the only one.

    Raises:
        PruningError: a setting, the model or the input cannot be used; the message says why.
    """
    settings = checked(
        Settings(
            sparsity=sparsity,
            target=target,
            ignore=ignore,
            importance=importance,
            scope=scope,
            min_width=min_width,
            max_sparsity=max_sparsity,
            round_to=round_to,
            bias=bias,
            exact=exact,
            attention=attention,
            outputs=outputs,
        )
    )
    check_mode(calibration_mode)
    check_limit(calibration_batches, "calibration_batches")
    if calibration is None:
        if importance == "reconstruction":
            raise SettingError("importance='reconstruction' needs inputs: pass calibration=")
        if calibration_batches is not None:
            raise SettingError("calibration_batches= counts what calibration= gives: pass both")
        if calibration_mode != "sequential":
            raise SettingError("calibration_mode= says how calibration= is taken: pass both")
        with parametrized(model):
            return _told(make_plan(model, example_input, settings, patterns, Planner))
    batches = Batches(calibration, model, example_input, calibration_batches)
    with parametrized(model):
        made = make_plan(model, example_input, settings, patterns, Planner, batches)
        calibrate(made, model, batches, mode=calibration_mode)
        return _told(made)


def _told(plan: PruningPlan) -> PruningPlan:
    """With what its target comes to."""
    if plan._budget is not None:
        plan.target = plan._budget.reached(plan)
        plan._budget.tell(plan.target)
    return plan


def make_plan(
    model: nn.Module,
    example_input: Any,
    settings: Settings,
    patterns: Iterable[Pattern],
    planner: Callable[..., Planner],
    batches: Batches | None = None,
    *,
    masked: bool = True,
    heard: bool = True,
) -> PruningPlan:
    """Record, relate, and let a planner choose, by what ``batches`` tell if it is asked to.

    Args:
        masked: False where units are dead as they are.
        heard: whether anyone is to hear what dead units say.
    """
    check_model(model, example_input)
    check_names(model, settings)
    settings = for_model(settings, model)

    registered = scope(*as_patterns(patterns), override=True)
    with registered, uncollected(), _naming_patterns(), parametrized(model):
        trace = record(model, example_input, settings.outputs)
        trace.cuts = Cuts(settings.attention)
        found = fusions.find(trace)  # before the first walk: they give nodes another meaning
        drawn = settings.bias == "expected" and trace.calls_any("norm")
        telling = Telling(settings.bias == "drop", masked, drawn)
        others = OtherRuns(model, example_input, settings.outputs)
        trace.fixed = Fixed(trace)
        training = InTraining(trace, others)
        while True:
            relations = discover(
                trace,
                telling=telling if heard else None,
                stays=lambda relations: [*training(relations), *beside_unreached(trace, relations)],
            )
            chooser = planner(trace, relations, settings, example_input, training, found, telling)
            if settings.importance == "reconstruction" and batches is not None:
                chooser.reconstruction = Reconstruction(trace, relations, batches)
            if settings.target is not None:
                chooser.budget = Budget(settings.target, trace, relations, example_input)
            try:
                return chooser.plan()
            except StayAround as stuck:
                around = {**trace.cuts.around, **dict.fromkeys(stuck.calls, stuck.reason)}
                trace.cuts = replace(trace.cuts, around=around)


@contextlib.contextmanager
def _naming_patterns() -> Iterator[None]:
    """An error that a pattern of a user's makes names it; others are ours."""
    try:
        yield
    except PruningError:
        raise
    except Exception as error:
        own = [f"{p.name} ({p.source})" for p in every() if not p.is_builtin]
        if not own:
            raise
        raise PatternError(
            f"planning failed with {type(error).__name__}: {error}. It rests on patterns that are "
            f"not fxprune's own: {', '.join(own)}; fxprune.check_pattern tries what one says"
        ) from error
