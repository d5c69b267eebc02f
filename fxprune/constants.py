"""The second walk: what removed channels still say.

A masked unit has zero weights and keeps its biases, so it is a constant; here the constants flow
through the trace beside the labels, until a layer reads them. What it reads is a :class:`Read`,
and decides how the reading layer is changed when the channels go.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor, fx, nn

from .algebra import Algebra
from .call import Call, Named, Roles
from .channels import Axis, Channels, SourceAxis
from .discover import Relations
from .recording import Trace
from .running import read_attribute


@dataclass
class Read:
    """A weight reads channels of which some are dead.

    ``constant`` is the input on each slice of ``axis``: NaN for live channels, and for dead ones
    whose value is not one number.
    """

    call: Call
    axis: SourceAxis
    dead: Tensor
    constant: Tensor
    border: str
    out: SourceAxis | None  # the weight's axis that makes the outputs
    arrive: Tensor  # labels of the channels that it reads, laid out like ``axis``
    # Of all channels over the data of training, where that is asked for; NaN where not known.
    mean: Tensor | None = None
    variance: Tensor | None = None


class Constants(Algebra):
    """Args:
    trace: the recorded run.
    relations: of the first walk.
    removed: for each unit class, whether a mask switches it off.
    silent: for each unit class, whether the mask takes its biases too.
    model: where parameter values are read.
    """

    masked = True  # whether removed units are masked, or dead as they are
    every = False  # whether layers that read no dead channel are noted too

    def __init__(
        self,
        trace: Trace,
        relations: Relations,
        removed: np.ndarray,
        silent: np.ndarray,
        model: nn.Module,
        *,
        attention: str = "heads",
    ) -> None:
        super().__init__(trace, attention=attention)
        self.given = (trace, relations, removed, silent, model)
        self._sources = {(s.name, s.view, s.dims): s for s in relations.sources}
        self._makers = {s.name: s for s in relations.sources if s.role == "out"}
        self._before = relations.values
        self.decisions = relations.decisions
        self._classes = torch.from_numpy(relations.classes)
        self._removed = torch.from_numpy(removed[relations.classes])  # by label
        self._silent = torch.from_numpy(silent[relations.classes])
        self._model = model
        self.reads: list[Read] = []
        self.lost: list[tuple[np.ndarray, str]] = []  # units whose constant no layer can take
        # Of each norm that makes slices alike in mean and spread, the tensor it knows theirs by.
        self.norms: dict[fx.Node, str | None] = {}

    def removed(self, units: Tensor) -> Tensor:
        """For each label, whether the mask switches its unit off."""
        return self._removed[units]

    def is_silent(self, units: Tensor) -> Tensor:
        """For each label, whether the mask takes its unit's biases too."""
        return self._silent[units]

    def is_removed(self, axis: SourceAxis) -> Tensor:
        """For each slice of a parameter axis, whether the mask switches it off."""
        return self._removed[axis.labels()]

    def read(self, name: str) -> Tensor:
        """A tensor of the model by name."""
        if name in self.trace.constants:
            return self.trace.constants[name]
        return read_attribute(self._model, name).detach()

    # -- values ---------------------------------------------------------------------------------

    def source(self, value: Named, roles: Roles, view: tuple[int, ...] | None) -> Channels:
        view = value.spec.shape if view is None else view
        axes = []
        for dims in roles.values():
            axis = self._sources.get((value.name, view, dims))
            if axis is not None:
                units = axis.labels()
                axes.append(Axis(dims, units, self.born(axis, units), source=axis))
        return Channels(view, tuple(axes), self._one(value))

    def blank(self, call: Call, value: float | None) -> Channels:
        known = self._before[call.node]
        if value is None:
            return known
        return replace(known, axes=tuple(
            replace(a, constant=torch.full(a.units.shape, float(value), dtype=torch.float64))
            for a in known.axes
        ))  # fmt: skip

    def _one(self, value: Named) -> float | None:
        if torch.Size(value.spec.shape).numel() != 1 or not value.spec.dtype.is_floating_point:
            return None
        return float(self.read(value.name))

    def born(self, axis: SourceAxis, units: Tensor) -> Tensor:
        """Constants of a parameter's own slices under the mask."""
        if axis.role == "in":
            return torch.full(units.shape, torch.nan, dtype=torch.float64)
        if axis.role == "out" or not axis.is_whole:
            return torch.where(self._removed[units], 0.0, torch.nan).double()
        values = axis.rows(self.read(axis.name).double().cpu()).reshape(units.shape)
        if axis.role == "stat":
            return values
        masked = self._removed if axis.role == "scale" else self._silent
        return torch.where(masked[units], 0.0, values)

    # -- meanings -------------------------------------------------------------------------------

    def rectangle(self, axis: Axis, call: Call) -> None:
        return

    def meet_constants(self, call, operands, touched, dims, shape, function):
        if function is None:
            return None, False
        known = torch.ones([shape[d] for d in dims], dtype=torch.bool)
        tensors, at_border = [], []
        border = False
        for x, axes in zip(operands, touched, strict=True):
            if not axes:
                if x.scalar is None:
                    known = known & False
                value = torch.full((1,) * len(shape), x.scalar or 0.0, dtype=torch.float64)
                tensors.append(value)
                at_border.append(value)
                continue
            value = torch.zeros((), dtype=torch.float64)
            for axis in axes:  # several only where another operand joins them
                array = axis.over(range(len(shape)), or_nan(axis))
                value = value + array if len(axes) == 1 else array * torch.nan
                border = border or axis.border
                known = known & ~axis.over(dims, torch.isnan(or_nan(axis)))
            tensors.append(torch.nan_to_num(value))
            at_border.append(torch.zeros_like(value) if axes[0].border else tensors[-1])
        zero = self._zero_products(call, operands, touched, dims, known.shape)
        if not known.any() and not zero.any():
            return None, False
        result = _over(function(tensors).double(), dims, known.shape)
        if border:  # zeros around the constant stay zeros, or the slice is not one number
            around = _over(function(at_border).double(), dims, known.shape)
            known = known & ((around == 0) | (around == result))
        result = torch.where(known, result, torch.nan)
        return torch.where(zero, 0.0, result), border

    def _zero_products(self, call, operands, touched, dims, shape) -> Tensor:
        """Where a factor is zero the product is, whatever the other factor is."""
        zero = torch.zeros(shape, dtype=torch.bool)
        if call.pattern is not None and call.pattern.product:
            for axes in touched:
                if len(axes) == 1:
                    zero = zero | (axes[0].over(dims, or_nan(axes[0])) == 0)
        return zero

    def _meet_scalar(self, operands, function):
        if function is None or any(x.scalar is None for x in operands):
            return None
        tensors = [torch.full((1,) * len(x.shape), x.scalar, dtype=torch.float64) for x in operands]
        result = function(tensors)
        return float(result) if result.numel() == 1 else None

    def contracted(
        self, call: Call, x: Channels, w: Channels, dims: Sequence[int], border: str
    ) -> None:
        seen: set[int] = set()
        for dim in dims:
            left, right = x.axis(dim), w.axis(dim)
            if left is None or right is None or id(right) in seen:
                continue
            seen.add(id(right))  # an axis over groups lies on two of the dimensions
            dead = self._removed[right.units]
            if not (self.every or dead.any()):
                continue
            weight, other = right, left
            if not (weight.source and weight.source.role == "in"):
                weight, other = left, right
            reads = weight.source is not None and weight.source.role == "in"
            if weight.source is not None and reads and set(other.dims) <= set(weight.dims):
                constant = other.over(weight.dims, or_nan(other)).expand(weight.units.shape)
                border = border or ("padding" if other.border else "")
                out = self._makers.get(weight.source.name)
                arrive = other.over(weight.dims).expand(weight.units.shape)
                read = Read(call, weight.source, dead, constant.clone(), border, out, arrive)
                self.reads.append(read)
            else:
                self._product_of_activations(call, left, right, dims)

    def _product_of_activations(
        self, call: Call, left: Axis, right: Axis, summed: Sequence[int]
    ) -> None:
        """Dead channels of two activations add the product of their constants: it has to be 0; but
        in sums that are dead themselves, as those of a removed head are."""
        dims = tuple(sorted({*left.dims, *right.dims}))
        a, b = (axis.over(dims, or_nan(axis)) for axis in (left, right))
        units = left.over(dims)
        removed = self._removed[units] & self._removed[right.over(dims)]
        over = [i for i, d in enumerate(dims) if d in summed]
        if len(over) < len(dims):
            whole = removed
            for i in over:
                whole = whole.all(i, keepdim=True)
            removed = removed & ~whole
        dead = removed & ~((a == 0) | (b == 0))
        if dead.any():
            classes = torch.unique(self._classes[units.expand(dead.shape)[dead]])
            self.lost.append((classes.numpy(), call.name))

    def needs_zero(self, call: Call, x: Channels, dims: Iterable[int]) -> None:
        for axis in x.touching(dims):
            dead = self._removed[axis.units] & (or_nan(axis) != 0)
            if dead.any():
                classes = torch.unique(self._classes[axis.units[dead]])
                self.lost.append((classes.numpy(), call.name))

    def contraction_constants(self, call, axis, x, w, ended):
        """A slice of a product is zero where the slice of a factor is."""
        sizes = axis.units.shape
        zero = torch.zeros(sizes, dtype=torch.bool)
        for operand in (x, w):
            for other in operand.touching(axis.dims):
                if set(other.dims) <= set(axis.dims):
                    array = other.over(axis.dims, or_nan(other))
                    zero = zero | (array == 0)
                else:
                    array = or_nan(other) == 0
                    over = tuple(i for i, d in enumerate(other.dims) if d not in axis.dims)
                    rest = tuple(d for d in other.dims if d in axis.dims)
                    folded = array.all(dim=over) if len(over) == 1 else array.amin(dim=over).bool()
                    zero = zero | Axis(rest, folded).over(axis.dims)
        constant = torch.where(zero, 0.0, torch.nan).double()
        return replace(axis, constant=constant, source=None)

    def reduced(self, axis: Axis) -> Axis:
        """A reduction over other dimensions keeps a zero; of other constants it is not sure."""
        zero = or_nan(axis) == 0
        return replace(axis, constant=torch.where(zero, 0.0, torch.nan).double(), border=False)

    def levelled(self, call: Call, x: Channels, y: Channels, dims: Iterable[int]) -> Channels:
        before = {id(a.units): a.constant for a in x.axes if not a.border}
        axes = (replace(a, constant=before.get(id(a.units), a.constant)) for a in y.axes)
        return replace(y, axes=tuple(axes))

    def averaged(self, y: Channels, x: Channels, dim: int) -> Channels:
        axes = []
        for axis in y.axes:
            same = [o for o in x.axes if o.dims == axis.dims and dim not in o.dims and not o.border]
            axes.append(replace(axis, constant=same[0].constant) if same else axis)
        return replace(y, axes=tuple(axes))

    def forget(self, value: Any) -> Any:
        return replace(
            value, axes=tuple(replace(a, constant=None, border=False) for a in value.axes)
        )

    def emit(
        self, x: Channels, dims: Iterable[int], constant: Channels | None, known: bool = True
    ) -> Channels:
        if not known:
            return self.forget(x)
        axes = []
        dims = set(dims)
        for axis in x.axes:
            if set(axis.dims) <= dims:
                dead = self._removed[axis.units]
                value = torch.zeros(axis.units.shape, dtype=torch.float64)
                for other in constant.touching(axis.dims) if constant is not None else ():
                    value = other.over(axis.dims, or_nan(other)).expand(axis.units.shape)
                axis = replace(axis, constant=torch.where(dead, value, torch.nan), border=False)
            else:
                axis = replace(axis, constant=None)
            axes.append(axis)
        return replace(x, axes=tuple(axes))

    def emitted(
        self, call: Call, x: Channels, dims: Sequence[int], find: Callable[[bool], Tensor]
    ) -> Channels:
        said = find(False)
        axes = []
        for axis in x.axes:
            if set(axis.dims) <= set(dims):
                dead, silent = self._removed[axis.units], self._silent[axis.units]
                value = _along(said, dims, axis)
                if bool((silent & dead).any()):
                    value = torch.where(silent, _along(find(True), dims, axis), value)
                axis = replace(axis, constant=torch.where(dead, value, torch.nan), border=False)
            else:
                axis = replace(axis, constant=None)
            axes.append(axis)
        return replace(x, axes=tuple(axes))

    def standardised(self, call, y, mean, deviation, variance):
        measured = [a.source.name for a in variance.axes if a.source] if variance else []
        self.norms[call.node] = measured[0] if len(measured) == 1 else None
        return y

    def bordered(self, x: Channels) -> Channels:
        return replace(x, axes=tuple(replace(a, border=True) for a in x.axes))

    def through_window(self, x: Channels) -> Channels:
        axes = (replace(self.reduced(a)) if a.border else a for a in x.axes)
        return replace(x, axes=tuple(axes))


def _along(said: Tensor, dims: Sequence[int], axis: Axis) -> Tensor:
    """What slices along ``dims`` say, for those of one axis: NaN where they differ along others."""
    for i in reversed(range(said.dim())):
        if dims[i] not in axis.dims:
            first = said.select(i, 0)
            same = (said == first.unsqueeze(i)).all(i)
            said = torch.where(same, first, torch.nan)
    return said.reshape(axis.units.shape)


def or_nan(axis: Axis) -> Tensor:
    if axis.constant is not None:
        return axis.constant
    return torch.full(axis.units.shape, torch.nan, dtype=torch.float64)


def _over(array: Tensor, dims: Sequence[int], sizes: Sequence[int]) -> Tensor:
    """A result over all dimensions, brought down to ``dims``."""
    index = tuple(slice(None) if d in dims else 0 for d in range(array.dim()))
    return array[index].expand(sizes)
