"""Numbers that ask and are asked while a run is recorded: attributes of modules, what functions of
Python's own make of sizes, and the floats that the code holds.
"""

from __future__ import annotations

import argparse
import builtins
import collections
import contextlib
import functools
import math
import operator
import sys
import types
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch
from torch import nn

from ..modules.frames import stand_ins
from ..modules.inspecting import modules_of
from ..modules.near import functions_of, package_of
from ..rules.sizes import (
    NUMBERS,
    Attribute,
    Literal,
    TracedInt,
    TracedProduct,
    asking,
    holds_traced,
    plain,
    traced,
)  # fmt: skip


@contextlib.contextmanager
def traced_attributes(model: nn.Module) -> Iterator[None]:
    """While recording, the integers in the modules' attributes know which attribute they are, and
    floats ask them."""
    undo: list[tuple[dict[str, Any], str, Any, Any]] = []

    def wrap(space: dict[str, Any], prefix: str) -> None:
        for key, value in list(space.items()):
            kind = type(value)
            if key[:1] == "_" or not (kind in _SIZES or issubclass(kind, np.integer)):
                continue
            if kind is int:
                new: Any = traced(value, Attribute(f"{prefix}{key}"))
            elif kind is float:
                new = Literal(value)
            elif issubclass(kind, np.integer):
                new = TracedProduct(value)
                new.origin = Attribute(f"{prefix}{key}")
            elif value and all(type(v) is int for v in value):
                name = f"{prefix}{key}"
                new = kind(traced(v, Attribute(name, i)) for i, v in enumerate(value))
            else:
                continue
            undo.append((space, key, value, new))
            space[key] = new

    seen: set[int] = set()
    for path, m in modules_of(model).items():
        prefix = f"{path}." if path else ""
        wrap(vars(m), prefix)
        for key, value in vars(m).items():
            kind: Any = type(value)
            if kind not in _PLAIN and is_configuration(kind) and id(value) not in seen:
                seen.add(id(value))  # one is often shared by many modules
                wrap(vars(value), f"{prefix}{key}.")
    try:
        yield
    finally:
        for space, key, old, new in reversed(undo):
            if space.get(key) is new:  # else the model's own code has set it
                space[key] = old


_SIZES = frozenset((int, float, tuple, list))
# What most attributes of modules are: no configurations.
_PLAIN = frozenset(
    (bool, int, float, str, type(None), tuple, list, dict, set, collections.OrderedDict, TracedInt)
)


@functools.lru_cache(maxsize=1024)
def is_configuration(kind: type) -> bool:
    """Whether an attribute of a module is an object whose attributes can be set in its place."""
    if any("__call__" in vars(base) for base in kind.__mro__):  # a module, a function
        return False
    if issubclass(kind, (types.SimpleNamespace, argparse.Namespace)):
        return True
    if not getattr(kind, "__dictoffset__", 0):  # a number, a tuple
        return False
    frozen = getattr(getattr(kind, "__dataclass_params__", None), "frozen", False)
    return not frozen and package_of(kind) not in ("torch", *sys.stdlib_module_names)


def _length(value: Any, /) -> int:
    """``len``: of a tensor its first size. Python makes of whatever a class's own ``__len__``
    returns a number that does not know where it came from."""
    if isinstance(value, torch.Tensor) and value.dim():
        return value.shape[0]
    return _len(value)


class _IsRange(type):
    def __instancecheck__(cls, value: Any) -> bool:
        return isinstance(value, _range)


class _Range(metaclass=_IsRange):
    """``range``, which takes what integers are without asking them."""

    def __new__(cls, *bounds: Any) -> Any:
        return _range(*map(_asked, bounds))


def _asked(number: Any) -> Any:
    return int(number) if isinstance(number, TracedInt) else number


def _asking(function: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(function)
    def given(*numbers: Any) -> Any:
        return function(*map(_asked, numbers))

    return given


def _asked_from(function: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(function)
    def giving(*numbers: Any) -> Any:
        return asking(function(*numbers), *numbers)

    return giving


def _product(numbers: Any, /, *, start: Any = 1) -> Any:
    return functools.reduce(operator.mul, numbers, start)


def _array_product(numbers: Any, *rest: Any, **named: Any) -> Any:
    """``numpy.prod``, which makes numbers of its own of a shape."""
    flat = isinstance(numbers, (list, tuple)) and all(type(n) in NUMBERS for n in numbers)
    if flat and not rest and not named and holds_traced(numbers):
        whole = _product(numbers)
        product = TracedProduct(plain(whole))
        product.origin = whole.origin
        return product
    return _numpys_prod(numbers, *rest, **named)


_len, _range, _numpys_prod = builtins.len, builtins.range, np.prod
_ASKING = ("log", "log2", "log10", "gcd", "lcm", "isqrt", "comb", "perm", "factorial")
_GIVING = ("sqrt", "exp", "pow")  # which ask for themselves
_READING: list[tuple[Any, str, Any]] = [
    (builtins, "len", _length), (builtins, "range", _Range), (math, "prod", _product),
    (np, "prod", _array_product),
    *((math, name, _asked_from(_asking(getattr(math, name)))) for name in _ASKING),
    *((math, name, _asked_from(getattr(math, name))) for name in _GIVING),
    *((math, name, Literal(getattr(math, name))) for name in ("pi", "e", "tau")),
]  # fmt: skip


@contextlib.contextmanager
def traced_builtins() -> Iterator[None]:
    """While recording, functions of Python's own that read integers past their methods ask them:
    what they make of them knows its origin, or is an answer. Modules that are imported meanwhile
    find Python's, for they may keep what they find."""
    before = [(owner, name, getattr(owner, name)) for owner, name, _ in _READING]
    depth = 0

    def put(functions: list[tuple[Any, str, Any]]) -> None:
        for owner, name, function in functions:
            setattr(owner, name, function)

    def run(execute: Callable[[Any], Any], module: Any) -> None:
        nonlocal depth
        depth += 1
        put(before)
        try:
            execute(module)
        finally:
            depth -= 1
            if not depth and finder in sys.meta_path:  # else it was found now and is run later
                put(_READING)

    def find_spec(name: str, path: Any = None, target: Any = None) -> Any:
        others = (f for f in sys.meta_path if f is not finder and hasattr(f, "find_spec"))
        found = next(filter(None, (f.find_spec(name, path, target) for f in others)), None)
        loader: Any = getattr(found, "loader", None)
        if hasattr(loader, "exec_module") and not isinstance(loader, type):  # of a file
            loader.exec_module = functools.partial(run, loader.exec_module)
        return found

    finder: Any = types.SimpleNamespace(find_spec=find_spec)
    put(_READING)
    sys.meta_path.insert(0, finder)
    try:
        yield
    finally:
        sys.meta_path.remove(finder)
        put(before)


@contextlib.contextmanager
def asking_literals(model: nn.Module) -> Iterator[None]:
    """While inside, the floats in the code of the model's classes ask what they meet, and those of
    functions of their packages that this code names.

    Of ``1.0 / x.shape[1]`` Python makes a plain number, whatever the class of the size: a float
    takes what an integer is without asking it.
    """
    classes: dict[Any, None] = dict.fromkeys(type(m) for m in modules_of(model).values())
    before: dict[types.FunctionType, types.CodeType] = {}
    try:
        for function in (f for cls in classes for f in functions_of(cls)):
            new = function.__code__ if function in before else _with_literals(function.__code__)
            if new is not function.__code__:
                before[function], function.__code__ = function.__code__, new
        yield
    finally:
        for function, code in before.items():
            function.__code__ = code
        stand_ins.clear()


def _with_literals(code: types.CodeType) -> types.CodeType:
    """The code itself, where it holds no float."""
    held = tuple(map(_constant, code.co_consts))
    if all(new is old for new, old in zip(held, code.co_consts, strict=True)):
        return code
    new = code.replace(co_consts=held)
    stand_ins[id(new)] = code
    return new


def _constant(value: Any) -> Any:
    return _with_literals(value) if isinstance(value, types.CodeType) else asking(value)
