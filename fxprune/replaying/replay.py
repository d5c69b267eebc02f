"""The second walk: the trace at its new widths.

Labels of kept slices run through the same rules. Where tensors meet, their units have to agree in
number and order; the order in which each parameter's slices are kept comes out, and the sizes of
:mod:`.resizing`: those that the model's code has to compute, and those that it will.
"""

from __future__ import annotations

import math
from collections.abc import Container, Iterable
from dataclasses import replace
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, fx

from ..rules.call import Call, Named, Roles
from ..rules.channels import Axis, Channels, SourceAxis, blank_axes, ends_of
from ..rules.shapes import broadcast_shape, view_dims
from .answers import wrong_answers
from .faults import Fault
from .orders import DIFFERENT, Mismatch, matching
from .resizing import Resizing


class Replay(Resizing):
    """Args: those of :class:`fxprune.replaying.resizing.Resizing`."""

    @cached_property
    def _counted(self) -> set[fx.Node | None]:
        return {note.node for note in self._relations.approximate}

    @cached_property
    def _sources(self) -> dict[Any, SourceAxis]:
        """By layout: of how many dimensions, for it is narrower by now; of a tensor that is used in
        several, and stays whole, as it is."""
        sources = self._relations.sources
        ranks = {(s.name, len(s.view), s.dims): s for s in sources}
        return {**ranks, **{s.key: s for s in sources if s.name in self.layouts}}

    @cached_property
    def _in_layouts(self) -> set[int]:
        return {s.first for s in self._relations.sources if s.name in self.layouts}

    # -- the walk ---------------------------------------------------------------------------------

    def run(self) -> None:
        self._tied_sizes()  # which the code may read
        super().run()
        self._check_indices()
        self._check_dimensions()

    def _check_dimensions(self) -> None:
        """Of a tensor with dimensions of its own for what a view cuts, whole slices go along the
        leading ones: only along the last may each keep others."""
        for s in self._relations.sources:
            order = self.order[s.first] if len(s.dims) > 1 else None
            if order is None or order.numel() == s.size:
                continue
            merged = view_dims(s.tensor_shape, s.view)
            home = {d: i for i, dims in enumerate(merged) for d in dims}
            for i, d in enumerate(s.dims[:-1]):
                at = s.along(order, i).movedim(i, 0).flatten(1)
                if home[d] != home[s.dims[-1]] and not bool((at == at[:, :1]).all()):
                    raise Mismatch(s.labels(), DIFFERENT, None)

    def _check_indices(self) -> None:
        """A buffer of positions has one set of numbers for all that is done with it."""
        for node in self.trace.graph.nodes:
            new = self.indices.get(str(node.target)) if node.op == "get_attr" else None
            if new is None or torch.equal(new, self.trace.tensor(str(node.target)).cpu()):
                continue
            name, told = str(node.target), self._told[str(node.target)]
            if not all(user in told and torch.equal(told[user], new) for user in node.users):
                raise Mismatch(self.indexed[name], f"{name} is used for something else, too", None)

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

    def _visit(self, node: fx.Node, *, again: bool = False) -> Any:
        """A plain call needs no rule here: what went in as it stood comes out as it stood."""
        spoken = self._relations.plain.get(node)
        inputs = node.all_input_nodes
        if (
            spoken is None or again or node in self._straighten
            or not self._moved.isdisjoint(spoken)
            or not self._in_layouts.isdisjoint(spoken)
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

    # -- what comes out ---------------------------------------------------------------------------

    def faults(self) -> list[Fault]:
        """What the model's own code would do wrongly, in the order of the trace."""
        at_nodes = [fault for node in self.trace.graph.nodes for fault in self.found.get(node, ())]
        return [*at_nodes, *wrong_answers(self)]

    def positions_kept(self, old: Channels, new: Channels) -> list[tuple[int, Tensor]]:
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

    # -- meanings ---------------------------------------------------------------------------------

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

    def source(self, value: Named, roles: Roles, view: tuple[int, ...] | None) -> Channels:
        view = value.shape if view is None else view
        several = value.name in self.layouts
        if several:
            self.layouts[value.name] = view
        layout = view if several else len(view)
        found = [self._sources.get((value.name, layout, dims)) for dims in roles.values()]
        axes = [Axis(s.dims, self.order[s.first] + s.first, source=s) for s in found if s]
        known = self._by_name.get(value.name)
        if known and len(known[0].view) == len(view) and not several:
            view = self.view_shape(value.name)
        return Channels(view, tuple(axes))

    def blank(
        self, call: Call, value: float | None, dims: Container[int] | None = None
    ) -> Channels:
        known = blank_axes(self.before[call.node], dims)
        axes = (replace(a, units=self._compress(a.units, a.units)) for a in known)
        return Channels(call.shape, tuple(axes))

    def put_around(
        self, call: Call, axis: Axis, dim: int, amounts: tuple[int, int], value: float | None
    ) -> tuple[Axis, Axis]:
        before, behind = (
            replace(end, units=self._compress(end.units, end.units))
            for end in ends_of(self.before[call.node], dim, amounts)
        )
        at = axis.dims.index(dim)
        beside = axis.units.narrow(at, 0, 1).shape
        if any(
            e.units.numel() and e.units.narrow(at, 0, 1).shape != beside for e in (before, behind)
        ):
            raise self._misfit(call)
        return before, behind

    def index_values(self, call: Call, index: Named, x: Channels, dim: int) -> Tensor | None:
        """Positions among the kept channels."""
        found = self._index_values(call, index, x, dim)
        self._told.setdefault(index.name, {})[call.node] = found
        return found

    def _index_values(self, call: Call, index: Named, x: Channels, dim: int) -> Tensor:
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
        self.indexed[index.name] = units
        if not torch.equal(known, new):
            raise Mismatch(units, f"{index.name} indexes two different sets of channels", call)
        return new


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
