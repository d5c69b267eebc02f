"""The second walk: what removed channels still say.

A masked unit has zero weights and keeps its biases, so it is a constant; here the constants flow
through the trace beside the labels, until a layer reads them. What it reads is a :class:`Read`,
and decides how the reading layer is changed when the channels go.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, fx, nn

from .algebra import Algebra
from .call import Call, Named, Roles
from .channels import Axis, Channels, SourceAxis
from .discover import Relations
from .recording import Trace


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


class Norm(NamedTuple):
    """What makes slices alike in mean and spread; ``measured`` is the tensor it knows theirs by."""

    y: Channels
    mean: Channels | None
    deviation: Channels | None
    measured: str | None


class Constants(Algebra):
    """Args:
    trace: the recorded run.
    relations: of the first walk.
    removed: for each unit class, whether a mask switches it off.
    silent: for each unit class, whether the mask takes its biases too.
    model: where modules and parameter values are read.
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
        self._zeroed = torch.where(self._removed, 0.0, torch.nan).double()
        self._tensors = trace.on(model)
        self.modules = self._tensors.modules  # those of the trace may have been pruned since
        self.reads: list[Read] = []
        self.lost: list[tuple[np.ndarray, str]] = []  # units whose constant no layer can take
        self.norms: dict[fx.Node, Norm] = {}

    def removed(self, units: Tensor) -> Tensor:
        """For each label, whether the mask switches its unit off."""
        return self._removed[units]

    def is_silent(self, units: Tensor) -> Tensor:
        """For each label, whether the mask takes its unit's biases too."""
        return self._silent[units]

    def is_removed(self, axis: SourceAxis) -> Tensor:
        """For each slice of a parameter axis, whether the mask switches it off."""
        return axis.part(self._removed)

    def read(self, name: str) -> Tensor:
        """A tensor of the model by name."""
        return self._tensors.tensor(name).detach()

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
            return axis.part(self._zeroed)
        values = axis.slices(self.read(axis.name)).double().cpu().reshape(axis.shape)
        if axis.role == "stat":
            return values
        masked = self._removed if axis.role == "scale" else self._silent
        return torch.where(axis.part(masked), 0.0, values)

    # -- meanings -------------------------------------------------------------------------------

    def rectangle(self, axis: Axis, call: Call) -> None:
        return

    def meet_constants(self, call, operands, touched, dims, shape, function):
        product = call.pattern is not None and call.pattern.product
        if function is None or not (product or all(map(_may_be_known, operands, touched))):
            return None, False
        sizes = [shape[d] for d in dims]
        operands = zip(operands, touched, strict=True)
        arrays = torch.stack([_laid(x, axes, dims, sizes) for x, axes in operands])
        unknown = arrays.isnan()
        known = ~unknown.any(0)
        # Where a factor is zero the product is, whatever the other factor is.
        factors = [i for i, axes in enumerate(touched) if product and len(axes) == 1]
        zero = (arrays[factors] == 0).any(0) if factors else None
        if not known.any() and (zero is None or not zero.any()):
            return None, False
        laid = [n if d in dims else 1 for d, n in enumerate(shape)]
        tensors = list(torch.where(unknown, 0.0, arrays).reshape(-1, *laid).unbind())
        result = _over(function(tensors).double(), dims, known.shape)
        border = any(axis.border for axes in touched for axis in axes)
        if border:  # zeros around the constant stay zeros, or the slice is not one number
            edge = [axes[0].border if axes else False for axes in touched]
            tensors = [torch.zeros_like(t) if e else t for t, e in zip(tensors, edge, strict=True)]
            around = _over(function(tensors).double(), dims, known.shape)
            known = known & ((around == 0) | (around == result))
        result = torch.where(known, result, torch.nan)
        return result if zero is None else torch.where(zero, 0.0, result), border

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
        by = measured[0] if len(measured) == 1 else None
        self.norms[call.node] = Norm(y, mean, deviation, by)
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


def _may_be_known(x: Channels, axes: Sequence[Axis]) -> bool:
    return all(a.constant is not None for a in axes) if axes else x.scalar is not None


def _laid(x: Channels, axes: Sequence[Axis], dims: Sequence[int], sizes: Sequence[int]) -> Tensor:
    """What is known of an operand along ``dims``."""
    if not axes:
        value = torch.nan if x.scalar is None else x.scalar
        return torch.full(sizes, value, dtype=torch.float64)
    values = [axis.over(dims, or_nan(axis)).expand(sizes) for axis in axes]
    # Of several axes, which only another operand joins: no number but, where all are known, 0.
    return values[0] if len(values) == 1 else 0.0 * sum(values[1:], values[0])


def or_nan(axis: Axis) -> Tensor:
    if axis.constant is not None:
        return axis.constant
    return torch.full(axis.units.shape, torch.nan, dtype=torch.float64)


def _over(array: Tensor, dims: Sequence[int], sizes: Sequence[int]) -> Tensor:
    """A result over all dimensions, brought down to ``dims``."""
    index = tuple(slice(None) if d in dims else 0 for d in range(array.dim()))
    return array[index].expand(sizes)
