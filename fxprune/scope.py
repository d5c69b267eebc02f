"""How much each group loses, where all of them share one budget.

With e_g(k) the error that a group leaves with its best k units, and the work of a layer in
proportion to the share of its inputs and outputs that stay, units go step by step from the group in
which they cost the least error for the work that they save.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from torch import fx

from .channels import SourceAxis
from .discover import Relations
from .recording import Trace, uses_of
from .spec import Spec

_STEPS = 64  # in which a group may lose its units
_LEAST, _FEWEST = 0.1, 4  # share and number of its units that every group keeps


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
    curves: Mapping[int, np.ndarray], work: Work, uniform: Mapping[int, float]
) -> dict[int, float]:
    """The fraction that each group loses, for the work that ``uniform`` fractions would leave.

    Args:
        curves: for some groups, by number, the error with 0, 1, … n units.
        uniform: the fraction of each group's units that would go; others lose none.
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
            if after < min(max(_FEWEST, _LEAST * n), n * (1 - uniform[g])) or slope[g] <= 0:
                continue
            rate = (curves[g][after] - curves[g][kept[g]]) / (slope[g] * step / n)
            if rate < price:
                best, price = g, rate
        if best is None:
            break
        kept[best] -= max(1, width[best] // _STEPS)
        left[best] = kept[best] / width[best]
    return {g: 1 - kept[g] / width[g] for g in width}
