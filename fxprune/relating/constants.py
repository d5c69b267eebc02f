"""What the removed channels still say, once they are chosen, and to whom.

:mod:`.sayings` tells what each slice says when its unit is masked. Of those units that are,
a layer that reads them is a :class:`Read`, which decides how it is changed when the channels go.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Container, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, fx, nn

from ..rules.call import Call, Named, Roles, leaves
from ..rules.channels import Axis, Channels, SourceAxis, blank_axes, ends_of
from ..tracing.trace import Trace
from .moments import Moments
from .relations import Relations
from .sayings import Demand, Heard, Sayings, Telling
from .side_by_side import SideBySide


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


class Retold(Sayings):
    """The sayings of a model, whose tensors may be others than those of the first walk."""

    def __init__(
        self, trace: Trace, relations: Relations, model: nn.Module, telling: Telling
    ) -> None:
        super().__init__(trace, model, telling)
        self._sources = {s.key: s for s in relations.sources}
        self._before = relations.values
        self.decisions = relations.decisions
        self.modules = self._tensors.modules  # those of the trace may have been pruned since

    def source(self, value: Named, roles: Roles, view: tuple[int, ...] | None) -> Channels:
        view = value.spec.shape if view is None else view
        axes = []
        for dims in roles.values():
            axis = self._sources.get((value.name, view, dims))
            if axis is not None:
                axes.append(Axis(dims, axis.labels(), self.born(axis), source=axis))
        return Channels(view, tuple(axes), self.one(value))

    def blank(
        self, call: Call, value: float | None, dims: Container[int] | None = None
    ) -> Channels:
        before = self._before[call.node]
        return before.with_axes(
            axis.saying(self.filled(value, len(axis.units))) for axis in blank_axes(before, dims)
        )

    def put_around(
        self, call: Call, axis: Axis, dim: int, amounts: tuple[int, int], value: float | None
    ) -> tuple[Axis, Axis]:
        before, behind = ends_of(self._before[call.node], dim, amounts)
        return (
            before.saying(self.filled(value, *before.units.shape)),
            behind.saying(self.filled(value, *behind.units.shape)),
        )


class Constants:
    """Args:
    trace: the recorded run.
    relations: of the first walk.
    removed: for each unit class, whether a mask switches it off.
    silent: for each unit class, whether the mask takes its biases too.
    model: where modules and parameter values are read.
    telling: how units say what they say that are not silent.
    every: whether layers that read no dead channel are noted too.
    first: whether the model is still what it was in the first walk, which heard it all.
    """

    def __init__(
        self,
        trace: Trace,
        relations: Relations,
        removed: np.ndarray,
        silent: np.ndarray,
        model: nn.Module,
        *,
        telling: Telling,
        every: bool = False,
        first: bool = False,
    ) -> None:
        self.trace = trace
        self._classes = torch.from_numpy(relations.classes)
        self._removed = torch.from_numpy(removed[relations.classes])  # by label
        self._silent = torch.from_numpy(silent[relations.classes])
        self._makers = {s.name: s for s in relations.sources if s.role == "out"}

        def told(telling: Telling) -> Sayings:
            said = relations.said if first else None
            if said is not None and said.telling == telling:
                return said
            walk = Retold(trace, relations, model, telling)
            walk.run()
            return walk

        heard = relations.said.telling if first and relations.said is not None else None
        if heard is not None and not removed.any():
            telling = heard  # no matter how nothing is said
        mute = Telling(silent=True, masked=telling.masked)
        mutes = telling.silent or (removed.any() and (silent | ~removed).all())
        self._loud = None if mutes else told(telling)
        self._mute = told(mute) if self._loud is None or silent.any() else None
        self._told: Sayings = self._loud or self._mute  # type: ignore[assignment]
        self.values = self._told.values
        self.modules = self._told.modules
        self.norms = self._told.norms
        self.measured = Counter(self.norms.values())  # by how many norms
        self.member = self._told.member
        self.read = self._told.read
        self.reads = self._reads(every)
        # Units whose constant no layer can take, and where.
        self.lost = [lost for both in self._both("demands") for lost in self._lost(*both)]

    def _both(self, what: str) -> Iterator[tuple[Any, Any]]:
        """What was heard of units that are loud, and the same of silent ones."""
        heard = [getattr(w, what) for w in (self._loud, self._mute) if w is not None]
        return zip(heard[0], heard[-1], strict=True)

    def removed(self, units: Tensor) -> Tensor:
        """For each label, whether the mask switches its unit off."""
        return self._removed[units]

    def is_removed(self, axis: SourceAxis) -> Tensor:
        """For each slice of a parameter axis, whether the mask switches it off."""
        return axis.part(self._removed)

    def at(self, node: fx.Node) -> Iterator[tuple[Channels, list[Tensor]]]:
        """The tensors that a call returns, with what the slices of each of their axes say when they
        are dead: NaN where that is not one number."""
        walks = [w for w in (self._loud, self._mute) if w is not None]
        for loud, *mute in zip(*(leaves(w.at_call(node)) for w in walks), strict=True):
            silent = mute[0] if mute else loud
            said = (
                self._by_silence(a.units, _first_row(a), _first_row(b))
                for a, b in zip(loud.axes, silent.axes, strict=True)
            )
            yield loud, list(said)

    def _by_silence(self, units: Tensor, loud: Tensor, mute: Tensor) -> Tensor:
        return loud if loud is mute else torch.where(self._silent[units], mute, loud)

    def _reads(self, every: bool) -> list[Read]:
        pairs: list[tuple[Heard, Heard]] = list(self._both("heard"))
        if not pairs:
            return []
        side = SideBySide([loud.units.shape for loud, _ in pairs])
        units = side.put([loud.units for loud, _ in pairs])
        said = side.put_rows([loud.constant for loud, _ in pairs])
        dead = self._removed[units]
        constant, moments = said[0], self._told.rows.moments(said, dead)
        if self._loud is not None and self._mute is not None:
            constant = side.put([mute.constant[0] for _, mute in pairs])
            constant = self._by_silence(units, said[0], constant)
            silent = dead & self._silent[units]
            moments = moments and Moments(
                torch.where(silent, constant, moments.mean),
                torch.where(silent, 0.0 * constant, moments.variance),
            )
        constant = constant.masked_fill(~dead, torch.nan)
        none = [None] * len(pairs)
        means, variances = map(side.parts, moments) if moments else (none, none)
        return [
            Read(h.call, h.axis, d, c, h.border, self._makers.get(h.axis.name), h.arrive, m, v)
            for (h, _), d, c, m, v, any_dead in zip(
                pairs, side.parts(dead), side.parts(constant), means, variances, side.any(dead),
                strict=True,
            )
            if every or any_dead
        ]  # fmt: skip

    def _lost(self, loud: Demand, mute: Demand) -> Iterator[tuple[np.ndarray, str]]:
        removed = self._removed[loud.left] & self._removed[loud.right]
        whole = removed
        for i in loud.over:
            whole = whole.all(i, keepdim=True)
        wrong = self._by_silence(loud.left, loud.wrong, mute.wrong)
        dead = (removed & ~whole if loud.over else removed) & wrong
        if bool(dead.any()):
            classes = torch.unique(self._classes[loud.left.expand(dead.shape)[dead]])
            yield classes.numpy(), loud.call.name


def all_reads(trace: Trace, relations: Relations) -> Constants:
    """Who reads what, before any unit goes."""
    nothing = np.zeros(int(relations.classes.max(initial=0)) + 1, dtype=bool)
    return Constants(
        trace, relations, nothing, nothing, trace.model, telling=Telling(), every=True, first=True
    )


def _first_row(axis: Axis) -> Tensor:
    return axis.says(axis.dims)[0].expand(axis.units.shape)
