"""The plan: what goes, what stays and why, before anything is changed."""

from __future__ import annotations

import copy
import fnmatch
import warnings
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from difflib import get_close_matches
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from . import fusions, groups, importance, kept, report, slots
from .channels import SourceAxis
from .check import check_model
from .code import CannotRewrite, Code, rewrite
from .constants import Constants
from .discover import Discover, Note, Relations
from .errors import PruningWarning, SettingError
from .fold import Folds, folds
from .replay import Mismatch, Replay, WrongSize
from .select import Choice
from .slots import Slots
from .trace import Trace, record

_ROUNDS = 50  # of freezing what turned out not to fit; each freezes at least one group


@dataclass
class ChannelGroup:
    """Axes of parameters that shrink together.

    Attributes:
        name: the first layer that makes the channels.
        members: ``(parameter name, dim)`` of every axis in the group.
        width: number of units.
        removed: LongTensor of the units that go, by position among the leading layer's channels.
        importance: one score a unit, or None where none was asked for.
        frozen: why the group stays whole, or None.
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


@dataclass(frozen=True)
class Fusion:
    """A run of nodes found in the trace: its pattern's name, and the nodes in order."""

    name: str
    nodes: tuple[str, ...]


@dataclass(frozen=True)
class Settings:
    sparsity: Any
    ignore: tuple[Any, ...]
    importance: Any
    round_to: int
    bias: str
    exact: bool
    attention: str


@dataclass
class PruningPlan:
    """What :func:`plan` found and chose. Nothing is changed until :meth:`apply`.

    Attributes:
        groups: every :class:`ChannelGroup`, pruned or frozen.
        kept: for each tensor that changes, ``{dim: LongTensor}`` of the old indices that stay, in
            the order they take: ascending, except behind a shuffle. For the input channels of a
            grouped convolution, whose groups may keep different ones, the tensor has a row a group.
        fusions: runs of nodes (``conv-act-conv``) by name.
        skipped: ``(what, reason)`` of each layer that stays whole.
        graph: the dependency graph, a :class:`networkx.Graph` over parameter axes.
        attributes: attributes of the model's own modules that will be set.
        code: modules whose forward is written anew, with its source, because it holds sizes.
    """

    groups: list[ChannelGroup]
    kept: dict[str, dict[int, Tensor]]
    fusions: list[Fusion]
    skipped: list[tuple[str, str]]
    graph: Any
    settings: Settings
    notes: list[tuple[str, str]]
    attributes: dict[str, Any]
    code: dict[str, Code]
    _trace: Trace = field(repr=False)
    _relations: Relations = field(repr=False)
    _removed: np.ndarray = field(repr=False)  # by unit class; carriers are among them
    _carriers: np.ndarray = field(repr=False)
    _silent: np.ndarray = field(repr=False)
    _replay: Replay = field(repr=False)

    @property
    def approximate(self) -> list[str]:
        """Names of pruned groups that some call counts; see :class:`ChannelGroup`."""
        return [g.name for g in self.groups if g.approximate and len(g.removed)]

    def mask(self, model: nn.Module) -> nn.Module:
        """A copy of ``model`` in which the removed channels are switched off by parametrizations.

        Shapes stay as they are; removed channels emit their constant. The copy trains (masked
        slices do not come back) and can be given to :meth:`apply`.
        """
        from .masks import mask

        return mask(self, model)

    def apply(self, model: nn.Module, *, inplace: bool = False) -> nn.Module:
        """``model`` without the removed channels: same class, smaller tensors.

        Args:
            model: the model the plan was made for, another of its architecture, or a masked one.
            inplace: change ``model`` itself; an exception leaves it as it was.

        Raises:
            PlanError: the plan does not fit the model.
        """
        from .rewrite import apply

        return apply(self, model, inplace=inplace)

    def folds(self, model: nn.Module) -> Folds:
        """Where the constants of ``model``'s removed channels go."""
        constants = Constants(
            self._trace, self._relations, self._removed, self._silent, model,
            attention=self.settings.attention,
        )  # fmt: skip
        constants.run()
        return folds(
            constants, self._carriers, self._relations.classes, model,
            bias=self.settings.bias, exact=self.settings.exact,
        )  # fmt: skip

    def flags(self, which: str, axis: SourceAxis) -> Tensor:
        """For each slice of an axis whether its unit is ``removed``, ``silent`` or a ``carrier``."""
        flags = {"removed": self._removed, "silent": self._silent, "carrier": self._carriers}[which]
        return torch.from_numpy(flags[self._relations.of(axis)])

    def __str__(self) -> str:
        return report.table(self)

    def __repr__(self) -> str:
        pruned = sum(len(g.removed) > 0 for g in self.groups)
        return (
            f"PruningPlan({pruned} of {len(self.groups)} groups pruned, {len(self.kept)} tensors)"
        )


def plan(
    model: nn.Module,
    example_input: Any,
    *,
    sparsity: float | Mapping[Any, float] = 0.5,
    ignore: Iterable[Any] | str | type | nn.Module = (),
    importance: Any = "l2",
    round_to: int = 1,
    bias: str = "propagate",
    exact: bool = False,
    attention: str = "heads",
) -> PruningPlan:
    """Record ``model``, group its channels and choose which go. Nothing is changed.

    Args:
        model: any module that runs on ``example_input``.
        example_input: a tensor, a tuple of positional or a mapping of keyword arguments.
        sparsity: the fraction of units that each group loses, in [0, 1); or a mapping from module
            name (globs allowed) or module type to a fraction. Layers that a mapping does not match
            stay whole, with all that is coupled to them.
        ignore: module names, globs, types or modules whose output channels all stay.
        importance: ``"l2"``, ``"l1"``, ``"random"``, ``"fpgm"`` or a callable
            (:mod:`fxprune.importance`); the lowest scores go.
        round_to: kept widths are multiples of this where they shrink at all.
        bias: ``"propagate"`` moves what removed channels still emit into the layers that read
            them; ``"drop"`` has removed channels contribute nothing.
        exact: keep one masked channel as a carrier where zero padding would make a moved constant
            wrong at the border.
        attention: cut attention into whole ``"heads"`` or into ``"head_dim"`` slices.

    Raises:
        PruningError: a setting, the model or the input cannot be used; the message says why.
    """
    settings = _settings(sparsity, ignore, importance, round_to, bias, exact, attention)
    check_model(model, example_input)
    _check_names(model, settings)
    trace = record(model, example_input)
    discover = Discover(trace, attention=attention)
    discover.run()
    relations = discover.relations()
    return Planner(trace, relations, settings).plan()


def _settings(sparsity, ignore, chosen, round_to, bias, exact, attention) -> Settings:
    values = sparsity.values() if isinstance(sparsity, Mapping) else [sparsity]
    for value in values:
        if not isinstance(value, (int, float)) or isinstance(value, bool) or not 0 <= value < 1:
            raise SettingError(
                f"sparsity={value!r} is not a fraction in [0, 1): it is the share of units that go"
            )
    importance.resolve(chosen)
    if not isinstance(round_to, int) or isinstance(round_to, bool) or round_to < 1:
        raise SettingError(f"round_to={round_to!r} is not a positive integer")
    if bias not in ("propagate", "drop"):
        raise SettingError(f"bias={bias!r} is unknown; use 'propagate' or 'drop'")
    if attention not in ("heads", "head_dim"):
        raise SettingError(f"attention={attention!r} is unknown; use 'heads' or 'head_dim'")
    names = (ignore,) if isinstance(ignore, (str, type, nn.Module)) else tuple(ignore)
    return Settings(sparsity, names, chosen, round_to, bias, bool(exact), attention)


def matches(key: Any, path: str, module: nn.Module) -> bool:
    """Whether a name, glob, type or module means the module at ``path``."""
    if isinstance(key, str):
        return key == path or fnmatch.fnmatchcase(path, key)
    if isinstance(key, type):
        return isinstance(module, key)
    return key is module


def _check_names(model: nn.Module, settings: Settings) -> None:
    """Every key of ``ignore`` and ``sparsity`` has to mean something."""
    modules = dict(model.named_modules(remove_duplicate=False))
    keys = {"ignore": settings.ignore}
    if isinstance(settings.sparsity, Mapping):
        keys["sparsity"] = tuple(settings.sparsity)
    for setting, wanted in keys.items():
        for key in wanted:
            if not isinstance(key, (str, type, nn.Module)):
                raise SettingError(f"{setting}: {key!r} is not a name, a glob, a type or a module")
            if not any(matches(key, path, m) for path, m in modules.items()):
                near = get_close_matches(key, list(modules), 3) if isinstance(key, str) else []
                hint = f"; did you mean {', '.join(map(repr, near))}?" if near else ""
                shown = key if isinstance(key, (str, type)) else type(key).__name__
                raise SettingError(
                    f"{setting}: {shown!r} matches no module of {type(model).__name__}{hint} "
                    "Names are those of model.named_modules()."
                )


class Planner:
    """From relations to a plan: choose, follow the constants, replay; freeze what does not fit."""

    def __init__(self, trace: Trace, relations: Relations, settings: Settings) -> None:
        self.trace = trace
        self.relations = relations
        self.settings = settings
        self.modules = dict(trace.model.named_modules(remove_duplicate=False))
        self.groups = groups.groups(relations)
        self.scores: dict[int, np.ndarray] = {}
        self.notes: list[tuple[str, str]] = []
        size = int(relations.classes.max()) + 1 if len(relations.classes) else 1
        self.removed = np.zeros(size, dtype=bool)
        self.silent = np.zeros(size, dtype=bool)
        self.carriers = np.zeros(size, dtype=bool)
        self.attributes: dict[str, Any] = {}
        self.code: dict[str, Code] = {}
        self.fixed: dict[int, np.ndarray] = {}  # choices that follow the code's own slots

    def plan(self) -> PruningPlan:
        self._ask()
        for _ in range(_ROUNDS):
            replay = self._attempt()
            if replay is not None:
                return self._result(replay)
        raise AssertionError("freezing did not come to an end")  # each round freezes a group

    def _ask(self) -> None:
        """How much each group is asked to lose, and how its units score."""
        score = importance.resolve(self.settings.importance)
        self.asked: dict[int, float] = {}
        for group in self.groups:
            fraction, reason = self._fraction(group)
            if group.frozen is None and reason:
                group.frozen = reason
            self.asked[id(group)] = fraction
            if group.frozen is None and fraction > 0:
                index = np.full(len(self.removed), -1)
                index[group.units] = np.arange(len(group.units))
                parts = [
                    importance.slices(
                        self.trace.tensor(a.name), a, index[self.relations.of(a)].reshape(-1),
                        len(group.units),
                    )
                    for a in group.axes
                ]  # fmt: skip
                scores = importance.check(score(parts), len(group.units), group.leader.name)
                self.scores[id(group)] = scores

    def _fraction(self, group: groups.Group) -> tuple[float, str | None]:
        owners = [self._owner(axis) for axis in group.producers]
        for path, module in owners:
            for key in self.settings.ignore:
                if matches(key, path, module):
                    return 0.0, f"{path} is in ignore"
        for axis in group.axes:  # norms and the like have no producer of their own
            path, module = self._owner(axis)
            if axis.role in ("scale", "stat") and any(
                matches(key, path, module) for key in self.settings.ignore
            ):
                return 0.0, f"{path} is in ignore"
        if not isinstance(self.settings.sparsity, Mapping):
            return float(self.settings.sparsity), None
        fractions = []
        for path, module in owners:
            found = [v for k, v in self.settings.sparsity.items() if matches(k, path, module)]
            if not found:
                return 0.0, f"sparsity does not name {path}"
            fractions.append(found[0])
        return min(fractions, default=0.0), None

    def _owner(self, axis: SourceAxis) -> tuple[str, nn.Module]:
        path = axis.name.rpartition(".")[0]
        return path, self.modules.get(path, self.trace.model)

    def _attempt(self) -> Replay | None:
        """One round; None when it froze something and another is needed."""
        for group in self.groups:
            self.removed[group.units] = False
            if id(group) in self.scores and group.frozen is None:
                stays = self.fixed.get(id(group))
                if stays is None:
                    choice = self._choice(group)
                    stays = choice.keep(self.asked[id(group)], self.settings.round_to)
                self.removed[group.units] = ~stays
        if self.settings.bias == "drop":
            self.silent = self.removed.copy()
        else:
            self.silent &= self.removed
        if not self._follow_constants():
            return None
        self.orders: dict[int, Tensor] = {}
        try:
            replay = self._replay()
        except Mismatch as mismatch:
            if mismatch.order and self._choose_by_slots(mismatch.units):
                return None
            self._freeze(mismatch.units, mismatch.reason, mismatch.where, mismatch.line)
            return None
        self.code = {}
        return replay if not replay.wrong or self._correct(replay) else None

    def _choose_by_slots(self, labels: np.ndarray) -> bool:
        """Choose anew, as many units of each kind as the code has slots for at these widths."""
        classes = np.unique(self.relations.classes[labels])
        concerned = [
            g for g in self.groups
            if g.frozen is None and np.isin(g.units, classes).any() and id(g) not in self.fixed
        ]  # fmt: skip
        if not concerned:
            return False
        walk = Slots(
            self.trace, self.relations, ~self.removed | self.carriers, self.attributes,
            attention=self.settings.attention,
        )  # fmt: skip
        walk.run()
        wanted, kinds = walk.kinds(), slots.kinds_of_units(self.relations)
        for group in concerned:
            if id(group) not in self.scores:
                continue
            by_kind: dict[slots.Kind, list[int]] = {}
            for i, unit in enumerate(group.units):
                by_kind.setdefault(kinds[int(unit)], []).append(i)
            counts = [(np.array(members), wanted[kind]) for kind, members in by_kind.items()]
            stays = self._choice(group).keep_counts(counts)
            if stays is None:
                return False
            self.fixed[id(group)] = stays
        return True

    def _choice(self, group: groups.Group) -> Choice:
        return Choice(group.units, self.scores[id(group)], group.bins, group.covers)

    def _follow_constants(self) -> bool:
        """Find units that have to be silent, units that cannot go, and carriers."""
        while True:
            self.carriers[:] = False
            constants = Constants(
                self.trace, self.relations, self.removed, self.silent, self.trace.model,
                attention=self.settings.attention,
            )  # fmt: skip
            constants.run()
            if not constants.lost:
                if self.settings.exact and self.settings.bias == "propagate":
                    self._choose_carriers(constants)
                    if self._spare_groups_of_carriers():
                        continue
                break
            units = np.concatenate([u for u, _ in constants.lost])
            if self.silent[units].all():
                self._freeze_classes(
                    units, "what its removed channels emit is multiplied there and is not 0",
                    constants.lost[0][1], "",
                )  # fmt: skip
                return False
            self.silent[units] = True
        self.folds = folds(
            constants, self.carriers, self.relations.classes, self.trace.model,
            bias=self.settings.bias, exact=self.settings.exact,
        )  # fmt: skip
        return True

    def _choose_carriers(self, constants: Constants) -> None:
        """For each layer whose border is at stake, a removed channel that stays, masked."""
        for read in constants.reads:
            if not read.border:
                continue
            units = torch.from_numpy(self.relations.of(read.axis))
            value = torch.where(read.dead, torch.nan_to_num(read.constant), 0.0).abs()
            rows, row_units = value.reshape(-1, value.shape[-1]), units.reshape(-1, value.shape[-1])
            for row, labels in zip(rows, row_units, strict=True):
                if not bool((row > 0).any()) or self._is_fixed(labels.numpy()):
                    continue
                carried = torch.from_numpy(self.carriers[labels.numpy()]) & (row > 0)
                if not bool(carried.any()):
                    self.carriers[int(labels[row.argmax()])] = True
        for group in self.groups:
            if self.carriers[group.units].any() and group.bins:
                stays = ~self.removed[group.units] | self.carriers[group.units]
                full = self._choice(group).complete(stays)
                self.carriers[group.units] |= full & self.removed[group.units]

    def _is_fixed(self, classes: np.ndarray) -> bool:
        """Whether the code leaves no room for carriers among these units."""
        return any(np.isin(g.units, classes).any() for g in self.groups if id(g) in self.fixed)

    def _spare_groups_of_carriers(self) -> bool:
        """A group whose every removed unit would have to stay as a carrier is left as it is."""
        spared = False
        for group in self.groups:
            units = group.units
            if self.removed[units].any() and not (self.removed & ~self.carriers)[units].any():
                self.removed[units] = False
                spared = True
        return spared

    def _replay(self) -> Replay:
        """The trace at the chosen widths; producers make channels in the order that fits."""
        while True:
            replay = Replay(
                self.trace, self.relations, ~self.removed | self.carriers, self.attributes,
                self.orders, attention=self.settings.attention,
            )  # fmt: skip
            try:
                replay.run()
                return replay
            except Mismatch as mismatch:
                if mismatch.reorder is None or mismatch.reorder[0] in self.orders:
                    raise
                first, order = mismatch.reorder
                self.orders[first] = order

    def _correct(self, replay: Replay) -> bool:
        """Sizes that the code would compute wrongly: set the attributes that they are, or write
        the code anew, or freeze. True where the plan stands with that."""
        proposals: dict[str, Any] = {}
        clash: set[str] = set()
        for wrong in replay.wrong:
            for name, value in attribute_values(wrong):
                if proposals.setdefault(name, value) != value or name in self.attributes:
                    clash.add(name)
        fresh = {k: v for k, v in proposals.items() if k not in clash}
        if fresh:
            self.attributes.update(fresh)
            return False
        by_call: dict[int, list[WrongSize]] = {}
        for wrong in replay.wrong:
            by_call.setdefault(wrong.node.meta["call"], []).append(wrong)
        stands = True
        for index, sizes in by_call.items():
            try:
                self.code[self.trace.calls[index].path] = rewrite(self.trace, index, sizes)
            except CannotRewrite as error:
                stands = False
                self._freeze_size(sizes[0], str(error))
        if not stands:
            self.attributes.clear()
        return stands

    def _freeze_size(self, wrong: WrongSize, why: str) -> None:
        line = wrong.node.meta.get("where", "")
        reason = (
            f"the code computes {shown(wrong.computed)} where it has to be {shown(wrong.needed)}, "
            f"and {why}"
        )
        place = line.rpartition("/")[2] or str(wrong.node)
        self._freeze(wrong.units, reason, place, line, must=False)

    def _freeze(
        self, labels: np.ndarray, reason: str, where: str, line: str, *, must: bool = True
    ) -> None:
        classes = np.unique(self.relations.classes[labels])
        self._freeze_classes(classes, reason, where, line, must=must)

    def _freeze_classes(
        self, classes: np.ndarray, reason: str, where: str, line: str, *, must: bool = True
    ) -> None:
        """Freeze the groups of these units that lose any; ``must`` be some."""
        found = False
        for group in self.groups:
            inside = np.isin(group.units, classes)
            if group.frozen is None and inside.any() and self.removed[group.units].any():
                group.frozen = f"{reason} ({where})" if where else reason
                group.line = line
                found = True
        assert found or not must, (reason, where)

    # -- the result -----------------------------------------------------------------------------

    def _result(self, replay: Replay) -> PruningPlan:
        result = PruningPlan(
            groups=[self._channel_group(g) for g in self.groups],
            kept=kept.by_dimension(replay, self.relations),
            fusions=[Fusion(*f) for f in fusions.find(self.trace, self.modules)],
            skipped=[],
            graph=self.relations.graph,
            settings=self.settings,
            notes=self.folds.notes,
            attributes=dict(self.attributes),
            code=self.code,
            _trace=self.trace,
            _relations=self.relations,
            _removed=self.removed,
            _carriers=self.carriers,
            _silent=self.silent,
            _replay=replay,
        )
        result.skipped = self._skipped(result)
        if result.groups and all(g.frozen for g in result.groups):
            reasons = "; ".join(f"{what}: {why}" for what, why in result.skipped[:5])
            warnings.warn(
                f"nothing of {type(self.trace.model).__name__} can be pruned. {reasons}",
                PruningWarning, stacklevel=4,
            )  # fmt: skip
        return result

    def _channel_group(self, group: groups.Group) -> ChannelGroup:
        lead = self.relations.of(group.leader).reshape(-1)
        scores = None
        if id(group) in self.scores:
            scores = torch.from_numpy(self.scores[id(group)])
        gone = self.removed & ~self.carriers
        units = group.units
        return ChannelGroup(
            name=(self._owner(group.leader)[0] or group.leader.name)
            + ("" if group.producers else " (input)"),
            members=kept.members(group.axes),
            width=len(units) if len(units) else len(np.unique(lead)) if lead.any() else len(lead),
            removed=torch.from_numpy(np.flatnonzero(gone[units])),
            importance=scores,
            frozen=group.frozen,
            approximate=group.approximate,
            line=group.line,
            carriers=torch.from_numpy(np.flatnonzero(self.carriers[units])),
        )

    def _skipped(self, result: PruningPlan) -> list[tuple[str, str]]:
        """Layers with weights that keep every output channel, and why."""
        skipped = []
        shrunk = {name for name, dims in result.kept.items()}
        for group, shown in zip(self.groups, result.groups, strict=True):
            if shown.frozen:
                for axis in group.producers:
                    path = self._owner(axis)[0] or axis.name
                    skipped.append((path, shown.frozen))
        known = {what for what, _ in skipped}
        for path, module in self.modules.items():
            weights = [p for p in module._parameters.values() if p is not None and p.dim() > 1]
            if not weights or path in known:
                continue
            if path not in self.trace.called and not any(
                self.trace.names.get(id(p), "") in self._used() for p in weights
            ):
                skipped.append((path, "it is not called on the example input"))
            elif not any(self.trace.names.get(id(p)) in shrunk for p in weights) and not any(
                self.trace.names.get(id(p)) in {s.name for s in self.relations.sources}
                for p in weights
            ):
                skipped.append((path, "fxprune has no pattern for how its weight is used"))
        return list(dict.fromkeys(skipped))

    def _used(self) -> set[str]:
        return {s.name for s in self.relations.sources}


def shown(size: Any) -> str:
    """A size argument as the code would write it."""
    if isinstance(size, slice):
        parts = [size.start, size.stop, *([size.step] if size.step is not None else [])]
        return ":".join("" if p is None else str(p) for p in parts)
    if isinstance(size, (tuple, list)):
        return f"({', '.join(map(shown, size))})"
    return str(size) if isinstance(size, (int, float, type(None))) else "…"


def attribute_values(wrong: Any) -> list[tuple[str, Any]]:
    """The attributes that would mend a wrong size: those that the argument is, and nothing else."""
    node, (position, name) = wrong.node, wrong.place
    argument = node.args[position] if position < len(node.args) else node.kwargs.get(name)
    needed = wrong.needed
    pairs = (
        list(zip(argument, needed, strict=False))
        if isinstance(argument, (tuple, list)) and isinstance(needed, (tuple, list))
        else [(argument, needed)]
    )
    return [
        (str(a.target), n)
        for a, n in pairs
        if isinstance(a, torch.fx.Node) and a.op == "get_attr" and isinstance(n, int)
        and a.meta["spec"] != n
    ]  # fmt: skip


__all__ = ["ChannelGroup", "Fusion", "Note", "PruningPlan", "copy", "plan"]
