"""Which node of the graph stands for which value of a run.

Tensors are known by weak reference, so no activation is kept alive; sizes by the expression that
they were computed by; what no recorded call has made is a tensor of the model or a constant.
"""

from __future__ import annotations

import dataclasses
import functools
import inspect
import itertools
import operator
import weakref
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import fx, nn
from torch.nn.utils.rnn import PackedSequence

from ..errors import ModelError
from ..modules import tree
from ..modules.frames import frame_of_model, where
from ..modules.holding import kept_besides
from ..modules.inspecting import named_tensors, read_attribute
from ..modules.near import reads_past_names, registered_by_forward
from ..modules.source import place_of, reads_behind
from ..modules.tensor_attributes import fixed_tensors
from ..rules import sizes
from ..rules.spec import BASIC, TOLD, spec
from .old_types import StandIn
from .trace import Filled, after_write


class Nodes:
    """The nodes of a run as it goes on.

    Args:
        modules: of the model, by path.
    """

    def __init__(self, model: nn.Module, modules: dict[str, nn.Module]) -> None:
        self.model = model
        self.graph = fx.Graph()
        self.count = 0
        self.running: list[int] = []  # the calls of modules at work, the outermost first
        fixed = fixed_tensors(modules)
        self.named = {id(each.tensor): each.name for each in reversed(fixed)}
        self.named |= {id(t): name for name, t in named_tensors(modules)}
        self._modules = modules
        # Tensors that code sets anew: of a constant of the run another run has another.
        spaces: Any = (vars(m).values() for m in modules.values())
        some = [own for own in spaces if torch.Tensor in map(type, own)]
        tensors = (t for own in some for t in own if type(t) is torch.Tensor)
        self._set_anew = {id(t) for t in tensors if id(t) not in self.named}
        # Buffers and attributes: where they are held, and in which memory. A parameter that a model
        # writes to (weight.data.clamp_(-1, 1)) is no state of its run; one that gets other memory
        # (weight.data = weight.data.renorm(2, 0, 1)) would not get it beneath a mask.
        buffers: list[dict[str, Any]] = [module._buffers for module in modules.values()]
        held: list[tuple[dict[str, Any], str, torch.Tensor]] = [
            (space, key, t) for space in buffers for key, t in space.items() if t is not None
        ]
        held += [(vars(each.module), each.key, each.tensor) for each in fixed]
        self._held = [(*one, _memory(one[2])) for one in held if one[2].layout == torch.strided]
        self._held_in: dict[int, list[torch.Tensor]] = {}  # by memory
        for _, _, own, memory in self._held:
            self._held_in.setdefault(memory, []).append(own)
        # By memory, which those of a recurrent layer share on a GPU; and what they are at first.
        self._parameters: dict[int, list[tuple[nn.Parameter, torch.Tensor]]] = {}
        for p in [p for module in modules.values() for p in module._parameters.values()]:
            if p is not None and p.layout == torch.strided:
                self._parameters.setdefault(_memory(p), []).append((p, p.data))
        self.written: set[str] = set()  # those that it writes to
        self.given_data: set[int] = set()  # ids of those whose data it sets
        self.reads_sizes = False  # of what is no parameter: inputs may have others
        self.given: list[float] = []  # plain numbers that the call at work is given
        self.constants: dict[str, Any] = {}
        self.kept_whole: list[tuple[fx.Node, str, str]] = []
        self._way = ""  # of an argument: handed from module to module, returned by the model
        # Tensors that hold sizes: id -> (weak reference, the number or list of numbers).
        self._numbers: dict[int, tuple[weakref.ref, Any]] = {}
        # id of a live tensor -> (weak reference, node, path of keys into the node's result)
        self._known: dict[int, tuple[weakref.ref, fx.Node, tuple[Any, ...]]] = {}
        self._memo: dict[Any, fx.Node] = {}
        # Types and devices that tensors told, by where in the source that was.
        self._told: dict[Any, tuple[Any, Callable[[], fx.Node]]] = {}

    def placeholders(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """A placeholder an argument; the inputs are shared, their tensors known by identity."""
        try:
            parameters = inspect.signature(self.model.forward).parameters
        except (TypeError, ValueError):
            parameters = {}  # type: ignore[assignment]
        positional = [
            n
            for n, p in parameters.items()
            if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)
        ]
        names = positional[: len(args)] + [f"arg{i}" for i in range(len(positional), len(args))]
        for name, value in [*zip(names, args, strict=True), *kwargs.items()]:
            node = self.add(self.graph.placeholder(name), value)
            self.learn(value, node, ())
            if node.meta["spec"] is None and tree.tensors(value):
                node.meta["object"] = type(value).__name__

    def call(self, kind: str, target: Any, args: Any, kwargs: Any = None) -> fx.Node:
        """``graph.create_node``, which would look for symbolic numbers among all arguments."""
        node = self.graph.create_node(kind, target)
        node.args = args
        if kwargs:
            node.kwargs = kwargs
        return node

    def add(self, node: fx.Node, value: Any) -> fx.Node:
        node.meta["spec"] = spec(value)
        node.meta["call"] = self.running[-1] if self.running else None
        node.meta["index"] = self.count
        self.count += 1
        return node

    def learn(self, value: Any, node: fx.Node, path: tuple[Any, ...]) -> None:
        """From now on, the tensors in ``value`` are the result of ``node``."""
        if isinstance(value, torch.Tensor):
            self._known[id(value)] = (weakref.ref(value), node, path)
        elif isinstance(value, dict):
            for key, item in value.items():
                self.learn(item, node, (*path, key))
        elif isinstance(value, (tuple, list)):
            for i, item in enumerate(value):
                self.learn(item, node, (*path, i))

    def holds(self, value: torch.Tensor, numbers: Any) -> None:
        """From now on, ``value`` is known to hold these traced numbers, as a list of lists."""
        if sizes.holds_traced(numbers):
            self._numbers[id(value)] = weakref.ref(value), numbers

    def numbers(self, value: Any) -> Any:
        """The traced numbers that a tensor holds; None where it holds others."""
        reference, numbers = self._numbers.get(id(value), (None, None))
        return numbers if reference is not None and reference() is value else None

    def number(self, value: Any) -> Any:
        """The one number that a tensor is known to hold, in its place; anything else as it is."""
        held = self.numbers(value)
        return value if held is None or isinstance(held, (list, tuple)) else held

    def argument(self, value: Any) -> Any:
        """``value`` as an argument of a node: tensors and traced sizes become nodes."""
        if isinstance(value, torch.Tensor):
            return self.tensor(value)
        if type(value) in (tuple, dict, list):  # as most containers are
            return tree.rebuild(value, self.argument)
        if isinstance(value, sizes.OWN):
            if not hasattr(value, "origin"):
                self.given.append(value)
            return self._size(value)
        if isinstance(value, PackedSequence):  # whose constructor takes tensors only
            parts = tuple(self.argument(part) for part in value)
            return self.add(self.graph.call_function(type(value), parts), value)
        if dataclasses.is_dataclass(value) and not isinstance(value, type):
            fields = {
                f.name: self.argument(getattr(value, f.name)) for f in dataclasses.fields(value)
            }
            return self.add(self.graph.call_function(type(value), (), fields), value)
        if isinstance(value, slice):  # where it may begin and end as a tensor says
            bounds = (value.start, value.stop, value.step)
            return slice(*(self.argument(self.number(bound)) for bound in bounds))
        if isinstance(value, (tuple, list, dict)):
            return tree.rebuild(value, self.argument)
        if self._told and isinstance(value, (*TOLD, str)):
            told = self._told_of(value)
            if told is not None:
                return told
        if type(value) in (int, float):
            self.given.append(value)
        if isinstance(value, bool) or type(value) in BASIC:
            return value
        if isinstance(value, range):
            return range(*(int(n) for n in (value.start, value.stop, value.step)))
        if isinstance(value, int):
            return int(value)
        if isinstance(value, np.generic):  # numpy's own numbers
            return value.item()
        if type(value) is StandIn:
            value = value.real
        if self._way == "returned":
            made = self._made_again(value)
            if made is not None:
                return made
        # An object of the model's own. Where it is handed to code that is recorded too, its tensors
        # are known when they come back; elsewhere they go where no rule can follow.
        for each in () if self._way == "handed" else tree.tensors(value):
            self.escapes(each, f"a {type(value).__name__}")
        return self._constant(value, "object")

    def _made_again(self, value: Any) -> fx.Node | None:
        """An object that the model returns, with the tensors in it as nodes; None where there are
        none, or it cannot be copied."""
        inside = list(dict.fromkeys(tree.tensors(value)))
        if not inside:
            return None
        # Like it, but without its tensors, which would stay alive.
        like = tree.copied(value, {id(t): torch.empty(0) for t in inside})
        if like is value:
            return None
        parts = (self._constant(like, "object"), *map(self.tensor, inside))
        return self.add(self.graph.call_function(Filled, parts), value)

    def tells(self, x: torch.Tensor, name: str, value: Any) -> None:
        """Code has asked a tensor for its type or device (``value``, by ``name``), which it may
        pass on."""
        place = place_of(frame_of_model())
        if place is None:
            return
        known = self._known.get(id(x))
        if known is None or known[0]() is not x:
            if id(x) not in self.named:
                return
            source = functools.partial(self.tensor, x)
        else:
            source = functools.partial(self._at, *known[1:])

        def node() -> fx.Node:
            asked = source()
            key = ("told", asked, name)
            if key not in self._memo:
                made = (
                    self.graph.call_method(name, (asked,)) if isinstance(value, str)
                    else self.graph.call_function(getattr, (asked, name))
                )  # fmt: skip
                self._memo[key] = self.add(made, value)
            return self._memo[key]

        self._told[place] = value, node

    def _told_of(self, value: Any) -> fx.Node | None:
        """The node for a type or a device that the code has from a tensor, as far as its source
        says so; None for a literal."""
        frame = frame_of_model()
        for place in reads_behind(frame) if frame is not None else ():
            found = self._told.get(place)
            if found is not None and found[0] == value:
                return found[1]()
        return None

    def escapes(self, value: torch.Tensor, to: str) -> None:
        reason = f"its values leave PyTorch through {to}"
        self.kept_whole.append((self.tensor(value), reason, where()))

    def handed(self, value: Any) -> Any:
        """``value`` from one module of the model to another."""
        return self._on_its_way("handed", value)

    def returned(self, value: Any) -> Any:
        """``value`` as what the model returns: objects of its own are made again in the graph."""
        return self._on_its_way("returned", value)

    def _on_its_way(self, way: str, value: Any) -> Any:
        self._way = way
        try:
            return self.argument(value)
        finally:
            self._way = ""

    def knows(self, value: torch.Tensor) -> bool:
        """Whether a recorded call has returned it, or it is an input."""
        known = self._known.get(id(value))
        return known is not None and known[0]() is value

    def tensor(self, value: torch.Tensor) -> fx.Node:
        return self._at(*self._known[id(value)][1:]) if self.knows(value) else self._unknown(value)

    def _at(self, node: fx.Node, path: tuple[Any, ...]) -> fx.Node:
        """The node of what lies at ``path`` in the result of ``node``."""
        for key in path:
            node = self._item(node, key)
        return node

    def _item(self, node: fx.Node, key: Any) -> fx.Node:
        memo = (node, key)
        if memo not in self._memo:
            item = node.meta["spec"][key]
            made = self.call("call_function", operator.getitem, (node, key))
            self._memo[memo] = self.add(made, item)
            self._memo[memo].meta["spec"] = item
        return self._memo[memo]

    def _unknown(self, value: torch.Tensor) -> fx.Node:
        """A tensor that no recorded call has returned: of the model, an alias, or a constant."""
        if torch._C._functorch.is_functorch_wrapped_tensor(value):
            raise ModelError(
                f"{type(self.model).__name__} transforms functions as it runs (torch.vmap, "
                f"torch.func), which cannot be recorded: {where()}. Write it as ordinary calls"
            )
        if id(value) in self.named:
            return self.named_node(self.named[id(value)], value)
        for reference, node, path in self._known.values():
            other = reference()
            if other is not None and _same_memory(other, value):
                self.learn(value, node, path)
                return self.tensor(value)
        return self._constant(value, "tensor")

    def named_node(self, name: str, value: torch.Tensor) -> fx.Node:
        if ("get_attr", name) not in self._memo:
            self._memo["get_attr", name] = self.add(self._get_attr(name), value)
        return self._memo["get_attr", name]

    def _constant(self, value: Any, kind: str) -> fx.Node:
        key = ("constant", id(value))
        if key not in self._memo:
            names = (f"_{kind}_constant{i}" for i in itertools.count(len(self.constants)))
            name = next(n for n in names if n not in self.constants and not hasattr(self.model, n))
            self.constants[name] = value
            self._memo[key] = self.add(self._get_attr(name), value)
            if id(value) in self._set_anew:
                self.written.add(name)
        return self._memo[key]

    def _get_attr(self, name: str) -> fx.Node:
        # Graph.get_attr warns about whatever is not a tensor of the model.
        return self.graph.create_node("get_attr", name)

    def _size(self, number: Any) -> Any:
        """The node that computes a traced number; a plain number as it is."""
        number = self.own(number)
        origin = getattr(number, "origin", None)
        if origin is None:
            return sizes.plain(number)
        key = sizes.expression(number)
        if key not in self._memo:
            self._memo[key] = self.add(self._size_node(origin), number)
        return self._memo[key]

    def own(self, number: Any) -> Any:
        """A number as a plain one where the model has kept it from another recording."""
        ours = all(o.source.graph is self.graph for o in sizes.dimensions([number]))
        return number if ours else sizes.plain(number)

    def _size_node(self, origin: sizes.Origin) -> fx.Node:
        if isinstance(origin, sizes.Dimension):
            return self.call("call_method", "size", (origin.source, origin.dim))
        if isinstance(origin, sizes.Operation):
            operands = tuple(self._size(operand) for operand in origin.operands)
            return self.call("call_function", origin.function, operands)
        if origin.index is None:
            return self._get_attr(origin.name)
        key = ("attribute", origin.name)
        if key not in self._memo:
            value = read_attribute(self.model, origin.name)
            self._memo[key] = self.add(self._get_attr(origin.name), value)
        return self.graph.call_function(operator.getitem, (self._memo[key], origin.index))

    def close(self) -> None:
        """After the run: what has been set anew, and what masks do not reach."""
        for space, key, own, memory in self._held:
            if space.get(key) is not own or _memory(own) != memory:
                self._written(own, "")
        for module in self._modules.values():
            kind: Any = type(module)
            for key, buffer in module._buffers.items():
                if buffer is not None and key in registered_by_forward(kind):
                    self._written(buffer, "")
        for memory, parameters in self._parameters.items():
            for parameter, before in parameters:  # which may only have moved (flatten_parameters)
                if _memory(parameter) != memory and (
                    id(parameter) in self.given_data or not torch.equal(parameter, before)
                ):
                    self._written(parameter, "")
        read = {node.target: node for node in self.graph.nodes if node.op == "get_attr"}
        for kept, place in kept_besides(self._modules).items() if read else ():
            node = read.get(self.named.get(kept, ""))
            if node is not None and place != node.target:
                self.kept_whole.append(
                    (node, f"it is also kept in {place}, which no mask reaches", "")
                )
        for module in self._modules.values() if read else ():
            kind = type(module)
            for t in (*module._parameters.values(), *module._buffers.values()):
                node = read.get(self.named.get(id(t), ""))
                if node is not None and reads_past_names(kind):
                    reason = f"{kind.__name__} reads it past its name, where no mask reaches"
                    self.kept_whole.append((node, reason, ""))

    def let_go(self) -> None:
        """Of objects that modules only hand on, such as a cache of keys and values."""

        def is_used(node: fx.Node) -> bool:
            return any(not isinstance(user.target, type) or is_used(user) for user in node.users)

        for node in self.graph.nodes:
            if node.target in self.constants and not is_used(node):
                self.constants[str(node.target)] = None

    def _written(self, own: torch.Tensor, line: str) -> None:
        """A mask would hand out another tensor at each reading."""
        self.written.add(self.named[id(own)])
        self.kept_whole.append((self.tensor(own), "the model writes to it as it runs", line))

    def _comes_from(self, value: Any, name: str) -> bool:
        waiting, seen = [value], set()
        while waiting:
            node = waiting.pop()
            if isinstance(node, fx.Node) and node not in seen:
                seen.add(node)
                if node.op == "get_attr" and node.target == name:
                    return True
                waiting += node.all_input_nodes
        return False

    def changed_in_place(self, changed: torch.Tensor, node: fx.Node, result: Any) -> None:
        """Other live tensors on the memory that ``node`` wrote to are new values from here on."""
        storage = _memory(changed)
        for own in self._held_in.get(storage, ()):
            self._written(own, where())
        for parameter, _ in self._parameters.get(storage, ()):
            self.written.add(self.named[id(parameter)])
            others = (*node.args[1:], *node.kwargs.values())
            if any(self._comes_from(other, self.named[id(parameter)]) for other in others):
                self._written(parameter, where())  # of what it is itself: its norm, its mean
        self.written |= {
            name for name, own in self.constants.items()
            if isinstance(own, torch.Tensor) and _memory(own) == storage
        }  # fmt: skip
        for key, (reference, before, path) in list(self._known.items()):
            other = reference()
            if other is None:
                del self._known[key]  # or the deeper the model, the longer this takes
                continue
            if other is result or _memory(other) != storage:
                continue
            after = self.graph.call_function(after_write, (self._at(before, path), node))
            after = self.add(after, other)
            self.learn(other, after, ())


def _memory(tensor: torch.Tensor) -> int:
    """Which storage it lies in, alone or with others; sparse ones have none."""
    return tensor.untyped_storage()._cdata if tensor.layout == torch.strided else -id(tensor)


def _same_memory(a: torch.Tensor, b: torch.Tensor) -> bool:
    return (
        a.layout == b.layout == torch.strided
        and a.numel() > 0
        and a.data_ptr() == b.data_ptr()
        and a.shape == b.shape
        and a.stride() == b.stride()
    )
