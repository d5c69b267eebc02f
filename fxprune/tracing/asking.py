"""Numbers that ask and are asked while a run is recorded: attributes of modules, what functions of
Python's own make of sizes, and the numbers that the code holds.
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
from collections.abc import Callable, Iterable, Iterator, Mapping
from itertools import chain
from typing import Any

import numpy as np
import torch
from torch import nn

from ..modules.frames import stand_ins
from ..modules.near import functions_near, functions_of, global_names, package_of
from ..modules.snapshot import is_same
from ..rules.sizes import (
    NUMBERS,
    Attribute,
    TracedInt,
    TracedProduct,
    asking,
    holds_traced,
    literal,
    plain,
    traced,
)  # fmt: skip


@contextlib.contextmanager
def traced_attributes(modules: Mapping[str, nn.Module]) -> Iterator[Callable[[], set[str]]]:
    """While recording, the integers in the modules' attributes know which attribute they are, and
    floats ask them. Gives what tells the names of those that have been set anew."""
    undo: list[tuple[dict[str, Any], str, Any, Any]] = []

    def wrap(space: dict[str, Any], prefix: str) -> None:
        for key, value in list(space.items()):
            kind: Any = type(value)
            if not _may_be_sizes(kind) or key[:1] == "_":
                continue
            if kind is int:
                new: Any = traced(value, Attribute(f"{prefix}{key}"))
            elif kind is float:
                new = literal(value, frozenset((Attribute(f"{prefix}{key}"),)))
            elif kind not in _SIZES:
                new = TracedProduct(value)
                new.origin = Attribute(f"{prefix}{key}")
            elif value and _INTEGERS.issuperset(map(type, value)):
                name = f"{prefix}{key}"
                new = kind(traced(v, Attribute(name, i)) for i, v in enumerate(value))
            else:
                continue
            undo.append((space, key, value, new))
            space[key] = new

    spaces: list[tuple[dict[str, Any], dict[str, Any]]] = []

    def changed() -> set[str]:
        return {
            key for space, before in spaces if not is_same(space, before)
            for key in space.keys() | before.keys() if space.get(key) is not before.get(key)
        }  # fmt: skip

    seen: set[int] = set()
    for path, m in modules.items():
        prefix = f"{path}." if path else ""
        wrap(vars(m), prefix)
        spaces.append((vars(m), dict(vars(m))))
        for key, value in vars(m).items():
            kind: Any = type(value)
            if kind not in _PLAIN and is_configuration(kind) and id(value) not in seen:
                seen.add(id(value))  # one is often shared by many modules
                wrap(vars(value), f"{prefix}{key}.")
                spaces.append((vars(value), dict(vars(value))))
    try:
        yield changed
    finally:
        for space, key, old, new in reversed(undo):
            if space.get(key) is new:  # else the model's own code has set it
                space[key] = old


_SIZES = frozenset((int, float, tuple, list))
_INTEGERS = frozenset((int,))
# What most attributes of modules are: no configurations.
_PLAIN = frozenset(
    (bool, int, float, str, type(None), tuple, list, dict, set, collections.OrderedDict, TracedInt)
)


@functools.lru_cache(maxsize=1024)
def _may_be_sizes(kind: Any) -> bool:
    """Whether it is a number, or several: NumPy has integers of its own."""
    return kind in _SIZES or issubclass(kind, np.integer)


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
    *((math, name, literal(getattr(math, name), frozenset())) for name in ("pi", "e", "tau")),
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
def asking_literals(modules: Mapping[str, nn.Module]) -> Iterator[Callable[[], set[str]]]:
    """While inside, the numbers in the code of the modules' classes know that this holds them, and
    those of functions of their packages that this code names; floats ask what they meet. Gives what
    tells the names of global ones that have been set anew.

    Of ``1.0 / x.shape[1]`` Python makes a plain number, whatever the class of the size: a float
    takes what an integer is without asking it.
    """
    undo: list[Callable[[], None]] = []
    rebound: list[tuple[dict[str, Any], str, Any, Any]] = []

    def changed() -> set[str]:
        return {name for space, name, _, new in rebound if space.get(name) is not new}

    try:
        for function in _functions(modules.values()):
            space = function.__globals__
            for name in global_names(function.__code__):
                value: Any = space.get(name)
                if type(value) in (int, float):
                    space[name] = literal(value, frozenset((Attribute(name),)))
                    rebound.append((space, name, value, space[name]))
            undo += hold_literals(function)
        yield changed
    finally:
        for space, name, old, new in rebound:
            if space.get(name) is new:  # else code has set it
                space[name] = old
        for put_back in reversed(undo):
            put_back()
        stand_ins.clear()


def _functions(modules: Iterable[nn.Module]) -> Iterable[types.FunctionType]:
    kinds = [functions_of(kind) for kind in dict.fromkeys(map(type, modules))]
    # PyTorch's own hold no others: most modules are of these, and looking takes time.
    own = [
        m
        for m in modules
        if package_of(type(m)) != "torch" or m._forward_hooks or m._forward_pre_hooks
    ]
    return dict.fromkeys(chain(*kinds, *map(functions_near, own)))


def hold_literals(function: types.FunctionType) -> list[Callable[[], None]]:
    """Have a function's code and the values of its arguments know who holds them. Returns what
    undoes it."""
    code, undo = function.__code__, list[Callable[[], None]]()

    def put(name: str, old: Any, new: Any) -> None:
        setattr(function, name, new)
        undo.append(functools.partial(setattr, function, name, old))

    holding = with_literals(code)
    if holding is not code:
        put("__code__", code, holding)
    if function.__defaults__:
        old = function.__defaults__
        put("__defaults__", old, tuple(_literal(value, code) for value in old))
    if function.__kwdefaults__:
        named = function.__kwdefaults__
        held = {key: _literal(value, code) for key, value in named.items()}
        put("__kwdefaults__", named, held)
    return undo


def with_literals(code: types.CodeType) -> types.CodeType:
    """The code itself, where it holds no number."""
    held = tuple(_literal(value, code) for value in code.co_consts)
    if all(new is old for new, old in zip(held, code.co_consts, strict=True)):
        return code
    new = code.replace(co_consts=held)
    stand_ins[id(new)] = code
    return new


def _literal(value: Any, code: types.CodeType) -> Any:
    """A number that code holds; but none in a tuple, of which another may be taken next time."""
    if isinstance(value, types.CodeType):
        return with_literals(value)
    return literal(value, frozenset((id(code),))) if type(value) in (int, float) else value
