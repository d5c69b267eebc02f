"""Numbers that remember where they came from.

While a model is recorded, the sizes it reads from tensors and the integers it reads from its own
attributes are instances of :class:`TracedInt`. They behave as plain integers, and carry an
*origin*: the tensor dimension, the attribute, or the arithmetic they are made of.
"""

from __future__ import annotations

import argparse
import builtins
import collections
import contextlib
import functools
import keyword
import math
import operator
import sys
import types
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import nn

from ..modules.inspecting import modules_of
from ..modules.near import package_of


@dataclass(frozen=True)
class Dimension:
    """Size of dimension ``dim`` of the tensor that ``source``, a node of the trace, computes."""

    source: Any
    dim: int


@dataclass(frozen=True)
class Attribute:
    """The attribute ``name`` (dotted) of the model, or its item ``index`` if a sequence."""

    name: str
    index: int | None = None


@dataclass(frozen=True)
class Operation:
    """``function(*operands)``; an operand is a traced or a plain number."""

    function: Callable[..., Any]
    operands: tuple[Any, ...]


Origin = Dimension | Attribute | Operation


@dataclass(frozen=True)
class Question:
    """Something that Python asked of traced numbers: what the code does depends on the answer."""

    function: Callable[..., Any]
    operands: tuple[Any, ...]
    answer: Any
    where: str = ""  # file and line
    site: Any = None  # the code that asked, and the place of its instruction

    @property
    def key(self) -> Any:
        """The same for questions of the same expressions only."""
        return (self.function, *map(expression, self.operands))

    def __str__(self) -> str:
        return f"{self.function.__name__}({', '.join(str(plain(o)) for o in self.operands)})"


# Questions whose answer is a plain number: it does not know any more what it was made of.
LOSING = (int, float)


class TracedInt(int):
    origin: Origin


class TracedProduct(TracedInt):
    """What ``numpy.prod`` makes of a shape, as a number of NumPy's would be used."""

    def item(self) -> TracedProduct:
        return self


class TracedFloat(float):
    origin: Origin


def traced(value: Any, origin: Origin) -> Any:
    """``value`` with an origin, where it is a plain int or float; anything else as it is."""
    if type(value) is int:
        result: Any = TracedInt(value)
    elif type(value) is float:
        result = TracedFloat(value)
    else:
        return value
    result.origin = origin
    return result


class TracedSize(tuple):
    """A ``torch.Size`` of traced numbers, whose product knows its origin, too. PyTorch's own class
    cannot be derived from: this one says that it is it, and is a tuple to whoever looks closer."""

    __class__ = property(lambda self: torch.Size)  # type: ignore[assignment]
    __slots__ = ()

    def numel(self) -> int:
        return functools.reduce(operator.mul, self) if self else 1

    def __getitem__(self, index: Any) -> Any:
        found = tuple.__getitem__(self, index)
        return TracedSize(found) if isinstance(index, slice) else found

    def __add__(self, other: Any) -> Any:
        return TracedSize(tuple.__add__(self, other))

    def __radd__(self, other: Any) -> Any:
        return TracedSize(other + tuple(self))

    def __mul__(self, times: Any) -> Any:
        return TracedSize(tuple.__mul__(self, times))

    def __repr__(self) -> str:
        return repr(torch.Size(map(plain, self)))

    def __reduce__(self) -> Any:
        return torch.Size, (tuple(map(plain, self)),)


def traced_size(source: Any, size: torch.Size, code: types.CodeType | None = None) -> Any:
    """``size`` with items that know that they are dimensions of ``source``.

    Args:
        code: that asks for it. Where it names the oldest type of tensors (``torch.Tensor(size)``),
            which takes all but PyTorch's own class for data, that is what it gets.
    """
    items = [traced(n, Dimension(source, i)) for i, n in enumerate(size)]
    old = code is not None and "Tensor" in code.co_names
    return torch.Size(items) if old else TracedSize(items)


def plain(number: Any) -> Any:
    """A traced number as Python's own; anything else as it is."""
    if isinstance(number, TracedInt):
        return int.__int__(number)
    return float.__float__(number) if isinstance(number, TracedFloat) else number


def holds_traced(value: Any) -> bool:
    """Whether a traced number is in a value, or in a list of lists."""
    if isinstance(value, (list, tuple)):
        return any(map(holds_traced, value))
    return hasattr(value, "origin")


def origins(number: Any) -> Iterator[Dimension | Attribute]:
    """The dimensions and attributes that a number is made of; none for a plain one."""
    origin = getattr(number, "origin", None)
    if isinstance(origin, Operation):
        for operand in origin.operands:
            yield from origins(operand)
    elif origin is not None:
        yield origin


def dimensions(numbers: Iterable[Any]) -> list[Dimension]:
    """The sizes of tensors that numbers are made of."""
    return [o for number in numbers for o in origins(number) if isinstance(o, Dimension)]


def expression(number: Any) -> Any:
    """A hashable form of what a number is made of: the same for equal expressions only."""
    origin = getattr(number, "origin", None)
    if isinstance(origin, Operation):
        return (origin.function, *map(expression, origin.operands))
    return (type(number), number) if origin is None else origin


_BINARY = ("add", "sub", "mul", "floordiv", "mod", "pow", "truediv", "lshift", "rshift",
           "and", "or", "xor")  # fmt: skip
_NUMBERS = (int, float, TracedInt, TracedProduct, TracedFloat)


def _install(base: type, cls: type) -> None:
    """Give ``cls`` the arithmetic of ``base``, with results that carry their origin."""

    def binary(name: str, reflected: bool) -> None:
        dunder = f"__{'r' if reflected else ''}{name}__"
        compute = getattr(base, dunder)
        function = getattr(operator, f"{name}_" if keyword.iskeyword(name) else name)

        def method(self: Any, other: Any, *rest: Any) -> Any:
            value = compute(self, other, *rest)
            if type(other) not in _NUMBERS or rest:
                return value
            if value is NotImplemented:  # an int and a float
                pair = (plain(self), plain(other))
                value = function(*(reversed(pair) if reflected else pair))
            operands = (other, self) if reflected else (self, other)
            return traced(value, Operation(function, operands))

        method.__name__ = dunder
        setattr(cls, dunder, method)

    for name in _BINARY:
        if hasattr(base, f"__{name}__"):
            binary(name, False)
            binary(name, True)

    def unary(name: str, function: Callable[..., Any]) -> None:
        compute = getattr(base, name)

        def method(self: Any, *digits: Any) -> Any:
            value = compute(self, *digits)
            return value if digits else traced(value, Operation(function, (self,)))

        method.__name__ = name
        setattr(cls, name, method)

    for name in ("abs", "neg", "pos", "invert"):
        if hasattr(base, f"__{name}__"):
            unary(f"__{name}__", getattr(operator, name))
    for name, function in (("floor", math.floor), ("ceil", math.ceil), ("round", round)):
        unary(f"__{name}__", function)

    def both(self: Any, other: Any) -> Any:
        return self // other, self % other

    def both_reflected(self: Any, other: Any) -> Any:
        return other // self, other % self

    setattr(cls, "__divmod__", both)  # noqa: B010
    setattr(cls, "__rdivmod__", both_reflected)  # noqa: B010

    def itself(self: Any) -> Any:
        return self

    for name in ("real", "numerator"):
        if hasattr(base, name):
            setattr(cls, name, property(itself))
    setattr(cls, "conjugate", itself)  # noqa: B010


_install(int, TracedInt)
_install(float, TracedFloat)


# Called with (operator, operands, answer) for each question. Set while a run is recorded.
on_question: Callable[[Callable[..., Any], tuple[Any, ...], Any], None] | None = None


def _install_questions(base: type, cls: type) -> None:
    def question(name: str, function: Callable[..., Any]) -> None:
        plain_method = getattr(base, name)

        def method(self: Any, *other: Any) -> Any:
            outcome = plain_method(self, *other)
            if on_question is not None and outcome is not NotImplemented:
                on_question(function, (self, *other), outcome)
            return outcome

        method.__name__ = name
        setattr(cls, name, method)

    for name in ("eq", "ne", "lt", "le", "gt", "ge"):
        question(f"__{name}__", getattr(operator, name))
    question("__bool__", operator.truth)
    # Plain numbers, which know their origin no more: what they were is an answer, too.
    question("__int__", int)
    question("__float__", float)
    question("__str__", str)
    question("__repr__", repr)
    question("__format__", format)
    question("__hash__", hash)  # of a key that a dictionary may lack
    if hasattr(base, "bit_length"):
        question("bit_length", bit_length)


def bit_length(number: int) -> int:
    return int.bit_length(number)


_install_questions(int, TracedInt)
_install_questions(float, TracedFloat)


@contextlib.contextmanager
def traced_attributes(model: nn.Module) -> Iterator[None]:
    """While recording, the integers in the modules' attributes know which attribute they are."""
    undo: list[tuple[dict[str, Any], str, Any, Any]] = []

    def wrap(space: dict[str, Any], prefix: str) -> None:
        for key, value in list(space.items()):
            kind = type(value)
            if kind not in _SIZES or key[:1] == "_":
                continue
            if kind is int:
                new: Any = traced(value, Attribute(f"{prefix}{key}"))
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
            if kind not in _PLAIN and _is_configuration(kind) and id(value) not in seen:
                seen.add(id(value))  # one is often shared by many modules
                wrap(vars(value), f"{prefix}{key}.")
    try:
        yield
    finally:
        for space, key, old, new in reversed(undo):
            if space.get(key) is new:  # else the model's own code has set it
                space[key] = old


_SIZES = frozenset((int, tuple, list))
# What most attributes of modules are: no configurations.
_PLAIN = frozenset(
    (bool, int, float, str, type(None), tuple, list, dict, set, collections.OrderedDict, TracedInt)
)


@functools.lru_cache(maxsize=1024)
def _is_configuration(kind: type) -> bool:
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
    def asking(*numbers: Any) -> Any:
        return function(*map(_asked, numbers))

    return asking


def _product(numbers: Any, /, *, start: Any = 1) -> Any:
    return functools.reduce(operator.mul, numbers, start)


def _array_product(numbers: Any, *rest: Any, **named: Any) -> Any:
    """``numpy.prod``, which makes numbers of its own of a shape."""
    flat = isinstance(numbers, (list, tuple)) and all(type(n) in _NUMBERS for n in numbers)
    if flat and not rest and not named and holds_traced(numbers):
        whole = _product(numbers)
        product = TracedProduct(plain(whole))
        product.origin = whole.origin
        return product
    return _numpys_prod(numbers, *rest, **named)


_len, _range, _numpys_prod = builtins.len, builtins.range, np.prod
_ASKING = ("log", "log2", "log10", "gcd", "lcm", "isqrt", "comb", "perm", "factorial")
_READING: list[tuple[Any, str, Any]] = [
    (builtins, "len", _length), (builtins, "range", _Range), (math, "prod", _product),
    (np, "prod", _array_product),
    *((math, name, _asking(getattr(math, name))) for name in _ASKING),
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
