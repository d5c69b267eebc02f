"""Writing a forward with the right sizes, where the module's own code holds one that is wrong now.

The smallest module whose code is wrong gets its forward from the recorded graph, with the sizes
written in that came out wrong and every other expression as the code had it.
"""

from __future__ import annotations

import inspect
import math
import operator
from collections.abc import Mapping
from fractions import Fraction
from itertools import starmap
from typing import Any

import torch
from torch import fx

from ..code import Code, _keys, expect_answer, expect_argument, take
from ..modules import tree
from ..modules.inspecting import all_tensors, modules_of
from ..modules.near import codes_near, methods_with, names_in, read_by_forward, set_by_forward
from ..parametrized.mask import parametrizations
from ..parametrized.weight_norm import is_hooked
from ..replaying.answers import answer, as_recorded, is_mixed
from ..replaying.faults import Fault, WrongOrder, WrongSize, same_sizes
from ..replaying.replay import Replay
from ..rules import sizes
from ..rules.spec import TOLD
from ..tracing.asking_again import number_in, parts_by_size
from ..tracing.comparing import Differences
from ..tracing.flags import depend_on_mode, may_read_mode, reads_mode_of_others
from ..tracing.lengths import check_lengths
from ..tracing.modes import differences
from ..tracing.runs import OtherRuns
from ..tracing.trace import CannotRewrite, ModuleCall, Trace, is_size
from ..tracing.unrecorded import OWN_CONTEXT
from .source_edits import sizes_in


def rewrite(
    trace: Trace,
    path: str,
    faults: Mapping[int, list[Fault]],
    replay: Replay,
    others: OtherRuns,
) -> Code:
    """New code for the module at ``path``, whose own has ``faults``, by the call. Where it runs
    more than once, all runs have to come out as the same code.

    Raises:
        CannotRewrite: with the reason.
    """
    calls = [i for i, call in enumerate(trace.calls) if call.path == path]
    wrong = [fault for index in calls for fault in faults.get(index, ())]
    cls: Any = type(trace.modules[path])
    stale = [*vars(cls).get("_fxprune_stale", ())]  # of an earlier pruning
    stale += methods_with(cls, [fault.line for fault in wrong])
    bodies = (_Body(trace, index, faults.get(index, []), replay, others) for index in calls)
    first, *more = (Code.of(body.build(), tuple(stale)) for body in bodies)
    if any(code != first for code in more):
        raise CannotRewrite(f"{path or 'the model'} runs more than once, not always alike")
    return first


class _Body:
    """The part of a trace that one module's forward has written."""

    def __init__(
        self,
        trace: Trace,
        index: int,
        faults: list[Fault],
        replay: Replay,
        others: OtherRuns,
    ) -> None:
        self.others = others
        self.modes: Differences = {}
        self.replay = replay
        self.trace = trace
        self.index = index
        self.call = trace.calls[index]
        self.module = trace.modules[self.call.path]
        self.name = self.call.path or "the model"
        self.sizes: dict[fx.Node, list[WrongSize]] = {}
        self.orders: dict[fx.Node, WrongOrder] = {}
        for fault in faults:
            if isinstance(fault, WrongOrder):
                self.orders[fault.node] = fault
            elif isinstance(fault, WrongSize):
                self.sizes.setdefault(fault.node, []).append(fault)
        self.open = {q.key: q for q in self.call.questions}
        self.graph = fx.Graph()
        self.local: dict[fx.Node, Any] = {}

    def build(self) -> fx.Graph:
        self._check()
        self._placeholders()
        self._settings()
        self._questions(at_once=True)
        children = {c.start: c for c in self.trace.calls if c.parent == self.index}
        skip_to = -1
        for node in self.trace.graph.nodes:
            at = node.meta.get("index", -1)
            if not self.call.start <= at < self.call.stop or node.op == "placeholder":
                continue
            while at in children:  # also a child that wrote no node of its own before this one
                child = children.pop(at)
                self._child(child)
                skip_to = max(skip_to, child.stop)
            own = at >= skip_to and node.op in ("call_function", "call_method", "call_module")
            if own and node not in self.local and not self._is_number(node):
                self._copy(node)
        for child in children.values():
            self._child(child)
        output = self.call.output
        if self.call.parent is None and output is None:
            output = next(n for n in self.trace.graph.nodes if n.op == "output").args[0]
        self._questions(at_once=False)
        self.graph.output(self._value(output))
        self.graph.eliminate_dead_code(lambda n: n.op != "get_attr" and not is_size(n))
        self.graph.lint()
        return self.graph

    def _check(self) -> None:
        if self.call.reads_data:
            raise CannotRewrite(f"the code of {self.name} depends on the values of tensors")
        if "forward" in vars(self.module):  # which would hide that of any class
            raise CannotRewrite(f"the forward of {self.name} was replaced on the module itself")
        if any(map(is_hooked, parametrizations(self.module).values())):
            raise CannotRewrite(f"a hook computes a weight of {self.name}")
        if self.call.unsaid:
            raise CannotRewrite(f"{self.name} {self.call.unsaid}")
        cls: Any = type(self.module)
        written = ", ".join(sorted(set_by_forward(cls)))
        if written:
            raise CannotRewrite(f"{self.name} sets {written} as it runs")
        named = set().union(*map(names_in, codes_near(self.module)))
        if "autocast" in named:  # which a recording does not see where it is switched off
            raise CannotRewrite(f"{self.name} {OWN_CONTEXT}")
        if "register_hook" in named:
            raise CannotRewrite(f"{self.name} puts hooks on tensors")
        if not named.isdisjoint(("manual_seed", "set_rng_state", "fork_rng")):
            raise CannotRewrite(f"{self.name} sets where random numbers begin")
        if not named.isdisjoint(("is_grad_enabled", "requires_grad")):
            raise CannotRewrite(f"{self.name} goes by whether gradients are recorded")
        if reads_mode_of_others(self.module):
            raise CannotRewrite(f"{self.name} goes by the mode of another module")
        for question in self.call.questions:
            # Other inputs may have others: of what is no width.
            read = sizes.dimensions(question.operands)
            if question.function in sizes.LOSING and any(
                self.replay.is_free(o.source, o.dim) for o in read
            ):
                raise CannotRewrite(f"{self.name} goes by {question}, and inputs may have others")
        check_lengths(self.trace, self.index, self.others, self.name)
        self.modes = differences(self.trace, self.index, self.others, self.name)

    def _placeholders(self) -> None:
        parameters = inspect.signature(self.module.forward).parameters
        bound = inspect.signature(self.module.forward).bind(*self.call.args, **self.call.kwargs)
        bound.apply_defaults()
        variable: dict[Any, str] = {
            inspect.Parameter.VAR_POSITIONAL: "*",
            inspect.Parameter.VAR_KEYWORD: "**",
        }
        behind = False  # whether an argument with a default stands before it
        for name, parameter in parameters.items():
            default = parameter.default
            default = () if default is inspect.Parameter.empty else (default,)
            if not all(isinstance(n, (*_PLAIN, str, torch.dtype)) for n in _nodes(default)):
                raise CannotRewrite(f"the default of {name} is no plain value")
            star = variable.get(parameter.kind, "")
            if behind and not default and not star:  # fx writes no ``*`` for it to stand behind
                raise CannotRewrite(f"{self.name} takes {name} by keyword only")
            behind = behind or bool(default)
            node = self.graph.placeholder(f"{star}{name}", None, *default)
            value = bound.arguments.get(name, {} if star == "**" else ())
            if any(self._is_object(n) for n in _nodes(value)):
                raise CannotRewrite(f"{self.name} takes an object that its code may change")
            self._expect(value, node, name)
            self._bind(value, node)

    def _is_object(self, value: Any) -> bool:
        return isinstance(value, fx.Node) and str(value.target).startswith("_object_constant")

    def _expect(self, value: Any, node: fx.Node, name: str) -> None:
        """What is no tensor has to be what it was: the code went its way."""
        if isinstance(value, (*_PLAIN, str, torch.dtype, torch.device)):
            self.graph.call_function(expect_argument, (node, value, name))
        elif isinstance(value, (tuple, list, dict)):
            keys = tuple(value) if isinstance(value, dict) else tuple(range(len(value)))
            given = self.graph.call_function(_keys, (node,))
            self.graph.call_function(expect_argument, (given, keys, name))
            for key in keys:
                if any(not isinstance(n, fx.Node) for n in _nodes(value[key])):
                    item = self.graph.call_function(operator.getitem, (node, key))
                    self._expect(value[key], item, f"{name}[{key!r}]")

    def _settings(self) -> None:
        """Flags, words and numbers of the module that its code reads: it went their way."""
        cls: Any = type(self.module)
        for name in sorted(read_by_forward(cls) - {"training"}):
            value = vars(self.module).get(name, ...)
            if isinstance(value, (bool, str, float, type(None))):
                node = self.graph.create_node("get_attr", name)
                self.graph.call_function(expect_answer, (node, value, f"self.{name}"))

    def _questions(self, *, at_once: bool) -> None:
        """What the code asked of sizes has to have the same answer; where the new widths give
        another one, the code's way is the one that was recorded. It is asked ``at_once`` where the
        arguments tell."""
        for key, question in list(self.open.items()):
            read = sizes.dimensions(question.operands)
            if at_once and not all(o.source in self.local for o in read):
                continue
            del self.open[key]
            mixed = is_mixed(self.replay, question)
            if mixed or answer(self.replay, question)[0] == question.answer:
                asked = (as_recorded(self.replay, n) if mixed else n for n in question.operands)
                operands = tuple(
                    number_in(self.graph, n, self._value, self._attribute) for n in asked
                )
                value = self.graph.call_function(question.function, operands)
                self.graph.call_function(expect_answer, (value, question.answer, str(question)))

    def _attribute(self, name: str) -> fx.Node:
        return self.graph.create_node("get_attr", self._relative(name))

    def _bind(self, value: Any, node: fx.Node) -> None:
        """Names for the recorded nodes inside an argument or a child's result."""
        if isinstance(value, fx.Node):
            self.local.setdefault(value, node)
        elif isinstance(value, (tuple, list, dict)):
            items = value.items() if isinstance(value, dict) else enumerate(value)
            for key, item in items:
                if any(isinstance(n, fx.Node) for n in _nodes(item)):
                    self._bind(item, self.graph.call_function(operator.getitem, (node, key)))

    def _child(self, child: ModuleCall) -> None:
        path = self._relative(child.path)
        inside = (c for c in self.trace.calls if child.start <= c.start < child.stop)
        if any(c.lent for c in (child, *inside)):
            raise CannotRewrite(f"{child.path} runs on tensors that are not its own")
        passes = isinstance(child.output, fx.Node) and child.output in child.inputs()
        if passes and may_read_mode(self.trace.modules[child.path]):  # which is read after it?
            raise CannotRewrite(f"{child.path} gives back what it gets, in eval mode at least")
        node = self.graph.create_node(
            "call_module", path, self._value(tuple(child.args)), self._value(child.kwargs)
        )
        self._bind(child.output, node)

    def _copy(self, node: fx.Node) -> fx.Node:
        args, kwargs, target = node.args, dict(node.kwargs), node.target
        for size in self.sizes.get(node, ()):
            position, name = size.place
            if size.instead is not None:  # whose argument there has another name
                target = size.instead if node.op == "call_method" else getattr(torch, size.instead)
                args = args or (kwargs.pop("input"),)
                args = (*args, kwargs.pop(name)) if position == len(args) else args
            if position < len(args):
                right = self._corrected(args[position], size.computed, size.needed)
                args = (*args[:position], right, *args[position + 1 :])
            else:
                kwargs[name] = self._corrected(kwargs.get(name), size.computed, size.needed)
        target = self._relative(str(node.target)) if node.op == "call_module" else target
        new = self.graph.create_node(node.op, target, self._value(args), self._value(kwargs))
        for place, train in self.modes.get(node, ()):
            depend_on_mode(new, place, train)
        self._expect_as_many(node, new)
        if node in self.orders:
            for dim, positions in self.orders[node].takes:
                new = self.graph.call_function(take, (new, dim, positions.tolist()))
        self.local[node] = new
        return new

    def _expect_as_many(self, node: fx.Node, new: fx.Node) -> None:
        """The code took each of the parts (of a batch, of a sequence) in its turn."""
        if parts_by_size(self.trace, node):
            count, parts = self.graph.call_function(len, (new,)), len(node.meta["spec"])
            self.graph.call_function(expect_answer, (count, parts, f"len({node.name})"))

    def _corrected(self, argument: Any, computed: Any, needed: Any) -> Any:
        """A size argument with what comes out wrong written in, and the rest as the code has it."""
        if same_sizes(computed, needed, argument):
            return argument
        if isinstance(needed, slice):
            parts = ("start", "stop", "step")
            each = [[getattr(of, part) for part in parts] for of in (argument, computed, needed)]
            return slice(*(
                mine if now == right else self._scaled(mine, right)
                for mine, now, right in zip(*each, strict=True)
            ))  # fmt: skip
        sequences = isinstance(needed, (tuple, list)) and isinstance(argument, (tuple, list))
        if sequences and len(argument) == len(needed):
            return type(needed)(map(self._corrected, argument, computed, needed))
        return self._scaled(argument, needed)

    def _scaled(self, number: Any, needed: Any) -> Any:
        """The code's product of sizes with another factor, for one of them may be the batch's:
        ``b * 4`` as ``b * 2``; what is no product of sizes as the number that is needed."""
        over, under = factors(number)
        sizes_read = [n for n in over if isinstance(n, fx.Node) and is_size(n)]
        if len(over) + len(under) < 2 or not sizes_read or not isinstance(needed, int):
            return self._instead(number, needed)
        top, bottom = (math.prod(map(self._now, side)) for side in (over, under))
        if not top or not bottom:
            return self._instead(number, needed)
        factor = Fraction(needed * bottom, top)
        literal = math.prod(n for n in over if isinstance(n, int)) * factor.numerator
        divisor = math.prod(n for n in under if isinstance(n, int)) * factor.denominator
        shared = math.gcd(literal, divisor)
        found = self._product([n for n in over if isinstance(n, fx.Node)], literal // shared)
        by = self._product([n for n in under if isinstance(n, fx.Node)], divisor // shared)
        if by != 1:
            found = self.graph.call_function(operator.floordiv, (found, by))
        self.local[found] = found
        return found

    def _instead(self, number: Any, needed: Any) -> Any:
        """What is needed in the place of a number: where sizes of the batch are in it, what the
        code makes of them and of the widths that it had when it was recorded."""
        if not any(starmap(self.replay.is_free, sizes_in(number))):
            return needed
        if not isinstance(number, fx.Node) or number.meta["spec"] != needed:
            raise CannotRewrite(f"{self.name} makes a size of widths and of sizes of the input")
        return self._as_recorded(number)

    def _as_recorded(self, number: Any) -> Any:
        if not isinstance(number, fx.Node):
            return number
        target: Any = number.target
        if is_size(number):
            free = self.replay.is_free(*number.args)  # type: ignore[arg-type]
            return self._value(number) if free else number.meta["spec"]
        if number.op == "get_attr" and self.replay.new_attribute(target) is not None:
            return number.meta["spec"]
        if number.op != "call_function":
            return self._value(number)
        new = self.graph.call_function(target, tuple(map(self._as_recorded, number.args)))
        self.local[new] = new
        return new

    def _now(self, number: Any) -> int:
        return int(self.replay.values[number]) if isinstance(number, fx.Node) else number

    def _product(self, nodes: list[fx.Node], literal: int) -> Any:
        found: Any = literal
        for node in nodes:
            new = self._value(node)
            found = new if found == 1 else self.graph.call_function(operator.mul, (new, found))
        return found

    def _value(self, value: Any) -> Any:
        if isinstance(value, fx.Node):
            return self._node(value)
        if isinstance(value, (tuple, list, dict, slice)):
            return tree.rebuild(value, self._value)
        return value

    def _node(self, node: fx.Node) -> Any:
        """What stands for a recorded node in the new code; sizes and attributes are read anew."""
        if node in self.local:
            return self.local[node]
        if node.op == "get_attr":
            self.local[node] = self.graph.create_node("get_attr", self._relative(str(node.target)))
            return self.local[node]
        if isinstance(node.meta.get("spec"), (*TOLD, str)) and not self._is_at_hand(node.args[0]):
            return node.meta["spec"]
        if self._is_number(node) or node.target in (operator.getitem, getattr, "type"):
            return self._copy(node)
        if isinstance(node.target, type):  # a container of the model's own, around its result
            return self._copy(node)
        raise CannotRewrite(f"{self.name} uses a tensor that is not among its arguments")

    def _is_at_hand(self, source: Any) -> bool:
        if source.op == "get_attr":
            prefix = f"{self.call.path}." if self.call.path else ""
            return str(source.target).startswith(prefix)
        return source in self.local

    def _is_number(self, node: fx.Node) -> bool:
        return node.op in ("call_function", "call_method") and isinstance(
            node.meta.get("spec"), (int, float)
        )

    def _relative(self, path: str) -> str:
        prefix = f"{self.call.path}." if self.call.path else ""
        if path in self.trace.constants:
            raise CannotRewrite(f"{self.name} uses a constant of its own")
        if path.startswith(prefix):
            return path[len(prefix) :]
        known = self.trace.modules.get(path)  # one that is shared goes by several names
        value = self.trace.tensor(path) if known is None else known
        own = modules_of(self.module) if known is not None else all_tensors(self.module)
        name = next((name for name, other in own.items() if other is value), None)
        if name is None:
            raise CannotRewrite(f"{self.name} uses {path}, which is not part of it")
        return name


def factors(number: Any) -> tuple[list[Any], list[Any]]:
    """What a number of the graph multiplies, and what it divides that by: nodes and numbers."""
    if isinstance(number, fx.Node) and number.target in (operator.mul, operator.floordiv):
        left, right = (factors(n) for n in number.args)
        if number.target is operator.floordiv:
            right = right[::-1]
        return left[0] + right[0], left[1] + right[1]
    return [number], []


_PLAIN = (bool, int, float, type(None))


def _nodes(value: Any) -> list[Any]:
    if isinstance(value, (dict, tuple, list)):
        return [n for item in tree.children(value) for n in _nodes(item)]
    return [value]
