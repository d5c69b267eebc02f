"""Tensors that are plain attributes of modules (``self.positions = torch.randn(9, 32)``).

They are like buffers that no state dict holds, as long as nothing sets them anew while the model
runs: caches, and what hooks compute, are none. Python lets any code set any attribute, so this asks
all code that is near: what some of it sets is not fixed. Of code that sets attributes by name
(``setattr``), a module's own may set any of it; other code those whose names, or parts of them, are
written somewhere as strings.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from .inspecting import dotted
from .near import functions, names_in, near, package_of, stored_in, within

# What sets up a module, or moves it to another device or dtype.
_SETTING_UP = frozenset({"__init__", "_apply", "to"})
_TORCHS = frozenset(dir(nn.Module))  # which PyTorch may call at any time
# What it puts into a pruned class, such as how that is pickled, sets none of a model's tensors.
_FXPRUNE = __name__.partition(".")[0]
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
        for path, module in modules.items()
        if Tensor in map(type, vars(module).values()) and not module._forward_pre_hooks
        for key, value in vars(module).items()
        if type(value) is Tensor and value.layout == torch.strided
        and not value.requires_grad and not value.is_inference() and not hasattr(type(module), key)
    ]  # fmt: skip
    if not found:
        return []
    running = _running(modules)
    by_name = {code for code in running if code.by_name}
    parts = {part for code in by_name for part in code.strings}
    anew = {name for code in running for name in code.stores}
    anew |= {name for code in running if by_name for name in code.strings}

    def is_set_anew(key: str, cls: Any) -> bool:
        own = not by_name.isdisjoint(_codes(cls))
        return own or key in anew or any(_is_part(part, key) for part in parts)

    return [each for each in found if not is_set_anew(each.key, type(each.module))]


def _is_part(part: str, name: str) -> bool:
    """Whether a name may be made of a string and something else: ``f"table_{i}"``."""
    apart = "_" in (part[0], part[-1]) or name.replace(part, "", 1).isdigit()
    return apart and part in name


def _running(modules: Mapping[str, nn.Module]) -> set[_Code]:
    """The code that is near, but for what is there to set a module up."""
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
    return {each for each in codes_of_all if each.method not in setting_up}


class _Code(NamedTuple):
    """The names and strings that a method has in its code, the attributes that it sets, and whether
    it can set more, by name."""

    method: str
    names: frozenset[str]
    strings: frozenset[str]
    stores: frozenset[str]
    by_name: bool


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
    own = [f for f in functions(function, package) if package_of(f) != _FXPRUNE]
    for code in (code for f in own for code in within(f.__code__)):
        strings = frozenset(c for c in code.co_consts if isinstance(c, str) and len(c) > 1)
        by_name = not _BY_NAME.isdisjoint(code.co_names)
        found.append(_Code("", frozenset(names_in(code)), strings, stored_in(code), by_name))
    return found
