"""Calibration: folding into each layer what the channels that stay can say of those that go.

The recorded run is replayed on many inputs, by the model as it is and by the masked one side by
side. At each layer that reads channels, those of the first are predicted from those of the second
that stay (:mod:`fxprune.regression`), and the prediction is folded into the layer's weight and bias
before the run goes on: so later layers see what the earlier ones have become.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, fx, nn

from . import masking, tree
from .channels import Channels
from .constants import Constants, Read
from .errors import SettingError
from .fold import Mix, Shift, delta_of, mixed, placed, sink_of
from .mask import bake
from .pruning_plan import PruningPlan
from .recording import Trace, uses_of
from .reference import Counting, tensor_nodes
from .regression import Sums
from .rewrite import apply
from .running import bind_inputs, evaluating

MODES = ("sequential", "parallel")
MOST = 4096  # channels that are predicted each for itself: their covariance has so many squared


@dataclass
class Reader:
    """A weight that reads channels, and where they are.

    Attributes:
        read: what the second walk knows of it.
        source: the node whose tensor it reads; None where that is inside its layer.
        dims: the dimensions of that tensor along which the channels lie, in the weight's order.
        order: (channels, positions) of the weight's slices, where each channel lies at several
            positions (behind a flatten): all are predicted alike.
    """

    read: Read
    source: fx.Node | None
    dims: tuple[int, ...] = ()
    order: Tensor | None = None

    @property
    def name(self) -> str:
        return self.read.axis.name

    def looks_back(self, plan: PruningPlan) -> bool:
        """Whether the weight reads what its own layer has made, a step before."""
        read = self.read
        if self.source is not None or read.out is None:
            return False
        classes = plan._relations.of(read.out), plan._relations.of(read.axis)
        return bool(np.isin(classes[0], classes[1][classes[1] > 0]).any())

    def samples(self, run: Run) -> Tensor | None:
        """What the weight is about to read in a run: (samples, channels)."""
        call, size = self.read.call, self.read.axis.size
        if self.source is None:
            args, kwargs = run.fetch_args_kwargs_from_env(call.node)
            module, local = run.fetch_attr(call.path), self.name.removeprefix(f"{call.path}.")
            found = call.pattern.reads(module, local, args, kwargs)  # type: ignore
            return None if found is None else found.reshape(-1, size)
        value = run.env[self.source]
        rank = value.dim()
        moved = value.movedim(self.dims, tuple(range(rank - len(self.dims), rank)))
        flat = moved.reshape(-1, size)
        if self.order is None:
            return flat
        return flat[:, self.order.to(flat.device)].movedim(1, 2).reshape(-1, len(self.order))


class Everything(Constants):
    """The second walk, with the layers that read no dead channel too: earlier ones have moved."""

    every = True


def calibrate(
    plan: PruningPlan,
    model: nn.Module,
    batches: Iterable[Any],
    *,
    mode: str = "sequential",
) -> None:
    """Have ``plan`` fold predictions into the layers that read removed channels. See
    :func:`fxprune.plan`; ``batches`` are :class:`Batches`."""
    constants = plan.constants(model, Everything)
    readers, notes = find_readers(plan._trace, constants)
    with evaluating(model), torch.no_grad():
        work = (Sequential if mode == "sequential" else Parallel)(plan, model, constants, readers)
        work.run(iter(batches))
    plan._mixes = work.mixes
    before, plan._folds = plan._folds, plan.folds(model)
    others = [note for note in plan.notes if note not in before.notes]
    plan.notes = list(dict.fromkeys([*plan._folds.notes, *others, *notes, *work.notes]))


def check_mode(mode: str) -> None:
    if mode not in MODES:
        raise SettingError(f"calibration_mode={mode!r} is unknown; use one of {', '.join(MODES)}")


def find_readers(trace: Trace, constants: Constants) -> tuple[list[Reader], list[tuple[str, str]]]:
    """The weights whose channels can be predicted, and why others cannot."""
    uses = uses_of(trace)
    reads: dict[str, list[Read]] = {}
    for read in constants.reads:
        reads.setdefault(read.axis.name, []).append(read)
    readers, notes = [], []
    for name, several in reads.items():
        read = several[0]
        reader = _reader(constants, read)
        if len(uses.get(name, ())) != 1 or any(
            other.call.node is not read.call.node or not torch.equal(other.arrive, read.arrive)
            for other in several
        ):
            why = "its weight is used in several places"
        elif name not in trace.names.values():
            why = "its weight is computed"
        elif reader is None:
            why = "what it reads is inside it"
        else:
            readers.append(reader)
            continue
        if bool(read.dead.any()):
            notes.append((read.call.name, f"not calibrated, for {why}: constants are folded"))
    return readers, notes


def _reader(constants: Constants, read: Read) -> Reader | None:
    """Where the channels are that a weight reads: the argument whose slices arrive there, in the
    order in which the weight has them."""
    arrive = read.arrive.reshape(-1)
    found = []
    for node in read.call.node.all_input_nodes:
        value = constants.values[node]
        for axis in value.axes if isinstance(value, Channels) else ():
            if axis.source is None and torch.equal(axis.units.reshape(-1), arrive):
                found.append(Reader(read, node, axis.dims, _positions(read)))
    if not found and read.call.pattern is not None and read.call.pattern.reads is not None:
        return Reader(read, None)
    return found[0] if len(found) == 1 else None


def _positions(read: Read) -> Tensor | None:
    """For each channel the slices of a weight that read it, where these are several and too many
    to be predicted one by one."""
    if read.axis.size <= MOST:
        return None
    labels, counts = torch.unique(read.arrive, return_counts=True)
    if len(read.axis.dims) > 1 or len(labels) == read.arrive.numel() or (counts != counts[0]).any():
        return None
    return torch.argsort(read.arrive, stable=True).reshape(len(labels), -1)


def live_weight(constants: Constants, read: Read) -> Tensor:
    """The weight that reads, without the outputs that go."""
    weight = constants.read(read.axis.name)
    if read.out is None:
        return weight
    gone = constants.is_removed(read.out).to(weight.device)
    return (weight.reshape(read.out.view) * ~read.out.laid(gone)).reshape(weight.shape)


class Run(fx.Interpreter):
    """The recorded run on one batch, node by node."""

    def __init__(self, module: fx.GraphModule, batch: Any) -> None:
        super().__init__(module)
        args, kwargs = bind_inputs(batch)
        self.args_iter = iter([*args, *kwargs.values()])
        first = next(tree.tensors((args, kwargs)), None)
        self.inputs = 1 if first is None or not first.dim() else first.shape[0]

    def step(self, node: fx.Node, result: Any = None) -> Any:
        self.env[node] = self.run_node(node) if result is None else result
        for done in self.user_to_last_uses.get(node, []):
            del self.env[done]
        return self.env.get(node)


class Calibration:
    """What both modes share: regressions become folds."""

    def __init__(
        self, plan: PruningPlan, model: nn.Module, constants: Constants, readers: list[Reader]
    ) -> None:
        self.plan, self.model, self.constants = plan, model, constants
        self.readers: dict[fx.Node, list[Reader]] = {}
        for reader in readers:
            self.readers.setdefault(reader.read.call.node, []).append(reader)
        self.names = {reader.name for reader in readers}
        self.graph = plan._trace.graph
        self.mixes: dict[str, Mix] = {}
        self.notes: list[tuple[str, str]] = []

    def kept(self, reader: Reader) -> Tensor:
        """(rows, n): the channels that the layer goes on reading."""
        axis = reader.read.axis
        gone = self.plan.flags("removed", axis) & ~self.plan.flags("carrier", axis)
        kept = ~gone.reshape(-1, gone.shape[-1])
        return kept if reader.order is None else kept[:, reader.order[:, 0]]

    def fit(self, reader: Reader, sums: Sums) -> Mix | None:
        read = reader.read
        weight = live_weight(self.constants, read)
        target = sink_of(self.constants, read, self.model)
        carried = bool(read.border) and self.plan.settings.exact
        intercept = target is not None and not carried and read.border != "pattern"
        flat = placed(read.axis.flat(weight), reader.order)
        fit = sums.fit(flat, intercept=intercept)
        if fit is None:
            why = "there are no samples of what it reads" if sums.finite else "it reads inf or NaN"
            self.notes.append((read.call.name, f"not calibrated, for {why}: constants are folded"))
            return None
        shift = None
        if intercept and target is not None:
            path, attribute, name, sign = target
            offset = fit.offset
            if reader.order is not None:
                offset = torch.zeros(read.axis.size, dtype=offset.dtype)
                offset[reader.order] = fit.offset[0][:, None]
            offset = offset.reshape(read.axis.shape)
            delta = sign * delta_of(self.constants, read, offset)
            shift = Shift(path, attribute, delta, True, name)
        return Mix(
            read.axis,
            reader.order,
            fit.matrix,
            fit.offset,
            shift,
            fit.error,
            fit.samples,
            fit.ridge,
        )

    def _bar(self) -> Any:
        from rich.console import Console
        from rich.progress import Progress

        console = Console(stderr=True)
        return Progress(console=console, transient=True, disable=not sys.stderr.isatty())


class Parallel(Calibration):
    """One pass of the model as it is: every layer is calibrated as if it were the only one."""

    def run(self, batches: Iterator[Any]) -> None:
        sums = {r.name: Sums(self.kept(r)) for rs in self.readers.values() for r in rs}
        module = self.plan._trace.on(self.model).graph_module()
        with self._bar() as bar:
            task = bar.add_task("calibrating", total=None)
            for batch in batches:
                run = Run(module, batch)
                for node in self.graph.nodes:
                    for reader in self.readers.get(node, ()):
                        x = reader.samples(run)
                        if x is not None:
                            sums[reader.name].add(x, x, run.inputs)
                    run.step(node)
                bar.advance(task)
        for readers in self.readers.values():
            for reader in readers:
                found = self.fit(reader, sums[reader.name])
                if found is not None:
                    self.mixes[reader.name] = found


class Sequential(Calibration):
    """All batches at once, layer by layer, in the model as it is and in the one pruned so far."""

    def run(self, batches: Iterator[Any]) -> None:
        plan, model = self.plan, self.model
        masked = masking.masked(plan, model, plan.folds(model, skip=self.names))
        bake(masked)
        self.masked = masked
        counting = Counting(plan, model, apply(plan, model)) if plan.approximate else None
        counted = set() if counting is None else set(counting.nodes)
        modules = [plan._trace.on(m).graph_module() for m in (model, masked)]
        with evaluating(masked), self._bar() as bar:
            before, after = modules
            runs = [(Run(before, batch), Run(after, batch)) for batch in batches]
            for node in bar.track(
                self.graph.nodes, len(self.graph.nodes), description="calibrating"
            ):
                if node.op == "output":
                    break
                for reader in self.readers.get(node, ()):
                    self._fold(reader, runs)
                for old, new in runs:
                    old.step(node)
                    found = None
                    if node in counted:
                        tensors = [new.env[source] for source in tensor_nodes(node)]
                        found = counting.run(node, tensors)  # type: ignore[union-attr]
                    new.step(node, found)

    def _fold(self, reader: Reader, runs: list[tuple[Run, Run]]) -> None:
        sums = Sums(self.kept(reader))
        looks_back = reader.looks_back(self.plan)
        for old, new in runs:
            x = reader.samples(old)
            # What follows from the weight itself is not known before it: the model's own is taken.
            y = x if looks_back else reader.samples(new)
            if x is not None and y is not None:
                sums.add(x, y, old.inputs)
        mix = self.fit(reader, sums)
        if mix is None:
            return
        self.mixes[reader.name] = mix
        target = self.masked.get_parameter(reader.name)
        target.data = mixed(target.data, mix)
        if mix.shift is not None:
            masking.add_shift(self.masked, mix.shift)
