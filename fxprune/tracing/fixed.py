"""What of a recorded run is the same in every run: its calls, and the plain numbers they are given.

What code makes of a size knows that mostly (:mod:`fxprune.rules.sizes`), and what it holds knows
that, too (:mod:`.asking`). A number that comes from nowhere may be another in another run: one made
of values, found in a list or counted. Code may choose between calls, or between the numbers that it
holds, by sizes that it asks, by values, or by what the run has changed: nothing of it is sure then.
"""

from __future__ import annotations

import dis
import functools
from collections.abc import Callable, Iterator
from itertools import chain
from types import CellType, CodeType
from typing import Any, NamedTuple

from torch import fx, nn

from ..modules.near import functions_near, package_of, within
from ..rules import sizes
from .asking_again import parts_by_size
from .assertions import ends_otherwise, is_in_loop, is_looped_over, may_compute
from .trace import Trace

IsFree = Callable[[sizes.Dimension], bool]  # whether a size is no width: other inputs have others


# What code asks of how it runs, but for whether it trains: masked and pruned alike.
_MODES = frozenset(("is_grad_enabled", "requires_grad", "grad_fn", "is_leaf", "is_autocast_enabled",
                    "is_inference_mode_enabled"))  # fmt: skip


class _Asked(NamedTuple):
    """What code has asked."""

    at: int  # the index of the next node
    read: list[sizes.Dimension] | None  # the sizes; None: values, or what the run has changed
    often: bool = False  # how often a loop runs, or of how many parts, which were several
    beneath: bool = False  # all calls beneath the code, too, hang on the answer

    def of(self, is_free: IsFree) -> bool:
        """Whether other inputs may have another answer."""
        return self.read is None or any(map(is_free, self.read))


def _place(node: fx.Node) -> Any:
    return node.meta.get("call"), node.meta.get("site")


class Fixed:
    """Of the calls of a trace."""

    def __init__(self, trace: Trace) -> None:
        self._trace = trace
        self._sure: dict[fx.Node, bool] = {}
        self._held: dict[str, set[float]] = {}
        self._apart: dict[fx.Node, bool] = {}  # by the first of the calls that a loop makes
        self._asked: dict[int, list[_Asked]] = {}  # by the id of the code that asked
        self._made: dict[Any, list[fx.Node]] = {}  # the calls by the place in code that makes them
        for node in trace.graph.nodes:
            self._made.setdefault(_place(node), []).append(node)
        for call in trace.calls:
            for question in (*call.read_in, *call.questions):
                self._note_question(question)
        for node in trace.graph.nodes:
            size = parts_by_size(trace, node) if "site" in node.meta else None
            if size is not None:
                several = size.source.meta["spec"].shape[size.dim] > 1
                asked = _Asked(node.meta["index"], [size], often=several)
                self._note(node.meta["site"][0], asked)
        running = {id(c): c for node in trace.graph.nodes for c in node.meta.get("codes", ())}
        for code in running.values():  # what a generator asks, its function goes by
            inside = [self._asked.get(id(c), []) for c in within(code) if c is not code]
            if any(inside):
                self._asked[id(code)] = [*self._asked.get(id(code), []), *chain(*inside)]

    def _note_question(self, question: sizes.Question) -> None:
        if question.site is None or question.only_checks or ends_otherwise(question.asked_at):
            return
        made_of = [origin for operand in question.operands for origin in sizes.origins(operand)]
        read = [origin for origin in made_of if isinstance(origin, sizes.Dimension)]
        attributes = [origin for origin in made_of if isinstance(origin, sizes.Attribute)]
        # By values, or by what the run has changed.
        alone = not question.operands or any(self.is_changed(each.name) for each in attributes)
        if not alone and not read:
            return
        # How often a loop runs says nothing of what it calls.
        lost, by = question.function in sizes.LOSING, None if alone else read
        often = lost and question.answer > 1 and is_looped_over(question.site)
        self._note(question.site[0], _Asked(question.index, by, often=often, beneath=not lost))
        for code in question.callers if may_compute(question.site) else ():
            self._note(code, _Asked(question.index, by))  # of what they are given back

    def _note(self, code: CodeType, asked: _Asked) -> None:
        self._asked.setdefault(id(code), []).append(asked)

    def is_sure(self, node: fx.Node, is_free: IsFree) -> bool:
        """Whether a call, and all the plain numbers that it is given, are the same in every run."""
        if node not in self._sure:
            self._sure[node] = not self.is_chosen(node, is_free) and self._are_sure(node, is_free)
        return self._sure[node]

    def is_chosen(self, node: fx.Node, is_free: IsFree, *, reads: bool = False) -> bool:
        """Whether another run may have another call in its place; of a call that ``reads``
        constants with a weight, whether it may read others."""
        codes = node.meta.get("codes", ())
        return any(self._chooses(c, node, is_free, i == 0, reads) for i, c in enumerate(codes))

    def _chooses(
        self, code: CodeType, node: fx.Node, is_free: IsFree, inside: bool, reads: bool
    ) -> bool:
        """Whether ``code``, which makes a call (``inside``) or calls what makes it, has another in
        its place in another run."""
        names = code.co_names
        if not self._trace.changed.isdisjoint(names) or (inside and not _MODES.isdisjoint(names)):
            return True
        return any(
            asked.at <= node.meta["index"]
            and (asked.beneath or inside)
            and asked.of(is_free)
            and not (asked.often and self._is_beside_loops(node, reads))
            for asked in self._asked.get(id(code), ())
        )

    def _is_beside_loops(self, node: fx.Node, reads: bool) -> bool:
        """Whether it is nothing to a call how often loops run that have run several times: they do
        not make it; or each time it goes by itself, or ``reads`` what it has to read every time."""
        alike = self._made[_place(node)]
        if len(alike) == 1 or reads:
            return len(alike) > 1 or not is_in_loop(node.meta.get("site"))
        if alike[0] not in self._apart:
            behind, waiting = set[fx.Node](), list(alike)
            while waiting:
                found = waiting.pop().users.keys() - behind
                behind |= found
                waiting += found
            self._apart[alike[0]] = behind.isdisjoint(alike)
        return self._apart[alike[0]]

    def _are_sure(self, node: fx.Node, is_free: IsFree) -> bool:
        given = node.meta.get("given", ())
        holding = [getattr(number, "held_by", None) for number in given]
        for each in frozenset[Any]().union(*(held for held in holding if held is not None)):
            if isinstance(each, sizes.Attribute):
                unsure = self.is_changed(each.name)
            elif isinstance(each, sizes.Dimension):
                unsure = is_free(each)
            else:  # of code that may choose between those that it holds
                unsure = any(asked.of(is_free) for asked in self._asked.get(each, ()))
            if unsure:
                return False
        unheld = {n for n, held in zip(given, holding, strict=True) if held is None}
        return not unheld or not self._unheld(unheld, node, is_free)

    def is_changed(self, attribute: str) -> bool:
        """Whether the run has set an attribute (a dotted name) anew."""
        return attribute.rpartition(".")[2] in self._trace.changed

    def _unheld(self, numbers: set[float], node: fx.Node, is_free: IsFree) -> set[float]:
        """Those that no module at work holds, nor its code has made of a width; nor the function
        that is called, for where it is not told any."""
        numbers = numbers - set(getattr(node.target, "__defaults__", None) or ())
        at = node.meta.get("call")
        while at is not None and numbers:
            call = self._trace.calls[at]
            if call.path not in self._held:
                self._held[call.path] = set(_held_by(self._trace.modules[call.path]))
            widths = {
                question.answer for question in call.questions
                if question.function in sizes.LOSING
                and not any(map(is_free, sizes.dimensions(question.operands)))
            }  # fmt: skip
            numbers, at = numbers - self._held[call.path] - widths, call.parent
        return numbers


def _held_by(module: nn.Module) -> Iterator[float]:
    """Numbers of a module's class, of functions that it holds with arguments, and of dictionaries;
    of a list another may be taken in another run."""
    bases = [base for base in type(module).__mro__ if package_of(base) != "torch"]
    found: list[Any] = [value for base in bases for value in vars(base).values()]
    for value in vars(module).values():
        if isinstance(value, functools.partial):
            found += [*value.args, *value.keywords.values()]
        elif type(value) is dict:
            found += value.values()
    for function in functions_near(module):
        if not _sets_variables(function.__code__):
            found += [c.cell_contents for c in function.__closure__ or () if c != CellType()]
        found += _in_steps(function.__code__)
    return (value for value in found if type(value) in (int, float))


@functools.lru_cache(maxsize=1024)
def _sets_variables(code: CodeType) -> bool:
    """Whether a function sets variables of the one around it: it may count with them."""
    steps = dis.get_instructions(code) if code.co_freevars else ()
    return any(s.opname == "STORE_DEREF" and s.argval in code.co_freevars for s in steps)


@functools.lru_cache(maxsize=1024)
def _in_steps(code: CodeType) -> list[int]:
    """Small integers, which Python keeps with its instructions from 3.14 on."""
    small = "LOAD_SMALL_INT"
    steps = dis.get_instructions(code) if small in dis.opmap else ()
    return [step.argval for step in steps if step.opname == small]
