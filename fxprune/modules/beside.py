"""Other models of the same parameters: averages of a model, which change as it does."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import nn

from ..errors import SettingError


def models_beside(
    also: Iterable[nn.Module] | nn.Module | None, model: nn.Module
) -> list[nn.Module]:
    """What ``also=`` names, out of its wrappers."""
    several = [also] if isinstance(also, nn.Module) else [] if also is None else also
    if not isinstance(several, Iterable):
        raise SettingError(f"also={also!r} is no module, nor several")
    found = [_unwrapped(other, model) for other in several]
    if len({id(other) for other in found}) < len(found):
        raise SettingError("also: a model stands there twice")
    return found


def _unwrapped(other: nn.Module, model: nn.Module) -> nn.Module:
    """A model of the same shapes as ``model``, or the one inside a wrapper."""
    if other is model or getattr(other, "module", None) is model:
        raise SettingError("also: it is the model itself, which is pruned anyway; leave it out")
    for found in (other, getattr(other, "module", None)):
        if isinstance(found, nn.Module) and _shapes(found) == _shapes(model):
            return found
    raise SettingError(
        f"also: {type(other).__name__} is no other model with the parameters of "
        f"{type(model).__name__}, nor a wrapper with one in .module"
    )


def _shapes(model: nn.Module) -> dict[str, torch.Size]:
    return {name: p.shape for name, p in model.named_parameters()}
