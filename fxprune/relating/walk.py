"""The walk over a trace: one node after the other, each with what its pattern says.

It is made with several meanings of the words of :mod:`.meanings`: to discover which slices belong
together (:mod:`.discover`) and what they say when they are dead (:mod:`.sayings`), and to replay
the trace at the new widths (:mod:`fxprune.replaying.replay`).
"""

from __future__ import annotations

import operator
from collections.abc import Mapping
from dataclasses import replace
from types import MappingProxyType
from typing import Any

import torch
from torch import fx

from ..modules import tree
from ..rules.call import Call, Named, leaves, map_specs, rigid
from ..rules.channels import Axis, Channels
from ..rules.spec import TOLD, Spec
from ..tracing.aten import followed, is_pointwise, ops_of
from ..tracing.trace import is_size
from ..tracing.transforms import Transform
from .algebra import Algebra

IS_OUTPUT = "it is an output of the model"

_NUMERIC = (operator.add, operator.sub, operator.mul, operator.floordiv, operator.mod,
            operator.pow, operator.truediv, operator.neg)  # fmt: skip


class Walk(Algebra):
    def run(self) -> None:
        with torch.no_grad():
            self._walk(self.trace.graph)

    def _walk(self, graph: fx.Graph) -> Any:
        values = self.values
        for node in graph.nodes:
            if graph is self.trace.graph:
                self.reach(node)
            if node.op == "placeholder":
                outer = node.meta.get("outer")  # set in the graph beneath a call
                spec = node.meta["spec"]
                values[node] = map_specs(spec, rigid) if outer is None else values[outer]
            elif node.op == "get_attr":
                values[node] = self._attribute(node)
            elif node.op == "output":
                result = self._resolve(node.args[0])
                if graph is self.trace.graph:
                    for value in leaves(result):
                        self.freeze_all(value, IS_OUTPUT, None)
                return result
            else:
                values[node] = self._visit(node)
        return None

    def _attribute(self, node: fx.Node) -> Any:
        spec = node.meta["spec"]
        if not isinstance(spec, Spec):
            return spec
        name = str(node.target)
        if node.meta.get("constant") or name in self.trace.constants:
            return replace(rigid(spec), scalar=self._scalar(name, spec))
        return Named(name, spec)

    def _scalar(self, name: str, spec: Spec) -> float | None:
        known = name in self.trace.constants and name not in self.trace.written
        if torch.Size(spec.shape).numel() != 1 or not known:
            return None
        value = self.trace.constants[name]  # None where nothing uses it
        return None if value is None or value.is_complex() else float(value)

    def _resolve(self, value: Any, numbers: Mapping[fx.Node, int] = MappingProxyType({})) -> Any:
        if isinstance(value, fx.Node):
            return self.values[value] if value not in numbers else numbers[value]
        if isinstance(value, (tuple, list, dict, slice)):
            return tree.rebuild(value, lambda child: self._resolve(child, numbers))
        return value

    def _visit(self, node: fx.Node) -> Any:
        numbers = node.meta.get("numbers", {})
        args = tuple([self._resolve(value, numbers) for value in node.args])
        kwargs = self._resolve(dict(node.kwargs), numbers) if node.kwargs else {}
        if node.target is operator.getitem and not isinstance(args[0], (Channels, Named)):
            return args[0][args[1]]
        inputs = [value for given in (*args, *kwargs.values()) for value in leaves(given)]
        if not isinstance(node.meta["spec"], Spec) and (
            not inputs or node.target in _NUMERIC or is_size(node)
        ):
            return self.number(node, args)
        if isinstance(node.meta["spec"], (*TOLD, str)):
            return node.meta["spec"]
        call = Call(self, node, self.trace.pattern(node), args, kwargs, inputs=inputs)
        if node.op == "call_module":
            call.path = str(node.target)
            call.module = self.modules[call.path]
        if isinstance(node.target, type):
            return kwargs or args  # a container of the model's own: its fields
        self.resize(call)
        return map_specs(self.apply(call), _without_sources)

    def apply(self, call: Call) -> Any:
        hooked = self.trace.computed_by_hook(call.path) if call.path else ""
        if hooked:
            return self.unknown(call, f"a hook computes the {hooked} of {call.name}")
        if call.pattern is not None and call.pattern.rule is not None:
            if "told" in call.node.meta and call.pattern.resize is None:
                return self.unknown(call, f"the input says how {call.name} is called")
            return call.pattern.rule(self, call)
        beneath = call.node.meta.get("aten")
        if beneath is not None:
            ops = ops_of(beneath)
            if followed(beneath):
                alone = len(ops) == 1 and is_pointwise(ops[0].target)
                alone = alone and not isinstance(call.node.target, Transform)  # it is the function
                self._above = call.node
                return self._pointwise(call) if alone else self._walk(beneath)
        elif is_pointwise(call.node.target):
            return self._pointwise(call)
        return self.unknown(call)

    def _pointwise(self, call: Call) -> Any:
        if isinstance(call.spec, Spec):
            return self.elementwise(call)
        values = [self.channels(v) for v in call.inputs]  # several results, such as frexp's
        return tuple(self.meet(call, values) for _ in call.spec)


def _without_sources(x: Any) -> Any:
    """A result is no parameter's own axis any more."""
    if isinstance(x, Channels) and any(axis.source is not None for axis in x.axes):
        return x.with_axes(Axis(a.dims, a.units, a.said, a.border, blank=a.blank) for a in x.axes)
    return x
