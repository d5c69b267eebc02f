"""Tensors that parametrizations compute: which of them can be set."""

from __future__ import annotations

import copy
from collections.abc import Iterator

import torch
from torch import Tensor, nn
from torch.nn.utils.parametrize import ParametrizationList

from .assigning import assign, inverted
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
        for smaller in (wanted, *_parts_of(wanted)) if not inverted(chain) else (wanted,):
            try:
                assign(chain, smaller)
                given = chain()
            except Exception as error:  # whatever the parametrization's own code raises
                return f"its parametrization ({kinds}) cannot be set: {error}"
            if given.shape != smaller.shape or not torch.allclose(given, smaller):
                return f"its parametrization ({kinds}) does not give back what it is set to"
    return ""


def _parts_of(tensor: Tensor) -> Iterator[Tensor]:
    """What is left of a tensor where every other slice of one dimension goes."""
    for dim, size in enumerate(tensor.shape):
        if size > 1:
            yield tensor.index_select(dim, torch.arange(0, size, 2, device=tensor.device))
