"""Shapes and types in the place of tensors."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from . import sizes

# What an fx node can hold as an argument as it is.
BASIC = (
    str, int, float, bool, complex, type(None), type(Ellipsis),
    torch.dtype, torch.device, torch.layout, torch.memory_format,
)  # fmt: skip

TOLD = (torch.dtype, torch.device)  # what code may ask a tensor for, and pass on


@dataclass(frozen=True)
class Spec:
    """Shape and dtype of one tensor of the trace."""

    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def is_inexact(self) -> bool:
        """Whether it holds real or complex numbers: what channels are made of."""
        return self.dtype.is_floating_point or self.dtype.is_complex

    @property
    def is_index(self) -> bool:
        """Whether its numbers may say which slices are meant, as those of flags and of channels'
        own values do not."""
        return not self.is_inexact and self.dtype != torch.bool


def spec(value: Any) -> Any:
    """``value`` with a :class:`Spec` in the place of each tensor."""
    if isinstance(value, torch.Tensor):
        return Spec(tuple(map(int, value.shape)), value.dtype)
    if isinstance(value, sizes.OWN):
        return sizes.plain(value)
    if isinstance(value, (tuple, list)):
        return (list if type(value) is list else tuple)(map(spec, value))
    if isinstance(value, dict):
        return {key: spec(item) for key, item in value.items()}
    return value if type(value) in BASIC else None
