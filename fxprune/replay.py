"""The second walk: the trace at its new widths.

Labels of kept slices run through the same rules. Where tensors meet, their units have to agree in
number and order; the order in which each parameter's slices are kept, the sizes that the model's
code has to compute, and those that it will compute, come out.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Container, Iterable
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor, fx

from . import registry
from .answers import wrong_answers
from .call import Call, Named, Roles, leaves
from .channels import Axis, Channels, SourceAxis, blank_axes
from .faults import Fault, WrongSize, same_sizes
from .inspecting import read_attribute
from .layout import broadcast_shape, view_dims
from .orders import Mismatch, Orders, matching
from .recording import Trace, is_size
from .relations import Relations
from .spec import TOLD
from .widths import NewSizes, OldSizes


class Replay(Orders):
    """Args:
    trace: the recorded run.
    relations: of the first walk.
    kept: for each unit class, whether it stays.
    attributes: module attributes that will be set, with the values they will have.
    orders: kept positions of producers, by first label, that are not to be ascending.
    straighten: nodes whose channels are to be put in the order of the model as it is.
    """

    def __init__(
        self,
        trace: Trace,
        relations: Relations,
        kept: np.ndarray,
        attributes: dict[str, Any] | None = None,
        orders: dict[int, Tensor] | None = None,
        straighten: Container[fx.Node] = (),
        *,
        attention: str = "heads",
    ) -> None:
        super().__init__(trace, relations, kept, orders, straighten, attention=attention)
        self.attributes = attributes or {}
        self.indices: dict[str, Tensor] = {}  # index buffers, rewritten
        self.module_sizes: dict[str, dict[str, Any]] = {}
        self.forwards: dict[str, Callable[..., Any]] = {}  # of modules that need another
        self.calls: dict[fx.Node, tuple[Any, Any]] = {}  # of calls that count channels
        self._counted = {note.node for note in relations.approximate}
        self._sources = {(s.name, len(s.view), s.dims): s for s in relations.sources}
        self._by_name: dict[str, list[SourceAxis]] = {}
        for s in relations.sources:
            self._by_name.setdefault(s.name, []).append(s)

    # -- sizes ----------------------------------------------------------------------------------

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
            if len(axis.view) == len(view):
                for d, n in zip(axis.dims, self.order[axis.first].shape, strict=True):
                    view[d] = n
        return tuple(view)

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

    def tensor_shape(self, value: Named) -> tuple[int, ...]:
        if value.name not in self._by_name:
            return value.spec.shape
        old = self._by_name[value.name][0].view
        new = self.view_shape(value.name)
        return tuple(math.prod(new[d] for d in dims) for dims in view_dims(value.spec.shape, old))

    def number(self, node: fx.Node, args: tuple[Any, ...]) -> Any:
        if is_size(node):
            source, dim = args
            return (source.shape if isinstance(source, Channels) else self.tensor_shape(source))[
                dim
            ]
        return node.target(*args) if callable(node.target) else node.meta["spec"]

    def _attribute(self, node: fx.Node) -> Any:
        new = self.new_attribute(str(node.target))
        return super()._attribute(node) if new is None else new

    def new_attribute(self, name: str) -> Any:
        """An attribute's new value, or None where it keeps the one it has."""
        path, _, key = name.rpartition(".")
        return self.attributes.get(name, self.module_sizes.get(path, {}).get(key))

    def run(self) -> None:
        self._tied_sizes()  # which the code may read
        super().run()

    def resume(self, attributes: dict[str, Any]) -> None:
        """Go on with other attributes: calls that read them, or what others make of them, are
        looked at again, and no others."""
        self.attributes = attributes
        changed: set[fx.Node] = set()
        with torch.no_grad():
            for node in self.trace.graph.nodes:
                if node.op == "get_attr":
                    value = self._attribute(node)
                elif node.op != "output" and not changed.isdisjoint(node.all_input_nodes):
                    value = self._visit_again(node)
                else:
                    continue
                if not _same(self.values[node], value):
                    self.values[node] = value
                    changed.add(node)

    def _visit_again(self, node: fx.Node) -> Any:
        beneath = node.meta.get("aten")
        for each in (node, *(() if beneath is None else beneath.nodes)):
            self._asked.pop(each, None)
        self.found.pop(node, None)
        self._disturbed.discard(node)
        return self._visit(node, again=True)

    def faults(self) -> list[Fault]:
        """What the model's own code would do wrongly, in the order of the trace."""
        at_nodes = [fault for node in self.trace.graph.nodes for fault in self.found.get(node, ())]
        return [*at_nodes, *wrong_answers(self)]

    def resize(self, call: Call) -> None:
        resize = None if call.pattern is None else call.pattern.resize
        found = {} if resize is None else dict(resize(call, NewSizes(self, call.node)))
        self._keep_numbers(call, {key for place in found if place for key in place})
        instead = found.pop(None, None)
        for (position, name), needed in found.items():
            given = position < len(call.args)
            computed = call.args[position] if given else call.kwargs.get(name)
            if any(leaves(computed)):
                computed = self._as_told(call, (position, name), computed)
            written = call.node.args[position] if given else call.node.kwargs.get(name)
            if not same_sizes(computed, needed, written):
                units = self.units_around(call.node)
                self.blame(WrongSize(units, call.node, (position, name), computed, needed, instead))
            self._give(call, (position, name), needed)

    def _as_told(self, call: Call, place: tuple[int, str], computed: Any) -> Any:
        """Sizes with what tensors among them tell, which is what they told: no width of channels
        where that is what the size was."""
        old = OldSizes({}, (), call.spec)
        before = call.pattern.resize(call, old).get(place)  # type: ignore[union-attr, misc, arg-type]
        if isinstance(computed, (Channels, Named)) and isinstance(before, int):
            return before
        several = isinstance(before, (tuple, list)) and isinstance(computed, (tuple, list))
        if not several or len(before) != len(computed):
            return computed
        pairs = zip(computed, before, strict=True)
        return [b if any(leaves(c)) and isinstance(b, int) else c for c, b in pairs]

    def _give(self, call: Call, place: tuple[int, str], value: Any) -> None:
        position, name = place
        if position < len(call.args):
            call.args = (*call.args[:position], value, *call.args[position + 1 :])
        else:
            call.kwargs = {**call.kwargs, name: value}

    def positions_kept(
        self, node: fx.Node, old: Channels, new: Channels
    ) -> list[tuple[int, Tensor]]:
        """For each dimension of a value that shrinks, the old positions that stay, in order.

        Only of axes that cover one dimension: what counts channels sees no cut ones ragged.
        """
        result = []
        for axis in old.axes:
            for i, d in enumerate(axis.dims):
                kept = self.kept(axis.units)
                others = [o for o in range(kept.dim()) if o != i]
                keep = kept.amax(others) if others else kept
                if bool(keep.all()):
                    continue
                after = new.axis(d)
                order = torch.nonzero(keep).reshape(-1)
                if len(axis.dims) == 1 and after is not None and len(after.dims) == 1:
                    order = order[matching(axis.units[order], after.units)]
                result.append((d, order))
        return result

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

    def units_around(self, node: fx.Node) -> np.ndarray:
        """Units of a call's result and inputs, and of the tensors its sizes are computed from."""
        units: list[Tensor] = []
        seen: set[fx.Node] = set()

        def visit(current: fx.Node) -> None:
            if current in seen:
                return
            seen.add(current)
            value = self.before[current]
            for x in value if isinstance(value, (tuple, list)) else [value]:
                if isinstance(x, Channels):
                    units.extend(axis.units.reshape(-1) for axis in x.axes)
            if current is node or not isinstance(value, (Channels, tuple, list, Named, *TOLD, str)):
                for source in current.all_input_nodes:
                    visit(source)

        visit(node)
        return torch.cat(units).numpy() if units else np.zeros(0, dtype=np.int64)

    # -- meanings -------------------------------------------------------------------------------

    def _visit(self, node: fx.Node, *, again: bool = False) -> Any:
        """A plain call needs no rule here: what went in as it stood comes out as it stood."""
        spoken = self._relations.plain.get(node)
        inputs = node.all_input_nodes
        if (
            spoken is None or again or node in self._straighten
            or not self._moved.isdisjoint(spoken)
            or not self._disturbed.isdisjoint(inputs)
        ):  # fmt: skip
            value = super()._visit(node)
            if not self._stands(self.before[node], value):
                self._disturbed.add(node)
            return value
        self._pinned |= spoken
        if node.op == "call_module":
            call = Call(self, node, self.trace.pattern(node), (), {}, path=str(node.target))
            call.module = self.modules[call.path]
            call.inputs = [self.values[source] for source in inputs]
            self._module_sizes(call)
        return self.shrunk(self.before[node])

    def shrunk(self, x: Channels) -> Channels:
        """What is left of a value whose channels stand as they stood."""
        axes = (Axis(a.dims, self.left(a.units), blank=a.blank) for a in x.axes)
        return Channels(self.new_shape(x), tuple(axes), x.scalar, x.sums_to_one)

    def _stands(self, before: Any, after: Any) -> bool:
        """Whether channels that lie on one dimension stand as they stood."""
        if isinstance(before, (tuple, list)):
            return all(map(self._stands, before, after))
        for axis in before.axes if isinstance(before, Channels) else ():
            if len(axis.dims) == 1:
                now, left = after.axis(axis.dims[0]), self.left(axis.units)
                if now is None or now.dims != axis.dims or not torch.equal(now.units, left):
                    return False
        return True

    def apply(self, call: Call) -> Any:
        if call.node in self._counted:
            self.calls[call.node] = (call.args, call.kwargs)
        result = super().apply(call)
        self._check_shape(call, result)
        self._module_sizes(call)
        return self.straightened(call, result) if call.node in self._straighten else result

    def _check_shape(self, call: Call, result: Any) -> None:
        """A size is how many channels lie there; where none lie, it is what it was."""
        for x in result if isinstance(result, tuple) else (result,):
            if isinstance(x, Channels) and any(
                x.shape[d] != n for a in x.axes for d, n in zip(a.dims, a.units.shape, strict=True)
            ):
                raise self._misfit(call)
        before = self.before.get(call.node)
        if not isinstance(before, Channels) or not isinstance(result, Channels):
            return
        moving = {d for axis in before.axes for d in axis.dims}
        sizes = zip(before.shape, result.shape, strict=True)
        if any(old != new for d, (old, new) in enumerate(sizes) if d not in moving):
            raise self._misfit(call)

    def viewed(self, call: Call, x: Channels, shape: tuple[int, ...]) -> None:
        if math.prod(x.shape) != math.prod(shape):
            raise self._misfit(call)

    def meet(self, call, operands, function=None, shape=None, *, together=True):
        to = broadcast_shape([x.shape for x in operands]) if shape is None else shape
        if any(
            n not in (1, wanted)
            for x in operands for n, wanted in zip(x.shape[::-1], to[::-1], strict=False)
        ):  # fmt: skip
            raise self._misfit(call)
        if any(len(axis.dims) > 1 for x in operands for axis in x.axes):
            rank = len(to)  # a tensor of fixed width minds which slice stands where
            for x in operands:
                rigid = [
                    d - rank for d in range(rank - len(x.shape), rank)
                    if any(
                        y is not x and len(y.shape) >= rank - d
                        and y.shape[d - rank] > 1 and y.axis(d - rank) is None
                        for y in operands
                    )
                ]  # fmt: skip
                self._in_place(call, x, rigid)
        return super().meet(call, operands, function, to, together=together)

    def move(self, call, x, function, shape=None, *, touched=()):
        def tried(labels: Tensor) -> Tensor:
            try:
                return function(labels)
            except (IndexError, RuntimeError) as error:  # of PyTorch: it has other sizes now
                raise self._misfit(call) from error

        self._in_place(call, x, touched)
        return super().move(call, x, tried, shape, touched=touched)

    def _in_place(self, call: Call, x: Channels, dims: Iterable[int]) -> None:
        """What is done to positions along some of the dimensions that a channel dimension was cut
        in is done to the same slices as ever: they have to stand where they stood."""
        at = {d % len(x.shape) for d in dims}
        cut = [axis for axis in x.axes if at & {*axis.dims} and not at >= {*axis.dims}]
        if not cut:
            return
        differing = {
            id(now): wanted for source in call.node.all_input_nodes
            for _, now, wanted in self._differing(self.before.get(source), self.values.get(source))
        }  # fmt: skip
        for axis in cut:
            wanted = differing.get(id(axis.units))
            if wanted is not None:
                mismatch = self._misfit(call)
                mismatch.reorder = self._made(wanted.reshape(-1))
                raise mismatch

    def _misfit(self, call: Call) -> Mismatch:
        units = torch.from_numpy(self.units_around(call.node))
        return Mismatch(units, "what is left of them does not fit together", call)

    def groups_of(self, weight: Named, old: int) -> int:
        axes = self._by_name.get(weight.name)
        return self.view_shape(weight.name)[0] if axes and axes[0].view[0] == old else old

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
                views[name] = self.view_shape(value.name) if known else value.spec.shape
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

    def source(self, value: Named, roles: Roles, view: tuple[int, ...] | None) -> Channels:
        rank = len(value.spec.shape if view is None else view)
        axes = []
        for dims in roles.values():
            axis = self._sources.get((value.name, rank, dims))
            if axis is not None:
                axes.append(Axis(dims, self.order[axis.first] + axis.first, source=axis))
        if value.name not in self._by_name:
            return Channels(value.spec.shape if view is None else view)
        if rank != len(self._by_name[value.name][0].view):
            return Channels(value.spec.shape if view is None else view, tuple(axes))
        return Channels(self.view_shape(value.name), tuple(axes))

    def blank(
        self, call: Call, value: float | None, dims: Container[int] | None = None
    ) -> Channels:
        known = blank_axes(self.before[call.node], dims)
        axes = (replace(a, units=self._compress(a.units, a.units)) for a in known)
        return Channels(call.shape, tuple(axes))

    def index_values(self, call: Call, index: Named, x: Channels, dim: int) -> Tensor | None:
        """Positions among the kept channels."""
        old = self.trace.tensor(index.name).cpu()
        source = next(n for n in call.node.all_input_nodes if n.target == index.name)
        holder = next(n for n in call.node.all_input_nodes if n is not source)
        before = self.before[holder]
        axis = before.axis(dim) if isinstance(before, Channels) else None
        bare = self._sources.get((str(holder.target), len(x.shape), (dim,)))
        units = axis.units if axis is not None else None if bare is None else bare.labels()
        if units is None or units.dim() > 1:
            return old
        keep = self.kept(units)
        if old.dim() != 1:
            if not bool(keep.all()):
                raise Mismatch(units, f"{index.name} indexes them in several dimensions", call)
            return old
        rank = torch.cumsum(keep, 0) - 1
        new = rank[old[keep[old]]]
        known = self.indices.setdefault(index.name, new)
        if not torch.equal(known, new):
            raise Mismatch(units, f"{index.name} indexes two different sets of channels", call)
        return new


def _is_number(value: Any) -> bool:
    """Or some of them."""
    if isinstance(value, (tuple, list)):
        return all(map(_is_number, value))
    return isinstance(value, (int, float))


def _same(before: Any, after: Any) -> bool:
    """Whether a value is the one that it was: for tensors, whether their channels are."""
    if isinstance(before, (tuple, list)):
        alike = isinstance(after, (tuple, list)) and len(before) == len(after)
        return alike and all(map(_same, before, after))
    if isinstance(before, Channels):
        return (
            isinstance(after, Channels)
            and (before.shape, before.scalar) == (after.shape, after.scalar)
            and [a.dims for a in before.axes] == [a.dims for a in after.axes]
            and all(
                torch.equal(a.units, b.units) for a, b in zip(before.axes, after.axes, strict=True)
            )
        )
    return type(before) is type(after) and before == after
