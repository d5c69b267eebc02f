"""Criteria that look at what units say of some inputs.

The recorded run is replayed node by node, so functions count as modules do. A unit is seen where it
is *read*: what arrives at each weight that reads it, behind activations, norms and pooling. Units
that no weight reads (queries and keys, when heads get narrower) are seen where they are made.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor, fx

from ..errors import SettingError
from ..modules.batches import Batches, check_limit
from ..modules.running import evaluating
from ..progress import tracking
from ..relating.constants import all_reads
from ..relating.readers import Reader, Run, reader_of
from ..rules.channels import Axis, Channels, SourceAxis
from ..tracing.trace import uses_of
from .criterion import Context, Criterion, Importance, Measured, Unscored
from .reduction import Member, check_choice
from .slices import Slices

STATISTICS = ("mean_abs", "variance", "apoz")
_NAMES = ("batches", "limit")
_CHUNK = 2**16  # samples that are looked at at once


@dataclass(frozen=True, kw_only=True, eq=False, repr=False)
class _OfActivations(Criterion):
    batches: Iterable[Any] = field(repr=False, kw_only=False)
    limit: int | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        check_limit(self.limit, "limit")

    def prepare(self, context: Context) -> Importance:
        data = _measure(self, context)
        return lambda group: self(group, data)

    def statistic_of(self, sums: Sums) -> np.ndarray:
        """Of each channel: (n,)."""
        raise NotImplementedError


@dataclass(frozen=True, kw_only=True, eq=False, repr=False)
class Activation(_OfActivations):
    """What a unit says, over all inputs and positions: where the weights behind read it, or where
    nothing does, what its layers make.

    Args:
        batches: an iterable of inputs, or of ``(input, label)``, whose labels are not used.
        statistic: ``"mean_abs"``, the mean of |a|; ``"variance"``: what varies little can be folded
            into a bias; ``"apoz"``, the share of values that are not zero: one minus the average
            percentage of zeros of Hu et al., "Network Trimming" (arXiv 1607.03250), for layers
            with a ReLU behind them. (All three as Molchanov et al., arXiv 1611.06440, compare.)
        limit: how many batches to take; by default all.
        reduce, normalize: see :class:`Criterion`; over all that read the unit.
    """

    statistic: str = "mean_abs"

    def __post_init__(self) -> None:
        super().__post_init__()
        check_choice("statistic", self.statistic, STATISTICS)

    def statistic_of(self, sums: Sums) -> np.ndarray:
        if self.statistic == "mean_abs":
            return sums.absolute / sums.count
        if self.statistic == "variance":
            return np.maximum(sums.squares / sums.count - (sums.plain / sums.count) ** 2, 0)
        return sums.nonzero / sums.count

    def members(self, group: list[Slices], data: Measured | None) -> list[Member]:
        seen = [s for s in group if s.first in self.measured(data).values]
        members = [self.measured(data).of(s) for s in seen if s.role == "in"]
        if not _complete(members):  # of those that make them, some may not have been looked at
            members = [self.measured(data).of(s) for s in seen if s.role != "in"]
        if not _complete(members):
            raise Unscored("its activations were not seen, and the importance ranks by them")
        if self.statistic == "apoz" and all((m.means(1.0) == 1).all() for m in members):
            raise Unscored("none of its activations is ever 0, and apoz counts zeros")
        return members


@dataclass(frozen=True, kw_only=True, eq=False, repr=False)
class Wanda(_OfActivations):
    """Weights times what they read: mean over the weights that read a unit of |w|·‖x‖, with ‖x‖ the
    root mean square of what the unit says there, over all inputs and positions.

    Sun et al., "A Simple and Effective Pruning Approach for Large Language Models" (arXiv
    2306.11695), for single weights; here over all weights that read a unit.

    Args:
        batches: an iterable of inputs, or of ``(input, label)``, whose labels are not used.
        limit: how many batches to take; by default all.
        reduce, normalize: see :class:`Criterion`; over all layers that read the unit.
    """

    def statistic_of(self, sums: Sums) -> np.ndarray:
        return np.sqrt(sums.squares / sums.count)

    def members(self, group: list[Slices], data: Measured | None) -> list[Member]:
        seen = [s for s in group if s.first in self.measured(data).values and s.role == "in"]
        found = []
        for s in seen:
            norms = s.norms(1).double().cpu().numpy()
            found.append(Member(s.summed(norms * self.measured(data).values[s.first]), s.sizes()))
        if not _complete(found):
            raise Unscored("no weight that was seen reads all of it, and wanda ranks by these")
        return found


def _complete(members: Sequence[Member]) -> bool:
    """Whether every unit was seen somewhere."""
    return bool(members) and bool(np.any([m.sizes > 0 for m in members], axis=0).all())


# -- running the model ----------------------------------------------------------------------------


@dataclass
class Sums:
    """Over samples, of each channel (n,): |a|, a, a² and how many are not zero."""

    absolute: Any = 0.0
    plain: Any = 0.0
    squares: Any = 0.0
    nonzero: Any = 0.0
    count: int = 0

    def add(self, samples: Tensor) -> None:
        """(samples, n)."""
        for part in samples.split(_CHUNK):
            part = part.float() if part.dtype.itemsize < 4 else part
            self.absolute += _sum(part.abs())
            self.plain += _sum(part)
            self.squares += _sum(part.square())
            self.nonzero += _sum(part != 0)
            self.count += len(part)


def _sum(samples: Tensor) -> np.ndarray:
    return samples.sum(0, dtype=torch.float64).cpu().numpy()


@dataclass
class _Made:
    """Where the units along an axis of a weight are, in what a node computes; ``index``: which
    tensor of several."""

    source: SourceAxis
    node: fx.Node
    index: int | None
    axis: Axis

    def samples(self, value: Any) -> Tensor:
        value = value if self.index is None else value[self.index]
        last = tuple(range(value.dim() - len(self.axis.dims), value.dim()))
        return value.movedim(self.axis.dims, last).reshape(-1, self.axis.units.numel())


def _measure(criterion: _OfActivations, context: Context) -> Measured:
    """For each axis that reads units the statistic of each of its slices; and for those that make
    units which nothing reads, of each unit, at its first slice."""
    trace, relations = context.trace, context.relations
    batches = Batches(
        criterion.batches, trace.model, context.example_input, criterion.limit, _NAMES
    )
    with torch.no_grad():
        readers = _readers(context)
        makers = _makers(context, readers)
        sums = [Sums() for _ in (*readers, *makers)]
        before: dict[fx.Node, list[int]] = {}
        after: dict[fx.Node, list[int]] = {}
        for i, reader in enumerate(readers):
            before.setdefault(reader.read.call.node, []).append(i)
        for i, maker in enumerate(makers):
            after.setdefault(maker.node, []).append(i)
        module, words = trace.graph_module(), type(criterion).__name__
        with evaluating(trace.model), tracking(words, criterion.limit) as track:
            for batch in track(batches):
                run = Run(module, batch, _NAMES[0])
                for node in trace.graph.nodes:
                    for i in before.get(node, ()):
                        x = readers[i].samples(run)
                        if x is not None:
                            sums[i].add(x)
                    value = run.step(node)
                    for i in after.get(node, ()):
                        sums[len(readers) + i].add(makers[i].samples(value))
    values: dict[int, np.ndarray] = {}
    sizes: dict[int, np.ndarray] = {}
    for reader, found in zip(readers, sums, strict=False):
        if found.count:
            axis = reader.read.axis
            _put(values, sizes, axis, criterion.statistic_of(found), np.ones(axis.size))
    for maker, found in zip(makers, sums[len(readers) :], strict=True):
        if found.count:
            seen = relations.classes[maker.axis.units.reshape(-1).numpy()]
            units, at = np.unique(context.classes(maker.source), return_index=True)
            where = np.searchsorted(units, seen)
            inside = (where < len(units)) & (units[np.minimum(where, len(units) - 1)] == seen)
            statistic = criterion.statistic_of(found)[inside]
            value, size = np.zeros((2, maker.source.size))
            np.add.at(value, at[where[inside]], statistic)
            np.add.at(size, at[where[inside]], 1)
            _put(values, sizes, maker.source, value, size)
    for axis in context.axes:
        if axis.first in values and not np.isfinite(values[axis.first]).all():
            raise SettingError(f"{words}: what {axis.name} reads or makes holds inf or NaN")
    return Measured(values, sizes)


def _put(values: dict, sizes: dict, axis: SourceAxis, value: np.ndarray, size: np.ndarray) -> None:
    """A weight that is used in several places has been seen in each."""
    if axis.first in values:
        value, size = value + values[axis.first], size + sizes[axis.first]
    values[axis.first], sizes[axis.first] = value, size


def _readers(context: Context) -> list[Reader]:
    """Every read of the units in question whose place in the run is known."""
    relations = context.relations
    constants = all_reads(context.trace, relations)
    wanted = {axis.first for axis in context.axes}
    found = [reader_of(constants, read) for read in constants.reads if read.axis.first in wanted]
    return [replace(reader, order=None) for reader in found if reader is not None]


def _makers(context: Context, readers: Sequence[Reader]) -> list[_Made]:
    """Where the units of groups are made of which some are never read."""
    relations, uses, found = context.relations, uses_of(context.trace), list[_Made]()
    read = np.concatenate([[0], *(context.classes(r.read.axis) for r in readers)])
    every = np.concatenate([[0], *(context.classes(axis) for axis in context.axes)])
    unread = np.unique(relations.component[np.setdiff1d(every, read)])
    for source in context.axes:
        classes = context.classes(source)
        classes = classes[(classes > 0) & np.isin(relations.component[classes], unread)]
        if source.role != "out" or not len(classes):
            continue
        for node in uses.get(source.name, ()):
            value = relations.values[node]
            several = isinstance(value, (tuple, list))
            for i, item in enumerate(value if several else [value]):
                for axis in item.axes if isinstance(item, Channels) else ():
                    if np.isin(relations.classes[axis.units.numpy()], classes).any():
                        found.append(_Made(source, node, i if several else None, axis))
    return found
