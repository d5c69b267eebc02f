"""Numbers that remember where they came from.

While a model is recorded, the sizes it reads from tensors and the integers it reads from its own
attributes are instances of :class:`TracedInt`. They behave as plain integers, and carry an
*origin*: the tensor dimension, the attribute, or the arithmetic they are made of.
"""

from __future__ import annotations

import functools
import keyword
import math
import operator
import types
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch


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
    site: Any = None  # the model's code that asked, and the place of its instruction
    asked_at: Any = None  # the same of the code that asked for it: it may be PyTorch's
    only_checks: bool = False  # another answer would have been an error
    index: int = 0  # of the next node
    codes: tuple[Any, ...] = ()  # those of the model that ran, from the one that asked outwards

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
    """What stands for an integer of NumPy's, such as ``numpy.prod`` makes of a shape."""

    def item(self) -> TracedProduct:
        return self


class TracedFloat(float):
    origin: Origin


class Literal(float):
    """A plain float that asks a traced number on its right. Python's own takes what integers are
    without asking them (``1.0 / x.shape[1]``).

    ``held_by`` are the codes (their ids), attributes and dimensions that hold it, or the numbers
    that it is made of; None where one of these comes from nowhere, and may be another in another
    run."""

    held_by: frozenset[Any] | None = None

    def __reduce__(self) -> Any:
        return float, (plain(self),)


class LiteralInt(int):
    """The same of an integer."""

    held_by: frozenset[Any] | None = None

    def __reduce__(self) -> Any:
        return int, (plain(self),)


LITERALS = (Literal, LiteralInt)
OWN = (TracedInt, TracedFloat, *LITERALS)  # numbers that are not Python's


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
        return TracedSize(found) if isinstance(index, slice) else _made(found)

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
    if isinstance(number, (TracedInt, LiteralInt)):
        return int.__int__(number)
    return float.__float__(number) if isinstance(number, (TracedFloat, Literal)) else number


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


# Called with each number that is made of sizes, or taken from several; and, with True, with one by
# which a list of numbers is repeated. Set while a run is recorded.
on_number: Callable[[Any, bool], None] | None = None


def _made(number: Any) -> Any:
    if on_number is not None:
        on_number(number, False)
    return number


def _are_numbers(value: Any) -> bool:
    several = isinstance(value, (list, tuple))
    return several and bool(value) and all(isinstance(v, (int, float)) for v in value)


_BINARY = ("add", "sub", "mul", "floordiv", "mod", "pow", "truediv", "lshift", "rshift",
           "and", "or", "xor")  # fmt: skip
NUMBERS = (int, float, TracedInt, TracedProduct, TracedFloat)


def _operand(value: Any) -> Any:
    """A number, traced or as Python's own; None for anything else."""
    if type(value) in NUMBERS:
        return value
    if isinstance(value, (int, np.integer)):  # a flag, a member of an enumeration
        return int(value)
    return float(value) if isinstance(value, float) else None


def _install(base: type, cls: type) -> None:
    """Give ``cls`` the arithmetic of ``base``, with results that carry their origin."""

    def binary(name: str, reflected: bool) -> None:
        dunder = f"__{'r' if reflected else ''}{name}__"
        compute = getattr(base, dunder)
        function = getattr(operator, f"{name}_" if keyword.iskeyword(name) else name)

        def method(self: Any, given: Any, *rest: Any) -> Any:
            other = _operand(given)
            if other is None or rest:
                if on_number is not None and name == "mul" and _are_numbers(given):
                    on_number(self, True)
                return compute(self, given, *rest)
            value = compute(self, other)
            if value is NotImplemented:  # an int and a float
                pair = (plain(self), plain(other))
                value = function(*(reversed(pair) if reflected else pair))
            operands = (other, self) if reflected else (self, other)
            return _made(traced(value, Operation(function, operands)))

        method.__name__ = dunder
        setattr(cls, dunder, method)

    for name in _BINARY:
        if hasattr(base, f"__{name}__"):
            binary(name, False)
            binary(name, True)

    def unary(name: str, function: Callable[..., Any]) -> None:
        compute = getattr(base, name)

        def method(self: Any, *digits: Any) -> Any:
            return _made(traced(compute(self, *digits), Operation(function, (self, *digits))))

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
        return self.__rfloordiv__(other), self.__rmod__(other)

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


def literal(value: float, held_by: frozenset[Any] | None) -> Any:
    """A number that code holds, or that is made of such; an integer of others is Python's own."""
    if type(value) is int and held_by is None:
        return value
    made = LiteralInt(value) if type(value) is int else Literal(value)
    made.held_by = held_by
    return made


def asking(value: Any, *operands: Any) -> Any:
    """A plain number made of ``operands`` as one that knows who holds these, and asks if it is a
    float; anything else as it is."""
    if type(value) not in (int, float):
        return value
    holding = [held for held in map(_holding, operands) if held is not None]
    all_held = len(holding) == len(operands)
    return literal(value, frozenset[Any]().union(*holding) if all_held else None)


def _holding(number: Any) -> frozenset[Any] | None:
    made_of = list(origins(number))
    return frozenset(made_of) if made_of else getattr(number, "held_by", None)


def _install_asking(base: type, cls: type, name: str, of_the_right: str = "") -> None:
    """Have a method of literals make such, too; ``of_the_right`` is the one that is called of a
    traced number in its place."""
    compute = getattr(base, name)

    def method(self: Any, *other: Any) -> Any:
        if of_the_right and isinstance(other[0], (TracedInt, TracedFloat)):
            return getattr(other[0], of_the_right)(plain(self))
        return asking(compute(self, *other), self, *other)

    method.__name__ = name
    setattr(cls, name, method)


for _base, _cls in (float, Literal), (int, LiteralInt):
    for _name in (*_BINARY, "divmod"):
        if hasattr(_base, f"__{_name}__"):
            _install_asking(_base, _cls, f"__{_name}__", f"__r{_name}__")
            _install_asking(_base, _cls, f"__r{_name}__")
    for _name in ("neg", "pos", "abs", "invert"):
        if hasattr(_base, f"__{_name}__"):
            _install_asking(_base, _cls, f"__{_name}__")
    for _name, _other in ("lt", "gt"), ("le", "ge"), ("eq", "eq"), ("ne", "ne"):
        _install_asking(_base, _cls, f"__{_name}__", f"__{_other}__")
        _install_asking(_base, _cls, f"__{_other}__", f"__{_name}__")
    setattr(_cls, "__hash__", _base.__hash__)  # noqa: B010 (comparisons of its own hide it)


# Called with (operator, operands, answer) for each question. Set while a run is recorded.
on_question: Callable[[Callable[..., Any], tuple[Any, ...], Any], None] | None = None


def _install_questions(base: type, cls: type) -> None:
    def question(name: str, function: Callable[..., Any]) -> None:
        plain_method = getattr(base, name)

        def method(self: Any, *other: Any) -> Any:
            other = tuple(plain(o) if isinstance(o, LITERALS) else o for o in other)
            outcome = plain_method(self, *other)
            if outcome is NotImplemented and isinstance(other[0], float):
                outcome = function(plain(self), plain(other[0]))
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
    for function in (bit_length, bit_count, is_integer, as_integer_ratio):
        if hasattr(base, function.__name__):
            question(function.__name__, function)


def bit_length(number: int) -> int:
    return int.bit_length(number)


def bit_count(number: int) -> int:
    return int.bit_count(number)


def is_integer(number: float) -> bool:
    return float(number).is_integer()


def as_integer_ratio(number: float) -> tuple[int, int]:
    return number.as_integer_ratio()


_install_questions(int, TracedInt)
_install_questions(float, TracedFloat)
