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
from .near import codes, names_in, near, package_of

# What sets up a module, or moves it to another device or dtype.
_SETTING_UP = frozenset({"__init__", "_apply", "to"})
_TORCHS = frozenset(dir(nn.Module))  # which PyTorch may call at any time
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
    anew = _set_anew(modules) if found else ()
    return [each for each in found if _ANY not in anew and each.key not in anew]


def _set_anew(modules: Mapping[str, nn.Module]) -> set[str]:
    """Attributes that code sets which is not there to set a module up."""
    codes_of_all = {each for m in {*modules.values()} for each in near(m, _codes, _code_of)}
    setting_up: set[str] = set()
    more: set[str] | frozenset[str] = _SETTING_UP
    while more:  # and what only that calls (``self._build()``)
        setting_up |= more
        called = [set[str](), set[str]()]
        for each in codes_of_all:
            called[each.method in setting_up] |= each.names
        own = {each.method for each in codes_of_all}
        more = {n for n in own & called[True] - called[False] - setting_up if n not in _TORCHS}
    return {n for each in codes_of_all if each.method not in setting_up for n in each.stores}


class _Code(NamedTuple):
    """The names that a method has in its code, and the attributes that it sets."""

    method: str
    names: frozenset[str]
    stores: frozenset[str]


@functools.lru_cache(maxsize=512)
def _codes(cls: Any) -> tuple[_Code, ...]:
    """Of a class, but for PyTorch's own."""
    return tuple(
        each._replace(method=key) for base in cls.__mro__
        if base is not object and package_of(base) != "torch"
        for key, value in vars(base).items() for each in _code_of(value, package_of(cls))
    )  # fmt: skip


def _code_of(function: Any, package: str) -> list[_Code]:
    found = []
    for code in codes(function, package):
        steps = [s for s in dis.get_instructions(code) if s.opname in ("STORE_ATTR", "DELETE_ATTR")]
        by_name = () if _BY_NAME.isdisjoint(code.co_names) else (_ANY,)
        stores = frozenset((*(s.argval for s in steps), *by_name))
        found.append(_Code("", frozenset(names_in(code)), stores))
    return found
