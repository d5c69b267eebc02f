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
from typing import Any

from torch import fx, nn

from ..modules.near import functions_near, package_of, within
from ..rules import sizes
from .asking_again import parts_by_size
from .assertions import ends_otherwise, may_compute
from .trace import Trace

IsFree = Callable[[sizes.Dimension], bool]  # whether a size is no width: other inputs have others


# What code asks of how it runs, but for whether it trains: masked and pruned alike.
_MODES = frozenset(("is_grad_enabled", "requires_grad", "grad_fn", "is_leaf", "is_autocast_enabled",
                    "is_inference_mode_enabled"))  # fmt: skip


class Fixed:
    """Of the calls of a trace."""

    def __init__(self, trace: Trace) -> None:
        self._trace = trace
        self._sure: dict[fx.Node, bool] = {}
        self._held: dict[str, set[float]] = {}
        # By code: before which node it asked, of what, and whether all beneath it hangs on that.
        self._asked: dict[int, list[tuple[int, list[sizes.Dimension] | None, bool]]] = {}
        for call in trace.calls:
            for question in (*call.read_in, *call.questions):
                self._note_question(question)
        for node in trace.graph.nodes:
            size = parts_by_size(trace, node) if "site" in node.meta else None
            if size is not None:
                self._note(node.meta["site"][0], node.meta["index"], [size], False)
        running = {id(c): c for node in trace.graph.nodes for c in node.meta.get("codes", ())}
        for code in running.values():  # what a generator asks, its function goes by
            inside = [self._asked.get(id(c), []) for c in within(code) if c is not code]
            if any(inside):
                self._asked[id(code)] = [*self._asked.get(id(code), []), *chain(*inside)]

    def _note_question(self, question: sizes.Question) -> None:
        if question.site is None or question.only_checks or ends_otherwise(question.site):
            return
        made_of = [origin for operand in question.operands for origin in sizes.origins(operand)]
        read = [origin for origin in made_of if isinstance(origin, sizes.Dimension)]
        attributes = [origin for origin in made_of if isinstance(origin, sizes.Attribute)]
        # By values, or by what the run has changed.
        alone = not question.operands or any(self.is_changed(each.name) for each in attributes)
        if not alone and not read:
            return
        # How often a loop runs says nothing of what it calls.
        chooses, by = question.function not in sizes.LOSING, None if alone else read
        self._note(question.site[0], question.index, by, chooses)
        for code in question.callers if may_compute(question.site) else ():
            self._note(code, question.index, by, False)  # of what they are given back

    def _note(
        self, code: CodeType, index: int, read: list[sizes.Dimension] | None, beneath: bool
    ) -> None:
        self._asked.setdefault(id(code), []).append((index, read, beneath))

    def is_sure(self, node: fx.Node, is_free: IsFree) -> bool:
        """Whether a call, and all the plain numbers that it is given, are the same in every run."""
        if node not in self._sure:
            self._sure[node] = not self.is_chosen(node, is_free) and self._are_sure(node, is_free)
        return self._sure[node]

    def is_chosen(self, node: fx.Node, is_free: IsFree) -> bool:
        """Whether another run may have another call in its place."""
        at = node.meta.get("index", 0)
        return any(
            self._chooses(code, at, is_free, inside=i == 0)
            for i, code in enumerate(node.meta.get("codes", ()))
        )

    def _chooses(self, code: CodeType, before: int, is_free: IsFree, *, inside: bool) -> bool:
        names = code.co_names
        if not self._trace.changed.isdisjoint(names) or (inside and not _MODES.isdisjoint(names)):
            return True
        return any(
            index <= before and (beneath or inside) and (read is None or any(map(is_free, read)))
            for index, read, beneath in self._asked.get(id(code), ())
        )

    def _are_sure(self, node: fx.Node, is_free: IsFree) -> bool:
        given = node.meta.get("given", ())
        holding = [getattr(number, "held_by", None) for number in given]
        for each in frozenset[Any]().union(*(held for held in holding if held is not None)):
            if isinstance(each, sizes.Attribute):
                unsure = self.is_changed(each.name)
            elif isinstance(each, sizes.Dimension):
                unsure = is_free(each)
            else:  # of code that may choose between those that it holds
                asked = (read for _, read, _ in self._asked.get(each, ()))
                unsure = any(read is None or any(map(is_free, read)) for read in asked)
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
