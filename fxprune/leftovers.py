"""What other pruning has left on a model: masks of PyTorch's two kinds, and our own."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.nn.utils import parametrize, prune

from .mask import bake, mask_of, masked_names, own_class, parametrizations, put_on, take_off
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


def from_torch_prune(model: nn.Module) -> nn.Module:
    """Turn masks of ``torch.nn.utils.prune`` and of ``torch.ao.pruning``'s sparsifiers into
    fxprune's, in place. The parameters stay the same objects, with their values beneath the masks.
    """
    for module in model.modules():
        for name in pruned_names(module):
            mask: Any = module._buffers.pop(f"{name}_mask")
            original = module._parameters.pop(f"{name}_orig")
            for key, hook in list(module._forward_pre_hooks.items()):
                if isinstance(hook, prune.BasePruningMethod) and hook._tensor_name == name:
                    del module._forward_pre_hooks[key]
            delattr(module, name)  # what the hook has computed
            module.register_parameter(name, original)
            put_on(module, name, mask != 0)
        for name in sparsified_names(module):
            masks: list[torch.Tensor] = [p.mask for p in parametrizations(module)[name]]
            _uncover(module, name)
            for mask in masks:
                put_on(module, name, mask != 0)
    return model


def to_torch_prune(model: nn.Module) -> nn.Module:
    """Turn fxprune's masks into those of ``torch.nn.utils.prune``, in place, as for tools that look
    for ``weight_orig`` and ``weight_mask``. Those on top of other parametrizations become final."""
    for module in model.modules():
        for name in masked_names(module):
            keep = mask_of(module, name)
            if len(parametrizations(module)[name]) > 1:
                take_off(module, name)
                continue
            _uncover(module, name)
            prune.custom_from_mask(module, name, keep)
    return model


def _uncover(module: nn.Module, name: str) -> None:
    """Take masks off a parameter with the values beneath them."""
    own_class(module)
    values = parametrizations(module)[name].original.detach().clone()
    parametrize.remove_parametrizations(module, name, leave_parametrized=True)
    with torch.no_grad():
        getattr(module, name).copy_(values)
