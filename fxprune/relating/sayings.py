"""What each slice says when a mask switches its unit off: constants beside the labels.

A masked unit has zero weights and keeps its biases, so it is a constant; here the constants flow
through the trace, until a layer reads them. What a slice says depends on its own unit alone, for
slices that meet are of one unit. So all are followed as if every unit were masked, before any is
chosen: by the first walk itself, or by one of their own with the tensors of another model.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, fx, nn

from ..rules.call import Call, Named, map_specs
from ..rules.channels import (
    Axis,
    Channels,
    Once,
    SourceAxis,
    laid_out,
    laid_over,
    varying,
)
from ..rules.shapes import with_rank
from ..rules.spec import Spec
from ..tracing.trace import Trace
from .meanings import Index
from .met import Met, laid_along, may_be_known, zero_or_nan
from .moments import Drawn, Masked
from .walk import Walk

_ZERO = torch.zeros(1, dtype=torch.float64)


@dataclass(frozen=True)
class Telling:
    """How dead units say what they say.

    Args:
        silent: masks take their biases, too.
        masked: False where units are dead as they are: norms go on scaling them.
        drawn: what they said over the data of training is followed, too.
    """

    silent: bool = False
    masked: bool = True
    drawn: bool = False


@dataclass
class Heard:
    """A weight reads channels: ``units`` are its own labels and ``arrive`` theirs, laid out like
    its ``axis``, and so is the ``constant`` behind its rows."""

    call: Call
    axis: SourceAxis
    units: Tensor
    arrive: Tensor
    constant: Tensor
    border: str


@dataclass
class Demand:
    """Where units ``left`` and ``right`` are both dead, ``wrong`` has to be False; but where they
    are all along the dimensions ``over``."""

    call: Call
    left: Tensor
    right: Tensor
    wrong: Tensor
    over: Sequence[int] = ()


class Sayings(Walk):
    """Args:
    model: where values of parameters are read.
    telling: None where constants are not asked for.
    """

    def __init__(self, trace: Trace, model: nn.Module, telling: Telling | None) -> None:
        super().__init__(trace)
        self.telling = telling
        self.rows = Drawn() if telling is not None and telling.drawn else Masked()
        self._tensors = trace.on(model)
        self._born: dict[tuple[int, str], Tensor | None] = {}
        self.heard: list[Heard] = []
        self.demands: list[Demand] = []
        self.undoubted: dict[fx.Node, Any] = {}  # values of which less is said by now
        self.norms: dict[fx.Node, str | None] = {}  # the tensor by which each knows its variance

    def read(self, name: str) -> Tensor:
        """A tensor of the model by name."""
        return self._tensors.tensor(name).detach()

    # -- where constants come from --------------------------------------------------------------

    def born(self, axis: SourceAxis) -> Callable[[], Tensor | None] | None:
        """Constants of a parameter's own slices under the mask: read when someone asks for them."""
        telling = self.telling
        if telling is None or axis.role == "in":
            return None

        def said() -> Tensor | None:
            now = self.as_it_is(axis)
            key = now.first, now.role
            if key not in self._born:
                self._born[key] = None if now.role == "in" else self._read_constants(now, telling)
            return self._born[key]

        return said

    def as_it_is(self, axis: SourceAxis) -> SourceAxis:
        """A parameter's axis with the role that it has by now."""
        return axis

    def _read_constants(self, axis: SourceAxis, telling: Telling) -> Tensor:
        scales = axis.role == "scale" and telling.masked
        if axis.role == "out" or not axis.is_whole:
            return self.rows.dead(torch.zeros(1, *axis.shape, dtype=torch.float64))
        if telling.silent and not scales and axis.role not in ("scale", "stat"):
            return torch.zeros(1, *axis.shape, dtype=torch.float64)
        values = axis.slices(self.read(axis.name)).reshape(1, *axis.shape)
        if values.is_complex():  # constants are real: of these only a zero is one
            return self.rows.dead(zero_or_nan((values.cpu() == 0) | scales))
        values = values.to("cpu", torch.float64)
        return self.rows.scale(values) if scales else values

    @property
    def masks_scales(self) -> bool:
        return self.telling is not None and self.telling.masked

    def one(self, value: Named) -> float | None:
        """A tensor of one real number, which is the same in every run."""
        alone = math.prod(value.spec.shape) == 1 and value.name not in self.trace.written
        if self.telling is None or not alone:
            return None
        return float(self.read(value.name)) if value.spec.dtype.is_floating_point else None

    def overwritten(self, x: Channels, value: float) -> Channels:
        axes = []
        for axis in x.axes:
            said = self.filled(value, axis.units.numel())
            axes.append(axis.saying(None if said is None else said.reshape(1, *axis.units.shape)))
        one = self.filled(value, 1) if math.prod(x.shape) == 1 else None
        return Channels(x.shape, tuple(axes), None if one is None else one.item())

    def filled(self, value: float | None, *sizes: int) -> Tensor | None:
        """Constants of a result that the call fills with one value."""
        if value is None or isinstance(value, complex) or self.telling is None:
            return None
        return torch.full((1, *sizes), float(value), dtype=torch.float64)

    # -- how they go on -------------------------------------------------------------------------

    def meet_constants(self, call, operands, touched, dims, shape, function, together):
        """Constants of a result where ``operands`` meet along ``dims``, and whether its slices have
        a border of other numbers."""
        product = call.pattern is not None and call.pattern.product
        if self.telling is None or not (product or function is not None):
            return None, False
        if not (product or all(map(may_be_known, operands, touched))):
            return None, False
        met = Met(operands, touched, dims, shape)
        zero = met.zeros(touched, first=product == "first") if product else None
        if function is None:  # of complex numbers, say: nothing but their zeros is known
            return (None if zero is None else zero_or_nan(zero)), False
        unknown = met.unknown
        if unknown is not None and unknown.all() and (zero is None or not zero.any()):
            return None, False
        result = met.apply(function, met.given(), together=together)
        if function == call.replay:  # and no rule that says NaN for what it does not know
            if not math.isfinite(result[0].sum()) and met.makes_worse(result[0]):
                why = f"{call.name} makes no finite number of masked ones (1 / 0, say)"
                for axis in (axis for axes in touched for axis in axes):
                    self.freeze(axis, why, call)
                return None, False
            if self.is_unsure(call):
                if not product and self.is_given_numbers(call):  # 0 + 0 may be 0 + 1
                    return None, False
                result = met.zeros_that_stay(result)
        border = any(axis.border for axes in touched for axis in axes)
        if border:  # zeros around the constant stay zeros, or the slice is not one number
            edge = met.given(zero=[bool(axes) and axes[0].border for axes in touched])
            around = met.apply(function, edge, together=together)
            differs = (around != 0) & (around != result)
            unknown = differs if unknown is None else unknown | differs
        result = result if unknown is None else result.masked_fill(unknown, torch.nan)
        return result if zero is None else result.masked_fill(zero, 0.0), border

    def meet_scalar(self, call, operands, function):
        if function is None or self.telling is None or any(x.scalar is None for x in operands):
            return None
        if function == call.replay and self.is_unsure(call):
            return None
        tensors = [torch.full((1,) * len(x.shape), x.scalar, dtype=torch.float64) for x in operands]
        result = function(tensors)
        return float(result) if result.numel() == 1 else None

    def contraction_constants(self, axis, x, w):
        """A slice of a product is zero where the slice of a factor is."""
        zero = None
        for other in (*x.touching(axis.dims), *w.touching(axis.dims)):
            if other.constant is None:
                continue
            found, dims = other.constant == 0, other.dims
            if not set(dims) <= set(axis.dims):
                over = tuple(i for i, d in enumerate(dims, 1) if d not in axis.dims)
                found = found.all(over[0]) if len(over) == 1 else found.amin(over)
                dims = tuple(d for d in dims if d in axis.dims)
            found = laid_over(found, dims, axis.dims)
            zero = found if zero is None else zero | found
        if zero is None:
            return axis.saying(None, axis.border)
        return axis.saying(zero_or_nan(zero.expand(-1, *axis.units.shape)), axis.border)

    def reduced(self, axis: Axis) -> Axis:
        """A reduction over other dimensions keeps a zero; of other constants it is not sure."""
        if axis.constant is None:
            return axis.saying(None)
        return axis.saying(zero_or_nan(axis.constant == 0))

    def levelled(self, x: Channels, y: Channels) -> Channels:
        before = {id(a.units): a.constant for a in x.axes if not a.border}
        return y.with_axes(a.saying(before.get(id(a.units), a.constant), a.border) for a in y.axes)

    def averaged(self, y: Channels, x: Channels, dim: int) -> Channels:
        axes = []
        for axis in y.axes:
            same = [o for o in x.axes if o.dims == axis.dims and dim not in o.dims and not o.border]
            axes.append(axis.saying(same[0].constant, axis.border) if same else axis)
        return y.with_axes(axes)

    def overlaid(self, x: Channels, value: Channels, index: Index | None) -> Channels:
        if index is None or self.telling is None:
            return self.forget(x)
        return Channels(x.shape, tuple(_overlaid(x, axis, value, index) for axis in x.axes))

    def reach(self, node: fx.Node) -> None:
        fixed, at = self.trace.fixed, node.meta.get("index")
        if self.telling is None or fixed is None or at is None:
            return
        for other in fixed.doubtful(at, self.is_free_size):
            if other in self.values:
                self.undoubted.setdefault(other, self.values[other])
                self.values[other] = map_specs(self.values[other], self._doubted)

    def at_call(self, node: fx.Node) -> Any:
        """What a call returned, before any code behind it went by what may be another."""
        return self.undoubted.get(node, self.values[node])

    def _doubted(self, value: Any) -> Any:
        return self.forget(value) if isinstance(value, Channels) and value.axes else value

    def forget(self, value: Any) -> Any:
        return Channels(value.shape, tuple(axis.saying(None) for axis in value.axes))

    def emit(
        self, x: Channels, dims: Iterable[int], constant: Channels | None, known: bool = True
    ) -> Channels:
        if not known or self.telling is None:
            return self.forget(x)
        axes = []
        dims = set(dims)
        for axis in x.axes:
            if not set(axis.dims) <= dims:
                axes.append(axis.saying(None, axis.border))
                continue
            others = constant.touching(axis.dims) if constant is not None else []
            axes.append(axis.saying(Once(partial(self._dead, axis, others))))
        return x.with_axes(axes)

    def _dead(self, axis: Axis, others: Sequence[Axis]) -> Tensor:
        """What dead slices say that hold what the last of ``others`` says, or 0."""
        value = others[-1].says(axis.dims) if others else _ZERO.reshape((1,) * (1 + len(axis.dims)))
        return self.rows.dead(value.expand(-1, *axis.units.shape))

    def emitted(
        self, call: Call, x: Channels, dims: Sequence[int], find: Callable[[bool], Tensor]
    ) -> Channels:
        if self.telling is None:
            return x
        said = find(self.telling.silent)
        axes = []
        for axis in x.axes:
            if set(axis.dims) <= set(dims):
                axes.append(axis.saying(self.rows.dead(_along(said, dims, axis)[None])))
            else:
                axes.append(axis.saying(None, axis.border))
        return x.with_axes(axes)

    def standardised(self, call, y, mean, deviation, variance):
        measured = [a.source.name for a in variance.axes if a.source] if variance else []
        self.norms[call.node] = measured[0] if len(measured) == 1 else None
        if not isinstance(self.rows, Drawn):
            return y
        points, axes = self.rows.points(), []
        for axis in y.axes:
            shift, scale = _own(mean, axis, 0.0), _own(deviation, axis, 1.0)
            if shift is not None and scale is not None:
                drawn = self.rows.standardised(points, axis.says(axis.dims), shift, scale)
                axis = axis.saying(drawn, axis.border)
            axes.append(axis)
        return y.with_axes(axes)

    def bordered(self, x: Channels) -> Channels:
        return x.with_axes(axis.saying(axis.constant, True) for axis in x.axes)

    def through_window(self, x: Channels) -> Channels:
        return x.with_axes(self.reduced(axis) if axis.border else axis for axis in x.axes)

    # -- who hears them -------------------------------------------------------------------------

    def contracted(
        self, call: Call, x: Channels, w: Channels, dims: Sequence[int], border: str
    ) -> None:
        seen: set[int] = set()
        for dim in dims if self.telling is not None else ():
            left, right = x.axis(dim), w.axis(dim)
            if left is None or right is None or id(right) in seen:
                continue
            seen.add(id(right))  # an axis over groups lies on two of the dimensions
            weight, other = right, left
            if not (weight.source and weight.source.role == "in"):
                weight, other = left, right
            if weight.source is not None and weight.source.role == "in":
                other = _as_read(other, weight.dims)
                sizes = weight.units.shape
                constant = other.says(weight.dims)
                constant = constant.expand(-1, *sizes)
                no_sink = isinstance(call.spec, Spec) and call.spec.dtype.is_complex
                if self.may_read_others(call):
                    constant = torch.full_like(constant, torch.nan)
                elif no_sink:
                    constant = zero_or_nan(constant == 0)
                around = border or ("padding" if other.border else "")
                arrive = other.over(weight.dims).expand(sizes)
                self.heard.append(Heard(call, weight.source, right.units, arrive, constant, around))
            else:
                self._product_of_activations(call, left, right, dims)

    def _product_of_activations(
        self, call: Call, left: Axis, right: Axis, summed: Sequence[int]
    ) -> None:
        """Dead channels of two activations add the product of their constants: it has to be 0; but
        in sums that are dead themselves, as those of a removed head are."""
        dims = tuple(sorted({*left.dims, *right.dims}))
        a, b = (axis.says(dims)[0] for axis in (left, right))
        over = [i for i, d in enumerate(dims) if d in summed]
        over = over if len(over) < len(dims) else []
        units = left.over(dims), right.over(dims)
        self.demands.append(Demand(call, *units, ~((a == 0) | (b == 0)), over))

    def needs_zero(self, call: Call, x: Channels, dims: Iterable[int]) -> None:
        for axis in x.touching(dims) if self.telling is not None else ():
            wrong = axis.says(axis.dims)[0] != 0
            self.demands.append(Demand(call, axis.units, axis.units, wrong))


def _as_read(axis: Axis, dims: tuple[int, ...]) -> Axis:
    """What a weight reads along ``dims`` of an axis that may be cut over more: slices along these
    are one to it, and say one number where they say the same."""
    over = [i for i, d in enumerate(axis.dims) if d not in dims]
    if not over:
        return axis
    first = tuple(0 if i in over else slice(None) for i in range(len(axis.dims)))
    said = axis.constant
    if said is not None:
        rows = [i + 1 for i in over]
        same = (said.amin(rows) == said.amax(rows)).all(0)
        said = said.movedim(0, -1)[first].movedim(-1, 0).masked_fill(~same, torch.nan)
    return Axis(tuple(d for d in axis.dims if d in dims), axis.units[first], said, axis.border)


def _overlaid(x: Channels, axis: Axis, value: Channels, index: Index) -> Axis:
    """An axis of ``x`` after ``x[index] = value``: where only some of a slice is written, it says a
    number if that was there before."""
    own = [(item, dim is None or dim in axis.dims) for dim, item in index]
    whole = all(mine or item == slice(None) for item, mine in own)
    over = tuple([
        item if mine else 0 if isinstance(item, int) else slice(None) for item, mine in own
    ])  # fmt: skip
    places = torch.arange(axis.units.numel()).reshape(axis.units.shape)
    places = laid_out(places, axis.dims, range(len(x.shape)))[over]
    dims = varying(places)
    value = with_rank(value, places.dim())
    others = value.touching(dims)
    if not all(set(other.dims) <= set(dims) for other in others):
        return axis.saying(None, axis.border)
    old, new = axis.says(axis.dims), laid_along(value, others, dims)
    rows = max(len(old), len(new))
    said = old.expand(rows, *axis.units.shape).reshape(rows, -1).clone()
    new = new.expand(rows, *[places.size(d) for d in dims]).reshape(rows, -1)
    places = places.reshape(-1)
    said[:, places] = new if whole else torch.where(said[:, places] == new, new, torch.nan)
    border = axis.border or any(other.border for other in others)
    said = said.reshape(rows, *axis.units.shape)
    return axis.saying(zero_or_nan(said == 0) if border else said, border)


def _along(said: Tensor, dims: Sequence[int], axis: Axis) -> Tensor:
    """What slices along ``dims`` say, for those of one axis: NaN where they differ along others."""
    for i in reversed(range(said.dim())):
        if dims[i] not in axis.dims:
            first = said.select(i, 0)
            same = (said == first.unsqueeze(i)).all(i)
            said = torch.where(same, first, torch.nan)
    return said.reshape(axis.units.shape)


def _own(vector: Channels | None, axis: Axis, absent: float) -> Tensor | None:
    """What a norm's vector says to ``axis``; None where the model computes it."""
    if vector is None:
        return torch.full((1, *axis.units.shape), absent, dtype=torch.float64)
    own = vector.touching(axis.dims)
    if len(own) != 1 or own[0].source is None:
        return None
    found = own[0].says(axis.dims)
    return found.expand(-1, *axis.units.shape)
