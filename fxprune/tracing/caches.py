"""Caches that are asked with traced numbers, out of the way.

A traced number is equal to the plain one, so ``functools.lru_cache`` would answer with what it has
made of a plain one, which does not know where it came from; or keep what it makes of a traced one,
whose graph is another's by the time it is asked for again. einops caches shapes so.
"""

from __future__ import annotations

import contextlib
import functools
import sys
from collections.abc import Iterator
from typing import Any

from ..rules.sizes import TracedFloat, TracedInt

_CACHED = functools._lru_cache_wrapper
# Of these no function is asked with sizes that a model's code has read.
_OTHERS = frozenset(
    (*sys.stdlib_module_names, "fxprune", "torch", "numpy", "scipy", "networkx", "sympy")
)
_scanned: dict[str, int] = {}  # name of a module -> its id
_scanned_last: list[tuple[int, str, int]] = []  # how many there were, and the last one
_found: list[tuple[Any, str, Any, Any]] = []  # (module or class, name there, cached, stand-in)


@contextlib.contextmanager
def passed_by() -> Iterator[None]:
    """Inside, cached functions of other packages run anew where they are given a traced number."""
    _scan()
    swapped = [f for f in _found if vars(f[0]).get(f[1]) is f[2]]
    for owner, name, _, stand_in in swapped:
        setattr(owner, name, stand_in)
    try:
        yield
    finally:
        for owner, name, cached, _ in swapped:
            setattr(owner, name, cached)


def _scan() -> None:
    """What has been imported since."""
    last = next(reversed(sys.modules))
    state = len(sys.modules), last, id(sys.modules[last])
    if _scanned_last == [state]:
        return
    _scanned_last[:] = [state]
    for name, module in list(sys.modules.items()):
        if _scanned.get(name) == id(module):
            continue
        _scanned[name] = id(module)
        if name.partition(".")[0] not in _OTHERS and hasattr(module, "__dict__"):
            _found.extend((*place, _stand_in(place[-1])) for place in _caches(module))


def _caches(module: Any) -> Iterator[tuple[Any, str, Any]]:
    """By type only: what else lies in a module may mind being asked."""
    for name, value in list(vars(module).items()):
        if type(value) is _CACHED:
            yield module, name, value
        elif issubclass(type(value), type) and vars(value).get("__module__") == module.__name__:
            for key, held in list(vars(value).items()):
                if type(_bare(held)) is _CACHED:
                    yield value, key, held


def _bare(value: Any) -> Any:
    return value.__func__ if type(value) in (staticmethod, classmethod) else value


def _stand_in(value: Any) -> Any:
    cached = _bare(value)

    @functools.wraps(cached)
    def ask(*args: Any, **kwargs: Any) -> Any:
        traced = _is_traced((args, *kwargs.values()))
        return (cached.__wrapped__ if traced else cached)(*args, **kwargs)

    for name in ("cache_clear", "cache_info", "cache_parameters"):
        setattr(ask, name, getattr(cached, name))
    return ask if cached is value else type(value)(ask)


def _is_traced(value: Any) -> bool:
    """Caches are asked with hashable values."""
    if isinstance(value, (tuple, frozenset)):
        return any(map(_is_traced, value))
    return isinstance(value, (TracedInt, TracedFloat))
