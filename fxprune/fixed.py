"""Tensors that are plain attributes of modules (``self.positions = torch.randn(9, 32)``).

They are like buffers that no state dict holds, as long as nothing sets them anew while the model
runs: caches, and what hooks compute, are none.
"""

from __future__ import annotations

import dis
import functools
import inspect
from collections.abc import Iterable, Iterator, Mapping
from types import CellType, CodeType
from typing import Any

import torch
from torch import Tensor, nn

from .running import dotted

# What sets up a module, or moves it to another device or dtype.
_SETTING_UP = frozenset({"__init__", "__setstate__", "_apply", "to"})


def fixed_tensors(modules: Mapping[str, nn.Module]) -> dict[str, Tensor]:
    """Those of a model, by name; one that goes by several names has them all."""
    found = {
        dotted(path, key): value
        for path, module in modules.items() if not module._forward_pre_hooks
        for key, value in vars(module).items() if isinstance(value, Tensor)
    }  # fmt: skip
    if not found:
        return found
    set_anew = {name for cls in {*map(type, modules.values())} for name in _set_by(cls)}
    for module in modules.values():  # a forward of their own
        for value in vars(module).values():
            if inspect.isroutine(value):
                set_anew |= _stored(getattr(value, "__func__", value))
    return {
        name: value for name, value in found.items()
        if name.rpartition(".")[2] not in set_anew
        and type(value) is Tensor and value.layout == torch.strided and not value.requires_grad
    }  # fmt: skip


@functools.lru_cache(maxsize=512)
def _set_by(cls: Any) -> frozenset[str]:
    """Attributes that the code of a class sets, but for what sets a module up."""
    code = {
        (base, key): value for base in set(cls.__mro__) - {nn.Module, object}
        for key, value in vars(base).items() if key not in _SETTING_UP
    }  # fmt: skip
    return frozenset(name for value in code.values() for name in _stored(value))


def _stored(function: Any) -> set[str]:
    names: set[str] = set()
    for code in _codes(function, set()):
        steps = dis.get_instructions(code)
        names.update(step.argval for step in steps if step.opname == "STORE_ATTR")
        if "setattr" in code.co_names:
            names.update(c for c in code.co_consts if isinstance(c, str))
    return names


def _codes(value: Any, seen: set[int]) -> Iterator[CodeType]:
    """The code of a function, of those that it wraps, and of those inside them."""
    if value is None or id(value) in seen:
        return
    seen.add(id(value))
    if isinstance(value, CodeType):
        yield value
        inside: Iterable[Any] = value.co_consts
    elif isinstance(value, (staticmethod, classmethod, functools.cached_property)):
        inside = [getattr(value, "__func__", None) or getattr(value, "func", None)]
    elif isinstance(value, property):
        inside = [value.fget, value.fset, value.fdel]
    elif inspect.isfunction(value):
        cells = [c.cell_contents for c in value.__closure__ or () if c != CellType()]
        inside = [value.__code__, *cells]
    else:
        inside = [getattr(value, "__dict__", {}).get("__wrapped__")]
    for each in inside:
        yield from _codes(each, seen)
