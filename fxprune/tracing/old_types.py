"""Tensors by the types of old: ``torch.FloatTensor(x.size())``, ``torch.IntTensor([self.width])``.

PyTorch tells of no such call, and takes all but plain numbers and its own sizes for data.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch

from ..rules import sizes


class StandIn(type):
    """The class of what stands for an old type: it is that type to whoever asks or passes it on."""

    real: Any

    def __instancecheck__(cls, value: Any) -> bool:
        return isinstance(value, cls.real)

    def __getattr__(cls, name: str) -> Any:
        return getattr(type.__getattribute__(cls, "real"), name)

    def __call__(cls, *args: Any, **kwargs: Any) -> Any:
        if args and (all(isinstance(n, int) for n in args) or isinstance(args[0], torch.Size)):
            return torch.empty(*args, dtype=cls.real.dtype, device="cpu")
        if args and isinstance(args[0], (list, tuple)) and sizes.holds_traced(args[0]):
            return torch.tensor(args[0], dtype=cls.real.dtype, device="cpu")
        return cls.real(*args, **kwargs)


_TYPES = {name: kind for name, kind in vars(torch).items() if type(kind) is type(torch.FloatTensor)}
# Under the whole name, which PyTorch reads where it is asked for a type.
_STAND_INS = {n: StandIn(f"torch.{n}", (), {"real": kind}) for n, kind in _TYPES.items()}


@contextlib.contextmanager
def recorded_types() -> Iterator[None]:
    """While inside, what they make is made by calls that PyTorch tells of."""
    vars(torch).update(_STAND_INS)
    try:
        yield
    finally:
        vars(torch).update(_TYPES)
