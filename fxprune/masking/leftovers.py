"""What other pruning has left on a model: masks of PyTorch's two kinds, and our own."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.nn.utils import parametrize, prune

from ..errors import SettingError
from ..modules.copying import copy_model
from ..modules.given import check_module
from ..parametrized.mask import (
    bake,
    mask_of,
    masked_names,
    masks_on,
    own_class,
    parametrizations,
    put_on,
    take_off,
)


def made_plain(model: nn.Module) -> nn.Module:
    """A copy of ``model`` with masks multiplied in and taken off; a tensor that is masked in one
    place and not in another is two from then on."""
    plain = copy_model(model)
    _untie(plain)
    bake(plain, others=True)
    for module in plain.modules():
        for name in pruned_names(module):
            prune.remove(module, name)
        for name in sparsified_names(module):
            own_class(module)
            parametrize.remove_parametrizations(module, name, leave_parametrized=True)
    return plain


def _untie(model: nn.Module) -> None:
    """Give each tensor that is shared, and not masked alike in every place, its own copy where it
    is masked."""
    places: dict[int, list[tuple[nn.Module, str]]] = {}
    for module in model.modules():
        if isinstance(module, parametrize.ParametrizationList):
            continue
        for name, p in module._parameters.items():
            if p is not None:
                places.setdefault(id(p), []).append((module, name))
        for name in masked_names(module):
            chain = parametrizations(module)[name]
            if len(masks_on(module, name)) == len(chain):
                places.setdefault(id(chain.original), []).append((module, name))
    for found in places.values():
        keeps = [mask_of(module, name) for module, name in found]
        if all(torch.equal(keep, keeps[0]) for keep in keeps):
            continue
        for module, name in found:
            if masks_on(module, name):
                chain = parametrizations(module)[name]
                p = chain.original
                copied = p.detach().clone()
                chain._parameters["original"] = nn.Parameter(copied, p.requires_grad)


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
    for path, module in check_module(model, "model").named_modules():
        for name in pruned_names(module):
            if f"{name}_orig" not in module._parameters:
                raise SettingError(
                    f"{name}_orig of {path or type(model).__name__} is no parameter any more: take "
                    "off what was put on it (masks.remove) first"
                )
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
    for path, module in check_module(model, "model").named_modules():
        for name in masked_names(module):
            chain = parametrizations(module)[name]
            if len(chain) == 1 and not isinstance(chain.original, nn.Parameter):
                raise SettingError(
                    f"{name} of {path or type(model).__name__} is a buffer, which "
                    "torch.nn.utils.prune does not mask; masks.remove makes its mask final"
                )
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
