"""What callers give, looked at before it is used: each kind of mistake has one sentence."""

from __future__ import annotations

import os
from numbers import Integral, Real
from typing import Any

from torch import Generator, nn

from ..errors import FileError, SettingError, warn


def is_number(value: Any) -> bool:
    """A real number: no flag, and not NaN."""
    return isinstance(value, Real) and not isinstance(value, bool) and bool(value == value)


def is_whole(value: Any) -> bool:
    return isinstance(value, Integral) and not isinstance(value, bool)


def check_flag(name: str, value: Any) -> None:
    if not isinstance(value, bool):
        raise SettingError(f"{name}={value!r} is neither True nor False")


def check_function(name: str, value: Any, wanted: str) -> None:
    """``wanted``: of what, such as."""
    if not callable(value):
        raise SettingError(f"{name}={value!r} is no function {wanted}")


def check_generator(value: Any) -> None:
    if value is not None and not isinstance(value, Generator):
        raise SettingError(f"generator={value!r} is no torch.Generator")


def check_module(value: Any, name: str = "module") -> nn.Module:
    if not isinstance(value, nn.Module):
        raise SettingError(f"{name} is a {type(value).__name__}, not a torch.nn.Module")
    return value


def check_path(value: Any) -> None:
    if not isinstance(value, (str, os.PathLike)):
        raise FileError(f"path is a {type(value).__name__}, where the name of a file is needed")


def falls(before: float, after: float) -> bool:
    """Whether a schedule goes down there, by more than rounding."""
    return after < before - 1e-9


class Rising:
    """Tells, once, that a schedule has fallen: what is gone does not come back."""

    def __init__(self) -> None:
        self._most, self._told = 0.0, False

    def see(self, step: int, wanted: float) -> None:
        if falls(self._most, wanted) and not self._told:
            self._told = True
            warn(
                f"the schedule asks for a sparsity of {wanted:.3g} at step {step}, and for "
                f"{self._most:.3g} before: nothing that is gone comes back, and until it rises "
                "above that nothing more goes"
            )
        self._most = max(self._most, wanted)
