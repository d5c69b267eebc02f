"""The one-line form."""

from __future__ import annotations

from typing import Any

from torch import nn

from .plan import plan as make_plan
from .proof import prove
from .rewrite import apply_with_journal


def prune(
    model: nn.Module,
    example_input: Any,
    *,
    inplace: bool = False,
    verify: bool = True,
    **settings: Any,
) -> nn.Module:
    """``model`` without its least important channels: same class, smaller tensors.

    Args:
        model: any module that runs on ``example_input``. It is left untouched.
        example_input: a tensor, a tuple of positional or a mapping of keyword arguments.
        inplace: change ``model`` itself; an exception leaves it as it was.
        verify: prove that the result computes what the masked model computes.
        **settings: those of :func:`fxprune.plan`.

    Raises:
        PruningError: and nothing has changed.
    """
    plan = make_plan(model, example_input, **settings)
    if not inplace:
        small, _ = apply_with_journal(plan, model, inplace=False)
        if verify:
            prove(plan, model, small, example_input)
        return small
    if verify:  # the masked reference needs the model as it was
        small, _ = apply_with_journal(plan, model, inplace=False)
        prove(plan, model, small, example_input)
    return apply_with_journal(plan, model, inplace=True)[0]
