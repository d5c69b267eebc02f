"""Training units towards zero: a group penalty on a plan's units, and its proximal step."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from ..errors import SettingError
from ..modules.given import is_number
from ..parametrized.mask import beneath
from ..rules.channels import SourceAxis
from .plan_masks import check_fits


def penalty(plan: Any, model: nn.Module, *, grow: float = 0.0) -> Tensor:
    """See :meth:`fxprune.PruningPlan.penalty`."""
    if not is_number(grow) or not 0 <= grow < float("inf"):
        raise SettingError(f"grow={grow!r} is no number from 0 on")
    total: Any = 0.0
    for norms in _norms(plan, model):
        if grow:
            size = norms.detach()
            spread = (size.max() - size.min()).clamp(min=1e-12)
            norms = norms * 2 ** (grow * (size.max() - size) / spread)
        total = total + norms.sum()
    return total


def proximal_step(plan: Any, model: nn.Module, amount: float) -> int:
    """See :meth:`fxprune.PruningPlan.proximal_step`."""
    if not is_number(amount) or not amount >= 0:
        raise SettingError(f"amount={amount!r} is no number from 0 on")
    for axis, tensor in _made(plan, model):
        if not tensor.is_leaf:
            raise SettingError(
                f"{axis.name} is computed (by a parametrization or a hook): it cannot be shrunk in "
                "place; add plan.penalty to the loss instead"
            )
    with torch.no_grad():
        sums = _squares(plan, model)
        scale, dead = torch.ones_like(sums), 0
        for units in _units(plan):
            left = (1 - amount / sums[units].sqrt().clamp(min=1e-30)).clamp(min=0)
            scale[units] = left
            dead += int((left == 0).sum())
        for axis, tensor in _made(plan, model):
            classes = torch.from_numpy(plan._relations.of(axis)).to(scale.device)
            by = axis.laid(scale[classes]).to(tensor)
            tensor.copy_((tensor.reshape(axis.view) * by).reshape(tensor.shape))
    return dead


def _norms(plan: Any, model: nn.Module) -> Iterator[Tensor]:
    """For each group that is not frozen, the norm of each unit over all slices that make it."""
    sums = _squares(plan, model)
    for units in _units(plan):
        yield (sums[units] + 1e-12).sqrt()


def _squares(plan: Any, model: nn.Module) -> Tensor:
    """By unit class, the sum of squares of the slices that make the unit."""
    found: Any = None
    for axis, tensor in _made(plan, model):
        if found is None:
            size = int(plan._relations.classes.max()) + 1
            dtype = torch.promote_types(tensor.dtype, torch.float32)
            found = torch.zeros(size, dtype=dtype, device=tensor.device)
        rows = axis.rows(tensor)
        squares = (rows.float() if rows.dtype.itemsize < 4 else rows).square().sum(1).to(found)
        classes = torch.from_numpy(plan._relations.of(axis).reshape(-1)).to(found.device)
        found = found.index_add(0, classes, squares)
    if found is None:
        raise SettingError("the plan has no layer that makes channels: there is nothing to train")
    return found


def _units(plan: Any) -> Iterator[Tensor]:
    for group in plan._units:
        if len(group):
            yield torch.from_numpy(group)


def _made(plan: Any, model: nn.Module) -> Iterator[tuple[SourceAxis, Tensor]]:
    """The parameters with slices that make channels; a masked one as it is beneath its mask."""
    check_fits(plan, model)
    for axis in plan._relations.sources:
        if axis.role != "out" or not plan._relations.of(axis).any():
            continue
        path, _, name = axis.name.rpartition(".")
        yield axis, beneath(model.get_submodule(path), name)
