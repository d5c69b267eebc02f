"""Channel groups: the connected components of the dependency graph, with their units."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from ..rules.channels import SourceAxis, distinct
from .relations import Note, Relations

# Roles of slices that bring a channel into being; a group without one has nothing to remove.
_MAKERS = ("out",)


@dataclass
class Group:
    """A component of the dependency graph, before anything is chosen."""

    axes: list[SourceAxis]
    units: np.ndarray  # classes that may go
    bins: list[np.ndarray]
    covers: list[np.ndarray]
    frozen: str | None = None
    line: str = ""
    approximate: list[str] = field(default_factory=list)

    @property
    def producers(self) -> list[SourceAxis]:
        return [axis for axis in self.axes if axis.role in _MAKERS]

    @property
    def leader(self) -> SourceAxis:
        """The axis that a group is named by: its first producer."""
        return (self.producers or self.axes)[0]


def groups(relations: Relations) -> list[Group]:
    """Every group, in the order in which the model makes their channels."""
    result = []
    home: dict[int, Group] = {}  # by component
    classes = _by_component(relations)
    members: dict[int, list[SourceAxis]] = {}
    for number, i in relations.members.tolist():
        members.setdefault(number, []).append(relations.sources[i])
    for number, axes in members.items():
        home[number] = Group(axes[::-1], np.sort(classes.get(number, classes[-1])), [], [])
        result.append(home[number])
    _add_bins(relations, home)
    _add_covers(relations, home)
    counted = [
        (note.where, set(relations.classes[note.units.numpy()].tolist()))
        for note in relations.approximate
    ]
    for group in result:
        _explain(group, relations)
        own = set(group.units.tolist()) if counted else set()
        group.approximate = sorted({where for where, units in counted if not own.isdisjoint(units)})
    return sorted(result, key=lambda g: g.leader.first)


def _by_component(relations: Relations) -> dict[int, np.ndarray]:
    """The classes that may go, by component; none of them for -1."""
    classes = np.flatnonzero(np.bincount(relations.classes)[1:]) + 1
    classes = classes[np.argsort(relations.component[classes], kind="stable")]
    homes = relations.component[classes]
    starts = np.flatnonzero(homes[1:] != homes[:-1]) + 1
    numbers = homes[[0, *starts]].tolist() if len(homes) else []
    return {-1: classes[:0], **dict(zip(numbers, np.split(classes, starts), strict=False))}


def _add_bins(relations: Relations, home: dict[int, Group]) -> None:
    for bin_ in relations.bins:
        units = bin_.rows[bin_.rows > 0]
        if len(units):
            home[int(relations.component[units[0]])].bins.append(bin_.rows)


def _add_covers(relations: Relations, home: dict[int, Group]) -> None:
    """No tensor of the run may lose all its channels."""
    laid: set[bytes] = set()
    seen: set[bytes] = set()

    def add(classes: np.ndarray) -> None:
        if (as_laid := classes.tobytes()) in laid:  # a norm has the axes of the layer before it
            return
        laid.add(as_laid)
        unique = distinct(classes)
        if len(unique) and unique[0] != 0 and (key := unique.tobytes()) not in seen:
            seen.add(key)
            for number in distinct(relations.component[unique]):
                home[int(number)].covers.append(unique)

    known: set[int] = set()  # most values go by the labels of a parameter
    for axis in relations.sources:
        known.add(id(axis.labels()))
        add(relations.of(axis))
    for value in relations.values.values():
        for x in value if isinstance(value, (tuple, list)) else [value]:
            for axis in getattr(x, "axes", ()):
                if id(axis.units) not in known:
                    known.add(id(axis.units))
                    add(relations.classes[axis.units.numpy()])


def _explain(group: Group, relations: Relations) -> None:
    """Why a group stays whole, if it does."""
    if not group.producers:
        group.frozen = "no layer makes these channels: they are read from the input or a constant"
        if all(axis.is_bare for axis in group.axes):  # a parameter that code uses
            note = _note_of(_labels(group), relations)
            group.frozen, group.line = (note.reason, note.line) if note else (group.frozen, "")
    elif not len(group.units):
        note = note_for(_labels(group), relations)
        group.frozen = note.reason if note else "its channels cannot change"
        group.line = note.line if note else ""
    elif len(group.units) == 1:
        group.frozen = "it has a single unit, and one has to stay"


def _labels(group: Group) -> np.ndarray:
    return np.concatenate([np.arange(a.first, a.first + a.size) for a in group.axes])


def note_for(labels: np.ndarray, relations: Relations) -> Note | None:
    """What was said of slices, else of others that they hang together with."""
    found = _note_of(labels, relations)
    if found is None:
        linked = relations.linked
        found = _note_of(np.flatnonzero(np.isin(linked, linked[labels])), relations)
    return found


def note_about(group: Group, relations: Relations) -> Note | None:
    """What was said of slices of its layers, where some stay."""
    return _note_of(_labels(group), relations)


def _note_of(labels: np.ndarray, relations: Relations) -> Note | None:
    """The one that is about most of them."""
    about = [int(np.isin(n.units.numpy(), labels).sum()) for n in relations.frozen]
    most = max(about, default=0)
    return relations.frozen[about.index(most)] if most else None
