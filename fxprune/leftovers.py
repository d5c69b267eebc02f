"""What other pruning has left on a model: masks of PyTorch's two kinds, and our own."""

from __future__ import annotations

import torch
from torch import nn
from torch.nn.utils import parametrize, prune

from .masks import bake, own_class, parametrizations
from .running import copy_model


def made_plain(model: nn.Module) -> nn.Module:
    """A copy of ``model`` with masks multiplied in and taken off."""
    plain = copy_model(model)
    bake(plain)
    for module in plain.modules():
        for name in pruned_names(module):
            prune.remove(module, name)
        for name in sparsified_names(module):
            own_class(module)
            parametrize.remove_parametrizations(module, name, leave_parametrized=True)
    return plain


def pruned_names(module: nn.Module) -> list[str]:
    """Parameters that ``torch.nn.utils.prune`` masks."""
    hooks = module._forward_pre_hooks.values()
    return [h._tensor_name for h in hooks if isinstance(h, prune.BasePruningMethod)]


def sparsified_names(module: nn.Module) -> list[str]:
    """Parameters whose only parametrization is a mask of ``torch.ao.pruning``'s sparsifiers."""
    return [
        name for name, chain in parametrizations(module).items()
        if all(is_sparsity(p) for p in chain)
    ]  # fmt: skip


def is_sparsity(parametrization: nn.Module) -> bool:
    kind = type(parametrization)
    mask = getattr(parametrization, "mask", None)
    return kind.__module__.startswith("torch.ao.pruning.") and isinstance(mask, torch.Tensor)
