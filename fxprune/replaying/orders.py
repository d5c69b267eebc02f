"""In which order kept channels stand: have those that meet met, and who can reorder them?"""

from __future__ import annotations

from collections.abc import Container, Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor, fx

from ..relating.relations import Relations
from ..relating.walk import Walk
from ..rules.call import Call, Named
from ..rules.channels import Axis, Channels, SourceAxis
from ..rules.spec import TOLD
from ..tracing.trace import Trace
from .faults import AtNode, WrongOrder

_MANY = 2**31  # more than there are labels: two of them make one number


DIFFERENT = "its parts would have to keep different slices"


class Mismatch(Exception):
    """The channels that were chosen do not fit together; ``units`` have to stay.

    ``reorder`` is a producer, by its first label, whose channels would fit if it made them in
    another order, and that order; ``misplaced`` a node whose code puts them in an order of its own.
    """

    def __init__(
        self,
        units: Tensor,
        reason: str,
        call: Call | None,
        *,
        reorder: tuple[int, Tensor] | None = None,
        misplaced: fx.Node | None = None,
    ) -> None:
        super().__init__(reason)
        self.reorder = reorder
        self.misplaced = misplaced
        self.units = units.reshape(-1).numpy()
        self.reason = reason
        self.where = call.name if call else ""
        self.line = call.node.meta.get("where", "") if call else ""


class Orders(Walk):
    """Args:
    trace: the recorded run.
    relations: of the first walk.
    kept: for each unit class, whether it stays.
    orders: kept positions of producers, by first label, that are not to be ascending.
    straighten: nodes whose channels are to be put in the order of the model as it is.
    """

    def __init__(
        self,
        trace: Trace,
        relations: Relations,
        kept: np.ndarray,
        orders: dict[int, Tensor] | None = None,
        straighten: Container[fx.Node] = (),
    ) -> None:
        super().__init__(trace)
        self._orders = orders or {}
        self._straighten = straighten
        self._relations = relations
        self.before = relations.values
        self.decisions = relations.decisions
        self.found: dict[fx.Node, list[AtNode]] = {}  # what is wrong at each node
        self._kept = torch.from_numpy(kept[relations.classes])  # by label
        for each in relations.followers:
            width = self._compress(each.units, each.units).size(each.dim)
            self._kept[each.blank] = torch.arange(len(each.blank)) < width
        self._pinned: set[int] = set()  # parameters whose order is settled, by first label
        self._moved = set(self._orders)  # those whose slices do not stand as they stood
        self._disturbed: set[fx.Node] = set()  # calls after which channels do not
        self._remaining: dict[int, tuple[Tensor, Tensor]] = {}
        self.order: dict[int, Tensor] = {}  # label of an axis -> kept positions in it, in order
        stays = np.flatnonzero(kept[relations.classes] & (relations.owners >= 0))
        owners = relations.owners[stays]
        firsts = np.array([s.first for s in relations.sources], dtype=np.int64)
        places = torch.from_numpy(stays - firsts[owners])
        counts = np.bincount(owners, minlength=len(firsts)).tolist()
        for s, order in zip(relations.sources, places.split(counts), strict=True):
            if len(s.dims) > 1:
                every = torch.arange(s.size).reshape(s.shape)
                order = self._compress(every, s.labels())
            self.order[s.first] = order
        self.order |= self._orders

    def kept(self, units: Tensor) -> Tensor:
        return self._kept[units]

    def left(self, units: Tensor) -> Tensor:
        """What is left of units, in their order: once for all axes that share the array."""
        key = id(units)
        if key not in self._remaining:
            self._remaining[key] = units, self._compress(units, units)
        return self._remaining[key][1]

    def _compress(self, array: Tensor, units: Tensor) -> Tensor:
        """The kept entries of an array over units, which have to form a rectangle."""
        kept = self.kept(units)
        if bool(kept.all()):
            return array
        if array.dim() == 1:
            return array[kept]
        for d in range(array.dim()):
            others = [o for o in range(array.dim()) if o != d]
            present = kept.amax(others) if others else kept
            rows = torch.nonzero(present).reshape(-1)
            array, kept, units = (t.index_select(d, rows) for t in (array, kept, units))
        if bool(kept.all()):
            return array
        for d in range(array.dim() - 1, -1, -1):
            counts = kept.sum(d)
            if bool((counts == counts.reshape(-1)[0]).all()):
                rows = array.movedim(d, -1)[kept.movedim(d, -1)]
                shape = (*array.movedim(d, -1).shape[:-1], -1)
                return rows.reshape(shape).movedim(-1, d)
        raise Mismatch(units, "what is left of them would not be a rectangle", None)

    def blame(self, fault: AtNode) -> None:
        self.found.setdefault(fault.node, []).append(fault)

    def units_around(self, node: fx.Node) -> np.ndarray:
        """Units of a call's result and inputs, and of the tensors its sizes are computed from."""
        units: list[Tensor] = []
        seen: set[fx.Node] = set()

        def visit(current: fx.Node) -> None:
            if current in seen:
                return
            seen.add(current)
            value = self.before[current]
            for x in value if isinstance(value, (tuple, list)) else [value]:
                if isinstance(x, Channels):
                    units.extend(axis.units.reshape(-1) for axis in x.axes)
            if current is node or not isinstance(value, (Channels, tuple, list, Named, *TOLD, str)):
                for source in current.all_input_nodes:
                    visit(source)

        visit(node)
        return torch.cat(units).numpy() if units else np.zeros(0, dtype=np.int64)

    def straightened(self, call: Call, result: Channels) -> Channels:
        takes = self._out_of_order(call.node, result)
        if not takes:
            return result
        self.blame(WrongOrder(self.units_around(call.node), call.node, takes))
        new = dict(takes)
        axes = [
            replace(a, units=a.units[new[a.dims[0]]], source=None) if a.dims[0] in new else a
            for a in result.axes
        ]
        return replace(result, axes=tuple(axes))

    def _out_of_order(self, node: fx.Node, after: Any) -> list[tuple[int, Tensor]]:
        """Dimensions of a value along which the same channels stand in another order than in the
        model as it is, with the position of each that would come first, second and so on."""
        return [
            (axis.dims[0], matching(now, wanted))
            for axis, now, wanted in self._differing(self.before.get(node), after)
            if len(axis.dims) == 1 and torch.equal(now.sort()[0], wanted.sort()[0])
        ]

    def _differing(self, before: Any, after: Any) -> Iterator[tuple[Axis, Tensor, Tensor]]:
        """(axis, units now, units that the model as it is would have left) where these differ."""
        if isinstance(before, tuple):
            for old, new in zip(before, after, strict=True):
                yield from self._differing(old, new)
        elif isinstance(before, Channels) and isinstance(after, Channels):
            for axis in before.axes:
                now = after.axis(axis.dims[0])
                wanted = self.left(axis.units)
                if now is not None and now.dims == axis.dims and not torch.equal(now.units, wanted):
                    yield axis, now.units, wanted

    def _first_misplaced(self, node: fx.Node) -> fx.Node | None:
        """The call before ``node`` that puts channels in an order of its own."""
        for source in node.all_input_nodes:
            after = self.values.get(source)
            if not any(self._differing(self.before.get(source), after)):
                continue
            found = self._first_misplaced(source)
            if found is None and source.op != "get_attr" and self._out_of_order(source, after):
                found = source
            if found is not None:
                return found
        return None

    def join(self, a: Axis, b: Axis, call: Call) -> None:
        """Every pair of slices that meets now has met in the model as it is."""
        if (a.blank or b.blank) and a.units.shape == b.units.shape:
            return
        if self._have_met(a.units, b.units, call):
            self._pinned.update(axis.source.first for axis in (a, b) if axis.source is not None)
            return
        for axis, other in ((b, a), (a, b)):
            if axis.source is not None and self._rebind(axis.source, other.units):
                return
        raise Mismatch(
            torch.cat([a.units.reshape(-1), b.units.reshape(-1)]),
            "channels that meet would stand in different orders",
            call,
            reorder=self._reorder(a.units, b.units, call, 0)
            or self._reorder(b.units, a.units, call, 1),
            misplaced=self._first_misplaced(call.node),
        )

    def _met(self, call: Call) -> tuple[np.ndarray, np.ndarray]:
        pairs = self._relations.meetings.get(call.node, [])
        empty = np.zeros(0, dtype=np.int64)
        left = np.concatenate([empty, *(p[0] for p in pairs)])
        return left, np.concatenate([empty, *(p[1] for p in pairs)])

    def _have_met(self, a: Tensor, b: Tensor, call: Call) -> bool:
        if a.shape != b.shape:
            return False
        left, right = a.reshape(-1).numpy(), b.reshape(-1).numpy()
        if np.array_equal(left, right):
            return True
        for first, second in self._relations.meetings.get(call.node, []):
            kept = self._kept.numpy()[first]
            if np.array_equal(second[kept], right) and np.array_equal(first[kept], left):
                return True  # as they stood
        known = [side.astype(np.int64) for side in self._met(call)]
        keys = left.astype(np.int64) * _MANY + right
        return bool(np.isin(keys, known[0] * _MANY + known[1]).all())

    def _reorder(self, a: Tensor, b: Tensor, call: Call, side: int) -> tuple[int, Tensor] | None:
        """The producer of ``b`` and the order in which it would have to make it to meet ``a``."""
        known = self._met(call)
        mine, partners = known[side], known[1 - side]
        if a.shape != b.shape or b.dim() != 1 or not np.isin(a.numpy(), mine).all():
            return None
        order = np.argsort(mine, kind="stable")
        found = order[np.searchsorted(mine[order], a.numpy())]
        wanted = torch.from_numpy(partners[found])
        return self._made(wanted)

    def _made(self, wanted: Tensor) -> tuple[int, Tensor] | None:
        """The producer of these slices, and the order that makes them so; None where it cannot."""
        for source in self._relations.sources:
            if source.role == "out" and 0 <= int(wanted.min()) - source.first < source.size:
                own = self.order[source.first]
                if source.first in self._orders or own.dim() != 1:
                    return None
                every = torch.equal((own + source.first).sort()[0], wanted.sort()[0])
                return (source.first, wanted - source.first) if every else None
        return None

    def _rebind(self, source: SourceAxis, units: Tensor) -> bool:
        """Keep the slices of a parameter in the order in which their channels arrive."""
        if source.first in self._pinned:
            return False
        arrived = self._relations.arrivals.get(source.first)
        if arrived is None or arrived.numel() != source.size:
            return False
        # By label, not by class: slices of one unit can arrive in another order too.
        arrived, wanted = arrived.reshape(-1), units.reshape(-1)
        kept = torch.nonzero(self.kept(arrived)).reshape(-1)
        if not torch.equal(arrived[kept].sort()[0], wanted.sort()[0]):
            return False
        order = kept[matching(arrived[kept], wanted)].reshape(units.shape)
        row, before = (o // source.shape[-1] for o in (order, self.order[source.first]))
        if len(source.dims) > 1 and bool((row != before[..., :1]).any()):
            return False  # a group would read a channel of another
        self.order[source.first] = order
        self._moved.add(source.first)
        self._pinned.add(source.first)
        return True


def matching(labels: Tensor, wanted: Tensor) -> Tensor:
    """Positions in ``labels`` of each entry of ``wanted``, the k-th of a label for its k-th."""
    result = torch.empty(wanted.shape, dtype=torch.int64)
    result[torch.argsort(wanted, stable=True)] = torch.argsort(labels, stable=True)
    return result
