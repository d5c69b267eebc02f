"""Batch norms whose statistics are those of the pruned model."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

from ..errors import SettingError, warn
from ..modules.batches import Batches
from ..modules.running import bind_inputs
from ..modules.usable import check_is_model


def recalibrate_batchnorm(
    model: nn.Module, batches: Iterable[Any], example_input: Any, *, limit: int | None = None
) -> nn.Module:
    """Estimate the running means and variances of ``model``'s batch norms anew, in place.

    What a pruned model's layers make has another mean and spread than what the statistics were
    taken of. Each batch counts the same; nothing is trained, and no label is used. (Nagel et al.,
    arXiv 1906.04721, among others.)

    Args:
        batches: an iterable of inputs, or of ``(input, label)``, of several samples each.
        example_input: as :func:`fxprune.plan` takes it; it tells inputs from labels.
        limit: how many batches to take; by default all.

    Returns:
        ``model``; with a :class:`fxprune.PruningWarning` where it has no such norm.

    Raises:
        SettingError: there are no batches, or they give no numbers. An exception leaves the
            statistics as they were.
    """
    check_is_model(model)
    norms: list[Any] = [
        m for m in model.modules() if isinstance(m, _BatchNorm) and m.track_running_stats
    ]
    if not norms:
        warn(
            f"{type(model).__name__} has no batch norm that keeps statistics: there is nothing to "
            "estimate anew"
        )
        return model
    training = {m: m.training for m in model.modules()}
    momenta = {m: m.momentum for m in norms}
    buffers = {b: b.clone() for b in model.buffers()}
    try:
        model.eval()
        for m in norms:
            m.train()
            m.momentum = None  # the mean of all batches
            m.reset_running_stats()
        with torch.no_grad():
            for batch in Batches(batches, model, example_input, limit, ("batches", "limit")):
                args, kwargs = bind_inputs(batch)
                model(*args, **kwargs)
        found = {m: (m.running_mean.clone(), m.running_var.clone()) for m in norms if _ran(m)}
        if not all(bool(t.isfinite().all()) for pair in found.values() for t in pair):
            raise SettingError("the batches give a batch norm inf or NaN: its statistics stay")
    finally:
        for module, flag in training.items():
            module.training = flag
        for m, momentum in momenta.items():
            m.momentum = momentum
        for buffer, values in buffers.items():
            buffer.data.copy_(values)
    for m, (mean, variance) in found.items():
        m.running_mean.copy_(mean)
        m.running_var.copy_(variance)
    return model


def _ran(norm: Any) -> bool:
    return norm.num_batches_tracked is None or int(norm.num_batches_tracked) > 0
