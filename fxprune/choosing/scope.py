"""How much each group loses: one knob for all of them, turned in several ways.

``local``: every group loses the same fraction of its units. ``global``: all units of all groups
compete by their scores, and that fraction of all of them goes. ``isomorphic``: those of groups with
the same structure compete (Fang et al., "Isomorphic Pruning for Vision Models", arXiv 2407.04616),
for scores of different kinds of layers are hardly comparable.

Where errors are predicted, ``global`` means something else: with e_g(k) the error that a group
leaves with its best k units, and the work of a layer in proportion to the share of its inputs and
outputs that stay, units go step by step from the group in which they cost the least error for the
work that they save.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from torch import fx, nn

from ..relating.groups import Group
from ..relating.relations import Relations
from ..rules.channels import SourceAxis
from ..rules.spec import Spec
from ..tracing.trace import Trace, uses_of
from .select import Choice

SCOPES = ("local", "global", "isomorphic")
MOST = 0.9  # share of its units that a group can lose to others, unless something else is said
_STEPS = 64  # in which a group may lose its units
_LEAST, _FEWEST = 0.1, 4  # share and number of its units that every group keeps


@dataclass
class Contender:
    """A group that can lose units.

    Attributes:
        choice: its units and their scores.
        least: how many units have to stay.
        own: a fraction that is this group's own: it does not compete.
        kind: of its structure; see :func:`structure`.
        curve: the predicted error with 0, 1, … n units, where that is known.
        step: what the numbers of channels of its layers are rounded to.
    """

    choice: Choice
    least: int = 1
    own: float | None = None
    kind: Hashable = None
    curve: np.ndarray | None = None
    step: int = 1

    @property
    def width(self) -> int:
        return len(self.choice.units)

    def most(self) -> float:
        """The largest fraction that can go."""
        return int(_Steps.of(self).asks[-1]) / self.width


def fractions(
    groups: Sequence[Contender],
    s: float,
    *,
    scope: str = "local",
    work: Work | None = None,
) -> list[float]:
    """What each group is to lose, as a fraction of its units: ``choice.keep`` takes it.

    The more ``s``, the more goes. What bins, rounding and the least widths forbid in one group goes
    in others that compete with it, so that the total is as near to ``s`` of all units as can be.

    Args:
        s: the one knob, in [0, 1).
        work: share out by predicted errors for equal work, where ``scope="global"``.
    """
    asked = [s if group.own is None else group.own for group in groups]
    if scope == "global" and work is not None:
        curves = {i: g.curve for i, g in enumerate(groups) if g.curve is not None}
        least = {i: g.least for i, g in enumerate(groups)}
        for i, fraction in share_out(curves, work, dict(enumerate(asked)), least).items():
            asked[i] = fraction
    elif scope != "local":
        pools: dict[Hashable, list[int]] = {}
        for i, group in enumerate(groups):
            if group.own is None:
                pools.setdefault(group.kind if scope == "isomorphic" else None, []).append(i)
        for pool in pools.values():
            found = compete([groups[i] for i in pool], s)
            for i, fraction in zip(pool, found, strict=True):
                asked[i] = fraction
    for i, group in enumerate(groups):
        if group.least > 1 and asked[i] > 0:
            asked[i] = min(asked[i], group.most())
    return asked


def compete(groups: Sequence[Contender], s: float) -> list[float]:
    """The fraction that each loses, where the share ``s`` of all their units goes, lowest first.

    Units go in steps: as few as bins and rounding let go of a group at a time, at the mean score of
    these. A step that is too large for what is left to remove ends its group's turn.
    """
    steps = [_Steps.of(group) for group in groups]
    total = sum(group.width for group in groups)
    wanted = int(np.ceil(s * total - 0.5 - 1e-9))
    owner = np.repeat(np.arange(len(groups)), [len(each.sizes) for each in steps])
    sizes, prices = (
        np.concatenate([getattr(each, key) for each in steps]) for key in ("sizes", "prices")
    )
    order = np.lexsort((np.concatenate([np.arange(len(each.sizes)) for each in steps]), prices))
    taken = np.zeros(len(groups), dtype=np.int64)  # steps of each group
    while wanted > 0 and len(order):
        fits = np.cumsum(sizes[order]) <= wanted
        count = len(order) if fits.all() else int(fits.argmin())
        now, order = order[:count], order[count:]
        taken += np.bincount(owner[now], minlength=len(groups))
        wanted -= int(sizes[now].sum())
        if len(order):
            over = order[0]
            order = order[owner[order] != owner[over]]
            if not (sizes[order] <= wanted).any() and sizes[over] < 2 * wanted:
                taken[owner[over]] += 1  # more than asked for, but nearer to it
                break
    return [each.asks[n] / group.width for each, n, group in zip(steps, taken, groups, strict=True)]


@dataclass
class _Steps:
    """In which a group can lose units: how many go with each, at what mean score; and, with 0, 1, …
    of them, how many units ``choice.keep`` is to be asked for."""

    sizes: np.ndarray
    prices: np.ndarray
    asks: np.ndarray

    @classmethod
    def of(cls, group: Contender) -> _Steps:
        n = group.width
        gone = n - group.choice.kept_counts(np.arange(n + 1) / n, group.step)
        can = (n - gone >= group.least) & (gone <= n - np.isposinf(group.choice.scores).sum())
        reached, asks = np.unique(gone[can], return_index=True)
        sizes = np.diff(reached)
        if not len(sizes):
            return cls(sizes, np.zeros(0), asks)
        lowest = np.sort(group.choice.scores)[: reached[-1]]
        return cls(sizes, np.add.reduceat(lowest, reached[:-1]) / sizes, asks)


def structure(group: Group, modules: Mapping[str, nn.Module]) -> Hashable:
    """Equal for groups of the same structure.

    These are groups whose axes are the same in kind and number: an axis' kind is the class of the
    module that owns the tensor, the tensor's name in it, what its slices do (make a channel, read
    it, scale it …) and the dimension it lies on. Widths and kernel sizes do not count. So the
    hidden units of all feed-forward parts of a transformer are of one kind, its heads are of
    another, and its residual stream is alone.
    """
    kinds = Counter(
        (type(modules.get(path)).__qualname__, name, axis.role, axis.dims)
        for axis in group.axes
        for path, _, name in [axis.name.rpartition(".")]
    )
    return frozenset(kinds.items())


@dataclass
class Work:
    """Multiply-accumulates of the layers that read channels, by the widths of the groups.

    ``base`` (layers,) at full width; ``reads`` and ``makes`` (layers, groups): the share of a
    layer's inputs and outputs that belongs to each group; what belongs to none stays.
    """

    base: np.ndarray
    reads: np.ndarray
    makes: np.ndarray

    def total(self, left: np.ndarray) -> float:
        """With the share ``left`` (groups,) of each group's units."""
        inputs, outputs = self._left(left)
        return float((self.base * inputs * outputs).sum())

    def slope(self, left: np.ndarray) -> np.ndarray:
        """What a unit share of each group costs, (groups,)."""
        inputs, outputs = self._left(left)
        return (self.base * outputs) @ self.reads + (self.base * inputs) @ self.makes

    def _left(self, left: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        return tuple(1 - shares @ (1 - left) for shares in (self.reads, self.makes))  # type: ignore


def work_of(trace: Trace, relations: Relations, groups: Sequence[np.ndarray]) -> Work:
    """The work of every layer that makes channels; ``groups`` are unit classes."""
    home = np.full(int(relations.classes.max(initial=0)) + 1, -1)
    for g, units in enumerate(groups):
        home[units] = g

    def shares(axis: SourceAxis | None) -> np.ndarray:
        if axis is None:
            return np.zeros(len(groups))
        of = home[relations.of(axis).reshape(-1)]
        return np.bincount(of[of >= 0], minlength=len(groups)) / len(of)

    uses = uses_of(trace)
    makes = {axis.name: axis for axis in relations.sources if axis.role == "out"}
    makes = {name: axis for name, axis in makes.items() if len(axis.tensor_shape) > 1}
    reads = {axis.name: axis for axis in relations.sources if axis.role == "in"}
    base = [
        sum(_positions(node, axis, reads.get(name)) for node in uses.get(name, ()))
        * np.prod(axis.tensor_shape, dtype=float)
        for name, axis in makes.items()
    ]
    shape = (len(base), len(groups))
    return Work(
        np.array(base),
        np.array([shares(reads.get(name)) for name in makes]).reshape(shape),
        np.array([shares(axis) for axis in makes.values()]).reshape(shape),
    )


def _positions(node: fx.Node, out: SourceAxis, read: SourceAxis | None) -> float:
    """How often a call applies a weight: at positions of its result, or of what it reads where
    these are fewer (a transposed convolution)."""
    found = _size(node.meta["spec"]) / out.size
    if read is not None:
        found = min(found, _size([n.meta["spec"] for n in node.all_input_nodes]) / read.size)
    return max(1.0, found)


def _size(spec: Any) -> float:
    """Of the first tensor."""
    while isinstance(spec, (tuple, list)):
        spec = spec[0]
    return float(np.prod(spec.shape, dtype=float)) if isinstance(spec, Spec) else 1.0


def share_out(
    curves: Mapping[int, np.ndarray],
    work: Work,
    uniform: Mapping[int, float],
    least: Mapping[int, int],
) -> dict[int, float]:
    """The fraction that each group loses, for the work that ``uniform`` fractions would leave.

    Args:
        curves: for some groups, by number, the error with 0, 1, … n units.
        uniform: the fraction of each group's units that would go; others lose none.
        least: how many units of each group have to stay.
    """
    left = np.ones(work.reads.shape[1])
    plain = left.copy()
    for g, fraction in uniform.items():
        plain[g] = 1 - fraction
        if g not in curves:  # nothing is known of its error
            left[g] = plain[g]
    goal = work.total(plain)
    width = {g: len(curve) - 1 for g, curve in curves.items() if uniform.get(g)}
    kept = dict(width)
    while width and work.total(left) > goal:
        slope = work.slope(left)
        best, price = None, np.inf
        for g, n in width.items():
            step = max(1, n // _STEPS)
            after = kept[g] - step
            floor = max(min(max(_FEWEST, _LEAST * n), n * (1 - uniform[g])), least[g])
            if after < floor or slope[g] <= 0:
                continue
            rate = (curves[g][after] - curves[g][kept[g]]) / (slope[g] * step / n)
            if rate < price:
                best, price = g, rate
        if best is None:
            break
        kept[best] -= max(1, width[best] // _STEPS)
        left[best] = kept[best] / width[best]
    return {g: 1 - kept[g] / width[g] for g in width}
