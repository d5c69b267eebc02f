"""Tensors that are plain attributes of modules (``self.positions = torch.randn(9, 32)``).

They are like buffers that no state dict holds, as long as nothing sets them anew while the model
runs: caches, and what hooks compute, are none. Python lets any code set any attribute, so this asks
all code that is near: if some of it sets a name, or names that are not written in it, nothing of
that name counts as fixed.
"""

from __future__ import annotations

import dis
import functools
from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from .inspecting import dotted
from .near import codes, near, package_of

# What sets up a module, or moves it to another device or dtype.
_SETTING_UP = frozenset({"__init__", "_apply", "to"})
_ANY = "*"
# Code with one of these can set attributes whose names are not written in it.
_BY_NAME = frozenset({"setattr", "delattr", "vars", "__dict__", "__setattr__", "__delattr__"})


class Fixed(NamedTuple):
    name: str
    module: nn.Module
    key: str
    tensor: Tensor


def fixed_tensors(modules: Mapping[str, nn.Module]) -> list[Fixed]:
    """Those of a model; one that goes by several names is there by all of them."""
    found = [
        Fixed(dotted(path, key), module, key, value)
        for path, module in modules.items() if not module._forward_pre_hooks
        for key, value in vars(module).items()
        if type(value) is Tensor and value.layout == torch.strided
        and not value.requires_grad and not value.is_inference() and not hasattr(type(module), key)
    ]  # fmt: skip
    if not found:
        return found
    set_anew = {name for module in {*modules.values()} for name in near(module, _set_by, _stored)}
    return [each for each in found if set_anew.isdisjoint((_ANY, each.key))]


@functools.lru_cache(maxsize=512)
def _set_by(cls: Any) -> frozenset[str]:
    """Attributes that the code of a class sets, but for PyTorch's own and what sets a module up."""
    code = [
        value for base in cls.__mro__ if base is not object and package_of(base) != "torch"
        for key, value in vars(base).items() if key not in _SETTING_UP
    ]  # fmt: skip
    return frozenset(name for value in code for name in _stored(value, package_of(cls)))


def _stored(function: Any, package: str) -> set[str]:
    names: set[str] = set()
    for code in codes(function, package):
        steps = dis.get_instructions(code)
        names.update(s.argval for s in steps if s.opname in ("STORE_ATTR", "DELETE_ATTR"))
        if not _BY_NAME.isdisjoint(code.co_names):
            names.add(_ANY)
    return names
