"""What modules keep of a model besides their own parts: in functions, lists and the like."""

from __future__ import annotations

import functools
import types
import weakref
from collections.abc import Mapping
from typing import Any

from torch import Tensor, nn

from .inspecting import attributes_of, dotted


def kept_besides(modules: Mapping[str, nn.Module]) -> dict[int, str]:
    """Where a tensor is kept that is no parameter or buffer there, by the tensor's id."""
    found: dict[int, str] = {}
    parts = {id(module) for module in modules.values()}
    for path, module in modules.items():
        for key, value in attributes_of(module):
            if isinstance(module, nn.RNNBase) and key in ("_flat_weights", "_flat_weight_refs"):
                continue  # PyTorch keeps them up to date, and masks do reach them
            waiting, seen = [value], set(parts)
            while waiting:
                value = waiting.pop()
                if isinstance(value, Tensor):
                    found.setdefault(id(value), dotted(path, key))
                elif id(value) not in seen:
                    seen.add(id(value))
                    waiting += inside(value)
    return found


def inside(value: Any) -> list[Any]:
    if isinstance(value, types.FunctionType):
        cells = [held for cell in value.__closure__ or () for held in content(cell)]
        return [*cells, *(value.__defaults__ or ()), *(value.__kwdefaults__ or {}).values()]
    if isinstance(value, weakref.ref):
        return [value()]
    if isinstance(value, types.MethodType):
        return [value.__self__, value.__func__]
    if isinstance(value, functools.partial):
        return [value.func, *value.args, *value.keywords.values()]
    if isinstance(value, nn.Module):  # in a list, say, so that it is no part of the model
        own = (value._parameters, value._buffers, value._modules)
        return [*(t for of in own for t in of.values()), *(v for _, v in attributes_of(value))]
    if isinstance(value, dict):
        return list(value.values())
    plain = isinstance(value, (list, tuple, set, frozenset))
    return list(iter(value)) if plain else []  # by no length: the class may have one of its own


def content(cell: types.CellType) -> list[Any]:
    try:
        return [cell.cell_contents]
    except ValueError:  # of a name that is bound later
        return []
