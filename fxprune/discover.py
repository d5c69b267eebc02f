"""The first walk: which slices of which tensors belong together, and what may not go.

Every slice of every parameter axis gets a label; where two axes meet, their labels are joined. The
joins are kept as arrays and solved at once (connected components), so no loop runs over channels.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Container, Iterable, Iterator
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import Any

import networkx as nx
import numpy as np
import torch
from torch import fx, nn

from .algebra import Algebra
from .call import Call, Named, Roles, leaves
from .channels import FROZEN, Axis, Channels, SourceAxis, distinct, varying
from .meanings import Decisions
from .recording import Trace


@dataclass
class Rectangle:
    """Labels over several dimensions of which a rectangle has to remain."""

    units: torch.Tensor
    held: set[int]
    where: str
    rather: set[int] = field(default_factory=set)  # held where something else can go


@dataclass
class Note:
    """Something said of labels: why they stay, or that a call counts them."""

    units: torch.Tensor
    reason: str
    where: str
    line: str = ""
    node: fx.Node | None = None


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
    component: np.ndarray  # class -> group
    bins: list[Bin]
    frozen: list[Note]
    approximate: list[Note]
    graph: nx.Graph
    parts: list[torch.Tensor]  # slices that something is done to and not to others
    # Labels that met at each call, pair by pair.
    meetings: dict[fx.Node, list[tuple[np.ndarray, np.ndarray]]]
    arrivals: dict[int, torch.Tensor]  # first label of an axis -> labels of what it met first
    values: dict = field(repr=False, default_factory=dict)
    decisions: Decisions = field(repr=False, default_factory=dict)

    def of(self, axis: SourceAxis) -> np.ndarray:
        """The unit class of each slice of a parameter axis, in the shape of its dimensions."""
        return self.classes[axis.first : axis.first + axis.size].reshape(axis.shape)


def discover(trace: Trace, *, attention: str = "heads") -> Relations:
    """Which slices hang together in a recorded run."""
    rigid: set[str] = set()
    while True:
        walk = Discover(trace, attention=attention, rigid=rigid)
        walk.run()
        relations = walk.relations()
        more = walk.shared_in_vain(relations) - rigid
        if not more:
            return relations
        rigid |= more


class Discover(Algebra):
    """Args:
    rigid: names of parameters and buffers that stay as they are.
    """

    def __init__(
        self, trace: Trace, *, attention: str = "heads", rigid: Container[str] = ()
    ) -> None:
        super().__init__(trace, attention=attention)
        self._rigid = rigid
        self.sources: list[SourceAxis] = []
        self._by_key: dict[tuple, SourceAxis] = {}
        self._by_name: dict[str, list[int]] = {}  # of a tensor, its axes among the sources
        # Why a computed tensor cannot be set, "" where it can or is a tensor of the model itself.
        self._computed: dict[str, str] = dict.fromkeys(trace.names.values(), "")
        self._next = FROZEN + 1
        self._joins: list[tuple[np.ndarray, np.ndarray]] = []
        self._couplings: list[tuple[np.ndarray, np.ndarray, str]] = []
        self._rectangles: dict[int, Rectangle] = {}
        self._alive: list[torch.Tensor] = []
        self._spread: list[np.ndarray] = []
        self.frozen: list[Note] = []
        self.counted: list[Note] = []
        self.arrivals: dict[int, torch.Tensor] = {}
        self.parts: list[torch.Tensor] = []
        self.meetings: dict[fx.Node, list[tuple[np.ndarray, np.ndarray]]] = {}

    def run(self) -> None:
        super().run()
        for node, word, line in self.trace.escapes:
            reason = f"its values leave PyTorch through {word}"
            for item in leaves(self.values[node]):
                for axis in self.channels(item).axes:
                    self.freeze(axis, reason, None, line)

    # -- words ----------------------------------------------------------------------------------

    def source(self, value: Named, roles: Roles, view: tuple[int, ...] | None) -> Channels:
        shape = value.spec.shape
        view = shape if view is None else view
        if not value.spec.dtype.is_floating_point or value.name in self._rigid:
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
                self._by_name.setdefault(axis.name, []).append(len(self.sources))
                self.sources.append(axis)
                self._check_view(axis)
                self._check_computed(axis)
            source = self._by_key[key]
            if source.role.startswith("bare") and not role.startswith("bare"):
                self._set_role(self.sources.index(source), role)
                source = self._by_key[key]
            result = Axis(dims, source.labels(), source=source)
            if len(dims) > 1:
                self.rectangle(result, None)
            axes.append(result)
        return Channels(view, tuple(axes))

    def decide(self, call: Call, answer: Callable[[], Any]) -> Any:
        self.decisions.setdefault(call.node, []).append(answer())
        return self.decisions[call.node][-1]

    def blank(self, call: Call, value: float | None) -> Channels:
        axes = []
        for d, n in enumerate(call.shape):
            if n > 1 and call.spec.dtype.is_floating_point:
                axes.append(Axis((d,), torch.arange(self._next, self._next + n), blank=True))
                self._next += n
        return Channels(call.shape, tuple(axes))

    def distinguish(self, x: Channels) -> None:
        self.parts += [axis.units for axis in x.axes]

    def makes(self, axis: Axis) -> None:
        if not any(source.role.startswith("bare") for source in self.sources):
            return
        for i in distinct(self._owners(axis.units.reshape(-1).numpy())):
            if i >= 0 and self.sources[i].role.startswith("bare"):
                self._set_role(int(i), "out")

    def _owners(self, labels: np.ndarray) -> np.ndarray:
        """Index of the parameter axis that each label belongs to, -1 for those of no parameter."""
        starts = np.array([s.first for s in self.sources], dtype=np.int64)
        ends = starts + np.array([s.size for s in self.sources], dtype=np.int64)
        index = np.searchsorted(starts, labels, side="right") - 1
        return np.where((index >= 0) & (labels < np.append(ends, 0)[index]), index, -1)

    def _set_role(self, index: int, role: str) -> None:
        old = self.sources[index]
        self.sources[index] = replace(old, role=role)
        self._by_key[old.name, old.view, old.dims] = self.sources[index]

    def _check_computed(self, axis: SourceAxis) -> None:
        """A tensor that a parametrization computes has to take smaller values back."""
        if axis.name not in self._computed:
            self._computed[axis.name] = cannot_be_set(self.trace.model, axis.name)
        if self._computed[axis.name]:
            self.freeze(Axis(axis.dims, axis.labels()), self._computed[axis.name], None)

    def _check_view(self, axis: SourceAxis) -> None:
        """A tensor that is seen in two ways (two group counts, say) is left whole."""
        axes = [self.sources[i] for i in self._by_name[axis.name]]
        known = axes[0].view
        bare = [s.dims for s in axes if s.role.startswith("bare")]
        apart = any(set(a) & set(b) and a != b for a in bare for b in bare)
        if known != axis.view or apart:
            for source in axes:
                self.freeze(
                    Axis(source.dims, source.labels()),
                    f"{axis.name} is used in two layouts, {known} and {axis.view}",
                    None,
                )

    def join(self, a: Axis, b: Axis, call: Call) -> None:
        if a.units is b.units:
            return
        for axis, other in ((a, b), (b, a)):
            if axis.source is not None:
                self.arrivals.setdefault(axis.source.first, other.units)
        self._couple(a.units, b.units, call)

    def join_whole(self, axis: Axis, head: torch.Tensor, call: Call) -> None:
        self._couple(axis.units, head, call)

    def _couple(self, a: torch.Tensor, b: torch.Tensor, call: Call) -> None:
        left, right = a.reshape(-1).numpy(), b.reshape(-1).numpy()
        self._joins.append((left, right))
        self.meetings.setdefault(call.node, []).append((left, right))
        self._couplings.append((left, right, call.name))

    def freeze(self, axis: Axis, reason: str, call: Call | None, line: str = "") -> None:
        units = axis.units.reshape(-1)
        self._joins.append((units.numpy(), np.full(len(units), FROZEN)))
        name = call.name if call else ""
        line = call.node.meta.get("where", "") if call else line
        self.frozen.append(Note(units, reason, name, line))

    def approximate(self, axis: Axis, call: Call) -> None:
        # Beneath a call, or cut over several dimensions: out of the reference's reach.
        if call.node.graph is not self.trace.graph or len(axis.dims) > 1:
            self.freeze(axis, f"{call.name} counts them", call)
        else:
            self.counted.append(Note(axis.units.reshape(-1), "", call.name, node=call.node))

    def rectangle(self, axis: Axis, call: Call | None) -> None:
        if len(axis.dims) > 1 and id(axis.units) not in self._rectangles:
            self._alive.append(axis.units)
            where = call.name if call else (axis.source.name if axis.source else "")
            self._rectangles[id(axis.units)] = Rectangle(axis.units, set(), where)

    def follow(self, blank: Axis, axis: Axis, call: Call) -> None:
        at = [axis.dims.index(d) for d in blank.dims]
        rectangle = self._rectangles.get(id(axis.units))
        if rectangle is None or not set(at) <= rectangle.held:  # what is held does not shrink
            index = tuple(slice(None) if i in at else 0 for i in range(axis.units.dim()))
            self.join(Axis(blank.dims, axis.units[index]), blank, call)

    def spread(self, axis: Axis) -> None:
        self._spread.append(axis.units.reshape(-1).numpy())

    def hold(self, axis: Axis, dims: Iterable[int], *, rather: bool = False) -> None:
        held = {i for i, d in enumerate(axis.dims) if d in set(dims)}
        if id(axis.units) not in self._rectangles:
            self._alive.append(axis.units)
            where = axis.source.name if axis.source else "the code that cuts them"
            self._rectangles[id(axis.units)] = Rectangle(axis.units, set(), where)
        rectangle = self._rectangles[id(axis.units)]
        if rather:
            rectangle.rather |= held
        else:
            rectangle.held |= held

    # -- the answer -----------------------------------------------------------------------------

    def relations(self) -> Relations:
        while True:
            natural, frozen = self._solve()
            # Classes that stay are one class, 0; no class of its own has that number.
            classes = np.where(frozen[natural], 0, natural + 1)
            stuck = [r for r in self._rectangles.values() if self._is_stuck(r, classes)]
            if not stuck:
                break
            for rectangle in stuck:
                if rectangle.rather:
                    rectangle.rather = set()
                    continue
                reason = f"every slice has to stay for {rectangle.where}"
                self.freeze(Axis((0,), rectangle.units.reshape(-1)), reason, None)
        bins = [
            bin_ for rectangle in self._rectangles.values()
            if (bin_ := self._cut_rectangle(rectangle, classes)) is not None
        ]  # fmt: skip
        components = self._components(natural, classes, bins)
        graph = self._dependency_graph(natural, components, bins)
        return Relations(
            self.sources,
            classes,
            np.concatenate([[-1], components]),
            bins,
            self.frozen,
            self.counted,
            graph,
            self.parts,
            self.meetings,
            self.arrivals,
            self.values,
            self.decisions,
        )

    def _solve(self) -> tuple[np.ndarray, np.ndarray]:
        """(class of each label, whether each class was joined to what stays)."""
        empty = np.zeros(0, dtype=np.int64)
        left = np.concatenate([empty, *(a for a, _ in self._joins)])
        right = np.concatenate([empty, *(b for _, b in self._joins)])
        real = (left != FROZEN) & (right != FROZEN)
        classes = components_of(left[real], right[real], self._next)
        frozen = np.zeros(int(classes.max()) + 1, dtype=bool)
        frozen[classes[np.maximum(left[~real], right[~real])]] = True
        frozen[classes[FROZEN]] = True
        owned = np.zeros(len(frozen), dtype=bool)  # what no parameter has a part in stays
        for s in self.sources:
            owned[classes[s.first : s.first + s.size]] = True
        return classes, frozen | ~owned

    def _components(self, natural: np.ndarray, classes: np.ndarray, bins: list[Bin]) -> np.ndarray:
        """Group of each natural class: classes made by one producer, or balanced with each other.

        A layer that reads (or normalises) the channels of several producers does not couple them.
        """
        links: list[np.ndarray] = [
            distinct(natural[s.first : s.first + s.size]) for s in self.sources if s.role == "out"
        ]
        made = np.zeros(int(natural.max()) + 1, dtype=bool)
        for link in links:
            made[link] = True
        for source in self.sources:
            rest = distinct(natural[source.first : source.first + source.size])
            links.append(rest[~made[rest]])
        links += [distinct(bin_.rows[bin_.rows > 0]) - 1 for bin_ in bins]
        left = np.concatenate([link[:-1] for link in links] or [np.zeros(0, dtype=np.int64)])
        right = np.concatenate([link[1:] for link in links] or [np.zeros(0, dtype=np.int64)])
        return components_of(left, right, len(made))

    def shared_in_vain(self, relations: Relations) -> set[str]:
        """Tensors that are the same for every head (a norm's weight, a rotary table), where that
        makes one unit of all heads: better they stay, and heads can go."""
        buffers = {name for name, _ in self.trace.model.named_buffers()}
        # A layer whose heads are shared can shrink, a table of frequencies is only read.
        made = {s.name for s in self.sources if s.role == "out"} - buffers
        found: set[str] = set()
        for rectangle in self._rectangles.values():
            classes = distinct(relations.classes[rectangle.units.numpy()])
            if len(classes) > 1 or classes[0] == 0 or len(varying(rectangle.units)) < 2:
                continue
            for labels in self._spread:
                if (relations.classes[labels] == classes[0]).any():
                    owners = distinct(self._owners(labels))
                    found |= {self.sources[i].name for i in owners if i >= 0}
        return found - made

    def _is_stuck(self, rectangle: Rectangle, classes: np.ndarray) -> bool:
        """Whether units lie along held dimensions only: none can go, and some could till now."""
        units = torch.from_numpy(classes[rectangle.units.numpy()])
        dims = varying(units)
        held = rectangle.held | rectangle.rather
        return bool(dims) and set(dims) <= held and bool((units > 0).any())

    def _cut_rectangle(self, rectangle: Rectangle, classes: np.ndarray) -> Bin | None:
        """How an array of units over several dimensions may shrink: one dimension gives, each
        slice along the others loses equally many."""
        units = torch.from_numpy(classes[rectangle.units.numpy()])
        dims = varying(units)
        if len(dims) < 2:
            return None
        held = rectangle.held | rectangle.rather
        free = [d for d in dims if d not in held] or list(dims)
        ragged = max(free, key=lambda d: units.size(d))
        rows = units.movedim(ragged, -1).reshape(-1, units.size(ragged)).numpy()
        rows = np.unique(rows, axis=0)
        return Bin(rows, rectangle.where) if len(rows) > 1 else None

    def _dependency_graph(
        self, natural: np.ndarray, components: np.ndarray, bins: list[Bin]
    ) -> nx.Graph:
        """Nodes are parameter axes, one for each group that has slices in the axis; an edge is a
        call that couples slices of two of them. Its connected components are the groups."""
        graph: nx.Graph = nx.Graph()
        group_of = components[natural]  # by label
        home = np.zeros(len(components), dtype=np.int64)  # an axis for each class: its first
        for i, source in reversed(list(enumerate(self.sources))):
            labels = slice(source.first, source.first + source.size)
            home[natural[labels]] = i
            for group in distinct(group_of[labels]):
                node = (i, int(group))
                graph.add_node(node, name=source.name, dims=source.dims, role=source.role)
        for a, b, group, call in self._coupled_axes(group_of):
            graph.add_edge((a, group), (b, group), via=call)
        for bin_ in bins:
            units = distinct(bin_.rows[bin_.rows > 0]) - 1
            # Units in a row of the same axis and group are one node.
            nodes = np.unique(np.stack([home[units], components[units]]), axis=1).T.tolist()
            for one, other in pairwise(map(tuple, nodes)):
                if not graph.has_edge(one, other):
                    graph.add_edge(one, other, via=f"equal numbers: {bin_.where}")
        # A component is a group even where its axes meet nowhere but in one producer.
        whole: dict[int, list[tuple[int, int]]] = {}
        for node in graph.nodes:
            whole.setdefault(node[1], []).append(node)
        for nodes in whole.values():
            parts = [min(part) for part in nx.connected_components(graph.subgraph(nodes))]
            for a, b in pairwise(parts):
                graph.add_edge(a, b, via="one producer")
        return graph

    def _coupled_axes(self, group_of: np.ndarray) -> Iterator[tuple[int, int, int, str]]:
        """(parameter axis, another that a call couples with it, group, the call), once each."""
        if not self._couplings:
            return
        left = np.concatenate([a for a, _, _ in self._couplings])
        right = np.concatenate([b for _, b, _ in self._couplings])
        call = np.repeat(np.arange(len(self._couplings)), [len(a) for a, _, _ in self._couplings])
        owners = self._owners(np.arange(self._next))
        here, there = owners[left], owners[right]
        real = (here >= 0) & (there >= 0) & (here != there)
        here, there, call = here[real], there[real], call[real]
        # One number for (group, axis, axis): sorting numbers is much faster than rows.
        count = len(self.sources)
        keys = (group_of[left[real]].astype(np.int64) * count + here) * count + there
        pairs, first = np.unique(keys, return_index=True)
        found = (pairs // count % count, pairs % count, pairs // count**2, call[first])
        for a, b, group, at in zip(*(array.tolist() for array in found), strict=True):
            yield a, b, group, self._couplings[at][2]


def components_of(left: np.ndarray, right: np.ndarray, size: int) -> np.ndarray:
    """The connected component of each of ``size`` items, linked in pairs."""
    from scipy.sparse import coo_array  # here: it takes a tenth of a second to import
    from scipy.sparse.csgraph import connected_components

    ends = left.astype(np.int32), right.astype(np.int32)  # all that csgraph of SciPy 1.11 takes
    links = coo_array((np.ones(len(left), dtype=np.int8), ends), shape=(size, size))
    return connected_components(links, directed=False)[1]


def cannot_be_set(model: nn.Module, name: str) -> str:
    """Why a parametrized tensor cannot be given other values or a smaller shape, or ``""``."""
    path, _, attribute = name.rpartition(".")
    module = copy.deepcopy(model.get_submodule(path))
    chain: Any = module.parametrizations[attribute]  # type: ignore[index]
    kinds = ", ".join(type(p).__name__.lstrip("_") for p in chain)
    if any(True for p in chain for _ in [*p.parameters(), *p.buffers()]):
        return f"its parametrization ({kinds}) has tensors of its own"
    wanted = getattr(module, attribute).detach() * 0.5
    try:
        setattr(module, attribute, wanted)
    except Exception as error:  # whatever the parametrization's own code raises
        return f"its parametrization ({kinds}) cannot be set: {error}"
    if not torch.allclose(getattr(module, attribute), wanted):
        return f"its parametrization ({kinds}) does not give back what it is set to"
    return ""
