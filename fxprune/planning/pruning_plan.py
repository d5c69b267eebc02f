"""The plan as its user sees it: what goes, what stays and why."""

from __future__ import annotations

import os
from collections.abc import Container, Iterable
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor, nn

from ..choosing.settings import Settings
from ..choosing.target import Reached
from ..code import Written
from ..masking import penalty as penalties
from ..masking import plan_masks as masking
from ..modules.given import check_flag
from ..modules.running import on_cpu
from ..relating.constants import Constants
from ..relating.dependency import dependency_graph
from ..relating.fold import Folds, Mix, folds
from ..relating.relations import Relations
from ..relating.sayings import Telling
from ..replaying.kept_indices import members
from ..replaying.replay import Replay
from ..reporting import report
from ..rewriting import rewrite
from ..rules.channels import SourceAxis
from ..rules.pattern_types import Pattern
from ..tracing.fusions import Fusion
from ..tracing.trace import Trace

if TYPE_CHECKING:
    import networkx as nx


@dataclass(frozen=True)
class ChannelGroup:
    """Axes of parameters that shrink together.

    Attributes:
        name: the first layer that makes the channels.
        members: ``(parameter name, dim)`` of every axis in the group.
        width: number of units.
        removed: LongTensor of the units that go, by position among the leading layer's channels.
        importance: one score a unit, or None where none was asked for.
        frozen: why the group stays whole, or None.
        line: the place in the model's source that keeps it whole, where it is known.
        carriers: LongTensor of masked units that stay (``exact=True``).
        approximate: calls that count the channels (a layer norm over them), for which the pruned
            model equals the masked one only when the norm counts the kept channels alone.
    """

    name: str
    members: list[tuple[str, int]]
    width: int
    removed: Tensor
    importance: Tensor | None
    frozen: str | None
    approximate: list[str]
    line: str = ""
    carriers: Tensor = field(default_factory=lambda: torch.zeros(0, dtype=torch.int64))

    @property
    def kept(self) -> int:
        """Units left, carriers included."""
        return self.width - len(self.removed)

    def __repr__(self) -> str:
        state = f"frozen: {self.frozen}" if self.frozen else f"{self.width} -> {self.kept}"
        return f"ChannelGroup({self.name!r}, {state}, {len(self.members)} axes)"


@dataclass
class PruningPlan:
    """What :func:`plan` found and chose. Nothing is changed until :meth:`apply`.

    Attributes:
        groups: every :class:`ChannelGroup`, pruned or frozen.
        kept: for each tensor that changes, ``{dim: LongTensor}`` of the old indices that stay, in
            the order they take: ascending, except behind a shuffle. For the input channels of a
            grouped convolution, whose groups may keep different ones, the tensor has a row a group.
        fusions: runs of nodes (``conv-act-conv``) by name.
        skipped: ``(what, reason)`` of each layer whose output channels all stay.
        settings: those that the plan was made with.
        notes: ``(layer or call, text)`` of what is not exact: constants that could not be folded,
            or were folded at a padded border, calls that were tried out.
        attributes: attributes of the model's own modules that will be set.
        code: modules whose forward is written anew, with its source, because it holds sizes.
        target: what was asked for and got, where a target was given.
    """

    groups: list[ChannelGroup]
    kept: dict[str, dict[int, Tensor]]
    fusions: list[Fusion]
    skipped: list[tuple[str, str]]
    settings: Settings
    notes: list[tuple[str, str]]
    attributes: dict[str, Any]
    code: dict[str, Written]
    _trace: Trace = field(repr=False)
    _relations: Relations = field(repr=False)
    _removed: np.ndarray = field(repr=False)  # by unit class; carriers are among them
    _carriers: np.ndarray = field(repr=False)
    _silent: np.ndarray = field(repr=False)
    _folds: Folds = field(repr=False)  # of the weights that the plan was made with
    _replay: Replay = field(repr=False)
    _units: list[np.ndarray] = field(repr=False)  # of each group that is not frozen
    _telling: Telling = field(repr=False)  # how dead units said what is folded
    _example_input: Any = field(repr=False)
    _mixes: dict[str, Mix] = field(default_factory=dict, repr=False)  # of a calibration
    target: Reached | None = None
    _budget: Any = field(default=None, repr=False)
    _calibration: str = field(default="", repr=False)  # which tells it from all others

    @cached_property
    def graph(self) -> nx.Graph:
        """The dependency graph: nodes are parameter axes, edges the calls that couple them."""
        return dependency_graph(self._relations)

    @property
    def approximate(self) -> list[str]:
        """Names of pruned groups that some call counts; see :class:`ChannelGroup`."""
        return [g.name for g in self.groups if g.approximate and len(g.removed)]

    @property
    def predicted_error(self) -> dict[str, float]:
        """Of a calibrated plan, for each group the expected squared error of what the layers make
        that read it, over its variance: of the layer with the largest. Later layers read what
        earlier ones have become, so the last ones' errors are those of the whole so far."""
        found: dict[str, float] = {}
        for mix in self._mixes.values():
            read = set(members([mix.axis]))
            for group in self.groups:
                if read & set(group.members):
                    found[group.name] = max(found.get(group.name, 0.0), mix.error)
        return found

    @property
    def last_error(self) -> float:
        """The expected squared error of the last calibrated layer, over its output's variance."""
        return list(self._mixes.values())[-1].error if self._mixes else 0.0

    def mask(self, model: nn.Module) -> nn.Module:
        """A copy of ``model`` in which the removed channels are switched off by parametrizations.

        Shapes stay as they are; removed channels emit their constant. The copy trains (masked
        slices do not come back) and can be given to :meth:`apply`.
        """
        return masking.mask(self, model)

    def apply(self, model: nn.Module, *, inplace: bool = False) -> nn.Module:
        """``model`` without the removed channels: same class, smaller tensors.

        Args:
            model: the model the plan was made for, another of its architecture, or a masked one.
            inplace: change ``model`` itself; an exception leaves it as it was.

        Raises:
            PlanError: the plan does not fit the model.
        """
        check_flag("inplace", inplace)
        return rewrite.apply(self, model, inplace=inplace)

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write what the plan has chosen as JSON: for other weights of the same architecture.

        Of the example input, shapes and types are in the file, and integers (token ids, masks).

        Raises:
            PlanError: the plan is calibrated: its predictions are those of one model's weights.
            FileError: the file cannot be written.
        """
        from ..saving import plan_file  # it makes plans, and so stands right of this file

        plan_file.save(self, path)

    @staticmethod
    def load(
        path: str | os.PathLike[str],
        model: nn.Module,
        *,
        example_input: Any = None,
        patterns: Iterable[Pattern] = (),
    ) -> PruningPlan:
        """The plan that :meth:`save` has written, for ``model``: the same channels go.

        ``model`` runs once, to be recorded; nothing in the file is executed. What the removed
        channels still say is worked out from the weights of ``model``.

        Args:
            path: the file.
            model: of the architecture that the plan was made for.
            example_input: what to run it on; by default an input like that of then, with random
                numbers in it.
            patterns: those that the plan was made with (:func:`fxprune.plan`).

        Raises:
            FileError: the file is damaged, or none of :meth:`save`.
            PlanError: it is of another model; the message names the first tensor that differs.
        """
        from ..saving import plan_file

        return plan_file.load(path, model, example_input=example_input, patterns=patterns)

    @on_cpu()
    def penalty(self, model: nn.Module, *, grow: float = 0.0) -> Tensor:
        """The sum of the norms of all units that may go: a group lasso, to be added to a loss.

        A unit's norm is that of all slices that make it, in every layer that it is coupled with.
        (Yuan & Lin 2006; over coupled layers: Fang et al., arXiv 2301.12900.)

        Args:
            model: the model the plan was made for, or a masked one; gradients flow into it.
            grow: how much more the weak units of a group weigh, as powers of two: with 4, the
                weakest weighs 16 times what the strongest does.

        Returns:
            A scalar tensor.
        """
        return penalties.penalty(self, model, grow=grow)

    def proximal_step(self, model: nn.Module, amount: float) -> int:
        """Take ``amount`` from the norm of every unit that may go, in place; none below zero.

        After each step of an optimizer, with ``amount`` the learning rate times the weight of the
        penalty, this minimises the penalty exactly: units become zero, and
        :func:`fxprune.compact` takes them out.

        Returns:
            How many units are zero now.
        """
        return penalties.proximal_step(self, model, amount)

    def to_html(self, path: str | os.PathLike[str], *, model: nn.Module | None = None) -> None:
        """Write the plan as one page of HTML: layers with their widths before and after, what is
        coupled by which calls, importance, and why what stays has to. It loads nothing.

        Args:
            path: where to.
            model: what to count parameters and multiply-accumulates of, before and after; by
                default the model that the plan was made for.

        Raises:
            PlanError: the plan does not fit the model: it has been pruned in place since, perhaps.
            FileError: the page cannot be written there.
        """
        from .. import html

        html.write(self, path, model)

    def draw(self, path: str | os.PathLike[str] | None = None) -> Any:
        """The dependency graph as a picture: a box a layer, a colour a group, a line where a call
        couples them; what stays whole is grey.

        Args:
            path: where to write it, in the format that its suffix names (``.svg``, ``.pdf``,
                ``.png``); by default nowhere.

        Returns:
            A :class:`graphviz.Source`, which notebooks show.

        Raises:
            SettingError: the graphviz package, or its program ``dot``, is not there.
            FileError: the picture cannot be written there.
        """
        from ..reporting import drawing

        return drawing.draw(self, path)

    def constants(
        self, model: nn.Module, *, telling: Telling | None = None, every: bool = False
    ) -> Constants:
        """What ``model``'s removed channels still say.

        Args:
            telling: how they say it; by default as they do when they are masked.
            every: layers that read no dead channel are noted, too.
        """
        return Constants(
            self._trace, self._relations, self._removed, self._silent, model,
            telling=telling or Telling(masked=self._telling.masked), every=every,
        )  # fmt: skip

    @on_cpu()
    def folds(self, model: nn.Module, *, skip: Container[str] = (), mixes: bool = True) -> Folds:
        """Where the constants of ``model``'s removed channels go.

        Args:
            skip: weights to leave alone.
            mixes: whether those that are calibrated get predictions; a masked model has them.
        """
        constants = self.constants(model, telling=self._telling)
        found = folds(
            constants, self._carriers, self._relations.classes,
            bias=self.settings.bias, exact=self.settings.exact, skip=skip or self._mixes,
        )  # fmt: skip
        if mixes and not skip:
            found.mixes = self._mixes
            found.shifts += [s for mix in self._mixes.values() if (s := mix.shift(constants))]
        return found

    def flags(self, which: str, axis: SourceAxis) -> Tensor:
        """For each slice of an axis whether its unit is removed, silent or a carrier."""
        flags = {"removed": self._removed, "silent": self._silent, "carrier": self._carriers}[which]
        return torch.from_numpy(flags[self._relations.of(axis)])

    def __deepcopy__(self, memo: Any) -> PruningPlan:
        return self  # it is not changed by use, and speaks of its own trace's nodes

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise TypeError("a PruningPlan cannot be pickled; use plan.save, or save the pruned model")

    def __str__(self) -> str:
        return report.table(self)

    def _repr_html_(self) -> str:
        from ..html import table

        return table.plan(self)

    def __repr__(self) -> str:
        pruned = sum(len(g.removed) > 0 for g in self.groups)
        return (
            f"PruningPlan({pruned} of {len(self.groups)} groups pruned, {len(self.kept)} tensors)"
        )
