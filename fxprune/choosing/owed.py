"""How much each group has to lose now, where sparsity counts the units that it had at first."""

from __future__ import annotations

import copy
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ..planning.pruning_plan import PruningPlan

Members = frozenset[tuple[str, int]]


class Widths:
    """What is left of each group, in the units that it had at first, and its units now: these can
    become smaller ones (slices of the last head). A group is known by the axes that it has of the
    tensors that were there at first: a bias may have been made since."""

    def __init__(self, plan: PruningPlan) -> None:
        self.tensors = {name for group in plan.groups for name, _ in group.members}
        self.names: dict[Members, str] = {}
        self.first: dict[Members, int] = {}
        for group in plan.groups:
            if group.frozen is None:
                key = self.key(group.members)
                self.names.setdefault(key, group.name)
                self.first[key] = self.first.get(key, 0) + group.width
        self.left: dict[Members, float] = dict(self.first)
        self.units = dict(self.first)

    def key(self, members: Iterable[tuple[str, int]]) -> Members:
        return frozenset(m for m in members if m[0] in self.tensors)

    def after(self, plan: PruningPlan) -> Widths:
        """What a plan leaves."""
        result = copy.copy(self)
        result.left, result.units = dict(self.left), dict(self.units)
        width = dict.fromkeys(self.first, 0)
        kept = dict.fromkeys(self.first, 0)
        for group in plan.groups:
            key = self.key(group.members)
            if key in kept:
                width[key] += group.width
                kept[key] += group.kept
        for key in [key for key in kept if kept[key] < width[key]]:
            result.left[key] = self.left[key] * kept[key] / width[key]
            result.units[key] = kept[key]
        return result

    def by_name(self) -> dict[str, int]:
        """Units now."""
        return {name: self.units[key] for key, name in self.names.items()}

    @property
    def sparsity(self) -> float:
        """The share of the units of all groups that could lose any which has gone."""
        first = sum(self.first.values())
        return 1 - sum(self.left.values()) / first if first else 0.0


class Owed(dict[Any, float]):
    """A mapping of sparsities, as :func:`fxprune.plan` takes it, that count the units a group had
    at first.

    Args:
        sparsity: a fraction, or a mapping from module names, globs or types to fractions.
        before: what was asked for in the step before, as a share of it.
    """

    def __init__(
        self, sparsity: float | Mapping[Any, float], widths: Widths, before: float
    ) -> None:
        super().__init__(sparsity if isinstance(sparsity, Mapping) else {"*": sparsity})
        self.widths, self.before = widths, before

    def share(self, members: list[tuple[str, int]], fraction: float) -> float:
        """The share of a group's units now that has to go for ``fraction`` of all it had to be
        gone."""
        key = self.widths.key(members)
        if key in self.widths.first:
            owed = 1 - (1 - fraction) * self.widths.first[key] / self.widths.left[key]
        else:  # it was none at first, or another
            owed = since(fraction, fraction * self.before)
        return min(max(owed, 0.0), 1.0)


def since(now: float, before: float) -> float:
    """The share to lose of what is left, from one sparsity to the next."""
    return max(0.0, (now - before) / (1 - before))
