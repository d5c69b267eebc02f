"""Code that is near a module: what Python tells of it without running it."""

from __future__ import annotations

import collections
import functools
import inspect
from collections.abc import Callable, Iterable, Iterator
from types import BuiltinFunctionType, CellType, CodeType, FunctionType, MethodWrapperType
from typing import Any, TypeVar

from torch import nn

from .bytecode import arguments

T = TypeVar("T")


def package_of(of: Any) -> str:
    return (getattr(of, "__module__", None) or "").partition(".")[0]


def functions(value: Any, package: str, seen: set[int] | None = None) -> Iterator[FunctionType]:
    """A function, those that it wraps, and those of the same package that it names."""
    seen = set() if seen is None else seen
    if value is None or id(value) in seen:
        return
    seen.add(id(value))
    inside: Iterable[Any]
    if isinstance(value, (staticmethod, classmethod, functools.cached_property)):
        inside = [getattr(value, "__func__", None) or getattr(value, "func", None)]
    elif isinstance(value, property):
        inside = [value.fget, value.fset, value.fdel]
    elif inspect.ismethod(value):
        inside = [value.__func__]
    elif inspect.isfunction(value):
        yield value
        cells = [c.cell_contents for c in value.__closure__ or () if c != CellType()]
        named = [value.__globals__.get(name) for name in value.__code__.co_names]
        inside = [*cells, *(f for f in named if inspect.isfunction(f) and package_of(f) == package)]
    else:
        inside = [getattr(value, "__dict__", {}).get("__wrapped__")]
    for each in inside:
        yield from functions(each, package, seen)


def codes(value: Any, package: str) -> Iterator[CodeType]:
    """The code of all these, with that of what is inside of it."""
    for function in functions(value, package):
        yield from within(function.__code__)


def within(code: CodeType) -> Iterator[CodeType]:
    """Code, and that of the functions in it."""
    yield code
    for each in code.co_consts:
        if isinstance(each, CodeType):
            yield from within(each)


def near(
    module: nn.Module,
    of_class: Callable[[Any], Iterable[T]],
    of_function: Callable[[Any, str], Iterable[T]],
) -> Iterator[T]:
    """What there is of a module's class, its hooks and functions, and the objects it holds."""
    cls: Any = type(module)
    package = package_of(cls)
    yield from of_class(cls)
    hooks = (*module._forward_hooks.values(), *module._forward_pre_hooks.values())
    for value in (*vars(module).values(), *hooks):
        held: Any = type(value)
        if held in _PLAIN:  # as most are
            continue
        if _is_routine(held):
            yield from of_function(value, package)
        elif not isinstance(value, nn.Module) and package_of(held) == package:
            yield from of_class(held)


# Types of Python's own: neither code, nor of any model's package.
_PLAIN = frozenset(
    (bool, int, float, str, type(None), tuple, list, dict, set, collections.OrderedDict)
)


@functools.lru_cache(maxsize=1024)
def _is_routine(kind: type) -> bool:
    """``inspect.isroutine`` of what is of this type."""
    of_c = issubclass(kind, (BuiltinFunctionType, MethodWrapperType))
    return of_c or (hasattr(kind, "__get__") and not hasattr(kind, "__set__"))


def functions_near(module: nn.Module) -> Iterator[FunctionType]:
    """The functions of all that."""
    return near(module, functions_of, functions)


def codes_near(module: nn.Module) -> Iterator[CodeType]:
    """The code of all that."""
    return near(module, _codes_of, codes)


def constants_near(module: nn.Module) -> Iterator[Any]:
    """Those in all that code."""
    return (value for code in codes_near(module) for value in code.co_consts)


@functools.lru_cache(maxsize=512)
def _codes_of(cls: type) -> tuple[CodeType, ...]:
    return tuple(dict.fromkeys(c for f in functions_of(cls) for c in within(f.__code__)))


@functools.lru_cache(maxsize=512)
def functions_of(cls: type) -> tuple[FunctionType, ...]:
    """The methods of a class, but for PyTorch's and its constructor, and what they name."""
    own = cls.__mro__[: cls.__mro__.index(nn.Module)] if nn.Module in cls.__mro__ else cls.__mro__
    methods = [
        value for base in own if base is not object
        for key, value in vars(base).items() if key != "__init__"
    ]  # fmt: skip
    return tuple(dict.fromkeys(f for value in methods for f in functions(value, package_of(cls))))


@functools.lru_cache(maxsize=4096)
def stored_in(code: CodeType) -> frozenset[str]:
    """The attributes that code sets or deletes."""
    return arguments(code, "STORE_ATTR", "DELETE_ATTR")


@functools.lru_cache(maxsize=4096)
def global_names(code: CodeType) -> frozenset[str]:
    """Which globals code reads: it has names of attributes in the same list."""
    return frozenset(name for c in within(code) for name in arguments(c, "LOAD_GLOBAL"))


def methods_with(cls: type, lines: Iterable[str]) -> list[str]:
    """Names of a class's own and inherited methods (and properties) in which one of ``lines``
    (``file:number``) lies; its forward is none of them."""
    names = {
        name for base in cls.__mro__ if package_of(base) != "torch" and base is not object
        for name, value in vars(base).items()
        if not name.startswith("__") and name != "forward"
        and any(_lies_in(line, code) for code in _own_codes(value) for line in lines)
    }  # fmt: skip
    return sorted(names)


def _own_codes(value: Any) -> Iterator[CodeType]:
    if isinstance(value, property):
        for function in (value.fget, value.fset):
            yield from _own_codes(function)
    function = inspect.unwrap(getattr(value, "__func__", value))
    if inspect.isfunction(function):
        yield function.__code__


def _lies_in(line: str, code: CodeType) -> bool:
    file, _, number = line.rpartition(":")
    lines = [n for *_, n in code.co_lines() if n is not None]
    return code.co_filename == file and min(lines) <= int(number) <= max(lines)


def names_in(code: CodeType) -> set[str]:
    """Attributes and globals that code names, and words, by which attributes can be read, too."""
    return {*code.co_names, *(c for c in code.co_consts if isinstance(c, str))}


@functools.lru_cache(maxsize=512)
def read_by_forward(cls: type) -> frozenset[str]:
    """The names in the code of a class's forward and of the methods that it calls, but of those
    that only check their arguments."""
    return frozenset(name for code in codes_of_forward(cls) for name in _called_in(code))


@functools.lru_cache(maxsize=512)
def set_by_forward(cls: type) -> frozenset[str]:
    """The attributes that the same code sets."""
    return frozenset[str]().union(*map(stored_in, codes_of_forward(cls)))


@functools.lru_cache(maxsize=512)
def registered_by_forward(cls: type) -> frozenset[str]:
    """Words in those parts of the same code that register buffers: their names, anew."""
    found = [code for code in codes_of_forward(cls) if "register_buffer" in code.co_names]
    return frozenset(word for code in found for word in code.co_consts if isinstance(word, str))


def codes_of_forward(cls: type) -> list[CodeType]:
    """Of a class's forward and of the methods that it calls."""
    return [method.__code__ for method in methods_of_forward(cls)]


@functools.lru_cache(maxsize=512)
def methods_of_forward(cls: type) -> tuple[FunctionType, ...]:
    """A class's forward and the methods that it calls, but for those that every module has."""
    found: dict[str, FunctionType] = {}
    waiting = ["forward"]
    while waiting:
        name = waiting.pop()
        method = inspect.unwrap(getattr(cls, name, None))  # type: ignore[arg-type]
        if method is getattr(nn.Module, name, None):  # or a tensor's, by the name of ``to``
            continue
        if name not in found and inspect.isfunction(method):
            found[name] = method
            waiting += _called_in(method.__code__)
    return tuple(found.values())


@functools.lru_cache(maxsize=512)
def reads_past_names(cls: Any) -> bool:
    """Whether the same code, or what a dictionary of tensors is read by, goes to where modules hold
    their tensors: a parametrization takes its own out of there."""
    read_by = [getattr(cls, name, None) for name in ("__getitem__", "get", "values", "items")]
    codes = [*codes_of_forward(cls), *(f.__code__ for f in read_by if inspect.isfunction(f))]
    return package_of(cls) != "torch" and any(
        not {"_parameters", "_buffers"}.isdisjoint(code.co_names) for code in codes
    )


def _called_in(code: CodeType) -> list[str]:
    return [name for name in code.co_names if not name.lstrip("_").startswith("check")]
