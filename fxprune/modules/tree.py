"""Walking the nested values that models take and return: containers, dataclasses, plain objects."""

from __future__ import annotations

import copy
import dataclasses
from collections import deque
from collections.abc import Callable
from typing import Any

import torch

# Numbers among them: a traced one remembers where it came from.
_WITHOUT = (int, float, str, type(None), type, torch.nn.Module)


def tensors(value: Any) -> list[torch.Tensor]:
    """Every tensor inside ``value``, in a fixed order; plain objects are searched by attribute."""
    found = []
    seen = set()
    waiting = [value]
    while waiting:
        value = waiting.pop()
        if isinstance(value, torch.Tensor):
            found.append(value)
        elif not isinstance(value, _WITHOUT) and id(value) not in seen:
            seen.add(id(value))
            waiting += reversed(children(value))
    return found


def children(value: Any) -> list[Any]:
    if isinstance(value, dict):
        return list(value.values())
    if isinstance(value, (list, tuple, set, frozenset, deque)):
        return list(value)
    if isinstance(value, slice):
        return [value.start, value.stop, value.step]
    attributes = getattr(value, "__dict__", None)
    return list(attributes.values()) if isinstance(attributes, dict) else []


def map_tensors(value: Any, function: Callable[[torch.Tensor], Any]) -> Any:
    """``value`` with each tensor in its containers replaced; other objects are kept as they are."""
    if isinstance(value, torch.Tensor):
        return function(value)
    return rebuild(value, lambda child: map_tensors(child, function))


def rebuild(value: Any, function: Callable[[Any], Any]) -> Any:
    """``value`` with ``function`` applied to each child of a container; leaves as they are."""
    if isinstance(value, tuple):
        items = [function(item) for item in value]
        return type(value)(*items) if hasattr(value, "_fields") else tuple(items)
    if isinstance(value, list):
        return [function(item) for item in value]
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        fields = {f.name: function(getattr(value, f.name)) for f in dataclasses.fields(value)}
        return type(value)(**fields)
    if isinstance(value, dict):
        return {key: function(item) for key, item in value.items()}
    if isinstance(value, slice):
        return slice(function(value.start), function(value.stop), function(value.step))
    return value


def copied(value: Any, memo: dict[int, Any]) -> Any:
    """A deep copy of a plain object, with what ``memo`` has in the place of its parts; the object
    itself where it cannot be copied, or holds a module, which is not for others to copy."""
    if any(isinstance(part, torch.nn.Module) for part in children(value)):
        return value
    try:
        return copy.deepcopy(value, memo)
    except (TypeError, copy.Error, RuntimeError):
        return value
