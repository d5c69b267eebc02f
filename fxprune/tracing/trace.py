"""A recorded run: the graph, and what an fx graph has no place for."""

from __future__ import annotations

import copy
from collections import Counter
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import torch
from torch import fx, nn

from ..modules import tree
from ..modules.filled import Empty
from ..modules.inspecting import (
    computed_by_hook,
    modules_of,
    own_tensors,
    parts_of,
    read_attribute,
    tensor_names,
)
from ..rules import registry, sizes
from ..rules.pattern_types import Pattern
from .cuts import Cuts


class CannotRewrite(Exception):
    """A recorded graph does not say everything that a module's forward does."""


@dataclass
class ModuleCall:
    """One call of a module that is not a leaf: its nodes lie in ``[start, stop)`` of the graph."""

    path: str
    parent: int | None
    start: int
    stop: int = -1
    args: Any = ()
    kwargs: Any = field(default_factory=dict)
    output: Any = None
    questions: list[sizes.Question] = field(default_factory=list)  # that its code asked of sizes
    unsaid: str = ""  # what its own code does that the graph does not hold
    lent: bool = False  # it ran on tensors that it was given in the place of its own
    reads_data: bool = False  # Python saw values of tensors: the run may go another way next time
    read_in: list[sizes.Question] = field(default_factory=list)  # by which code, without operands
    taken: list[sizes.Question] = field(default_factory=list)  # by which sizes it takes items
    depth: int = 0  # how many codes of the model ran when it was called

    def inputs(self) -> set[fx.Node]:
        found: set[fx.Node] = set()
        fx.node.map_arg((self.args, self.kwargs), found.add)
        return found


@dataclass
class Trace:
    """A recorded run: the graph, and what the fx graph has no place for."""

    graph: fx.Graph
    model: nn.Module
    calls: list[ModuleCall]
    constants: dict[str, Any]
    called: set[str]  # paths of all modules that ran
    # id of a tensor of the model -> its name, as it was recorded. A model that has been moved since
    # has other buffers: after planning go by what a module's members are called.
    names: dict[int, str]
    kept_whole: list[tuple[fx.Node, str, str]]  # (tensor, why nothing of it can go, where)
    # Parameters that the run writes to (weight.data.mul_(mask)): they are cut, but what they hold
    # is the model's affair.
    written: set[str] = field(default_factory=set)
    reads_sizes: bool = False  # whether code read one of a tensor that inputs have a part in
    filled: Empty = field(default_factory=dict)  # attributes that the run put tensors in
    # Paths of modules that ran beneath a call that nobody has a pattern for.
    within: dict[str, fx.Node] = field(default_factory=dict)
    cuts: Cuts = field(default_factory=Cuts, repr=False)
    # Tensors of leaf modules as values of the algebra, as far as they have been asked for.
    members: dict[tuple[str, str], Any] = field(default_factory=dict, repr=False)
    changed: set[str] = field(default_factory=set)  # names of attributes that the run has set anew
    fixed: Any = field(default=None, repr=False)  # Fixed: what is the same in every run
    _tensor_names: dict[str, list[str]] = field(default_factory=dict, repr=False)
    _hooked: dict[str, str] = field(default_factory=dict, repr=False)

    @cached_property
    def modules(self) -> dict[str, nn.Module]:
        """The model's modules by path; one that goes by several has them all."""
        return modules_of(self.model)

    @cached_property
    def calls_of(self) -> Counter[str]:
        """How often the graph calls each module, by path."""
        return Counter(str(n.target) for n in self.graph.nodes if n.op == "call_module")

    @cached_property
    def uses(self) -> dict[str, set[fx.Node]]:
        """The calls that use each tensor of the model."""
        return uses_of(self)

    def module_of(self, node: fx.Node) -> nn.Module:
        """Whose own code made the call."""
        call = node.meta.get("call")
        return self.model if call is None else self.modules[self.calls[call].path]

    def is_layer(self, path: str) -> bool:
        """Whether no code of the model's own runs in the module: a leaf of the trace."""
        if path not in self.modules:  # a configuration
            return False
        runs = any(call.path == path for call in self.calls)
        return not runs and (
            path in self.called or type(self.modules[path]).__module__.startswith("torch.nn.")
        )

    def tensor_names(self, path: str) -> list[str]:
        """Of a leaf module; see :func:`fxprune.modules.inspecting.tensor_names`."""
        if path not in self._tensor_names:
            self._tensor_names[path] = tensor_names(self.modules[path])
        return self._tensor_names[path]

    def computed_by_hook(self, path: str) -> str:
        """Of a leaf module; see :func:`fxprune.modules.inspecting.computed_by_hook`."""
        if path not in self._hooked:
            self._hooked[path] = computed_by_hook(self.modules[path])
        return self._hooked[path]

    def pattern(self, node: fx.Node) -> Pattern | None:
        """The pattern of a call: the one that held when it was first asked for."""
        if "pattern" not in node.meta:
            node.meta["pattern"] = self._look_up(node)
        return node.meta["pattern"]

    def _look_up(self, node: fx.Node) -> Pattern | None:
        if node.op == "call_module":
            return registry.for_module(self.modules[str(node.target)])
        if node.op == "call_method":
            return registry.for_function(getattr(torch.Tensor, str(node.target), node.target))
        if node.op == "call_function":
            # A property of a tensor, such as x.T, goes by its own name.
            return registry.for_function(node.args[1] if node.target is getattr else node.target)
        return None

    def calls_any(self, kind: str) -> bool:
        """Whether some call has a pattern of this kind, or one of the aten ops beneath it has."""
        graphs = [self.graph, *(g for n in self.graph.nodes if (g := n.meta.get("aten")))]
        patterns = (self.pattern(node) for graph in graphs for node in graph.nodes)
        return any(pattern is not None and pattern.kind == kind for pattern in patterns)

    def on(self, model: nn.Module) -> Trace:
        """The same run, with the tensors of another model of its kind."""
        return self if model is self.model else replace(self, model=model, kept_whole=[])

    def graph_module(self, graph: fx.Graph | None = None) -> fx.GraphModule:
        """The trace, or another form of its graph, as a module of its own that shares the model's
        parameters."""
        return fx.GraphModule(_Root(self.model, self.constants), graph or self.graph, "Trace")

    def tensor(self, name: str) -> Any:
        """The parameter, buffer or attribute that a ``get_attr`` node reads."""
        path, _, key = name.rpartition(".")
        owner = self.modules.get(path)
        if owner is None:
            return read_attribute(self.model, name)
        for own in (owner._parameters, owner._buffers):  # as most are
            if key in own:
                return own[key]
        return read_attribute(owner, key)


def is_size(value: Any) -> bool:
    """Whether it is a node for a size that code has read from a tensor."""
    return isinstance(value, fx.Node) and value.op == "call_method" and value.target == "size"


def is_told(node: fx.Node) -> bool:
    """Whether it is for the type or the device that code has asked a tensor for."""
    if node.op == "call_method":
        return node.target == "type" and len(node.args) == 1
    return node.target is getattr and node.args[1] in ("dtype", "device", "layout")


def uses_of(trace: Trace) -> dict[str, set[fx.Node]]:
    """The calls that use each tensor of the model."""
    found: dict[str, set[fx.Node]] = {}
    for node in trace.graph.nodes:
        if node.op == "get_attr":
            found.setdefault(str(node.target), set()).update(node.users)
        elif node.op == "call_module":
            for tensor in (
                t for m in parts_of(trace.modules[str(node.target)]) for t in own_tensors(m)
            ):
                found.setdefault(trace.names.get(id(tensor), ""), set()).add(node)
    return found


class _Root(nn.Module):
    """Where a graph module looks its targets up: the model, plus the trace's constants."""

    def __init__(self, model: nn.Module, constants: dict[str, Any]) -> None:
        super().__init__()
        self.__dict__["_model"] = model
        self.__dict__["training"] = model.training
        self.__dict__.update(constants)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.__dict__["_model"], name)


def set_item(target: Any, index: Any, value: Any) -> Any:
    """``target[index] = value`` as an expression."""
    target[index] = value
    return target


class Filled:
    """``Filled(model, *tensors)`` in a graph: a copy of an object that a model returns, with other
    tensors in the place of its own."""

    def __new__(cls, model: Any, *tensors: torch.Tensor) -> Any:
        own = dict.fromkeys(map(id, tree.tensors(model)))
        return copy.deepcopy(model, dict(zip(own, tensors, strict=True)))


def after_write(value: Any, write: Any) -> Any:
    """``value``, whose memory ``write`` has changed."""
    return value
