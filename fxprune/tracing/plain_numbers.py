"""Plain numbers that calls are given: whether they are the same in every run.

What code makes of a size knows that mostly (:mod:`fxprune.rules.sizes`). What it makes of values,
by a list (``scales[n]``) or of what it counts does not, nor what Python makes of a size unseen. A
number that the code or an attribute of the model holds is the same; of others a further run tells.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

from torch import fx, nn
from torch.utils._pytree import tree_leaves

from ..modules.near import codes_near, constants_near, functions_of, stored_in
from ..rules import sizes
from .asking import is_configuration
from .runs import OtherRuns
from .trace import ModuleCall, Trace, set_item


class PlainNumbers:
    """Of the calls of a trace; ``others`` are asked where a number comes from nowhere."""

    def __init__(self, trace: Trace, others: OtherRuns) -> None:
        self._trace, self._others = trace, others
        self._sure: dict[fx.Node, bool] = {}
        self._held: dict[nn.Module, set[float]] = {}
        self._twins: dict[int, dict[fx.Node, fx.Node]] = {}  # in each of the other runs

    def are_sure(self, node: fx.Node, is_free: Callable[[sizes.Dimension], bool]) -> bool:
        """Whether all that a call is given are the same in every run.

        Args:
            is_free: whether a size is no width, so that other inputs may have others.
        """
        if node not in self._sure:
            self._sure[node] = self._are_sure(node, is_free)
        return self._sure[node]

    def _are_sure(self, node: fx.Node, is_free: Callable[[sizes.Dimension], bool]) -> bool:
        numbers = _numbers(node)
        if not numbers:
            return True
        chain = list(self._running(node))
        if not self._unheld(set(numbers), chain):
            lost = any(_lost(call, is_free) for call in chain)
            return not lost or all(self._same_in(other, node) for other in self._others.lengths)
        # By a value, a list, or a counter.
        if any(c.reads_data or _counts(self._trace.modules[c.path]) for c in chain):
            return False
        if node.target is set_item:  # a mask, mostly, with a number for each part: no run for it
            return False
        runs = self._others.lengths
        return bool(runs) and all(self._same_in(other, node) for other in runs)

    def _running(self, node: fx.Node) -> Iterator[ModuleCall]:
        """The calls of modules at work."""
        at = node.meta.get("call")
        while at is not None:
            yield self._trace.calls[at]
            at = self._trace.calls[at].parent

    def _same_in(self, other: Trace, node: fx.Node) -> bool:
        if id(other) not in self._twins:
            mine, theirs = list(self._trace.graph.nodes), list(other.graph.nodes)
            alike = [(n.op, n.target) for n in mine] == [(n.op, n.target) for n in theirs]
            self._twins[id(other)] = dict(zip(mine, theirs, strict=True)) if alike else {}
        twin = self._twins[id(other)].get(node)
        return twin is not None and _numbers(twin) == _numbers(node)

    def _unheld(self, numbers: set[float], chain: Sequence[ModuleCall]) -> set[float]:
        """Those that no code of the model holds, nor an attribute of its modules and their
        configurations; most are of modules at work."""
        numbers = numbers - self._trace.literals
        at_work = [self._trace.modules[call.path] for call in chain]
        for module in dict.fromkeys((*at_work, *self._trace.modules.values())):
            if not numbers:
                break
            if module not in self._held:
                self._held[module] = _held_by(module)
            numbers = numbers - self._held[module]
        return numbers


def _held_by(module: nn.Module) -> set[float]:
    kind: Any = type(module)
    found: list[Any] = [*constants_near(module)]
    for function in functions_of(kind):
        found += (*(function.__defaults__ or ()), *(function.__kwdefaults__ or {}).values())
    for value in vars(module).values():
        found.append(value)
        if not isinstance(value, nn.Module) and is_configuration(value.__class__):
            found += vars(value).values()
    return {value for value in found if type(value) in (int, float)}


def _numbers(node: fx.Node) -> list[float]:
    leaves = tree_leaves((node.args, node.kwargs))
    return [leaf for leaf in leaves if type(leaf) in (int, float)]


def _counts(module: nn.Module) -> bool:
    """Whether code of a module sets numbers that it holds."""
    stored = (name for code in codes_near(module) for name in stored_in(code))
    return any(type(vars(module).get(name)) in (int, float) for name in stored)


def _lost(call: ModuleCall, is_free: Callable[[sizes.Dimension], bool]) -> bool:
    """Whether code has made a plain number of a size that is free."""
    return any(
        question.function in sizes.LOSING and any(map(is_free, sizes.dimensions(question.operands)))
        for question in call.questions
    )
