"""The aten ops beneath one torch call, for calls that no pattern is known for."""

from __future__ import annotations

import operator
from typing import Any

import torch
from torch import fx
from torch.utils._python_dispatch import TorchDispatchMode

from ..modules import tree
from ..rules import sizes
from ..rules.registry import for_function
from ..rules.spec import BASIC, spec
from .nodes import Nodes


def is_pointwise(target: Any) -> bool:
    """Whether each slice that comes out is made of the same slice of what goes in. PyTorch also
    calls ``equal`` so, which gives one answer for all."""
    return (
        isinstance(target, torch._ops.OpOverload) and torch.Tag.pointwise in target.tags
        and torch.Tag.data_dependent_output not in target.tags
    )  # fmt: skip


def understood(node: fx.Node) -> bool:
    """Whether an aten op can be followed where no code is there to take new sizes."""
    pattern = for_function(node.target)
    return is_pointwise(node.target) or (pattern is not None and pattern.resize is None)


def ops_of(graph: fx.Graph) -> list[fx.Node]:
    return [n for n in graph.nodes if n.op == "call_function" and n.target is not operator.getitem]


def followed(graph: fx.Graph) -> bool:
    """Whether all ops beneath a call can be followed, and all tensors come from ops or the model:
    one that comes from nowhere may have been computed outside of PyTorch."""
    ops = ops_of(graph)
    return bool(ops) and all(map(understood, ops)) and not _from_nowhere(graph)


def _from_nowhere(graph: fx.Graph) -> bool:
    return any(
        n.meta.get("constant") and any(size > 1 for size in n.meta["spec"].shape)
        for n in graph.nodes
    )


def says_all(graph: fx.Graph) -> bool:
    """Whether the ops beneath a call are all that it does, and each is known, be it by code that
    takes new sizes: none that draws, and no tensor that comes from nowhere."""
    ops = ops_of(graph)
    return bool(ops) and not _from_nowhere(graph) and all(
        isinstance(op.target, torch._ops.OpOverload)
        and torch.Tag.nondeterministic_seeded not in op.target.tags
        and (is_pointwise(op.target) or for_function(op.target) is not None)
        for op in ops
    )  # fmt: skip


def counts(graph: fx.Graph) -> bool:
    """Whether ops beneath a call make one value of several slices."""
    patterns = [for_function(op.target) for op in ops_of(graph)]
    return any(pattern is not None and pattern.kind in ("pool", "sum") for pattern in patterns)


class AtenRecorder(TorchDispatchMode):
    """The aten ops beneath one call, as a small graph of their own.

    Args:
        asks_more: the call may read tensors of the run that it is not given (``besides``).
    """

    supports_higher_order_operators = True  # such as ``torch.cond``: ops that nobody can follow

    def __init__(
        self, outer: Nodes, inputs: list[tuple[torch.Tensor, int]], *, asks_more: bool = False
    ) -> None:
        super().__init__()
        self._outer, self._asks_more = outer, asks_more
        self.graph = fx.Graph()
        self.besides: list[fx.Node] = []
        self._nodes: dict[int, tuple[fx.Node, tuple[Any, ...]]] = {}
        self._alive: list[Any] = []  # ids stay valid for the length of the call
        for t, _ in inputs:
            if id(t) not in self._nodes:
                node = self.graph.placeholder("input")
                node.meta["spec"], node.meta["outer"] = spec(t), outer.argument(t)
                self._nodes[id(t)] = (node, ())
                self._alive.append(t)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        inputs = (self._argument(args), self._argument(kwargs))
        value = func(*args, **kwargs)
        node = self.graph.call_function(func, *inputs)
        node.meta["spec"] = spec(value)
        self._learn(value, node, ())
        return value

    def _learn(self, value: Any, node: fx.Node, path: tuple[Any, ...]) -> None:
        if isinstance(value, torch.Tensor):
            self._nodes[id(value)] = (node, path)
            self._alive.append(value)
        elif isinstance(value, (tuple, list)):
            for i, item in enumerate(value):
                self._learn(item, node, (*path, i))

    def _argument(self, value: Any) -> Any:
        if isinstance(value, torch.Tensor):
            if id(value) not in self._nodes:
                self._learn(value, self._not_given(value), ())
            node, path = self._nodes[id(value)]
            item = node.meta["spec"]
            for key in path:
                item = item[key]
                node = self.graph.call_function(operator.getitem, (node, key))
                node.meta["spec"] = item
            return node
        if isinstance(value, (tuple, list, dict, slice)):
            return tree.rebuild(value, self._argument)
        if isinstance(value, sizes.OWN):
            return sizes.plain(value)
        return value if type(value) in BASIC else None

    def _not_given(self, value: torch.Tensor) -> fx.Node:
        named = self._outer.named.get(id(value))
        known = self._outer.knows(value)
        if self._asks_more and (named or known):
            self.besides.append(self._outer.tensor(value))
        if self._asks_more and known:
            node = self.graph.placeholder("besides")
            node.meta["outer"] = self.besides[-1]
        else:
            node = self.graph.create_node("get_attr", named or "constant")
            node.meta["constant"] = named is None
        node.meta["spec"] = spec(value)
        return node

    def finish(self, value: Any) -> fx.Graph:
        self.graph.output(self._argument(value))
        return self.graph
