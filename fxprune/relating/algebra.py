"""The algebra of channels: the words in which a pattern says how channels hang together.

They mean the same in every walk (:mod:`.walk`), but for those of :mod:`.meanings`.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from torch import Tensor, fx
from torch.nn.utils import parametrize

from ..modules.inspecting import read_from
from ..rules.call import Call, Named, Turned, leaves
from ..rules.channels import (
    Axis,
    Channels,
    compact,
    positions,
    remap,
    run_on,
    varying,
)
from ..rules.shapes import broadcast_shape, clusters, pad, place, reshape_groups, with_rank
from ..rules.sizes import Dimension
from ..rules.spec import Spec
from ..tracing.trace import Trace, is_size
from .meanings import Meanings

IS_KERNEL = "they are a kernel's"

Runs = list[tuple[list[int], list[int]]]


class Algebra(Meanings):
    """What a pattern's rule gets to speak with."""

    def __init__(self, trace: Trace) -> None:
        super().__init__(trace)
        self.values: dict[fx.Node, Any] = {}
        self.modules = trace.modules
        self._above: Any = None  # the call that the graph at work lies beneath
        self._varying: set[int] = set()  # labels of slices of which other inputs have others
        # Dimensions of nodes without channels that weights read: no other input has another size.
        self.read_dims: set[tuple[fx.Node, int]] = set()
        self.laid_over: dict[fx.Node, list[fx.Node]] = {}  # what lies beneath the result of a call

    def unknown(self, call: Call, reason: str = "") -> Any:
        """A call that nothing is known about: what goes in stays whole, what comes out is rigid."""
        if not reason:
            known = call.pattern is not None and call.pattern.rule is not None
            odd, new = " in a form that no pattern follows", ", which fxprune has no pattern for"
            reason = f"it goes into {call.name}{odd if known else new}"
        for value in call.inputs:
            self.freeze_all(value, reason, call)
        return self.rigid_result(call)

    # -- words for patterns: values -----------------------------------------------------------

    def channels(self, value: Any) -> Channels:
        """A value as Channels; a parameter used bare gets an axis on each dimension."""
        if isinstance(value, Turned):
            return value.seen(self.channels(value.whole))
        if isinstance(value, Named):
            together = self.trace.cuts.together.get(value.name)
            return self._by_itself(value, [together] if together else [])
        return value

    def lies_together(self, value: Named) -> bool:
        """Whether one axis of a parameter that is used bare lies over several of its dimensions."""
        return value.name in self.trace.cuts.together

    def _by_itself(self, value: Named, together: Sequence[tuple[int, ...]]) -> Channels:
        """A parameter used bare, with an axis on each dimension, or over several ``together``."""
        alone = set(range(len(value.spec.shape))) - {d for dims in together for d in dims}
        axes = sorted([*together, *((d,) for d in alone)])
        return self.source(value, {f"bare{dims[0]}": dims for dims in axes}, None)

    def varies(self, number: Any) -> bool:
        """Whether a number of the graph is made of sizes that are no widths: other inputs may have
        others."""
        if not isinstance(number, fx.Node) or isinstance(number.meta.get("spec"), Spec):
            return False
        if not is_size(number):
            return any(map(self.varies, number.all_input_nodes))
        return self.is_free_size(Dimension(*number.args))  # type: ignore[arg-type]

    def is_free_size(self, size: Dimension) -> bool:
        """Whether it is no width: other inputs may have another."""
        x = self.values.get(size.source)
        if not isinstance(x, Channels):
            return False
        axis = x.axis(size.dim)
        return axis is None or (axis.units.numel() > 0 and int(axis.units.min()) in self._varying)

    def is_unsure(self, call: Call) -> bool:
        """Whether another run may have another call there, or other numbers in it."""
        node, fixed = self._recorded(call), self.trace.fixed
        return any(map(self._may_be_another, call.node.all_input_nodes)) or (
            fixed is not None and not fixed.is_sure(node, self.is_free_size)
        )

    def is_given_numbers(self, call: Call) -> bool:
        """Whether a call is given any number, or makes its result with one."""
        tensors = all(isinstance(n.meta.get("spec"), Spec) for n in call.node.all_input_nodes)
        return not tensors or bool(self._recorded(call).meta.get("given"))

    def may_read_others(self, call: Call) -> bool:
        """Whether a call may read other constants in another run."""
        fixed, node = self.trace.fixed, self._recorded(call)
        return fixed is not None and fixed.is_chosen(node, self.is_free_size, reads=True)

    def _recorded(self, call: Call) -> fx.Node:
        """The call of the model's that a call is, or is beneath."""
        return call.node if call.node.graph is self.trace.graph else self._above

    def _may_be_another(self, number: fx.Node) -> bool:
        """Whether a number of the graph may be another in another run."""
        if isinstance(number.meta.get("spec"), Spec):
            return False
        if number.op == "get_attr":
            return self.trace.fixed is not None and self.trace.fixed.is_changed(str(number.target))
        if number.target is operator.getitem:
            return True  # of a list: it may be another one's turn
        if not is_size(number):
            return any(map(self._may_be_another, number.all_input_nodes))
        return self.varies(number)

    def number_given(self, call: Call, position: int, name: str) -> float | None:
        """The number that a call is given; None where a tensor or the size of an input tells it."""
        value = call.arg(position, name)
        return value if isinstance(value, (int, float)) and not self.is_unsure(call) else None

    def sized_by(self, x: Channels, numbers: Sequence[Any]) -> Channels:
        """``x``, whose sizes are these numbers of the graph."""
        for dim, number in enumerate(numbers):
            axis = x.axis(dim)
            if axis is not None and self.varies(number):
                self._varying.update(axis.units.reshape(-1).tolist())
        return x

    def member(self, call: Call, name: str) -> Named | None:
        """A parameter or buffer of the call's leaf module, or None where it has none."""
        key = (call.path, name)
        if key not in self.trace.members:
            self.trace.members[key] = self._member(call, name)
        return self.trace.members[key]

    def _member(self, call: Call, name: str) -> Named | None:
        path, _, key = name.rpartition(".")
        module = self.trace.modules[call.path]  # whose tensors the trace has names for
        owner = module.get_submodule(path) if path else module
        if key in owner._parameters:
            value: Any = owner._parameters[key]  # None for a bias that it goes without
        else:
            try:
                value = read_from(owner, key)
            except AttributeError:
                return None
        if not isinstance(value, Tensor):
            return None
        full = self.trace.names.get(id(value))
        if full is None:  # computed by a parametrization
            full = f"{call.path}.{name}"
            if not parametrize.is_parametrized(owner, key):
                return None
        return Named(full, Spec(tuple(value.shape), value.dtype))

    # -- words for patterns: relations --------------------------------------------------------

    def elementwise(self, call: Call) -> Channels:
        """Each element of the result depends on the elements it stands over."""
        given = [v for v in call.inputs if isinstance(v, Channels)]
        values = [v if isinstance(v, Channels) else self._bare(v, given) for v in call.inputs]
        known = isinstance(call.spec, Spec) and call.is_floating(flags=True)
        return self.meet(call, values, call.replay if known else None)

    def _bare(self, value: Named, others: Sequence[Channels]) -> Channels:
        """A parameter used bare: an axis on each dimension, but one over those that an axis of what
        it meets lies on together (a vector for every head)."""
        if self.lies_together(value):
            return self.channels(value)
        shape = value.spec.shape
        rank = max([len(x.shape) for x in others], default=0)
        together: list[tuple[int, ...]] = []
        for x in others:
            for axis in with_rank(x, rank).axes:
                dims = tuple(d - rank + len(shape) for d in axis.dims)
                inside = all(d >= 0 and shape[d] > 1 for d in dims)
                if len(dims) > 1 and inside and not any(set(dims) & set(t) for t in together):
                    together.append(dims)
        return self._by_itself(value, together)

    def meet(
        self,
        call: Call,
        operands: Sequence[Channels],
        function: Callable[[Sequence[Tensor]], Tensor] | None = None,
        shape: tuple[int, ...] | None = None,
        *,
        together: bool = True,
    ) -> Channels:
        """Operands that meet under broadcasting share their units.

        ``function`` computes the result's constants from the operands' (default: not constant);
        ``together``: it treats each element by itself, along dimensions without channels at least.
        """
        shape = broadcast_shape([x.shape for x in operands]) if shape is None else shape
        if isinstance(call.spec, Spec) and call.spec.shape == shape:
            self.laid_over[call.node] = [
                node for node in call.node.all_input_nodes
                if any(self.values.get(node) is x for x in operands)
            ]  # fmt: skip
        shifted = [with_rank(x, len(shape)) for x in operands]
        axes = [
            axis
            for dims in clusters(shifted)
            if (axis := self._meet_axis(call, shifted, dims, shape, function, together)) is not None
        ]
        return Channels(shape, tuple(axes), self.meet_scalar(call, operands, function))

    def _meet_axis(self, call, operands, dims, shape, function, together):
        sizes = tuple([shape[d] for d in dims])
        laid, wide, followers = [], [], []
        touched = [x.touching(dims) for x in operands]
        for axes in touched:
            if len(axes) > 1:
                self.apart(axes, len(dims))
            for axis in axes:
                if axis.dims == dims and axis.units.shape == sizes:
                    laid.append(axis)
                elif axis.blank:
                    followers.append(axis)
                else:
                    self.spread(axis)
                    wide.append(Axis(dims, axis.over(dims).expand(sizes)))
        # A parameter's own axis follows the order of what it meets.
        if len(laid) > 1:
            laid.sort(key=lambda axis: (axis.blank, axis.source is not None))
        laid += wide
        if not laid:
            laid, followers = [Axis(dims, a.over(dims).expand(sizes)) for a in followers], []
        first = laid[0]
        for axis in followers:
            self.follow(axis, first, call)
        for other in laid[1:]:
            self.join(first, other, call)
        for x, axes in zip(operands, touched, strict=True):
            if len(axes) == 1 and axes[0].dims == dims:  # as mostly
                continue
            own = {d for axis in axes for d in axis.dims}
            if not own.issuperset(dims):
                long = [d for d in dims if shape[d] > 1]
                stiff = [d for d in long if x.shape[d] > 1 and d not in own]
                stays = bool(long) and stiff == long
                if len(dims) > 1:  # of which one may be left as the only one along a dimension
                    stays = self.decide(call, partial(bool, stays))
                if stays:
                    self.freeze(first, f"it meets a tensor of fixed width in {call.name}", call)
                    return None
                elif stiff:
                    self.hold(first, stiff)
        constant, border = self.meet_constants(
            call, operands, touched, dims, shape, function, together
        )
        alike = all([axis.blank for axes in touched for axis in axes])
        return Axis(dims, first.units, constant, border, blank=alike)

    def move(
        self,
        call: Call,
        x: Channels,
        function: Callable[[Tensor], Tensor],
        shape: tuple[int, ...] | None = None,
        *,
        touched: Iterable[int] = (),
    ) -> Channels:
        """Slices of ``x`` are moved, dropped or repeated as ``function`` does it to any tensor.

        ``touched`` are the dimensions whose sizes the op minds; the others may be of size 1 for it.
        """
        shape = call.shape if shape is None else shape
        axes: list[Axis] = []
        for axis in x.axes:
            units, old = run_on(axis, x, function, touched)
            dims = self.decide(call, partial(varying, units))
            if not dims:
                if units.numel() and not all(map(is_size, call.node.users)):  # the rest is not read
                    one = Axis((0,), units.reshape(-1)[:1])
                    self.freeze(one, f"one slice of it is read by itself in {call.name}", call)
                continue
            units, said = compact(axis, units, old, dims)
            axes.append(Axis(dims, units, said, axis.border, blank=axis.blank))
        return Channels(shape, self._disjoint(call, axes))

    def reindex(self, call: Call, x: Channels, dim: int, index: Tensor) -> Channels:
        """Slice ``j`` of the result along ``dim`` is slice ``index[j]`` of ``x``, whatever becomes
        of the other dimensions. ``index`` has to be worked out from ``x.shape``, which has the
        widths of this pass."""
        dim %= len(x.shape)
        rest = [d for d in range(len(x.shape)) if d != dim]
        x = self.freeze_dims(
            x, rest, f"by its pattern, slices are mixed there by {call.name}", call
        )
        return self.move(call, x, lambda t: t.index_select(dim, index), touched=[dim])

    def _disjoint(self, call: Call, axes: list[Axis]) -> tuple[Axis, ...]:
        """Axes, each checked as a rectangle; of several that fell on one dimension one goes on."""
        kept: list[Axis] = []
        for axis in axes:
            clash = [other for other in kept if set(other.dims) & set(axis.dims)]
            if clash:
                mixed = [*clash, axis]
                first = self.decide(call, partial(self._first_of, mixed))
                for other in [*mixed[:first], *mixed[first + 1 :]]:
                    self.freeze(other, f"two channel dimensions are mixed in {call.name}", call)
                kept = [other for other in kept if other not in clash] + [mixed[first]]
            else:
                kept.append(axis)
        for axis in kept:
            self.rectangle(axis, call)
        return tuple(kept)

    def _first_of(self, axes: Sequence[Axis]) -> int:
        """Which of several axes may shrink: one that layers make; heads, or slices of each head."""
        made = [i for i, axis in enumerate(axes) if self.is_made(axis)] or [*range(len(axes))]
        return made[-1 if self.attention == "head_dim" else 0]

    def view(self, call: Call, x: Channels, shape: tuple[int, ...]) -> Channels:
        """The elements of ``x`` in the same order under another shape."""
        self.viewed(call, x, shape)
        axes: list[Axis] = []
        runs = self.decide(call, lambda: reshape_groups(x.shape, shape))
        for old, new in runs:
            inside = x.touching(old)
            if len(old) == len(new) == 1 and inside and len(inside[0].dims) == 1:
                axes.append(replace(inside[0], dims=(new[0],)))
                continue
            if len(inside) > 1:  # how often something is repeated, beside channels
                for axis in inside:
                    if axis.blank:
                        self.freeze(axis, "each of them is repeated beside others", call)
                inside = [axis for axis in inside if not axis.blank]
            if not inside:
                continue
            spanning = [a for a in inside if not set(a.dims) <= set(old)]
            if spanning:
                return self._view_whole(call, x, shape, runs)
            part = Channels(
                tuple(x.shape[d] for d in old),
                tuple(replace(a, dims=tuple(old.index(d) for d in a.dims)) for a in inside),
            )
            target = tuple(shape[d] for d in new)
            moved = self.move(
                call, part, lambda t: t.reshape(target), target, touched=range(len(old))
            )
            axes += [replace(a, dims=tuple(new[d] for d in a.dims)) for a in moved.axes]
        return Channels(shape, tuple(sorted(axes, key=lambda a: a.dims)), x.scalar)

    def _view_whole(self, call: Call, x: Channels, shape: tuple[int, ...], runs: Runs) -> Channels:
        straight = {new[0]: old[0] for old, new in runs if len(old) == len(new) == 1}
        touched = set(range(len(x.shape))) - set(straight.values())

        def function(t: Tensor) -> Tensor:
            return t.reshape(
                [t.size(straight[d]) if d in straight else n for d, n in enumerate(shape)]
            )

        return self.move(call, x, function, shape, touched=touched)

    def contract(
        self,
        call: Call,
        x: Channels,
        w: Channels,
        contracted: Sequence[tuple[int, int]],
        batch: Sequence[tuple[int, int, int]],
        free_x: Mapping[int, int],
        free_w: Mapping[int, int],
        shape: tuple[int, ...],
    ) -> Channels:
        """A sum of products over dimension pairs of ``x`` and ``w``.

        Contracted pairs share their units and end; batch pairs ``(x, w, result)`` share them and
        stay; free dimensions pass on to the result.
        """
        self._note_read(call, x, w, contracted)
        # In a space where each pair is one dimension, x and w meet as under broadcasting.
        pairs = [*contracted, *((a, b) for a, b, _ in batch)]
        rank = len(pairs)
        xs, extra_x = place(x, {a: i for i, (a, _) in enumerate(pairs)}, rank)
        ws, extra_w = place(w, {b: i for i, (_, b) in enumerate(pairs)}, rank + extra_x)
        space = rank + extra_x + extra_w
        xs, ws = pad(xs, space), pad(ws, space)
        met = self.meet(call, [xs, ws], None, broadcast_shape([xs.shape, ws.shape]))
        ended = set(range(len(contracted)))
        self.contracted(call, xs, ws, sorted(ended), "")
        result: dict[int, int] = {len(contracted) + i: out for i, (_, _, out) in enumerate(batch)}
        for i, d in enumerate(sorted(set(range(len(x.shape))) - {a for a, _ in pairs})):
            result[rank + i] = free_x[d]
        for i, d in enumerate(sorted(set(range(len(w.shape))) - {b for _, b in pairs})):
            result[rank + extra_x + i] = free_w[d]
        for operand, dims in ((x, free_x), (w, free_w)):
            for axis in operand.touching(dims):
                self.makes(axis)
        axes = []
        for axis in met.axes:
            over = ended & set(axis.dims)
            if not over:
                axes.append(axis)
                continue
            rest = tuple(d for d in axis.dims if d not in over)
            if rest:
                survivor = self._cut(call, axis, rest, [xs, ws])
                if survivor is not None:
                    axes.append(survivor)
        passed = [self.contraction_constants(axis, xs, ws) for axis in axes]
        return remap(Channels(met.shape, tuple(passed)), result, shape)

    def keep_rows(self, x: Channels, dim: int, *, several: bool = False) -> None:
        """A row of ``x`` is read by its place along ``dim``, or ``several`` are: of a cut axis no
        row goes there. Slices of heads (a rotary embedding's halves) are a part, of which equally
        many go in each: they stay only where heads are to go, and can."""
        axis, dim = x.axis(dim), dim % len(x.shape)
        if axis is None or len(axis.dims) == 1:
            return
        part = several and dim == axis.dims[-1]
        if not (part and self.attention == "head_dim"):
            self.hold(axis, [dim], rather=part)

    def _cut(self, call: Call, axis: Axis, rest: tuple[int, ...], operands) -> Axis | None:
        """An axis over several dimensions of which some are contracted: what is left of it.

        Cut along what is left (whole heads) or along what is contracted (the same share of each
        head), as ``attention`` says; where one operand has nothing along ``rest``, only the second
        is possible, and meeting it has tied the slices already.
        """
        if self.decide(call, lambda: any(
            all(other.blank for other in x.touching(rest)) and x.touching(axis.dims)
            for x in operands
        )):  # fmt: skip
            return None
        if self.is_sliced(call, axis):
            self.hold(axis, rest)
            return None
        return self.tie(call, axis.saying(None, axis.border), rest)

    def consume(
        self,
        call: Call,
        x: Channels,
        w: Channels,
        pairs: Sequence[tuple[int, int]],
        border: str = "",
    ) -> None:
        """The weight ``w`` reads channels of ``x`` on dimension pairs, which share their units.

        ``border`` tells that a constant input does not make a constant output: ``"padding"`` where
        zeros stand around it, ``"pattern"`` where outputs differ by position throughout.
        """
        self._note_read(call, x, w, pairs)
        xs = remap(x, {d: i for i, (d, _) in enumerate(pairs)}, tuple(x.shape[d] for d, _ in pairs))
        ws = remap(w, {d: i for i, (_, d) in enumerate(pairs)}, tuple(w.shape[d] for _, d in pairs))
        self.meet(call, [xs, ws], None, xs.shape)
        self.contracted(call, xs, ws, range(len(pairs)), border)

    def _note_read(
        self, call: Call, x: Channels, w: Channels, pairs: Iterable[tuple[int, int]]
    ) -> None:
        axes = ((d, x.axis(d), w.axis(e)) for d, e in pairs)
        dims = [d for d, own, axis in axes if own is None and axis is not None and axis.source]
        for node in call.node.all_input_nodes if dims else ():
            if self.values.get(node) is x:
                self.read_dims.update((node, d) for d in dims)

    def reduce(
        self, call: Call, x: Channels, dims: Iterable[int], keepdim: bool, *, adds: bool = False
    ) -> Channels:
        """A value over ``dims``: channels there end, what is left of a cut axis is tied. Of a sum
        (``adds``) it need not be: zeros make no difference to it."""
        rank = len(x.shape)
        gone = {d % rank for d in dims} if rank else set()
        where = {
            d: d if keepdim else d - sum(g < d for g in gone) for d in range(rank) if d not in gone
        }
        shape = tuple(
            1 if d in gone else n for d, n in enumerate(x.shape) if keepdim or d not in gone
        )
        axes = []
        for axis in x.axes:
            over = gone & set(axis.dims)
            rest = tuple(d for d in axis.dims if d not in gone)
            if over and not rest:
                self.ended(axis, call)
            elif adds and over == {axis.dims[-1]} and self.is_sliced(call, axis):
                self.hold(axis, rest)
                self.needs_zero(call, x, over)
            elif over:
                axes.append(self.tie(call, axis.saying(None, axis.border), rest))
            else:
                axes.append(self.reduced(axis))
        return remap(Channels(x.shape, tuple(axes)), where, shape)

    def freeze_all(self, value: Any, reason: str, call: Call | None) -> None:
        """Everything in ``value`` stays whole."""
        for item in leaves(value):
            for axis in self.channels(item).axes:
                self.freeze(axis, reason, call)

    def freeze_dims(self, x: Channels, dims: Iterable[int], reason: str, call: Call) -> Channels:
        """Nothing along ``dims`` can go, but with a whole slice of the other dimensions."""
        dims = {d % len(x.shape) for d in dims}
        if all(dims.isdisjoint(axis.dims) for axis in x.axes):
            return x
        axes = []
        for axis in x.axes:
            if dims.isdisjoint(axis.dims):
                axes.append(axis)
            elif dims >= set(axis.dims):
                self.freeze(axis, reason, call)
            else:
                axes.append(self.tie(call, axis, [d for d in axis.dims if d not in dims]))
        return x.with_axes(axes)

    def are_tied(self, call: Call) -> bool:
        """Whether tensors that ``call`` stacks are to have the same channels."""
        return call.node in self.trace.cuts.tied

    def kernel(self, call: Call, weight: Any, dims: Iterable[int]) -> Any:
        """A weight, as it is along ``dims``, which are positions."""
        if isinstance(weight, Channels):  # computed in the forward, with an axis on every dimension
            return self.freeze_dims(weight, dims, IS_KERNEL, call)
        return weight

    def tie(self, call: Call, axis: Axis, rest: Sequence[int]) -> Axis:
        """A cut axis as one over ``rest`` alone: slices go whole along the other dimensions."""
        index = tuple(slice(None) if d in rest else slice(0, 1) for d in axis.dims)
        head = axis.units[index]
        self.join_whole(axis, head.expand(axis.units.shape), call)
        kept = tuple(i for i, d in enumerate(axis.dims) if d in rest)
        old = None if axis.said is None else positions(axis)
        units, said = compact(axis, axis.units, old, kept)
        return Axis(tuple(rest), units, said, axis.border)
