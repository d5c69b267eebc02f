"""Channels of a tensor as arrays of integers, and how they move.

An :class:`Axis` covers one dimension of a tensor, or several where a view has cut one channel
dimension in parts, and says for each slice which *label* it carries. Dimensions without an axis
are rigid: nothing along them can be removed.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Container, Iterable
from dataclasses import dataclass, field, replace
from functools import partial

import numpy as np
import torch
from torch import Tensor

FROZEN = 0  # the label of slices that have to stay
_MOST = 2**24  # numbers in the constants of an axis


@dataclass(frozen=True)
class SourceAxis:
    """An axis of a parameter or buffer: where labels are born.

    The tensor is seen as ``view``, a shape with the same elements in which channels have a
    dimension of their own (the groups of a grouped convolution, the gates of an LSTM).
    ``role`` says what the slices do: ``out`` makes a channel, ``in`` reads one, ``scale`` and
    ``shift`` act on one, ``stat`` is measured from one, ``bare`` is anything else.
    """

    name: str
    tensor_shape: tuple[int, ...]
    view: tuple[int, ...]
    dims: tuple[int, ...]
    role: str
    first: int  # label of the first slice; the others follow in row-major order

    shape: tuple[int, ...] = field(init=False)  # of the slices
    size: int = field(init=False)  # their number
    is_bare: bool = field(init=False, compare=False)  # nothing is known of what the slices do
    numbers: np.ndarray = field(init=False, repr=False, compare=False)  # the labels, one by one
    _labels: Tensor = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        own = vars(self)  # which a frozen class lets nobody assign to one by one
        own["shape"] = shape = tuple([self.view[d] for d in self.dims])
        own["size"] = size = math.prod(shape)
        own["numbers"] = np.arange(self.first, self.first + size)
        labels = torch.from_numpy(self.numbers)
        own["_labels"] = labels if len(shape) == 1 else labels.reshape(shape)
        own["is_bare"] = self.role.startswith("bare")

    @property
    def key(self) -> tuple[str, tuple[int, ...], tuple[int, ...]]:
        """What tells it from other axes of the model."""
        return self.name, self.view, self.dims

    @property
    def is_whole(self) -> bool:
        """Whether the slices are single elements of the tensor."""
        return math.prod(self.view) == self.size

    def part(self, by_label: Tensor) -> Tensor:
        """Of one value a label, those of this axis."""
        return by_label[self.first : self.first + self.size].reshape(self.shape)

    def slices(self, tensor: Tensor) -> Tensor:
        """``tensor`` with the axis's dimensions first, and the others of its view behind them."""
        front = tuple(range(len(self.dims)))
        seen = tensor if tensor.shape == self.view else tensor.reshape(self.view)
        return seen if self.dims == front else seen.movedim(self.dims, front)

    def rows(self, tensor: Tensor) -> Tensor:
        """``tensor`` as a matrix with a row a slice."""
        return self.slices(tensor).reshape(self.size, -1)

    def laid(self, values: Tensor) -> Tensor:
        """One value a slice, laid out to meet the tensor in its view."""
        return values.reshape([n if d in self.dims else 1 for d, n in enumerate(self.view)])

    def flat(self, tensor: Tensor) -> Tensor:
        """The tensor as (rows, n, rest): the axis' last dimension, one row for each slice of its
        others (the groups of a grouped convolution)."""
        front = tensor.reshape(self.view).movedim(self.dims, tuple(range(len(self.dims))))
        return front.reshape(-1, self.shape[-1], front[(0,) * len(self.dims)].numel())

    def unflat(self, flat: Tensor) -> Tensor:
        """The tensor again, from what :meth:`flat` makes of it."""
        rest = [n for d, n in enumerate(self.view) if d not in self.dims]
        front = flat.reshape(*self.shape, *rest)
        back = front.movedim(tuple(range(len(self.dims))), self.dims)
        return back.reshape(self.tensor_shape)

    def labels(self) -> Tensor:
        return self._labels

    def along(self, positions: Tensor, i: int) -> Tensor:
        """Where ``positions`` in the axis (row-major) are along the ``i``-th of its dimensions."""
        return positions // math.prod(self.shape[i + 1 :]) % self.shape[i]


Said = Tensor | Callable[[], Tensor | None] | None  # an axis' constants, or who knows them


class Once:
    """What a function gives, worked out when someone asks for it first."""

    __slots__ = ("_found", "_work_out")

    def __init__(self, work_out: Callable[[], Tensor | None]) -> None:
        self._work_out: Callable[[], Tensor | None] | None = work_out
        self._found: Tensor | None = None

    def __call__(self) -> Tensor | None:
        if self._work_out is not None:
            self._found, self._work_out = self._work_out(), None
        return self._found


# Nothing assigns to the fields of the two below; frozen they would take three times as long to
# make, which every call does. Two are the same only where they are one: arrays have no one answer.
@dataclass(slots=True, eq=False)
class Axis:
    """Channels along ``dims`` of a tensor.

    ``constant`` holds what each slice contains when its unit is removed by a mask, NaN where that
    is not one number: (rows, ...), of which :mod:`fxprune.relating.moments` tells. ``border``
    tells that zeros stand around it (it went through zero padding).
    ``blank`` tells that all slices are alike: they go in any order with those they meet.
    """

    dims: tuple[int, ...]
    units: Tensor
    said: Said = None
    border: bool = False
    source: SourceAxis | None = None
    blank: bool = False

    @property
    def constant(self) -> Tensor | None:
        return self.said() if callable(self.said) else self.said

    def on(self, dims: tuple[int, ...]) -> Axis:
        """The same channels along other dimensions; ``dataclasses.replace`` is too slow for this,
        which every call does."""
        return Axis(dims, self.units, self.said, self.border, self.source, self.blank)

    def saying(self, said: Said, border: bool = False) -> Axis:
        """The same channels with other constants."""
        return Axis(self.dims, self.units, said, border, self.source, self.blank)

    def says(self, dims: tuple[int, ...]) -> Tensor:
        """``constant``, behind its rows laid out over ``dims``; NaN where nothing is known."""
        constant = self.constant
        if constant is None:
            return torch.full((1,) * (1 + len(dims)), torch.nan, dtype=torch.float64)
        return laid_over(constant, self.dims, dims)

    def over(self, dims: Iterable[int]) -> Tensor:
        """``units`` over ``dims``, of size 1 where the axis has no such one."""
        return laid_out(self.units, self.dims, dims)


@dataclass(slots=True, eq=False)
class Channels:
    """What is known of one tensor: its shape, its axes (no two on one dimension), its one value
    where it is a constant of one element, and the dimension along which it sums to one."""

    shape: tuple[int, ...]
    axes: tuple[Axis, ...] = ()
    scalar: float | None = None
    sums_to_one: int | None = None

    def axis(self, dim: int) -> Axis | None:
        """The axis that covers ``dim`` (which may be negative), or None where it is rigid."""
        dim %= max(len(self.shape), 1)
        return next((axis for axis in self.axes if dim in axis.dims), None)

    def touching(self, dims: Iterable[int]) -> list[Axis]:
        if not self.axes:
            return []
        dims = set(dims)
        return [axis for axis in self.axes if not dims.isdisjoint(axis.dims)]

    def with_axes(self, axes: Iterable[Axis]) -> Channels:
        """The same tensor with other axes; see :meth:`Axis.on`."""
        return Channels(self.shape, tuple(axes), self.scalar, self.sums_to_one)

    def told_apart(self, dims: Iterable[int]) -> Channels:
        """The same tensor after some slices along ``dims`` were written to: they are not all alike
        any more."""
        dims = set(dims)
        return self.with_axes(
            axis if dims.isdisjoint(axis.dims) else replace(axis, blank=False) for axis in self.axes
        )


def blank_axes(x: Channels, dims: Container[int] | None) -> list[Axis]:
    """Those of ``x`` whose slices are all alike; where ``dims`` are given, that lie along these."""
    return [a for a in x.axes if a.blank and (dims is None or all(d in dims for d in a.dims))]


def ends_of(x: Channels, dim: int, amounts: tuple[int, int]) -> tuple[Axis, Axis]:
    """Of the axis of ``x`` along ``dim``, so many first slices and so many last ones."""
    axis = x.axis(dim)
    assert axis is not None
    at = axis.dims.index(dim)
    before, behind = amounts
    first = axis.units.narrow(at, 0, before)
    last = axis.units.narrow(at, axis.units.size(at) - behind, behind)
    return Axis(axis.dims, first), Axis(axis.dims, last)


def laid_out(array: Tensor, dims: tuple[int, ...], over: Iterable[int]) -> Tensor:
    """An array along ``dims`` as one along ``over``, of size 1 along those it has not."""
    if over == dims:
        return array
    sizes = dict(zip(dims, array.shape, strict=True))
    return array.reshape([sizes.get(d, 1) for d in over])


def laid_over(rows: Tensor, dims: tuple[int, ...], over: Iterable[int]) -> Tensor:
    """The same of an array (rows, ...)."""
    if over == dims:
        return rows
    count, *shape = rows.shape
    sizes = dict(zip(dims, shape, strict=True))
    return rows.reshape([count, *[sizes.get(d, 1) for d in over]])


def followed(rows: Tensor, size: int) -> Tensor:
    """Of constants (rows, ...), those that go on in an axis of so many slices: of too many (the
    channels of a whole feature map in one dimension), what a mask makes of them, and not what they
    said in the mean."""
    return rows if rows.shape[0] * size <= _MOST else rows[:1]


def remap(x: Channels, where: dict[int, int], shape: tuple[int, ...]) -> Channels:
    """``x`` with its dimensions in new places; an axis with one that is not in ``where`` ends."""
    axes = []
    for axis in x.axes:
        moved = [where[d] for d in axis.dims if d in where]
        if len(moved) == len(axis.dims):
            if len(moved) == 1 or moved == sorted(moved):
                axes.append(axis.on(tuple(moved)))
                continue
            order = sorted(range(len(moved)), key=moved.__getitem__)
            constant = axis.constant
            if constant is not None:
                constant = constant.permute([0, *[i + 1 for i in order]])
            dims, units = tuple(moved[i] for i in order), axis.units.permute(order)
            axes.append(Axis(dims, units, constant, axis.border, None, axis.blank))
    return Channels(shape, tuple(axes), x.scalar)


def distinct(values: np.ndarray) -> np.ndarray:
    """The different values, ascending; ``np.unique`` is slower on arrays as short as axes."""
    ordered = values.flatten()
    ordered.sort()
    return without_repeats(ordered)


def without_repeats(values: np.ndarray) -> np.ndarray:
    """Without those that are as the one before: of what slices of axes have in common not many are
    left, and there is less to sort."""
    first = np.ones(len(values), dtype=bool)
    np.not_equal(values[1:], values[:-1], out=first[1:])
    return values[first]


def distinct_rows(rows: np.ndarray) -> np.ndarray:
    """The different rows of a matrix, ascending; ``np.unique`` compares whole rows, where mostly
    their first numbers tell."""
    ordered = rows[np.argsort(rows[:, 0], kind="stable")]
    if (ordered[1:, 0] != ordered[:-1, 0]).all():
        return ordered
    return np.unique(rows, axis=0)


def renumbered(numbers: np.ndarray) -> np.ndarray:
    """Numbers from 0 on without gaps, in their order: the inverse that ``np.unique`` finds by
    sorting."""
    there = np.zeros(int(numbers.max(initial=0)) + 1, dtype=bool)
    there[numbers] = True
    return (np.cumsum(there) - 1)[numbers]


def components_of(left: np.ndarray, right: np.ndarray, size: int) -> np.ndarray:
    """The connected component of each of ``size`` items, linked in pairs."""
    from scipy.sparse import coo_array  # here: it takes a tenth of a second to import
    from scipy.sparse.csgraph import connected_components

    ends = left.astype(np.int32), right.astype(np.int32)  # all that csgraph of SciPy 1.11 takes
    links = coo_array((np.ones(len(left), dtype=np.int8), ends), shape=(size, size))
    return connected_components(links, directed=False)[1]


def varying(units: Tensor) -> tuple[int, ...]:
    """The dimensions along which an array of labels is not the same throughout."""
    return tuple(d for d in range(units.dim()) if units.size(d) > 1 and _varies(units, d))


def _varies(units: Tensor, dim: int) -> bool:
    if units.stride(dim) == 0:  # it was expanded
        return False
    ends = units.select(dim, 0), units.select(dim, -1)  # which mostly tell
    return not torch.equal(*ends) or bool((units != ends[0].unsqueeze(dim)).any())


def stand_in(axis: Axis, shape: tuple[int, ...], touched: Iterable[int], array: Tensor) -> Tensor:
    """``array`` laid out like the tensor, with size 1 for the dimensions an op does not touch."""
    full = {*axis.dims, *touched}
    laid = laid_out(array, axis.dims, range(len(shape)))
    return laid.expand([n if d in full else 1 for d, n in enumerate(shape)])


def run_on(axis: Axis, x: Channels, function: Callable[[Tensor], Tensor], touched: Iterable[int]):
    """The labels of ``axis`` after an op that moves slices about, over all dimensions of the
    result; and for each its old position in the axis, if somebody may ask what it says."""
    units = function(stand_in(axis, x.shape, touched, axis.units))
    if axis.said is None:
        return units, None
    return units, function(stand_in(axis, x.shape, touched, positions(axis)))


def positions(axis: Axis) -> Tensor:
    """Where each slice of an axis lies in it, from 1 on."""
    return torch.arange(1, axis.units.numel() + 1).reshape(axis.units.shape)


def compact(
    axis: Axis, units: Tensor, old: Tensor | None, dims: tuple[int, ...]
) -> tuple[Tensor, Said]:
    """Over ``dims``, what an op has made of an axis: of its labels, and of what it says by the
    ``old`` positions. That is worked out when somebody asks: mostly nobody does."""
    index = tuple([slice(None) if d in dims else slice(0, 1) for d in range(units.dim())])
    said = None if old is None else Once(partial(_said_at, axis, old, index, dims))
    return units[index].reshape([units.size(d) for d in dims]), said


def _said_at(
    axis: Axis, old: Tensor, index: tuple[slice, ...], dims: tuple[int, ...]
) -> Tensor | None:
    """What an axis says at ``old`` positions: NaN where that varies along the dimensions besides
    ``dims``, and at position 0, which an op has filled."""
    constant = axis.constant
    if constant is None:
        return None
    rows = followed(constant.flatten(1), old.numel())
    rows = torch.cat([rows.new_full((len(rows), 1), torch.nan), rows], 1)
    heads = old[index]
    found = rows[:, heads.reshape(-1)].reshape(-1, *heads.shape)
    if not torch.equal(old, heads.expand(old.shape)):
        level = rows[:, old.reshape(-1)].reshape(-1, *old.shape) == found
        for d in range(old.dim()):
            if d not in dims:
                level = level.all(d + 1, keepdim=True)
        found = torch.where(level, found, torch.nan)
    return found.reshape(-1, *[old.size(d) for d in dims])
