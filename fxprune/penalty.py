"""Training units towards zero: a group penalty on a plan's units, and its proximal step."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from .channels import SourceAxis
from .errors import SettingError
from .mask import Mask, parametrizations
from .running import read_attribute


def penalty(plan: Any, model: nn.Module, *, grow: float = 0.0) -> Tensor:
    """See :meth:`fxprune.PruningPlan.penalty`."""
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
    if amount < 0:
        raise SettingError(f"amount={amount!r} is negative")
    dead = 0
    with torch.no_grad():
        sums, groups = _squares(plan, model), _units(plan)
        for units in groups:
            size = sums[units].sqrt()
            factor = (1 - amount / size.clamp(min=1e-30)).clamp(min=0)
            dead += int((factor == 0).sum())
            scale = torch.ones_like(sums)
            scale[units] = factor
            for axis, tensor in _made(plan, model):
                classes = torch.from_numpy(plan._relations.of(axis)).to(tensor.device)
                if bool(torch.isin(classes, units).any()):
                    shape = [n if d in axis.dims else 1 for d, n in enumerate(axis.view)]
                    by = scale[classes].reshape(shape).to(tensor)
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
            found = torch.zeros(size, dtype=tensor.dtype, device=tensor.device)
        rows = tensor.reshape(axis.view).movedim(axis.dims, tuple(range(len(axis.dims))))
        squares = rows.reshape(axis.size, -1).square().sum(1).to(found)
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
    for axis in plan._relations.sources:
        if axis.role != "out" or not plan._relations.of(axis).any():
            continue
        path, _, name = axis.name.rpartition(".")
        module = model.get_submodule(path)
        chains = parametrizations(module)  # a ModuleDict, which has no get
        chain: Any = chains[name] if name in chains else ()  # noqa: SIM401
        if len(chain) and all(isinstance(p, Mask) for p in chain):
            yield axis, chain.original
        else:
            yield axis, read_attribute(model, axis.name)
