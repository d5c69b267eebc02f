"""The plan: what goes, what stays and why, before anything is changed."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping
from numbers import Integral
from typing import Any

import numpy as np
import torch
from torch import fx, nn

from .. import importance
from ..budgets.budget import Budget
from ..budgets.searching import Options
from ..calibration.reconstruction import Reconstruction
from ..choosing.owed import Owed
from ..choosing.scope import MOST, Contender, fractions, structure, work_of
from ..choosing.select import Choice, keep_count
from ..choosing.settings import Meaning, Settings, check_makers, keys_of, matches
from ..errors import SettingError
from ..mending.in_training import check_in_training
from ..mending.mend import Mended, Mending, Unfit
from ..modules.inspecting import dotted
from ..relating import groups
from ..relating.constants import Constants
from ..relating.fold import Folds, folds, uses_alone
from ..relating.relations import Relations
from ..relating.sayings import Telling
from ..relating.training_only import InTraining
from ..replaying import kept_indices as kept
from ..rules.call import node_name
from ..rules.channels import SourceAxis
from ..tracing import fusions
from ..tracing.trace import Trace
from .assembling import assemble
from .pruning_plan import PruningPlan

# Each round freezes a group or, in a Compactor, units of one; with a budget, a few do neither.
_ROUNDS = 50
_TRIES = 4  # of counting carriers, whose number depends on the units that go
_ENDLESS = "the scores of its units are infinite"
_OF_NORMS = ("scale", "stat")  # roles of slices that act on channels which others make


class StayAround(Exception):
    """What some calls put around channels has to stay; the channels may go all the same."""

    def __init__(self, calls: set[fx.Node], reason: str) -> None:
        super().__init__(reason)
        self.calls = calls
        self.reason = reason


class Planner:
    """From relations to a plan: choose, follow the constants, mend; freeze what does not fit.

    Args:
        example_input: that the trace was recorded with.
        training: what hangs together in training mode.
        telling: how dead units say what they say.
    """

    reconstruction: Reconstruction | None = None  # scores units, where that is asked for
    budget: Budget | None = None  # says how many go, where a target is given

    def __init__(
        self,
        trace: Trace,
        relations: Relations,
        settings: Settings,
        example_input: Any,
        training: InTraining,
        found: list[fusions.Fusion],
        telling: Telling,
    ) -> None:
        self.telling = telling
        self.example_input = example_input
        self.training = training
        self.fusions = found
        self.trace = trace
        self.relations = relations
        self.settings = settings
        self.modules = trace.modules
        self.meaning = Meaning(self.modules)
        self.groups = groups.groups(relations)
        self._names = self._unique_names()
        self.scores: dict[int, np.ndarray] = {}
        self.notes: list[tuple[str, str]] = [
            (node_name(node), f"the slices that it puts around channels stay: {reason}")
            for node, reason in trace.cuts.around.items()
        ]
        size = int(relations.classes.max()) + 1 if len(relations.classes) else 1
        self.removed = np.zeros(size, dtype=bool)
        self.silent = np.zeros(size, dtype=bool)
        self.carriers = np.zeros(size, dtype=bool)
        self.carried: dict[int, np.ndarray] = {}  # of groups the carriers that rounding counts
        self._tries: Counter[int] = Counter()

    def plan(self) -> PruningPlan:
        self._check_keys()
        self._ask()
        for _ in range(_ROUNDS + len(self.removed)):
            self._divide()
            mended = self._attempt()
            if mended is not None and self._is_met(mended):
                self.relations.quieten()
                self._explain_whole()
                return assemble(self, mended)
        raise AssertionError("freezing did not come to an end")

    def _check_keys(self) -> None:
        """What settings name has to make channels. A layer may that is not called, or whose weight
        no pattern knows: the plan says so of it."""
        if any(keys_of(self.settings)):
            check_makers(self.settings, self.meaning, *self._makers())
        wanted = self.settings.importance
        for key in wanted if isinstance(wanted, Mapping) else ():
            if any(matches(key, name, self.trace.model) for name in self._names.values()):
                continue
            for group in self.groups:
                for path, module in map(self.owner, group.producers):
                    if matches(key, path, module):
                        name = self.name(group)
                        raise SettingError(
                            f"importance: {key!r} is no group's name: the channels of {path} are "
                            f"those of group {name!r}, which have one score"
                        )

    def _makers(self) -> tuple[list[nn.Module], list[nn.Module]]:
        """The modules that make channels, or might if they were called; and norms."""
        sources = self.relations.sources
        used = {s.name for s in sources}
        makers = [self.owner(s)[1] for s in sources if s.role == "out"]
        norms = [self.owner(s)[1] for s in sources if s.role in _OF_NORMS]
        makers += [
            module for path, module in self.modules.items()
            if any(p is not None and p.dim() > 1 and dotted(path, name) not in used
                   for name, p in module._parameters.items())
        ]  # fmt: skip
        return makers, norms

    def _ask(self) -> None:
        """Which groups can lose units, and how these score."""
        self.own: dict[int, float] = {}  # of a mapping
        for group in self.groups:
            self.own[id(group)], reason = self._fraction(group)
            if group.frozen is None and reason:
                group.frozen = reason
        self._score([g for g in self.groups if g.frozen is None])

    def _score(self, losing: list[groups.Group]) -> None:
        if self.reconstruction is not None:
            found = {id(g): self.reconstruction.scores(g.units) for g in losing}
            self.scores |= {key: each for key, each in found.items() if each is not None}
            losing = [g for g in losing if id(g) not in self.scores]
            why = "no layer that reads its units was seen: they are chosen by l2"
            self.notes += [(self.name(g), why) for g in losing]
        names = {id(g): self.name(g) for g in self.groups}
        context = importance.Context(self.trace, self.relations, [], self.example_input)
        axes = {names.pop(id(g)): g.axes for g in losing}
        scorer = importance.Scorer(self.settings.importance, context, axes, list(names.values()))
        for group in losing:
            try:
                self.scores[id(group)] = scorer(self.name(group), group.units)
            except importance.Unscored as unscored:
                group.frozen = str(unscored)

    def _divide(self) -> None:
        """How much each group is asked to lose: by the sparsity, or as a target has it."""
        sparsity, scope = self.settings.sparsity, self.settings.scope
        losing = [g for g in self.groups if g.frozen is None and id(g) in self.scores]
        contenders = [self._contender(g) for g in losing]
        self._choices = {id(g): c.choice for g, c in zip(losing, contenders, strict=True)}
        work = None
        if self.reconstruction is not None and scope == "global":
            work = work_of(self.trace, self.relations, [g.units for g in losing])
            for contender in contenders:
                contender.curve = self.reconstruction.curve(contender.choice.units)

        def at(s: float) -> list[float]:
            return fractions(contenders, s, scope=scope, work=work)

        if self.budget is None:
            found = at(0.0 if isinstance(sparsity, Mapping) else float(sparsity))
        else:
            stays = self.budget.choose([Options(c.choice, c.step) for c in contenders], at)
            self.chosen = {id(g): kept for g, kept in zip(losing, stays, strict=True)}
            found = [float(1 - kept.mean()) for kept in stays]
        self.asked = {id(g): fraction for g, fraction in zip(losing, found, strict=True)}

    def _is_met(self, mended: Mended) -> bool:
        """Whether a target is, if there is one."""
        if self.budget is None:
            return True
        met = self.budget.is_met(self.removed, self.carriers, self.folds)
        if met and self.budget.measure.unsure:
            return self.budget.is_counted(assemble(self, mended))
        return met

    def _contender(self, group: groups.Group) -> Contender:
        settings, width = self.settings, len(group.units)
        most = min(self._own(settings.max_sparsity, group), default=None)
        if most is None:
            most = 1.0 if settings.scope == "local" else MOST
        most = self._of_now(settings.max_sparsity, group, most)
        least = [1, width - math.floor(most * width + 1e-9)]
        for given in self._own(settings.min_width, group):
            if isinstance(given, Integral):
                least.append(int(given))
            else:
                gone = self._of_now(settings.min_width, group, 1 - given)
                least.append(math.ceil((1 - gone) * width - 1e-9))
        own = self.own[id(group)] if isinstance(settings.sparsity, Mapping) else None
        kind = structure(group, self.modules) if settings.scope == "isomorphic" else None
        choice, least_of_all = self._choice(group), min(max(least), width)
        return Contender(choice, least_of_all, own, kind, step=settings.round_to)

    def _own(self, setting: Any, group: groups.Group) -> list[Any]:
        """What a setting that may be a mapping says of the layers that make a group's channels."""
        if not isinstance(setting, Mapping):
            return [] if setting is None else [setting]
        found = (self.meaning.first(setting, self.owner(axis)[1]) for axis in group.producers)
        return [value for value in found if value is not None]

    def _fraction(self, group: groups.Group) -> tuple[float, str | None]:
        """What it is asked to lose, and why not where nothing of it may go."""
        norms = [axis for axis in group.axes if axis.role in _OF_NORMS]
        for path, module in map(self.owner, [*group.producers, *norms]):
            if any(self.meaning(key, module) for key in self.settings.ignore):
                return 0.0, f"{path} is in ignore"
        sparsity = self.settings.sparsity
        if not isinstance(sparsity, Mapping):
            return float(sparsity), None
        asked = []
        for path, module in map(self.owner, group.producers):
            asked.append(self.meaning.first(sparsity, module))
            if asked[-1] is None:
                return 0.0, f"sparsity does not name {path}"
        return self._of_now(sparsity, group, min(asked, default=0.0)), None

    def _of_now(self, setting: Any, group: groups.Group, fraction: float) -> float:
        """What is to be gone of what a group had at first, as a share of what it has now."""
        known = isinstance(setting, Owed)
        return setting.share(kept.members(group.axes), fraction) if known else fraction

    def name(self, group: groups.Group) -> str:
        """The first layer that makes the channels; for those of the input, that reads them. Of
        several groups of one layer, the later ones have a number."""
        return self._names[id(group)]

    def _unique_names(self) -> dict[int, str]:
        met: Counter[str] = Counter()
        names = {}
        for group in sorted(self.groups, key=lambda g: g.frozen is not None):
            name = self.owner(group.leader)[0] or group.leader.name
            name = name if group.producers else f"{name} (input)"
            met[name] += 1
            names[id(group)] = name if met[name] == 1 else f"{name} ({met[name]})"
        return names

    def owner(self, axis: SourceAxis) -> tuple[str, nn.Module]:
        path = axis.name.rpartition(".")[0]
        return path, self.modules.get(path, self.trace.model)

    def _attempt(self) -> Mended | None:
        """One round; None when it froze something and another is needed."""
        for group in self.groups:
            stays = self._stays(group)
            self.removed[group.units] = False if stays is None else ~stays
        self._chosen = {id(g) for g in self.groups if self.removed[g.units].any()}
        if self.settings.bias == "drop":
            self.silent = self.removed.copy()
        else:
            self.silent &= self.removed
        if not self._follow_constants():
            return None
        kept = ~self.removed | self.carriers
        mending = Mending(self.trace, self.relations, kept, self.training.others)
        try:
            mended = mending.mend()
            check_in_training(self.training, self.relations, kept, mended)
            return mended
        except Unfit as unfit:
            classes = np.unique(self.relations.classes[unfit.units])
            around = self._around(classes)
            if around:
                raise StayAround(around, unfit.reason) from unfit
            self._freeze_classes(classes, unfit.reason, unfit.where, unfit.line)
            return None

    def _stays(self, group: groups.Group) -> np.ndarray | None:
        """For each unit of a group whether it is to stay; None where all do."""
        if group.frozen is not None or not self.asked.get(id(group)):
            return None
        if self.budget is not None:
            return self.chosen[id(group)]
        stays = self._choices[id(group)].keep(self.asked[id(group)], self.settings.round_to)
        if stays.all():
            group.frozen = self._why_nothing_goes(group)
        return stays

    def _explain_whole(self) -> None:
        """Of groups that are asked for nothing, though others are, or left to carriers."""
        for group in self.groups:
            spared = id(group) in self._chosen and not self.removed[group.units].any()
            if spared and group.frozen is None:
                group.frozen = "exact=True would keep each of its masked channels"
            if group.frozen is not None or self.asked.get(id(group), 1.0) > 0:
                continue
            contender = self._contender(group)
            if np.isposinf(contender.choice.scores).all():
                group.frozen = _ENDLESS
            elif not contender.most():
                group.frozen = "no smaller width is within min_width, max_sparsity and round_to"
            elif self.budget is not None:
                group.frozen = "the target is met with all of its units"
            elif contender.own is None and any(self.asked.values()):
                group.frozen = "its units score higher than those that go in its place"

    def _why_nothing_goes(self, group: groups.Group) -> str:
        width, asked = len(group.units), self.asked[id(group)]
        if keep_count(width, asked) == width:
            return f"{asked:g} of its {width} units is less than one"
        if np.isposinf(self.scores[id(group)]).all():
            return _ENDLESS
        if self.settings.round_to > 1:
            return f"no smaller width is a multiple of {self.settings.round_to} in all its parts"
        note = groups.note_about(group, self.relations)
        stays = f"; of some, {note.reason}" if note else ""
        return f"its parts have to lose equally many, and no choice of units does{stays}"

    def _choice(self, group: groups.Group) -> Choice:
        layers = [self.relations.of(axis).reshape(-1) for axis in group.producers]
        scores, carried = self.scores[id(group)], self.carried.get(id(group))
        kinds = self.relations.kinds[group.units]
        return Choice(group.units, scores, group.bins, group.covers, layers, carried, kinds)

    def _is_rounded(self) -> bool:
        """Whether widths are with the carriers; these are counted in the next round."""
        if self.settings.round_to == 1 or not self.settings.exact:
            return True
        off = []
        for group in self.groups:
            removed, carriers = self.removed[group.units], self.carriers[group.units]
            if removed.any():
                kept = ~removed | carriers
                if not self._choice(group).is_rounded(kept, self.settings.round_to):
                    off.append(group)
        for group in off:
            self.carried[id(group)] = self.carriers[group.units].copy()
            self._tries[id(group)] += 1
            if self._tries[id(group)] > _TRIES:
                group.frozen = "no width that counts the masked channels of exact=True is rounded"
        return not off

    def _follow_constants(self) -> bool:
        """Find units that have to be silent, units that cannot go, and carriers."""
        while True:
            self.carriers[:] = False
            constants = self._heard()
            if not constants.lost:
                if self.settings.exact and self.settings.bias == "propagate":
                    self._choose_carriers(constants)
                    if self._spare_groups_of_carriers():
                        continue
                break
            units = np.concatenate([u for u, _ in constants.lost])
            if not self._lost(units, constants.lost[0][1]):
                return False
        if not self._is_rounded():
            return False
        self.folds = self._folded(constants)
        return True

    def _heard(self) -> Constants:
        return Constants(
            self.trace, self.relations, self.removed, self.silent, self.trace.model,
            telling=self.telling, first=True,
        )  # fmt: skip

    def _folded(self, constants: Constants) -> Folds:
        return folds(
            constants, self.carriers, self.relations.classes,
            bias=self.settings.bias, exact=self.settings.exact,
        )  # fmt: skip

    def _lost(self, units: np.ndarray, where: str) -> bool:
        """Units that no constant can stand for: silent ones say nothing; False where that is not
        enough, and they were frozen."""
        if self.silent[units].all():
            reason = "what its removed channels emit is multiplied there and is not 0"
            self._freeze_classes(units, reason, where, "")
            return False
        self.silent[units] = True
        return True

    def _choose_carriers(self, constants: Constants) -> None:
        """For each layer whose border is at stake, a removed channel that stays, masked."""
        # A computed weight (weight_norm) cannot be zero, as a carrier's is.
        no_carrier = np.zeros(len(self.removed), dtype=bool)
        named = set(self.trace.names.values())
        for source in self.relations.sources:
            if source.name not in named and source.role == "out":
                no_carrier[self.relations.of(source)] = True
        for read in constants.reads:
            name = read.axis.name
            if not read.border or name in self.trace.written:
                continue
            if not uses_alone(self.trace, read.call, name):  # its columns say more elsewhere
                continue
            units = torch.from_numpy(self.relations.of(read.axis))
            value = torch.where(read.dead, torch.nan_to_num(read.constant), 0.0).abs()
            rows, row_units = value.reshape(-1, value.shape[-1]), units.reshape(-1, value.shape[-1])
            for row, labels in zip(rows, row_units, strict=True):
                row = torch.where(torch.from_numpy(no_carrier[labels.numpy()]), 0.0, row)
                if not bool((row > 0).any()):
                    continue
                carried = torch.from_numpy(self.carriers[labels.numpy()]) & (row > 0)
                if not bool(carried.any()):
                    self.carriers[int(labels[row.argmax()])] = True
        for group in self.groups:
            if self.carriers[group.units].any() and group.bins:
                stays = ~self.removed[group.units] | self.carriers[group.units]
                full = self._choice(group).complete(stays)
                self.carriers[group.units] |= full & self.removed[group.units]

    def _spare_groups_of_carriers(self) -> bool:
        """A group whose every removed unit would have to stay as a carrier is left as it is."""
        spared = False
        for group in self.groups:
            units = group.units
            if self.removed[units].any() and not (self.removed & ~self.carriers)[units].any():
                self.removed[units] = self.silent[units] = False
                spared = True
        return spared

    def _around(self, classes: np.ndarray) -> set[fx.Node]:
        """Calls that put slices around channels, where it is no more than such slices that have to
        stay."""
        around = {node: self.relations.classes[a] for node, a in self.relations.around.items()}
        every = np.concatenate([classes[:0], *around.values()])
        alone = self.removed[classes].any() and np.isin(classes, every).all()
        return {n for n, found in around.items() if alone and np.isin(found, classes).any()}

    def _freeze_classes(self, classes: np.ndarray, reason: str, where: str, line: str) -> None:
        """Freeze the groups of these units that lose any; where none does, all that do."""
        losing = [g for g in self.groups if g.frozen is None and self.removed[g.units].any()]
        concerned = [g for g in losing if np.isin(g.units, classes).any()] or losing
        assert concerned, (reason, where)  # a model that loses nothing fits
        for group in concerned:
            group.frozen = f"{reason} ({where})" if where else reason
            group.line = line
