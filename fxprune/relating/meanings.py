"""The words of the channel algebra whose meaning depends on the pass.

Each pass (:mod:`.discover`, :mod:`.sayings`, :mod:`fxprune.replaying.replay`) defines those
that it is about; here they say nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, fx

from ..rules.call import Call, Named, Roles, map_specs, rigid
from ..rules.channels import Axis, Channels
from ..tracing.trace import Trace

# Of an index each dimension, None where it makes one, with the number or slice that it has there.
Index = Sequence[tuple[int | None, Any]]

# What the first walk found of a call, question by question.
Decisions = dict[fx.Node, list[Any]]


class Meanings:
    def __init__(self, trace: Trace) -> None:
        self.trace = trace
        self.attention = trace.cuts.attention
        self.decisions: Decisions = {}
        self._asked: dict[fx.Node, int] = {}

    def rigid_result(self, call: Call) -> Any:
        """The result of a call, without channels."""
        return map_specs(call.spec, rigid)

    def number(self, node: fx.Node, args: tuple[Any, ...]) -> Any:
        """What a size expression of the code comes to."""
        return node.meta["spec"]

    def decide(self, call: Call, answer: Callable[[], Any]) -> Any:
        """What the first walk answered for the call, question by question: at the new widths, sizes
        of 1 could tell another story."""
        self._asked[call.node] = at = self._asked.get(call.node, -1) + 1
        return self.decisions[call.node][at]

    def result_shape(self, node: fx.Node) -> tuple[int, ...]:
        return node.meta["spec"].shape

    def result_shapes(self, node: fx.Node) -> list[Any]:
        """Shapes of the results, None for what is no tensor."""
        return [getattr(spec, "shape", None) for spec in node.meta["spec"]]

    def groups_of(self, weight: Named, old: int) -> int:
        """How many groups are left of the ``old`` ones of a grouped weight."""
        return old

    def parts_left(self, call: Call, dim: int, count: int) -> int:
        """Of how many of ``count`` equal parts of the call's first argument something is left."""
        return count

    def tensor_shape(self, value: Named) -> tuple[int, ...]:
        return value.spec.shape

    def resize(self, call: Call) -> None:
        """Give the call the arguments of this pass's widths."""

    def blank(
        self, call: Call, value: float | None, dims: Container[int] | None = None
    ) -> Channels:
        """A result that the call fills with one value (None: not known): its widths are free, and
        follow what it meets. Where ``dims`` are given, along these."""
        return self.rigid_result(call)

    def put_around(
        self, call: Call, axis: Axis, dim: int, amounts: tuple[int, int], value: float | None
    ) -> tuple[Axis, Axis]:
        """Slices that the call puts before and behind those that ``axis`` has along ``dim``, so
        many when the run was recorded: the units of what meets them there. All of them are of one
        ``value`` (None: not known)."""
        raise NotImplementedError

    def source(self, value: Named, roles: Roles, view: tuple[int, ...] | None) -> Channels:
        raise NotImplementedError

    def join(self, a: Axis, b: Axis, call: Call) -> None:
        """Slices at one position of two axes belong to one unit: they meet there."""

    def is_made(self, axis: Axis) -> bool:
        """Whether layers make its slices: not buffers, nor parameters that code uses bare."""
        return True

    def join_whole(self, axis: Axis, head: Tensor, call: Call) -> None:
        """Slices along some dimensions of an axis belong to one unit: that of ``head``."""

    def freeze(self, axis: Axis, reason: str, call: Call | None) -> None:
        """The slices of an axis stay."""

    def hold(self, axis: Axis, dims: Iterable[int], *, rather: bool = False) -> None:
        """Along ``dims`` of a cut axis nothing goes as a whole: each slice loses equally many.

        ``rather`` asks for it only where something else can go.
        """

    def follow(self, blank: Axis, axis: Axis, call: Call) -> None:
        """A blank axis has as many slices as ``axis``, over more dimensions, has along its own."""

    def viewed(self, call: Call, x: Channels, shape: tuple[int, ...]) -> None:
        """``x`` is seen under another shape."""

    def spread(self, axis: Axis) -> None:
        """The axis meets one over more dimensions: each slice of it meets many."""

    def apart(self, axes: Sequence[Axis], rank: int) -> None:
        """Axes of one tensor that meet one over ``rank`` dimensions."""

    def is_grouped(
        self, call: Call, weight: Named, made: Sequence[int], x: Channels, dims: Sequence[int]
    ) -> bool:
        """Whether ``weight`` is to be cut as that of a grouped convolution: each group makes slices
        of its own, along ``made``, and reads its own run of ``x`` along ``dims``, and keeps as many
        as the others. Else whole groups go, or the same slices of each."""
        return self.trace.cuts.grouped.get(call.node, False)

    def in_groups(self, call: Call, axes: Iterable[Axis]) -> None:
        """``axes`` are what the groups of a convolution make and read, each equally many."""

    def are_groups_whole(self, call: Call) -> bool:
        """Whether groups of a convolution go as a whole, where none can lose some of its
        channels."""
        return self.trace.cuts.whole.get(call.node, False)

    def is_sliced(self, call: Call, axis: Axis) -> bool:
        """Whether slices of each head are to go, where ``call`` sums over those of a cut axis, and
        not whole heads."""
        return self.attention == "head_dim" or self.trace.cuts.sliced.get(call.node, False)

    def stacked(self, call: Call, axis: Axis, dim: int) -> None:
        """``axis`` holds what ``call`` put together along ``dim``, each part with channels of its
        own."""

    def rectangle(self, axis: Axis, call: Call) -> None:
        """What is kept of an axis over several dimensions has to be a rectangle."""

    def balance(self, axis: Axis, bins: int, call: Call) -> None:
        """The axis falls in ``bins`` equal runs that have to lose equally many."""
        if axis.units.numel() % bins == 0:
            rows = Axis((0, 1), axis.units.reshape(bins, -1))
            self.rectangle(rows, call)
            self.hold(rows, (0,))

    def approximate(self, axis: Axis, call: Call) -> None:
        """The call counts channels of the axis: exact only against a kept-channels reference."""

    def ended(self, axis: Axis, call: Call) -> None:
        """A reduction over the whole axis."""
        self.approximate(axis, call)

    def reduced(self, axis: Axis) -> Axis:
        """An axis after a reduction over other dimensions."""
        return axis

    def adds(self, bias: Channels) -> None:
        """A parameter, by which units are made too, is no more than added to what others make."""

    def makes(self, axis: Axis) -> None:
        """A product has the axis as a free one: a parameter used bare makes channels with it."""

    def contracted(
        self, call: Call, x: Channels, w: Channels, dims: Sequence[int], border: str
    ) -> None:
        """Called with the operands of a contraction, in the space where they meet."""

    def meet_constants(
        self, call: Call, operands: Sequence[Channels], touched: Sequence[Sequence[Axis]],
        dims: tuple[int, ...], shape: tuple[int, ...], function: Any, together: bool,
    ) -> tuple[Tensor | None, bool]:  # fmt: skip
        """What the axis over ``dims`` holds where operands meet, and whether zeros stand around it;
        ``touched`` are the axes of each operand there."""
        return None, False

    def meet_scalar(self, call: Call, operands: Sequence[Channels], function: Any) -> float | None:
        """What operands of one number come to."""
        return None

    def contraction_constants(self, axis: Axis, x: Channels, w: Channels) -> Axis:
        """An axis of a product of ``x`` and ``w`` that is summed over other dimensions."""
        return axis

    def distinguish(self, x: Channels) -> None:
        """Something is done to the slices of ``x`` and not to others of its tensor."""

    def overwritten(self, x: Channels, value: float) -> Channels:
        """``x``, every element of which is ``value`` from here on."""
        return x

    def overlaid(self, x: Channels, value: Channels, index: Index | None) -> Channels:
        """``x`` after ``x[index] = value``, where the index is known."""
        return x

    def reach(self, node: fx.Node) -> None:
        """The walk has come to a call of the model's."""

    def forget(self, value: Any) -> Any:
        """The value, of whose constants nothing is known any more."""
        return value

    def emit(
        self, x: Channels, dims: Iterable[int], constant: Channels | None, known: bool = True
    ) -> Channels:
        """Dead slices of ``x`` along ``dims`` hold ``constant`` from here on, or 0.

        ``known`` is False where that is not so: nothing is known of them then.
        """
        return x

    def emitted(
        self, call: Call, x: Channels, dims: Sequence[int], find: Callable[[bool], Tensor]
    ) -> Channels:
        """Dead slices of ``x`` along ``dims`` say what ``find(silent)`` gives, NaN where that is
        not one number; ``silent`` is for those whose biases are masked too."""
        return x

    def needs_zero(self, call: Call, x: Channels, dims: Iterable[int]) -> None:
        """Dead slices of ``x`` along ``dims`` have to hold 0 for the call to be as masked."""

    def levelled(self, x: Channels, y: Channels) -> Channels:
        """``y``, a reduction of ``x`` that leaves a constant map's constant."""
        return y

    def averaged(self, y: Channels, x: Channels, dim: int) -> Channels:
        """``y``, weighted means of slices of ``x`` along ``dim``: a constant map's constant."""
        return y

    @property
    def masks_scales(self) -> bool:
        """Whether a dead slice of a norm's scale is 0."""
        return False

    def standardised(
        self,
        call: Call,
        y: Channels,
        mean: Channels | None,
        deviation: Channels | None,
        variance: Channels | None,
    ) -> Channels:
        """``y``, whose slices had this mean and this standard deviation over the data of training
        (None: 0 and 1), whatever went in, for it was divided by the root of ``variance``. The three
        are what :meth:`Call.tensor` gives."""
        return y

    def positions(self, call: Call, index: Any, x: Channels, dim: int) -> Tensor | None:
        """An index tensor's values where ``x`` has channels along ``dim``: None if it is data.

        Where it has none, positions do not matter and zeros stand for them, one if there are none.
        """
        if x.axis(dim) is None:
            return torch.zeros([max(n, 1) for n in index.shape], dtype=torch.int64)
        if isinstance(index, Tensor):
            return index
        return self.index_values(call, index, x, dim) if isinstance(index, Named) else None

    def index_values(self, call: Call, index: Named, x: Channels, dim: int) -> Tensor | None:
        return self.trace.tensor(index.name).cpu()

    def bordered(self, x: Channels) -> Channels:
        """``x`` after zeros were put around it, outside its channel dimensions."""
        return x

    def through_window(self, x: Channels) -> Channels:
        """``x`` after an op that leaves a constant map as it is, and a border not."""
        return x
