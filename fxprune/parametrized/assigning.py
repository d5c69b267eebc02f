"""Setting tensors that parametrizations compute."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn.utils.parametrize import ParametrizationList


def assign(chain: ParametrizationList, wanted: Tensor) -> None:
    """Have a parametrized tensor come out as ``wanted``, as nearly as its parametrizations allow.

    One without ``right_inverse`` is taken as it is by PyTorch, as if that were the identity: it is,
    where the parametrization is a projection (onto rows of some largest norm) and ``wanted`` is in
    its image. Some inverses are near only (w · m / (m + ε)): what they miss is made up for.
    """
    value = wanted
    with torch.no_grad():
        for _ in range(3):
            _set(chain, value)
            missed = _missed(chain(), wanted)
            if missed is None:
                return
            value = value + missed


def _missed(found: Tensor, wanted: Tensor) -> Tensor | None:
    """What lacks of what was wanted, where that is more than rounding and can be added."""
    if found.shape != wanted.shape or not wanted.numel() or not wanted.is_floating_point():
        return None
    missed = wanted - found
    rounding = 16 * torch.finfo(wanted.dtype).eps * wanted.abs().max()
    return missed if missed.isfinite().all() and missed.abs().max() > rounding else None


def inverted(chain: ParametrizationList) -> bool:
    """Whether all parametrizations of a tensor say what they are to be given."""
    return all(hasattr(part, "right_inverse") for part in chain)


def _set(chain: ParametrizationList, value: Tensor) -> None:
    if inverted(chain):
        chain.right_inverse(value)
        return
    parts: list[Any] = list(chain)
    for part in reversed(parts):
        value = part.right_inverse(value) if hasattr(part, "right_inverse") else value
    for original, new in zip(_originals(chain), [value] if chain.is_tensor else value, strict=True):
        original.set_(new.clone())


def _originals(chain: ParametrizationList) -> list[Tensor]:
    return [*chain.parameters(recurse=False), *chain.buffers(recurse=False)]
