"""Which slices hang together: the first walk, made until nothing is better cut another way."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np
from torch import fx

from ..rules.channels import distinct, varying, without_repeats
from ..tracing.cuts import Cuts
from ..tracing.trace import Trace
from .first_walk import FirstWalk
from .relations import Relations, Stays
from .sayings import Telling


def discover(
    trace: Trace,
    *,
    telling: Telling | None = None,
    stays: Callable[[Relations], Sequence[Stays]] | None = None,
) -> Relations:
    """Which slices hang together in a recorded run, and what they say when they are dead.

    Args:
        stays: tells of what may go by these relations what has to stay all the same.
    """
    while True:
        walk = FirstWalk(trace, telling=telling)
        walk.run()
        relations = walk.relations()
        cuts = _looser(walk, relations)
        if cuts == trace.cuts and stays is not None:
            kept = stays(relations)
            for each in kept:
                walk.keep(each)
            relations = walk.relations() if kept else relations
        if cuts == trace.cuts:
            cuts = _looser_within_heads(walk, relations)
        if cuts == trace.cuts:
            return relations
        trace.cuts = cuts


def _looser(walk: FirstWalk, relations: Relations) -> Cuts:
    """How tensors are better cut that other code than attention's has put together."""
    cuts = walk.trace.cuts
    if walk.better_together.keys() - cuts.together.keys():
        return replace(cuts, together={**walk.better_together, **cuts.together})
    tied = cuts.tied | _tied(walk, relations)
    if tied != cuts.tied:
        return replace(cuts, tied=tied)
    grouped = _grouped(walk, relations)
    if grouped != cuts.grouped:
        return replace(cuts, grouped=grouped)
    return replace(cuts, whole=_whole(walk, relations))


def _looser_within_heads(walk: FirstWalk, relations: Relations) -> Cuts:
    cuts = walk.trace.cuts
    rigid = cuts.rigid | _shared_in_vain(walk, relations)
    if rigid != cuts.rigid:
        return replace(cuts, rigid=rigid)
    return replace(cuts, sliced=_sliced(walk, relations))


def _tied(walk: FirstWalk, relations: Relations) -> set[fx.Node]:
    """Stacks whose parts have one unit each. What is read behind them may ask for the same channels
    in all parts (a norm), and where it does nothing can go: all stay, or each part is one unit."""
    classes = ((n, relations.classes[units.numpy()]) for n, units in walk.stacks.items())
    return {n for n, parts in classes if (parts == parts[:, :1]).all()}


def _grouped(walk: FirstWalk, relations: Relations) -> dict[fx.Node, bool]:
    """For each product that may be one of groups, whether it is to be: where otherwise what it
    reads or makes could not shrink, and what it reads can then."""
    found = dict(walk.trace.cuts.grouped)
    for node, (name, made, units) in walk.groupable.items():
        read = relations.classes[units.numpy()]
        if node in found:
            found[node] = found[node] and bool(read.any())
            continue
        own = [relations.of(source) for source in walk.axes_of(name)
               if not set(source.dims).isdisjoint(made)]  # fmt: skip
        several = len(distinct(read)) > 1
        found[node] = not several or not any(classes.any() for classes in own)
    return found


def _whole(walk: FirstWalk, relations: Relations) -> dict[fx.Node, bool]:
    """For each grouped convolution whether its groups are to go as a whole: where nothing of what
    they make, or of what they read, could go otherwise (they are heads, say), and can then."""
    found = dict(walk.trace.cuts.whole)
    for node, arrays in walk.in_groups_of.items():
        classes = (distinct(relations.classes[units.numpy()]) for units in arrays)
        several = all(np.count_nonzero(each) > 1 for each in classes)
        if node in found:
            found[node] = found[node] and several
        elif not several:
            found[node] = True
    return found


def _sliced(walk: FirstWalk, relations: Relations) -> dict[fx.Node, bool]:
    """For each sum over slices of heads whether slices are to go: where all heads are one unit, and
    are several units then."""
    found = dict(walk.trace.cuts.sliced)
    for node, units in walk.summed.items() if walk.attention == "heads" else ():
        classes = distinct(relations.classes[units.numpy()])
        several = len(classes) > 1
        if node in found:
            found[node] = found[node] and several
        elif not several and classes[0]:
            found[node] = True
    return found


def _shared_in_vain(walk: FirstWalk, relations: Relations) -> set[str]:
    """Tensors that are the same for every head (a norm's weight, a rotary table, an embedding of
    relative positions), where that makes one unit of all heads: better they stay, and heads can
    go."""
    if not walk.shared:
        return set()
    # A layer whose heads are shared can shrink, with what it reads; a table reads nothing.
    out, reading = ({s.name for s in walk.sources if s.role == r} for r in ("out", "in"))
    made = (out & reading) - walk.buffers
    found: set[str] = set()
    owners = distinct(without_repeats(relations.owners[relations.classes > 0]))
    moving = {walk.sources[i].name for i in owners if i >= 0}
    shared = []  # with the names of their tensors, and whether nothing of these may go
    for labels in walk.shared:
        names = {walk.sources[i].name for i in distinct(relations.owners[labels]) if i >= 0}
        shared.append((labels, names, moving.isdisjoint(names)))
    for rectangle in walk.rectangles:
        heads = rectangle.units.numpy()
        classes = distinct(relations.classes[heads])
        if len(classes) > 1 or len(varying(rectangle.units)) < 2:
            continue
        together = _together(relations, heads)
        for labels, names, stays in shared:
            if (classes[0] or stays) and together[labels].any():
                found |= names
    return found - made


def _together(relations: Relations, heads: np.ndarray) -> np.ndarray:
    """For each label whether it is of the heads' one unit; or where that has to stay, whether it
    has to with it."""
    one = relations.classes[heads.flat[0]]
    if one:
        return relations.classes == one
    found = np.zeros(len(relations.linked), dtype=bool)
    found[relations.linked[heads]] = True
    return found[relations.linked]
