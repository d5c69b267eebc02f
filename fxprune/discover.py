"""The first walk: which slices of which tensors belong together, and what may not go.

Every slice of every parameter axis gets a label; where two axes meet, their labels are joined. The
joins are kept as arrays and solved at once (connected components), so no loop runs over channels.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

import networkx as nx
import numpy as np
import torch
from scipy.sparse import coo_array
from scipy.sparse.csgraph import connected_components

from .algebra import Algebra, Call, Named, Roles
from .channels import FROZEN, Axis, Channels, SourceAxis, varying
from .trace import Trace


@dataclass
class Rectangle:
    """Labels over several dimensions of which a rectangle has to remain."""

    units: torch.Tensor
    held: set[int]
    where: str


@dataclass
class Note:
    """Something said of labels: why they stay, or that a call counts them."""

    units: torch.Tensor
    reason: str
    where: str
    line: str = ""


@dataclass
class Bin:
    """Rows of unit classes that have to keep equally many each; ``where`` says what asks for it."""

    rows: np.ndarray
    where: str


@dataclass
class Relations:
    """What the first walk found: unit classes, what couples them, and why some stay."""

    sources: list[SourceAxis]
    classes: np.ndarray  # label -> class; class 0 stays
    bins: list[Bin]
    frozen: list[Note]
    approximate: list[Note]
    graph: nx.Graph
    values: dict = field(repr=False, default_factory=dict)

    def of(self, axis: SourceAxis) -> np.ndarray:
        """The unit class of each slice of a parameter axis, in the shape of its dimensions."""
        return self.classes[axis.first : axis.first + axis.size].reshape(axis.shape)


class Discover(Algebra):
    def __init__(self, trace: Trace, *, attention: str = "heads") -> None:
        super().__init__(trace, attention=attention)
        self.sources: list[SourceAxis] = []
        self._by_key: dict[tuple, SourceAxis] = {}
        self._views: dict[str, tuple] = {}
        self._next = FROZEN + 1
        self._joins: list[tuple[np.ndarray, np.ndarray]] = []
        self._couplings: list[tuple[np.ndarray, np.ndarray, str]] = []
        self._rectangles: dict[int, Rectangle] = {}
        self._alive: list[torch.Tensor] = []
        self.frozen: list[Note] = []
        self.counted: list[Note] = []

    # -- words ----------------------------------------------------------------------------------

    def source(self, value: Named, roles: Roles, view: tuple[int, ...] | None) -> Channels:
        shape = value.spec.shape
        view = shape if view is None else view
        if not value.spec.dtype.is_floating_point:
            return Channels(view)
        axes = []
        for role, dims in roles.items():
            key = (value.name, view, dims)
            if all(view[d] == 1 for d in dims):
                continue
            if key not in self._by_key:
                axis = SourceAxis(value.name, shape, view, dims, role, self._next)
                self._next += axis.size
                self._by_key[key] = axis
                self.sources.append(axis)
                self._check_view(axis)
            source = self._by_key[key]
            if source.role.startswith("bare") and not role.startswith("bare"):
                self._by_key[key] = source = SourceAxis(**{**vars(source), "role": role})
                index = next(i for i, s in enumerate(self.sources) if s.first == source.first)
                self.sources[index] = source
            result = Axis(dims, source.labels(), source=source)
            if len(dims) > 1:
                self.rectangle(result, None)
            axes.append(result)
        return Channels(view, tuple(axes))

    def _check_view(self, axis: SourceAxis) -> None:
        """A tensor that is seen in two ways (two group counts, say) is left whole."""
        known = self._views.setdefault(axis.name, axis.view)
        if known != axis.view:
            for source in self.sources:
                if source.name == axis.name:
                    self.freeze(
                        Axis(source.dims, source.labels()),
                        f"{axis.name} is used in two layouts, {known} and {axis.view}",
                        None,
                    )

    def join(self, a: Axis, b: Axis, call: Call | None) -> None:
        if a.units is b.units:
            return
        left, right = a.units.reshape(-1).numpy(), b.units.reshape(-1).numpy()
        self._joins.append((left, right))
        self._couplings.append((left, right, call.name if call else ""))

    def freeze(self, axis: Axis, reason: str, call: Call | None) -> None:
        units = axis.units.reshape(-1)
        self._joins.append((units.numpy(), np.full(len(units), FROZEN)))
        name = call.name if call else ""
        line = call.node.meta.get("where", "") if call else ""
        self.frozen.append(Note(units, reason, name, line))

    def approximate(self, axis: Axis, call: Call) -> None:
        self.counted.append(Note(axis.units.reshape(-1), call.name, call.name))

    def rectangle(self, axis: Axis, call: Call | None) -> None:
        if len(axis.dims) > 1 and id(axis.units) not in self._rectangles:
            self._alive.append(axis.units)
            where = call.name if call else (axis.source.name if axis.source else "")
            self._rectangles[id(axis.units)] = Rectangle(axis.units, set(), where)

    def hold(self, axis: Axis, dims: Iterable[int]) -> None:
        self.rectangle(axis, None)
        if id(axis.units) in self._rectangles:
            held = {axis.dims.index(d) for d in dims}
            self._rectangles[id(axis.units)].held |= held

    # -- the answer -----------------------------------------------------------------------------

    def relations(self) -> Relations:
        classes = self._solve()
        bins: list[Bin] = []
        for rectangle in self._rectangles.values():
            bins += self._cut_rectangle(rectangle, classes)
        graph = self._dependency_graph(bins, classes)
        return Relations(
            self.sources, classes, bins, self.frozen, self.counted, graph, self.values
        )

    def _solve(self) -> np.ndarray:
        """Class of each label; the class of FROZEN is 0."""
        size = self._next
        if self._joins:
            rows = np.concatenate([a for a, _ in self._joins])
            columns = np.concatenate([b for _, b in self._joins])
        else:
            rows = columns = np.zeros(0, dtype=np.int64)
        links = coo_array((np.ones(len(rows), dtype=np.int8), (rows, columns)), shape=(size, size))
        _, classes = connected_components(links, directed=False)
        return np.where(classes == classes[FROZEN], 0, np.where(classes == 0, classes[FROZEN], classes))

    def _cut_rectangle(self, rectangle: Rectangle, classes: np.ndarray) -> list[Bin]:
        """How an array of units over several dimensions may shrink: one dimension gives, each
        slice along the others loses equally many."""
        units = torch.from_numpy(classes[rectangle.units.numpy()])
        dims = varying(units)
        if len(dims) < 2:
            return []
        free = [d for d in dims if d not in rectangle.held] or list(dims)
        ragged = max(free, key=lambda d: units.size(d))
        rows = units.movedim(ragged, -1).reshape(-1, units.size(ragged)).numpy()
        return [Bin(np.unique(rows, axis=0), rectangle.where)]

    def _dependency_graph(self, bins: list[Bin], classes: np.ndarray) -> nx.Graph:
        """Parameter axes, with an edge where a call couples slices of two of them."""
        graph: nx.Graph = nx.Graph()
        for i, source in enumerate(self.sources):
            graph.add_node(i, name=source.name, dims=source.dims, role=source.role, size=source.size)
        starts = np.array([s.first for s in self.sources] or [0])
        count = len(starts) + 1

        def owner(labels: np.ndarray) -> np.ndarray:
            return np.searchsorted(starts, labels, side="right") - 1

        for left, right, call in self._couplings:
            real = (left != FROZEN) & (right != FROZEN)
            pairs = np.unique(owner(left[real]) * count + owner(right[real]))
            for a, b in zip(pairs // count, pairs % count, strict=True):
                if a != b:
                    graph.add_edge(int(a), int(b), via=call)
        # A balance couples how many go, not which: its own kind of edge.
        home: dict[int, int] = {}
        for i, source in enumerate(self.sources):
            for unit in np.unique(classes[source.first : source.first + source.size]):
                home.setdefault(int(unit), i)
        for bin_ in bins:
            members = sorted({home[int(u)] for u in np.unique(bin_.rows) if u})
            for a, b in zip(members, members[1:], strict=False):
                if not graph.has_edge(a, b):
                    graph.add_edge(a, b, via=f"equal numbers: {bin_.where}")
        return graph
