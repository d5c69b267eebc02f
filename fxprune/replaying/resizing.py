"""What becomes of sizes: those of values, those that calls are given, and those that layers have.

A pattern says which sizes a call needs; where the model's code would compute others, that is blamed
and the call goes on with what it needs.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Container
from typing import Any

import numpy as np
import torch
from torch import Tensor, fx

from ..modules.inspecting import read_attribute
from ..relating.relations import Relations
from ..rules import registry
from ..rules.call import Call, Named
from ..rules.channels import Axis, Channels, SourceAxis
from ..rules.ops import argument_at
from ..rules.shapes import view_dims
from ..tracing.trace import Trace, is_size
from .faults import WrongSize, same_sizes
from .new_sizes import NewSizes
from .orders import Mismatch, Orders


class Resizing(Orders):
    """Args: those of :class:`fxprune.replaying.orders.Orders`, and
    attributes: those of modules that will be set, with the values they will have.
    """

    def __init__(
        self,
        trace: Trace,
        relations: Relations,
        kept: np.ndarray,
        attributes: dict[str, Any] | None = None,
        orders: dict[int, Tensor] | None = None,
        straighten: Container[fx.Node] = (),
    ) -> None:
        super().__init__(trace, relations, kept, orders, straighten)
        self.attributes = attributes or {}
        self.module_sizes: dict[str, dict[str, Any]] = {}
        self.forwards: dict[str, Callable[..., Any]] = {}  # of modules that need another
        self.indices: dict[str, Tensor] = {}  # index buffers, rewritten
        self.indexed: dict[str, Tensor] = {}  # the units whose positions they hold
        self._told: dict[str, dict[fx.Node, Tensor]] = {}  # what their readers got in their place
        self.calls: dict[fx.Node, tuple[Any, Any]] = {}  # arguments of calls that count channels
        self._by_name: dict[str, list[SourceAxis]] = {}
        for s in relations.sources:
            self._by_name.setdefault(s.name, []).append(s)
        # Tensors that are used in several layouts, of which nothing goes: that of the last use.
        self.layouts = {
            name: axes[0].tensor_shape for name, axes in self._by_name.items()
            if len({axis.view for axis in axes}) > 1
        }  # fmt: skip

    # -- of values --------------------------------------------------------------------------------

    def new_shape(self, x: Channels) -> tuple[int, ...]:
        shape = list(x.shape)
        for axis in x.axes:
            for d, n in zip(axis.dims, self.left(axis.units).shape, strict=True):
                shape[d] = n
        return tuple(shape)

    def result_shape(self, node: fx.Node) -> tuple[int, ...]:
        return self.new_shape(self.before[node])

    def result_shapes(self, node: fx.Node) -> list[Any]:
        return [self.new_shape(x) if isinstance(x, Channels) else None for x in self.before[node]]

    def widths(self) -> set[tuple[int, int]]:
        """(old, new) of every size of the run that changes."""
        pairs: set[tuple[int, int]] = set()
        for before in self.before.values():
            for x in before if isinstance(before, tuple) else (before,):
                if isinstance(x, Channels):
                    pairs.update(zip(x.shape, self.new_shape(x), strict=True))
        return {(old, new) for old, new in pairs if old != new}

    def view_shape(self, name: str) -> tuple[int, ...]:
        """New shape of a tensor, seen as its pattern sees it."""
        axes = self._by_name[name]
        view = list(axes[0].view)
        for axis in axes:
            if axis.view == axes[0].view:
                for d, n in zip(axis.dims, self.order[axis.first].shape, strict=True):
                    view[d] = n
        return tuple(view)

    def tensor_shape(self, value: Named) -> tuple[int, ...]:
        if value.name not in self._by_name:
            return value.spec.shape
        old = self._by_name[value.name][0].view
        new = self.view_shape(value.name)
        return tuple(math.prod(new[d] for d in dims) for dims in view_dims(value.spec.shape, old))

    def labels_of(self, call: Call, name: str) -> Tensor:
        """All labels of a tensor of a leaf module."""
        value = self.member(call, name)
        axes = self._by_name.get(value.name, []) if value is not None else []
        return torch.cat(
            [torch.zeros(0, dtype=torch.int64), *(a.labels().reshape(-1) for a in axes)]
        )

    def as_it_was(self, value: Named) -> Channels:
        """A parameter with the axes that it had in the first walk."""
        shape = value.spec.shape
        sources = [s for s in self._by_name.get(value.name, ()) if s.view == shape]
        return Channels(shape, tuple(Axis(s.dims, s.labels()) for s in sources))

    def number(self, node: fx.Node, args: tuple[Any, ...]) -> Any:
        if is_size(node):
            source, dim = args
            return (source.shape if isinstance(source, Channels) else self.tensor_shape(source))[
                dim
            ]
        if not callable(node.target):
            return node.meta["spec"]
        try:
            return node.target(*args)
        except (ArithmeticError, ValueError) as error:  # a division by a difference of widths, say
            why = "the code cannot compute its sizes from what is left"
            raise Mismatch(torch.from_numpy(self.units_around(node)), why, None) from error

    def groups_of(self, weight: Named, old: int) -> int:
        axes = self._by_name.get(weight.name)
        return self.view_shape(weight.name)[0] if axes and axes[0].view[0] == old else old

    def parts_left(self, call: Call, dim: int, count: int) -> int:
        return NewSizes(self, call.node).parts(dim, count)

    # -- that calls are given ---------------------------------------------------------------------

    def resize(self, call: Call) -> None:
        resize = None if call.pattern is None else call.pattern.resize
        asked = self._as_told(call) if "told" in call.node.meta else call
        found = {} if resize is None else dict(resize(asked, NewSizes(self, call.node)))
        self._keep_numbers(call, {key for place in found if place for key in place})
        instead = found.pop(None, None)
        for (position, name), needed in found.items():
            computed = argument_at(asked, position, name)
            written = argument_at(call.node, position, name)
            if not same_sizes(computed, needed, written):
                around = self._relations.around.get(call.node)
                units = self.units_around(call.node) if around is None else around
                self.blame(WrongSize(units, call.node, (position, name), computed, needed, instead))
            self._give(call, (position, name), needed)

    def _as_told(self, call: Call) -> Call:
        """A call with the numbers that the input told in the recorded run."""
        numbers = call.node.meta["told"] | call.node.meta.get("numbers", {})
        told = copy.copy(call)
        told.args = self._resolve(tuple(call.node.args), numbers)
        told.kwargs = self._resolve(dict(call.node.kwargs), numbers)
        return told

    def _give(self, call: Call, place: tuple[int, str], value: Any) -> None:
        position, name = place
        if position < len(call.args):
            call.args = (*call.args[:position], value, *call.args[position + 1 :])
        else:
            call.kwargs = {**call.kwargs, name: value}

    def is_free(self, node: fx.Node, dim: int) -> bool:
        """Whether a dimension is no width, but the batch's or one of positions."""
        x = self.before[node]
        if not isinstance(x, Channels) or x.axis(dim) is not None:
            return False
        return (node, dim % len(x.shape)) not in self._relations.read_dims

    def _keep_numbers(self, call: Call, sizes: Container[Any]) -> None:
        """A number that the code computes from a width (``y / y.shape[1]``) stays what it was, but
        for ``sizes``, the arguments that have to change."""
        node = call.node
        if node.graph is not self.trace.graph:
            return
        given = [((i, ""), n, call.args[i]) for i, n in enumerate(node.args) if i not in sizes]
        given += [
            ((len(node.args), key), n, call.kwargs[key])
            for key, n in node.kwargs.items() if key not in sizes
        ]  # fmt: skip
        for place, argument, computed in given:
            if isinstance(argument, (fx.Node, tuple, list)):
                old = fx.node.map_arg(argument, lambda n: n.meta["spec"])
                if _is_number(old) and computed != old:
                    units = self.units_around(node)
                    self.blame(WrongSize(units, node, place, computed, old))
                    self._give(call, place, old)

    # -- that layers have -------------------------------------------------------------------------

    def _attribute(self, node: fx.Node) -> Any:
        new = self.new_attribute(str(node.target))
        return super()._attribute(node) if new is None else new

    def new_attribute(self, name: str) -> Any:
        """An attribute's new value, or None where it keeps the one it has."""
        path, _, key = name.rpartition(".")
        return self.attributes.get(name, self.module_sizes.get(path, {}).get(key))

    def _module_sizes(self, call: Call) -> None:
        """New attributes of a leaf module, which all its calls have to agree on."""
        pattern = call.pattern
        if call.module is None or pattern is None or pattern.attributes is None:
            return
        if self.trace.computed_by_hook(call.path):
            return  # left whole
        views, spoken = self._views(call)
        if views and not spoken:
            return  # its pattern has not spoken of its tensors: they stay whole
        first = call.inputs[0] if call.inputs else None
        shape = first.shape if isinstance(first, Channels) else ()
        shape = self.tensor_shape(first) if isinstance(first, Named) else shape
        found = pattern.attributes(call.module, NewSizes(self, call.node, views, shape))
        forward = found.pop("forward", None)
        if forward is not None and type(call.module).forward is not forward:
            self.forwards[call.path] = forward
        changed: dict[str, dict[str, Any]] = {call.path: {}}
        for name, value in found.items():
            path, _, key = f"{call.path}.{name}".rpartition(".")  # of a part of the layer, too
            if read_attribute(call.module, name) != value:
                changed.setdefault(path, {})[key] = value
        known = {path: self.module_sizes.setdefault(path, keys) for path, keys in changed.items()}
        if known != changed:
            units = torch.cat([a.units.reshape(-1) for x in call.inputs if isinstance(x, Channels)
                               for a in x.axes] or [torch.zeros(0, dtype=torch.int64)])  # fmt: skip
            raise Mismatch(units, f"two calls of {call.path} would need different sizes", call)

    def _views(self, call: Call) -> tuple[dict[str, tuple[int, ...]], bool]:
        """New shapes of a leaf module's tensors, as patterns see them, and whether any has axes."""
        views, spoken = {}, False
        for name in self.trace.tensor_names(call.path):
            value = self.member(call, name)
            if value is not None:
                known = value.name in self._by_name
                whole = self._relations.views.get(value.name, value.spec.shape)
                views[name] = self.view_shape(value.name) if known else whole
                if value.name in self.layouts:  # the pattern has just spoken of it
                    views[name] = self.layouts[value.name]
                spoken = spoken or known
        return views, spoken

    def _tied_sizes(self) -> None:
        """New attributes of layers that are not called, but share a tensor with one that is."""
        called = {id(self.modules[path]) for path in self.trace.called}
        for path, module in self.modules.items():
            pattern = None if id(module) in called else registry.for_module(module)
            if pattern is None or pattern.attributes is None or path in self.module_sizes:
                continue
            node = next(iter(self.trace.graph.nodes))  # it has none of its own
            call = Call(self, node, pattern, (), {}, module=module, path=path)
            views, spoken = self._views(call)
            cut = any(
                len(view) != read_attribute(module, name).dim() for name, view in views.items()
            )
            # With no input, a norm says nothing.
            if spoken and not cut and set(views) <= {"weight", "bias"}:
                found = pattern.attributes(module, NewSizes(self, node, views))
                changed = {k: v for k, v in found.items() if getattr(module, k) != v}
                self.module_sizes[path] = changed


def _is_number(value: Any) -> bool:
    """Or some of them."""
    if isinstance(value, (tuple, list)):
        return all(map(_is_number, value))
    return isinstance(value, (int, float))
