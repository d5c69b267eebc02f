"""What of a recorded run is the same in every run: its calls, and the plain numbers they are given.

What code makes of a size knows that mostly (:mod:`fxprune.rules.sizes`), and what it holds knows
that, too (:mod:`.asking`). A number that comes from nowhere may be another in another run: one made
of values, found in a list or counted. Code may choose between calls, or between the numbers that it
holds, by sizes that it asks, by values, or by what the run has changed: nothing of it is sure then.
"""

from __future__ import annotations

import dis
import functools
from collections.abc import Callable, Iterable, Iterator
from itertools import chain
from types import CellType, CodeType
from typing import Any, NamedTuple

from torch import fx, nn

from ..modules.bytecode import arguments, is_in_loop, is_looped_over
from ..modules.near import functions_near, package_of, read_by_forward, within
from ..rules import sizes
from .asking_again import parts_by_size
from .assertions import ends_otherwise, is_caught
from .hanging import hanging
from .trace import ModuleCall, Trace

IsFree = Callable[[sizes.Dimension], bool]  # whether a size is no width: other inputs have others


# What code asks of how it runs, but for whether it trains: masked and pruned alike.
_MODES = frozenset(("is_grad_enabled", "requires_grad", "grad_fn", "is_leaf", "is_autocast_enabled",
                    "is_inference_mode_enabled"))  # fmt: skip


class _Asked(NamedTuple):
    """What code has asked."""

    at: int  # the index of the next node
    until: int  # that of the one behind the call of the module whose code it is
    read: list[sizes.Dimension] | None  # the sizes; None: values, or what the run has changed
    often: bool = False  # how often a loop runs, or of how many parts, which were several
    beneath: bool = False  # all calls beneath the code, too, hang on the answer

    def of(self, is_free: IsFree) -> bool:
        """Whether other inputs may have another answer."""
        return self.read is None or any(map(is_free, self.read))

    def may_be_of(self, node: fx.Node, is_free: IsFree) -> bool:
        """The same, before a call of which the answer may be asked behind it."""
        return self.at > node.meta["index"] or self.of(is_free)


def _place(node: fx.Node) -> Any:
    return node.meta.get("call"), node.meta.get("site")


class Fixed:
    """Of the calls of a trace."""

    def __init__(self, trace: Trace) -> None:
        self._trace = trace
        self._nodes = [node for node in trace.graph.nodes if "index" in node.meta]
        self._sure: dict[fx.Node, bool] = {}
        self._held: dict[str, set[float]] = {}
        self._apart: dict[fx.Node, bool] = {}  # by the first of the calls that a loop makes
        self._asked: dict[int, list[_Asked]] = {}  # by the id of the code that asked
        self._calling: dict[str, list[_Asked]] = {}  # names of what is called by some answers
        self._set: dict[str, list[_Asked]] = {}  # attributes that are set by some answers
        self._doubts: dict[int, list[tuple[ModuleCall, _Asked]]] = {}  # by index of the next node
        self._made: dict[Any, list[fx.Node]] = {}  # the calls by the place in code that makes them
        for node in trace.graph.nodes:
            self._made.setdefault(_place(node), []).append(node)
        for i, call in enumerate(trace.calls):
            # What a tensor is asked for is a call of its own.
            taken = (q for q in call.taken if (i, q.site) not in self._made)
            for question in (*call.read_in, *call.questions, *taken):
                self._note_question(call, question)
            cls: Any = type(trace.modules[call.path])
            if not trace.changed.isdisjoint(read_by_forward(cls)):
                self._doubt(call, _Asked(call.start, call.stop, None))
        for node in trace.graph.nodes:
            size = parts_by_size(trace, node) if "site" in node.meta else None
            if size is not None:
                several = size.source.meta["spec"].shape[size.dim] > 1
                call = trace.calls[node.meta["call"]]
                asked = _Asked(node.meta["index"], call.stop, [size], often=several)
                self._note(node.meta["site"][0], asked)
        running = {id(c): c for node in trace.graph.nodes for c in node.meta.get("codes", ())}
        for code in running.values():  # what a generator asks, its function goes by
            inside = [self._asked.get(id(c), []) for c in within(code) if c is not code]
            if any(inside):
                self._asked[id(code)] = [*self._asked.get(id(code), []), *chain(*inside)]

    def _note_question(self, call: ModuleCall, question: sizes.Question) -> None:
        if question.site is None or question.only_checks:
            return
        running, site = question.codes, question.site
        error = ends_otherwise(*(question.asked_at or site))
        if error and not is_caught(running):
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
        often = lost and question.answer > 1 and is_looped_over(*site)
        hangs = hanging(*site)
        asked = _Asked(question.index, call.stop, by, often, beneath=not lost)
        self._note(site[0], asked)
        for name in hangs.sets:
            self._set.setdefault(name, []).append(asked)
        if often:
            return
        for name in self._called(type(self._trace.modules[call.path]), hangs.names):
            self._calling.setdefault(name, []).append(asked)
        # What other code is given back may be another, too.
        asked, around = asked._replace(beneath=False), running[1 : len(running) - call.depth]
        for code in around if error or hangs.returns else ():
            self._note(code, asked)
        if error or hangs.gives:
            self._doubt(call, asked)
        while call.parent is not None and (error or _tells(call.output)):
            above = self._trace.calls[call.parent]
            asked = asked._replace(at=call.stop, until=above.stop)
            for code in running[len(running) - call.depth : len(running) - above.depth]:
                self._note(code, asked)
            call = above
            self._doubt(call, asked)

    def _note(self, code: CodeType, asked: _Asked) -> None:
        self._asked.setdefault(id(code), []).append(asked)

    def _doubt(self, call: ModuleCall, asked: _Asked) -> None:
        """What code of a module has at hand when it asks, or gives back, may be another."""
        for at in {asked.at, call.stop}:
            self._doubts.setdefault(at, []).append((call, asked))

    def doubtful(self, index: int, is_free: IsFree) -> Iterator[fx.Node]:
        """The calls whose results may be others for what comes from ``index`` on."""
        done = set[int]()
        for call, asked in self._doubts.get(index, ()):
            if id(call) not in done and asked.of(is_free):
                done.add(id(call))
                yield from call.inputs()
                yield from self._nodes[call.start : index]

    def is_sure(self, node: fx.Node, is_free: IsFree) -> bool:
        """Whether a call, and all the plain numbers that it is given, are the same in every run."""
        if node not in self._sure:
            self._sure[node] = not self.is_chosen(node, is_free) and self._are_sure(node, is_free)
        return self._sure[node]

    def is_chosen(self, node: fx.Node, is_free: IsFree, *, reads: bool = False) -> bool:
        """Whether another run may have another call in its place; of a call that ``reads``
        constants with a weight, whether it may read others."""
        codes = node.meta.get("codes", ())
        chosen = any(self._chooses(c, node, is_free, i == 0, reads) for i, c in enumerate(codes))
        return chosen or (reads and self._is_called_again(node, is_free))

    def _chooses(
        self, code: CodeType, node: fx.Node, is_free: IsFree, inside: bool, reads: bool
    ) -> bool:
        """Whether ``code``, which makes a call (``inside``) or calls what makes it, has another in
        its place in another run."""
        names = code.co_names
        if not self._trace.changed.isdisjoint(names) or (inside and not _MODES.isdisjoint(names)):
            return True
        if any(
            asked.may_be_of(node, is_free) for name in names for asked in self._set.get(name, ())
        ):
            return True
        return any(
            (asked.at <= node.meta["index"] or (reads and inside))  # a layer may be called again
            and node.meta["index"] < asked.until
            and (asked.beneath or inside)
            and asked.may_be_of(node, is_free)
            and not (asked.often and self._is_beside_loops(node, reads))
            for asked in self._asked.get(id(code), ())
        )

    def _is_called_again(self, node: fx.Node, is_free: IsFree) -> bool:
        """Whether other answers may lead to further calls of the layer: by code that names it."""
        holding = [node, *node.all_input_nodes]
        paths = [str(n.target) for n in holding if n.op in ("call_module", "get_attr")]
        return any(
            asked.may_be_of(node, is_free)
            for path in paths
            for name in path.split(".")
            for asked in self._calling.get(name, ())
        )

    def _called(self, cls: type, names: Iterable[str]) -> set[str]:
        """These, and what methods of a class name that go by them."""
        found, waiting = set[str](), list(names)
        while waiting:
            name = waiting.pop()
            if name not in found:
                found.add(name)
                method = getattr(getattr(cls, name, None), "__code__", None)
                waiting += method.co_names if method is not None and name != "forward" else ()
        return found

    def _is_beside_loops(self, node: fx.Node, reads: bool) -> bool:
        """Whether it is nothing to a call how often loops run that have run several times: they do
        not make it; or each time it goes by itself, or ``reads`` what it has to read every time."""
        alike = self._made[_place(node)]
        if len(alike) == 1 or reads:
            return len(alike) > 1 or not ("site" in node.meta and is_in_loop(*node.meta["site"]))
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
                sets = self._set.get(each.name.rpartition(".")[2], ())
                unsure = self.is_changed(each.name) or any(asked.of(is_free) for asked in sets)
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
        held = node.meta["site"][0].co_consts if node.meta.get("site") else ()
        for given in (*node.args, *node.kwargs.values()):
            if isinstance(given, tuple) and given in held:  # but not an item of one
                numbers -= set(given)
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


def _tells(output: Any) -> bool:
    """Whether what a module gives back holds a plain number or a flag, which says where code goes
    on."""
    if isinstance(output, (tuple, list, dict)):
        return any(map(_tells, output.values() if isinstance(output, dict) else output))
    return isinstance(output, (int, float, str)) and not hasattr(output, "origin")


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
        code = function.__code__
        # A function that sets variables of the one around it may count with them.
        if not code.co_freevars or arguments(code, "STORE_DEREF").isdisjoint(code.co_freevars):
            found += [c.cell_contents for c in function.__closure__ or () if c != CellType()]
        if _SMALL in dis.opmap:
            found += arguments(code, _SMALL)
    return (value for value in found if type(value) in (int, float))


# Small integers, which Python keeps with its instructions from 3.14 on.
_SMALL = "LOAD_SMALL_INT"
