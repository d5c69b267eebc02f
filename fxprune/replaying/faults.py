"""What the model's own code would do wrongly at the new widths, and how that could be mended."""

from __future__ import annotations

import operator
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from torch import Tensor, fx

from ..rules import sizes
from ..rules.call import Named
from ..rules.channels import Channels
from ..rules.ops import argument_at

# An attribute of the model, or an item of one that is a sequence, and the value it should have.
Proposal = tuple[str, int | None, Any]


@dataclass
class Fault:
    """``units`` have to stay where the fault cannot be mended."""

    units: np.ndarray

    @property
    def call(self) -> int:
        """Index of the module call whose code it is."""
        raise NotImplementedError

    @property
    def line(self) -> str:
        raise NotImplementedError

    @property
    def words(self) -> str:
        raise NotImplementedError

    @property
    def told(self) -> bool:
        """Whether a number that is wrong is one that the input tells: no code could hold it."""
        return False

    def attributes(self) -> Iterator[str]:
        """The attributes that its numbers are, and nothing else."""
        return iter(())

    def proposals(self) -> Iterator[Proposal]:
        """Those of them that would mend it."""
        return iter(())

    def parts(self, values: Mapping[fx.Node, Any]) -> Iterator[tuple[str, int]]:
        """Attributes that its numbers are made of, each with what would mend it if the others are
        right; ``values`` are those at the new widths."""
        return iter(())


@dataclass
class AtNode(Fault):
    """A fault in what one node of the trace does."""

    node: fx.Node

    @property
    def call(self) -> int:
        return self.node.meta["call"]

    @property
    def line(self) -> str:
        return self.node.meta.get("where", "")


@dataclass
class WrongSize(AtNode):
    """A size that comes out wrong, in the argument at ``place``; ``instead`` is the method that
    takes what is needed there."""

    place: tuple[int, str]
    computed: Any
    needed: Any
    instead: str | None = None

    @property
    def words(self) -> str:
        computed, needed = shown(self.computed), shown(self.needed)
        return f"the code computes {computed} where it has to be {needed}"

    @property
    def told(self) -> bool:
        given = argument_at(self.node, *self.place)
        numbers = _numbers_of(given, self.needed, self.computed)
        told = self.node.meta.get("told", {})
        return bool(told) and any(a in told for a, needed, now in numbers if needed != now)

    def attributes(self) -> Iterator[str]:
        return (name for name, _, _, _ in self._numbers())

    def proposals(self) -> Iterator[Proposal]:
        for name, index, known, needed in self._numbers():
            if known not in (needed, -1):
                yield name, index, needed

    def parts(self, values: Mapping[fx.Node, Any]) -> Iterator[tuple[str, int]]:
        given = argument_at(self.node, *self.place)
        for argument, needed, now in _numbers_of(given, self.needed, self.computed):
            if isinstance(needed, int) and needed != now:
                yield from _parts(argument, needed, values)

    def _numbers(self) -> Iterator[tuple[str, int | None, Any, int]]:
        """Sizes that are attributes, one divided by another, or so many times one: name, index,
        what it was when recorded, what it has to be."""
        given = argument_at(self.node, *self.place)
        for argument, needed, now in _numbers_of(given, self.needed, self.computed):
            if not isinstance(argument, fx.Node) or not isinstance(needed, int):
                continue
            if argument.target is operator.floordiv and isinstance(now, int):
                argument, needed = _dividend(argument, now, needed)
            elif argument.target is operator.mul:
                argument, needed = _factor(argument, needed)
            index: Any = None
            if argument.target is operator.getitem and isinstance(argument.args[1], int):
                argument, index = argument.args  # type: ignore[assignment]
            if argument.op == "get_attr":
                known = argument.meta["spec"]
                yield str(argument.target), index, known if index is None else known[index], needed


def _numbers_of(given: Any, needed: Any, computed: Any) -> Iterator[tuple[Any, Any, Any]]:
    """The single numbers of a size argument: as recorded, as needed, as computed now."""
    if isinstance(given, slice) and isinstance(needed, slice) and isinstance(computed, slice):
        for part in ("start", "stop", "step"):
            yield tuple(getattr(each, part) for each in (given, needed, computed))  # type: ignore[misc]
    elif all(isinstance(each, (tuple, list)) for each in (given, needed, computed)):
        for parts in zip(given, needed, computed, strict=False):
            yield from _numbers_of(*parts)
    else:
        yield given, needed, computed


def _parts(number: Any, needed: int, values: Mapping[fx.Node, Any]) -> Iterator[tuple[str, int]]:
    """Of sums and products, each attribute with what it has to be for the number ``needed``."""
    if not isinstance(number, fx.Node):
        return
    if number.op == "get_attr":
        yield str(number.target), needed
    elif number.target in (operator.add, operator.mul):
        for mine, other in (number.args, number.args[::-1]):
            value = values.get(other) if isinstance(other, fx.Node) else other
            if not isinstance(value, int):
                continue
            if number.target is operator.add:
                yield from _parts(mine, needed - value, values)
            elif value and needed % value == 0:
                yield from _parts(mine, needed // value, values)


def _dividend(quotient: fx.Node, now: int, needed: int) -> tuple[Any, int]:
    """Of attributes ``width // heads``, where the number of heads is set already, the width; and
    what it has to be for ``needed``."""
    width: Any = quotient.args[0]
    known: Any = width.meta["spec"] if isinstance(width, fx.Node) else None
    exact = isinstance(known, int) and now > 0 and known % now == 0
    return (width, needed * known // now) if exact else (quotient, needed)


def _factor(product: fx.Node, needed: int) -> tuple[Any, int]:
    """Of attributes ``3 * width``, the width; and what it has to be for ``needed``."""
    width: Any
    times: Any
    width, times = product.args if isinstance(product.args[1], int) else product.args[::-1]
    exact = isinstance(width, fx.Node) and isinstance(times, int) and times > 0
    return (width, needed // times) if exact and needed % times == 0 else (product, needed)


@dataclass
class WrongOrder(AtNode):
    """A value whose channels the code puts in another order than that of the model as it is.

    ``takes`` holds for each such dimension the position that each slice has to be taken from.
    """

    takes: list[tuple[int, Tensor]]

    @property
    def words(self) -> str:
        return "the code would put what is left of them in another order"


@dataclass
class WrongAnswer(Fault):
    """A question of the code, such as a comparison of sizes, that has another answer now."""

    question: sizes.Question
    index: int
    now: Any
    operands: tuple[Any, ...]  # at the new widths

    @property
    def call(self) -> int:
        return self.index

    @property
    def line(self) -> str:
        return self.question.where

    @property
    def words(self) -> str:
        if self.now == self.question.answer:
            return f"{self.question} may have another answer for other inputs, and a third one here"
        return f"{self.question} was {self.question.answer} and would be {self.now}"

    def attributes(self) -> Iterator[str]:
        found = (o for number in self.question.operands for o in sizes.origins(number))
        return (o.name for o in found if isinstance(o, sizes.Attribute))

    def proposals(self) -> Iterator[Proposal]:
        if self.question.function not in (operator.eq, operator.ne):
            return
        first, second = self.question.operands
        pairs = ((first, self.operands[1]), (second, self.operands[0]))
        for number, other in pairs:
            origin = getattr(number, "origin", None)
            if isinstance(origin, sizes.Attribute):
                yield origin.name, origin.index, other


def shown(size: Any) -> str:
    """A size argument as the code would write it."""
    if isinstance(size, slice):
        parts = [size.start, size.stop, *([size.step] if size.step is not None else [])]
        return ":".join("" if p is None else str(p) for p in parts)
    if isinstance(size, (tuple, list)):
        return f"({', '.join(map(shown, size))})"
    return str(size) if isinstance(size, (int, float, type(None))) else "…"


def same_sizes(computed: Any, needed: Any, written: Any) -> bool:
    """Whether what the code computes is what is needed; -1, where that is what is ``written`` or
    was computed in the recorded run, is worked out by the op itself."""
    written = written.meta.get("spec") if isinstance(written, fx.Node) else written
    if isinstance(needed, (tuple, list)):
        if not isinstance(computed, (tuple, list)) or len(computed) != len(needed):
            return False
        parts = written if isinstance(written, (tuple, list)) else [written] * len(needed)
        return all(map(same_sizes, computed, needed, parts))
    if isinstance(needed, slice):
        return isinstance(computed, slice) and computed == needed
    if isinstance(needed, int) and isinstance(computed, int):
        return computed == needed or computed == written == -1
    return isinstance(needed, (Channels, Named, Tensor)) or computed is needed or computed == needed


def unless_open(computed: Any, needed: Any) -> Any:
    """What is needed, but for each -1 that the code gives: which the op works out, for a batch of
    any size."""
    several = isinstance(needed, (tuple, list)) and isinstance(computed, (tuple, list))
    if several and len(needed) == len(computed):
        return type(needed)(map(unless_open, computed, needed))
    return computed if type(computed) is type(needed) is int and computed == -1 else needed
