"""Tensors that parametrizations compute: which of them can be set."""

from __future__ import annotations

import copy

import torch
from torch import nn
from torch.nn.utils.parametrize import ParametrizationList

from .mask import Mask, parametrizations


def goes_by_its_name(chain: ParametrizationList) -> bool:
    """Whether what makes a parametrized tensor is no affair of the code that reads it: the tensor
    can be masked, and set."""
    masked = any(isinstance(part, Mask) for part in chain)
    return masked or not _cannot_be_set(chain)


def cannot_be_set(model: nn.Module, name: str) -> str:
    """Why a parametrized tensor cannot be given other values or a smaller shape, or ``""``."""
    path, _, attribute = name.rpartition(".")
    return _cannot_be_set(parametrizations(model.get_submodule(path))[attribute])


def _cannot_be_set(chain: ParametrizationList) -> str:
    if any(isinstance(p, Mask) for p in chain):
        return "a mask of fxprune is on it"
    kinds = ", ".join(type(p).__name__.lstrip("_") for p in chain)
    if any(True for p in chain for _ in [*p.parameters(), *p.buffers()]):
        return f"its parametrization ({kinds}) has tensors of its own"
    chain = copy.deepcopy(chain)
    with torch.no_grad():
        wanted = chain() * 0.5
        try:
            chain.right_inverse(wanted)
        except Exception as error:  # whatever the parametrization's own code raises
            return f"its parametrization ({kinds}) cannot be set: {error}"
        if not torch.allclose(chain(), wanted):
            return f"its parametrization ({kinds}) does not give back what it is set to"
    return ""
