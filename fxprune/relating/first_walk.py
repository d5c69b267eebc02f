"""The first walk: which slices of which tensors belong together, and what may not go.

Every slice of every parameter axis gets a label; where two axes meet, their labels are joined
(:mod:`fxprune.relating.labels`). What each slice says when it is dead is followed beside
(:mod:`fxprune.relating.sayings`).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Container, Iterable, Sequence
from typing import Any

import numpy as np
import torch
from torch import fx

from ..modules.inspecting import dotted
from ..modules.tensor_attributes import fixed_tensors
from ..parametrized.computed import cannot_be_set
from ..rules.call import Call, Named, Roles, leaves
from ..rules.channels import Axis, Channels, SourceAxis
from ..tracing.trace import Trace, is_told
from .algebra import IS_KERNEL
from .labels import Labels
from .rectangles import Rectangles
from .relations import Follower, Note, Product, Relations, Stays
from .sayings import Sayings, Telling


class FirstWalk(Sayings):
    def __init__(self, trace: Trace, *, telling: Telling | None = None) -> None:
        super().__init__(trace, trace.model, telling)
        self.labels = Labels()
        self.sources = self.labels.sources
        self._by_key: dict[tuple, SourceAxis] = {}
        self._by_name: dict[str, list[int]] = {}  # of a tensor, its axes among the sources
        self._kernels: list[tuple[str, set[int], Call]] = []
        # False once a parameter changed its role after its constants had been read: those of this
        # walk are stale then, and are followed again.
        self._settled = True
        # Of tensors, the axes that were bare at first.
        self._bare_dims: dict[str, list[tuple[int, ...]]] = {}
        self._used_bare: dict[int, int] = {}  # those that are used bare, by first label
        # Why a computed tensor cannot be set, "" where it can or is a tensor of the model itself.
        self._computed: dict[str, str] = dict.fromkeys(trace.names.values(), "")
        self.rectangles = Rectangles()
        self.buffers = {dotted(path, key) for path, m in self.modules.items() for key in m._buffers}
        self.buffers |= {fixed.name for fixed in fixed_tensors(self.modules)}
        self.frozen: list[Note] = []
        self.counted: list[Note] = []
        self.arrivals: dict[int, torch.Tensor] = {}
        self.parts: list[torch.Tensor] = []
        self.meetings: dict[fx.Node, list[tuple[np.ndarray, np.ndarray]]] = {}
        self.products: dict[fx.Node, list[Product]] = {}
        self.followers: list[Follower] = []
        self.views: dict[str, tuple[int, ...]] = {}
        self.added: set[int] = set()
        self.around: dict[fx.Node, list[np.ndarray]] = {}
        # Of cut dimensions: the units of the parts, what is put around each, and along which.
        self._around_parts: list[tuple[torch.Tensor, Axis, int, Call]] = []
        # What may be cut another way (:mod:`.discover`). Parameters whose axes have met one over as
        # many dimensions: which of theirs.
        self.better_together: dict[str, tuple[int, ...]] = {}
        self.stacks: dict[fx.Node, torch.Tensor] = {}
        # Of products that may be those of groups: what of its weight makes channels, and what of
        # the other operand it reads.
        self.groupable: dict[fx.Node, tuple[str, Sequence[int], torch.Tensor]] = {}
        self.in_groups_of: dict[fx.Node, list[torch.Tensor]] = {}  # convolutions
        self.summed: dict[fx.Node, torch.Tensor] = {}  # cut axes that calls sum over in part
        self.shared: list[np.ndarray] = []  # axes that meet many slices with each of theirs
        self.plain: dict[fx.Node, set[int]] = {}
        # First labels of the axes that the call at hand has spoken of; None once it is not plain.
        self._spoken: set[int] | None = None

    def run(self) -> None:
        super().run()
        for name, dims, call in self._kernels:
            for source in self.axes_of(name):
                if source.view == source.tensor_shape and not dims.isdisjoint(source.dims):
                    self.freeze(Axis(source.dims, source.labels()), IS_KERNEL, call)
        for node, reason, line in self.trace.kept_whole:
            for item in leaves(self.values[node]):
                for axis in self.channels(item).axes:
                    self.freeze(axis, reason, None, line)
        self._check_counted()

    def _check_counted(self) -> None:
        """What calls count that are no modules' is compared by the recorded run: its way must not
        depend on what they make."""
        by_data = any(call.reads_data for call in self.trace.calls)
        waiting = [
            node for node, *_ in self.trace.kept_whole if by_data and self.counted
            and getattr(self.trace.pattern(node), "kind", "") != "check"
        ]  # fmt: skip
        above: set[fx.Node] = set()
        while waiting:
            node = waiting.pop()
            if node not in above and not is_told(node):  # which no value decides
                above.add(node)
                waiting += node.all_input_nodes
        if any(note.node in above for note in self.counted):
            for note in self.counted:
                if note.node is not None and note.node.op != "call_module":
                    why = f"{note.where} counts them, and the code goes by values that come of it"
                    line = note.node.meta.get("where", "")
                    self.freeze(Axis((0,), note.units), why, None, line)

    def keep(self, stays: Stays) -> None:
        labels = self._by_key[stays.key].labels().reshape(-1)[stays.slices]
        self.freeze(Axis((0,), labels), stays.reason, None)

    def _visit(self, node: fx.Node) -> Any:
        self._spoken = set()
        value = super()._visit(node)
        if self._spoken is not None and node.graph is self.trace.graph:
            pattern = self.trace.pattern(node)
            known = pattern is None or (pattern.is_builtin and pattern.resize is None)
            inputs = [self.values[source] for source in node.all_input_nodes]
            if known and _is_plain(value) and all(map(_is_plain, inputs)):
                self.plain[node] = self._spoken
        return value

    def _walk(self, graph: fx.Graph) -> Any:
        result = super()._walk(graph)
        self._spoken = None  # of the call that the graph lies beneath
        return result

    # -- words ----------------------------------------------------------------------------------

    def source(self, value: Named, roles: Roles, view: tuple[int, ...] | None) -> Channels:
        shape = value.spec.shape
        view = shape if view is None else view
        self.views.setdefault(value.name, view)
        if value.spec.is_index or value.name in self.trace.cuts.rigid:
            return Channels(view, (), self.one(value))
        axes = []
        for role, dims in roles.items():
            key = (value.name, view, dims)
            sizes = [view[d] for d in dims]
            if 0 in sizes or sizes.count(1) == len(sizes):
                continue
            if key not in self._by_key:
                axis = SourceAxis(value.name, shape, view, dims, role, self.labels.count)
                self._by_key[key] = axis
                self._by_name.setdefault(axis.name, []).append(len(self.sources))
                if axis.is_bare:
                    self._used_bare[axis.first] = len(self.sources)
                    self._bare_dims.setdefault(axis.name, []).append(axis.dims)
                self.labels.add(axis)
                self._check_view(axis)
                self._check_computed(axis)
            source = self._by_key[key]
            if self._spoken is not None:
                self._spoken.add(source.first)
            if source.is_bare and not role.startswith("bare"):
                self._set_role(self._used_bare[source.first], role)
                source = self._by_key[key]
            result = Axis(dims, source.labels(), self.born(source), source=source)
            if len(dims) > 1:
                self.rectangle(result, None)
            axes.append(result)
        return Channels(view, tuple(axes), self.one(value))

    def decide(self, call: Call, answer: Callable[[], Any]) -> Any:
        self._spoken = None
        self.decisions.setdefault(call.node, []).append(answer())
        return self.decisions[call.node][-1]

    def blank(
        self, call: Call, value: float | None, dims: Container[int] | None = None
    ) -> Channels:
        self._spoken = None
        axes = []
        filled = dims is None and not call.spec.is_index  # with positions, it would be one of them
        for d, n in enumerate(call.shape):
            if n > 1 and (filled if dims is None else d in dims):
                labels = self.labels.fresh(n)
                axes.append(Axis((d,), labels, self.filled(value, n), blank=True))
        return Channels(call.shape, tuple(axes))

    def put_around(
        self, call: Call, axis: Axis, dim: int, amounts: tuple[int, int], value: float | None
    ) -> tuple[Axis, Axis]:
        self._spoken = None
        ends = []
        for n in amounts:
            sizes = list(axis.units.shape)
            sizes[axis.dims.index(dim)] = n
            units = self.labels.fresh(math.prod(sizes)).reshape(sizes)
            ends.append(Axis(axis.dims, units, self.filled(value, *sizes)))
        if call.node in self.trace.cuts.around:
            for end in ends:
                self.freeze(end, self.trace.cuts.around[call.node], call)
        elif len(axis.dims) > 1:
            at = axis.dims.index(dim)
            self._around_parts += [(axis.units.movedim(at, -1), end, at, call) for end in ends]
        else:
            labels = self.around.setdefault(call.node, [])
            labels += [end.units.reshape(-1).numpy() for end in ends]
        return ends[0], ends[1]

    def kernel(self, call: Call, weight: Any, dims: Iterable[int]) -> Any:
        if isinstance(weight, Named):  # which other code may use as a matrix
            self._kernels.append((weight.name, set(dims), call))
            return weight
        return super().kernel(call, weight, dims)

    def stacked(self, call: Call, axis: Axis, dim: int) -> None:
        self.stacks[call.node] = axis.units.movedim(axis.dims.index(dim), 0).flatten(1)

    def is_grouped(
        self, call: Call, weight: Named, made: Sequence[int], x: Channels, dims: Sequence[int]
    ) -> bool:
        axis = x.axis(dims[0])
        assert axis is not None
        self.groupable[call.node] = weight.name, made, axis.units
        return super().is_grouped(call, weight, made, x, dims)

    def in_groups(self, call: Call, axes: Iterable[Axis]) -> None:
        self.in_groups_of[call.node] = [axis.units for axis in axes]

    def is_sliced(self, call: Call, axis: Axis) -> bool:
        self.summed[call.node] = axis.units
        return super().is_sliced(call, axis)

    def distinguish(self, x: Channels) -> None:
        self.parts += [axis.units for axis in x.axes]

    def adds(self, bias: Channels) -> None:
        self.added |= {axis.source.first for axis in bias.axes if axis.source is not None}

    def makes(self, axis: Axis) -> None:
        for i in self.labels.owners_of(axis.units) if self._used_bare else ():
            if i >= 0 and self.sources[i].is_bare:
                self._set_role(int(i), "out")

    def _set_role(self, index: int, role: str) -> None:
        before = self.sources[index]
        self.labels.set_role(index, role)
        source = self.sources[index]
        self._by_key[source.key] = source
        self._used_bare.pop(source.first, None)
        self._settled = self._settled and (before.first, before.role) not in self._born

    def axes_of(self, name: str) -> list[SourceAxis]:
        """Of a tensor, those that patterns have spoken of."""
        return [self.sources[i] for i in self._by_name.get(name, ())]

    def as_it_is(self, axis: SourceAxis) -> SourceAxis:
        return self._by_key[axis.key]

    def is_made(self, axis: Axis) -> bool:
        owners = (self.sources[i] for i in self.labels.owners_of(axis.units) if i >= 0)
        return any(s.role == "out" and s.name not in self.buffers for s in owners)

    def _check_computed(self, axis: SourceAxis) -> None:
        """A tensor that a parametrization computes has to take smaller values back."""
        if axis.name not in self._computed:
            self._computed[axis.name] = cannot_be_set(self.trace.model, axis.name)
        if self._computed[axis.name]:
            self.freeze(Axis(axis.dims, axis.labels()), self._computed[axis.name], None)

    def _check_view(self, axis: SourceAxis) -> None:
        """A tensor that is seen in two ways (two group counts, say) is left whole."""
        if len(self._by_name[axis.name]) == 1:
            return
        axes = self.axes_of(axis.name)
        known = axes[0].view
        bare = self._bare_dims.get(axis.name, [])
        apart = any(set(a) & set(b) and a != b for a in bare for b in bare)
        if known == axis.view and apart:  # one use has an axis over dimensions of two of another's
            self.better_together.setdefault(axis.name, max(bare, key=len))
        if known != axis.view or apart:
            for source in axes:
                self.freeze(
                    Axis(source.dims, source.labels()),
                    f"{axis.name} is used in two layouts, {known} and {axis.view}",
                    None,
                )

    def contract(self, call, x, w, contracted, batch, free_x, free_w, shape) -> Channels:
        met = Product(x, w, [*contracted, *((a, b) for a, b, _ in batch)])
        self.products.setdefault(call.node, []).append(met)
        return super().contract(call, x, w, contracted, batch, free_x, free_w, shape)

    def join(self, a: Axis, b: Axis, call: Call) -> None:
        if a.units is b.units:
            return
        for axis, other in ((a, b), (b, a)):
            if axis.source is not None:
                self.arrivals.setdefault(axis.source.first, other.units)
        self._couple(a.units, b.units, call)

    def join_whole(self, axis: Axis, head: torch.Tensor, call: Call) -> None:
        self._spoken = None
        self._couple(axis.units, head, call)

    def _couple(self, a: torch.Tensor, b: torch.Tensor, call: Call) -> None:
        self.meetings.setdefault(call.node, []).append(self.labels.join(a, b))

    def freeze(self, axis: Axis, reason: str, call: Call | None, line: str = "") -> None:
        self.labels.freeze(axis.units)
        name = call.name if call else ""
        line = call.node.meta.get("where", "") if call else line
        self.frozen.append(Note(axis.units.reshape(-1), reason, name, line))

    def approximate(self, axis: Axis, call: Call) -> None:
        self._spoken = None
        # Beneath a call, or cut over several dimensions: out of the reference's reach.
        if call.node.graph is not self.trace.graph or len(axis.dims) > 1:
            self.freeze(axis, f"{call.name} counts them", call)
        else:
            self.counted.append(Note(axis.units.reshape(-1), "", call.name, node=call.node))

    def rectangle(self, axis: Axis, call: Call | None) -> None:
        if len(axis.dims) > 1:
            self._spoken = None
            where = call.name if call else (axis.source.name if axis.source else "")
            self.rectangles.of(axis, where)

    def follow(self, blank: Axis, axis: Axis, call: Call) -> None:
        self._spoken = None
        at = [axis.dims.index(d) for d in blank.dims]
        rectangle = self.rectangles.get(axis)
        if rectangle is None or not set(at) <= rectangle.held:  # what is held does not shrink
            index = tuple(slice(None) if i in at else 0 for i in range(axis.units.dim()))
            self.join(Axis(blank.dims, axis.units[index]), blank, call)
            if len(at) == 1 < len(axis.dims):
                self.followers.append(Follower(blank.units, axis.units, at[0]))

    def apart(self, axes: Sequence[Axis], rank: int) -> None:
        if len(axes) != rank:
            return
        owners = [self.labels.owners_of(axis.units) for axis in axes]
        found = [self.sources[o[0]] for o in owners if len(o) == 1 and o[0] >= 0]
        names = {source.name for source in found}
        bare = all(s.dims in self._bare_dims.get(s.name, ()) and len(s.dims) == 1 for s in found)
        if len(found) == rank and len(names) == 1 and bare:
            self.better_together[names.pop()] = tuple(sorted(s.dims[0] for s in found))

    def spread(self, axis: Axis) -> None:
        self.shared.append(axis.units.reshape(-1).numpy())

    def hold(self, axis: Axis, dims: Iterable[int], *, rather: bool = False) -> None:
        self._spoken = None
        where = axis.source.name if axis.source else "the code that cuts them"
        self.rectangles.hold(axis, dims, where, rather=rather)

    # -- the answer -----------------------------------------------------------------------------

    def relations(self) -> Relations:
        owners = self.labels.owners()
        while True:
            natural, frozen = self._solve(owners)
            # Classes that stay are one class, 0; no class of its own has that number.
            classes = np.where(frozen[natural], 0, natural + 1)
            if self._around_parts:
                self._place_around_parts(natural)
                continue
            stuck = [r for r in self.rectangles if r.is_stuck(classes)]
            if not stuck:
                break
            for rectangle in stuck:
                if rectangle.rather:
                    rectangle.rather = set()
                    continue
                reason = f"every slice has to stay for {rectangle.where}"
                self.freeze(Axis((0,), rectangle.units.reshape(-1)), reason, None)
        bins = [b for r in self.rectangles if (b := r.bin(classes)) is not None]
        components = self.labels.groups(natural, owners, bins)
        group_of = components[natural]
        return Relations(
            sources=self.sources,
            classes=classes,
            component=np.concatenate([[-1], components]),
            owners=owners,
            group_of=group_of,
            members=self.labels.members(owners, group_of),
            bins=bins,
            frozen=self.frozen,
            approximate=self.counted,
            parts=self.parts,
            meetings=self.meetings,
            arrivals=self.arrivals,
            plain=self.plain,
            values=self.values,
            decisions=self.decisions,
            products=self.products,
            followers=self.followers,
            views=self.views,
            added=self.added,
            around={node: np.concatenate(labels) for node, labels in self.around.items()},
            read_dims=self._all_read_dims(),
            said=self if self._settled and self.telling is not None else None,
        )

    def _all_read_dims(self) -> set[tuple[fx.Node, int]]:
        """With those of what is added to them, say, or normed to become them."""
        read = set(self.read_dims)
        for node in reversed(self.trace.graph.nodes) if read else ():
            for source in self.laid_over.get(node, ()):
                x, y = self.values[source].shape, self.values[node].shape
                over = len(y) - len(x)
                read.update(
                    (source, d) for d, n in enumerate(x)
                    if (node, d + over) in read and n == y[d + over]
                )  # fmt: skip
        return read

    def _place_around_parts(self, natural: np.ndarray) -> None:
        """What is put around the slices of a head goes with the head, where that goes as a whole;
        where slices of it can go, code puts as many around them as ever."""
        for units, end, at, call in self._around_parts:
            parts = torch.from_numpy(natural[units.numpy()])
            if bool((parts == parts[..., :1]).all()):
                head = units[..., :1].movedim(-1, at)
                self._couple(end.units, head.expand(end.units.shape), call)
            else:
                self.freeze(end, "they are padded", call)
        self._around_parts.clear()

    def _solve(self, owners: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """(class of each label, whether each class stays)."""
        classes, frozen = self.labels.joined()
        owned = np.zeros(len(frozen), dtype=bool)  # what no parameter has a part in stays
        owned[classes[owners >= 0]] = True
        return classes, frozen | ~owned


def _is_plain(value: Any) -> bool:
    """Whether a value is a tensor no dimension of which was cut in parts."""
    if isinstance(value, Channels):
        return all([len(axis.dims) == 1 for axis in value.axes])
    return isinstance(value, Named)
