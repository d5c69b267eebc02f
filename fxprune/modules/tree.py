"""Walking the nested values that models take and return: containers, dataclasses, plain objects."""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import functools
import types
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
    return list(attributes(value).values())


def attributes(value: Any) -> dict[str, Any]:
    """What a plain object holds by name, in slots of its class too (``@dataclass(slots=True)``)."""
    own = getattr(value, "__dict__", None)
    found = dict(own) if isinstance(own, dict) else {}
    kind: Any = type(value)
    for name, slot in _slots(kind):
        # A slot that nothing was put in raises, as any attribute that is not there.
        with contextlib.suppress(AttributeError):
            found[name] = slot.__get__(value)
    return found


@functools.lru_cache(maxsize=1024)
def _slots(kind: type) -> list[tuple[str, Any]]:
    """The slots of a class by name, as they are declared."""
    found = []
    for base in reversed(kind.__mro__):
        names = vars(base).get("__slots__", ())
        for name in (names,) if isinstance(names, str) else names:
            private = name.startswith("__") and not name.endswith("__")
            called = f"_{base.__name__.lstrip('_')}{name}" if private else name
            slot = vars(base).get(called)
            if isinstance(slot, types.MemberDescriptorType):
                found.append((called, slot))
    return found


def map_tensors(value: Any, function: Callable[[torch.Tensor], Any]) -> Any:
    """A copy of ``value`` with each tensor in it replaced. Objects and containers keep their
    classes; functions, modules and what cannot be copied are kept as they are."""
    if isinstance(value, torch.Tensor):
        return function(value)
    if type(value) in (dict, list, tuple, slice) or hasattr(type(value), "_fields"):
        return rebuild(value, lambda child: map_tensors(child, function))
    if isinstance(value, dict):
        return _of_its_class(value, function)
    if isinstance(value, (list, tuple)) or (attributes(value) and not callable(value)):
        return copied(value, {id(t): function(t) for t in tensors(value)})
    return value


def _of_its_class(value: dict[Any, Any], function: Callable[[torch.Tensor], Any]) -> Any:
    """``map_tensors`` of a mapping of a class of its own, whose items may be its attributes, too
    (``self.__dict__ = self``): ``copy.deepcopy`` gets many of these wrong."""
    done: dict[int, Any] = {}

    def once(item: Any) -> Any:
        if id(item) not in done:
            done[id(item)] = map_tensors(item, function)
        return done[id(item)]

    new = copy.copy(value)
    dict.update(new, {key: once(item) for key, item in value.items()})
    for name, item in attributes(value).items():
        object.__setattr__(new, name, once(item))
    return new


def rebuild(value: Any, function: Callable[[Any], Any]) -> Any:
    """``value`` with ``function`` applied to each child of a container; leaves as they are."""
    if isinstance(value, tuple):
        items = [function(item) for item in value]
        return type(value)(*items) if hasattr(value, "_fields") else tuple(items)
    if isinstance(value, list):
        return [function(item) for item in value]
    if type(value) is dict:
        return {key: function(item) for key, item in value.items()} if value else {}
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
