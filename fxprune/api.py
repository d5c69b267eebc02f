"""The one-line form."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, Literal

from torch import nn

from .choosing.target import Target
from .errors import SettingError
from .modules.given import check_flag
from .modules.running import on_cpu, uncollected
from .planning.make import plan
from .proving.proof import prove
from .rewriting.rewrite import apply_with_journal
from .rules.pattern_types import Pattern
from .tracing.as_graph import trace


@on_cpu()
@uncollected()
def prune(
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
    inplace: bool = False,
    as_graph: bool = False,
    verify: bool = True,
) -> nn.Module:
    """``model`` without its least important channels: same class, smaller tensors.

    Args:
        model: any module that runs on ``example_input``. It is left untouched.
        example_input: a tensor, a tuple of positional or a mapping of keyword arguments.
        sparsity, ..., calibration_mode: those of :func:`fxprune.plan`.
        inplace: change ``model`` itself; an exception leaves it as it was.
        as_graph: return the pruned model as one :class:`torch.fx.GraphModule`, recorded from its
            run on ``example_input`` (:func:`fxprune.trace`), for further fx passes.
        verify: end with the proof: compare the outputs with those of the masked model.

    Returns:
        A pruned copy, of the model's class, or of a subclass with the same name where its code held
        a size; ``model`` itself with ``inplace=True``; a graph with ``as_graph=True``.

    Raises:
        PruningError: and nothing has changed.
    """
    for name, value in {"inplace": inplace, "as_graph": as_graph, "verify": verify}.items():
        check_flag(name, value)
    if inplace and as_graph:
        raise SettingError("as_graph=True makes a module of its own; use inplace=False with it")
    chosen = plan(
        model,
        example_input,
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
        patterns=patterns,
        calibration=calibration,
        calibration_batches=calibration_batches,
        calibration_mode=calibration_mode,
    )
    if verify or not inplace:
        small, _ = apply_with_journal(chosen, model, inplace=False, folds=chosen._folds)
        if as_graph:
            small = trace(small, example_input)
        if verify:
            prove(chosen, model, small, example_input)
        if not inplace:
            return small
    return apply_with_journal(chosen, model, inplace=True, folds=chosen._folds)[0]
