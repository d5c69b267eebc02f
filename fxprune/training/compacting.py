"""Removing what is dead already: units whose mask would change nothing.

A unit is dead where all slices that make it are zero, or where a norm that is all that reads them
scales it by zero. What it says is then a constant, which goes where it is read, exactly or not at
all: a unit stays where that cannot be.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np
from torch import fx, nn

from ..choosing.select import Choice
from ..choosing.settings import Settings, by_name, checked
from ..errors import ProofError
from ..masking.leftovers import made_plain
from ..modules.given import check_flag
from ..modules.running import on_cpu, outputs
from ..modules.usable import check_model
from ..planning.make import make_plan
from ..planning.planner import Planner
from ..planning.pruning_plan import PruningPlan
from ..proving.proof import largest_error, tolerance
from ..proving.random_draws import settled_error
from ..relating import groups
from ..relating.relations import Relations
from ..rewriting.rewrite import apply_with_journal
from ..rules.pattern_types import Pattern
from ..tracing.trace import Trace


@on_cpu()
def compact(
    model: nn.Module,
    example_input: Any,
    *,
    ignore: Iterable[Any] | str | type | nn.Module = (),
    patterns: Iterable[Pattern] = (),
    verify: bool = True,
) -> nn.Module:
    """``model`` without the units that are dead already: same class, smaller tensors, same outputs.

    Units die by masks (``torch.nn.utils.prune``, ``torch.ao.pruning``, :mod:`fxprune.masks`, a
    plan's), by training with a group penalty, or by norms whose scale is zero. Where a dead unit
    still says a constant, that goes into the next layer; where zero padding would make it wrong at
    the border, one dead channel stays and carries it. Masks are gone from the result.

    Args:
        model: any module that runs on ``example_input``. It is left untouched.
        example_input: a tensor, a tuple of positional or a mapping of keyword arguments.
        ignore: module names, globs, types or modules whose output channels all stay.
        patterns: see :func:`fxprune.plan`.
        verify: compare the result with ``model`` on the example input.

    Raises:
        PruningError: and nothing has changed.
    """
    check_model(model, example_input)
    check_flag("verify", verify)
    plain = made_plain(model)
    ignore = by_name(ignore, model)
    plan = plan_compact(plain, example_input, ignore=ignore, patterns=patterns)
    small, _ = apply_with_journal(plan, plain, inplace=False, folds=plan._folds)
    if verify:

        def compared() -> float:
            return largest_error(*(outputs(m, example_input) for m in (model, small)))

        error, allowed = compared(), tolerance(model)
        if not error <= allowed and settled_error(model, compared, allowed) is None:
            raise ProofError(
                f"the compact {type(model).__name__} differs from the model by {error:.2g} "
                f"(relative; {allowed:.0e} is allowed). Nothing was changed. Please "
                "report the model; ignore= its layers to go on."
            )
    return small


def plan_compact(
    model: nn.Module,
    example_input: Any,
    *,
    ignore: Iterable[Any] | str | type | nn.Module = (),
    patterns: Iterable[Pattern] = (),
) -> PruningPlan:
    """The plan of :func:`compact`, for a model without masks: which units are dead."""
    settings = checked(Settings(ignore=ignore, exact=True))
    return make_plan(model, example_input, settings, patterns, Compactor, masked=False)


class Compactor(Planner):
    """Chooses what is dead, and nothing else."""

    def _ask(self) -> None:
        self.asked = {}
        self.dead = dead_units(self.trace, self.relations)
        self.dead[np.unique(self.relations.classes[_counted(self.relations)])] = False
        for group in self.groups:
            fraction, reason = self._fraction(group)
            if group.frozen is None and not fraction:
                group.frozen = reason

    def _stays(self, group: groups.Group) -> np.ndarray | None:
        """All that lives, and what has to stay beside it: bins equal, no tensor empty."""
        stays = ~self.dead[group.units]
        if group.frozen is not None or stays.all():
            return None
        choice = Choice(group.units, stays.astype(float), group.bins, group.covers)
        for cover in group.covers:
            inside = np.isin(group.units, cover)
            if 0 not in cover and inside.sum() == len(cover) and not stays[inside].any():
                stays[np.flatnonzero(inside)[0]] = True
        return choice.complete(stays)

    def _choice(self, group: groups.Group) -> Choice:
        return Choice(group.units, np.ones(len(group.units)), group.bins, group.covers)

    def _lost(self, units: np.ndarray, where: str) -> bool:
        """What is multiplied and not zero has to stay: its biases are no one's to drop."""
        self.dead[units] = False
        return False

    def _follow_constants(self) -> bool:
        if not super()._follow_constants():
            return False
        for axis, columns in self.folds.dropped.values():
            units = self.relations.of(axis)[columns.numpy()]
            units = units[self.removed[units] & ~self.carriers[units]]
            if len(units):  # a constant that no layer can take, or none at all
                self.dead[units] = False
                return False
        return True


def dead_units(trace: Trace, relations: Relations) -> np.ndarray:
    """For each unit class, whether masking it would change nothing."""
    made = np.zeros(int(relations.classes.max()) + 1, dtype=bool)
    alive = np.zeros_like(made)
    silenced = _scaled_by_zero(trace, relations)
    for s in relations.sources:
        if s.role != "out" and (not s.is_bare or s.is_whole):
            continue
        classes = relations.of(s).reshape(-1)
        made[classes] |= s.role == "out"
        moving = (s.rows(trace.tensor(s.name).detach()) != 0).any(1).cpu().numpy()
        alive[classes[moving & ~silenced.get(s.first, np.zeros(1, dtype=bool))]] = True
    alive[0] = True
    return made & ~alive


def _scaled_by_zero(trace: Trace, relations: Relations) -> dict[int, np.ndarray]:
    """For axes that make channels which only a norm reads: where its scale is zero."""
    scales = {s.name: s for s in relations.sources if s.role == "scale"}
    found: dict[int, np.ndarray] = {}
    for s in relations.sources:
        if s.role != "out":
            continue
        path = s.name.rpartition(".")[0]
        nodes = [n for n in trace.graph.nodes if n.op == "call_module" and n.target == path]
        readers = [user for node in nodes for user in node.users]
        if not nodes or not readers or not all(_is_norm(trace, user) for user in readers):
            continue
        zero = np.ones(s.size, dtype=bool)
        for reader in readers:
            scale = scales.get(f"{reader.target}.weight")
            if scale is None or scale.size != s.size:
                break
            gamma = trace.tensor(scale.name).detach().reshape(-1)
            zero &= (gamma == 0).cpu().numpy()
        else:
            found[s.first] = zero
    return found


def _is_norm(trace: Trace, node: fx.Node) -> bool:
    pattern = trace.pattern(node)
    return node.op == "call_module" and pattern is not None and pattern.absorb is not None


def _counted(relations: Relations) -> np.ndarray:
    """Labels that some call counts: fewer of them would be another mean."""
    none = np.zeros(0, dtype=np.int64)
    return np.concatenate([none, *(note.units.numpy() for note in relations.approximate)])
