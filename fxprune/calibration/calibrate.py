"""Calibration: folding into each layer what the channels that stay can say of those that go.

The recorded run is replayed on many inputs, by the model as it is and by the masked one side by
side. At each layer that reads channels, those of the first are predicted from those of the second
that stay (:mod:`.regression`), and the prediction is folded into the layer's weight and bias before
the run goes on: so later layers see what the earlier ones have become.
"""

from __future__ import annotations

import uuid
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, fx, nn

from ..errors import SettingError, warn
from ..masking import plan_masks as masking
from ..modules.inspecting import read_attribute
from ..modules.running import evaluating
from ..parametrized.mask import bake
from ..progress import tracking
from ..proving.reference import Counting, tensor_nodes
from ..relating.constants import Constants
from ..relating.fold import Mix, mixed, placed, sink_of
from ..relating.readers import Reader, Run, find_readers, live_weight
from ..rewriting.rewrite import apply
from .regression import Sums

if TYPE_CHECKING:
    from ..planning.pruning_plan import PruningPlan

MODES = ("sequential", "parallel")


def calibrate(
    plan: PruningPlan,
    model: nn.Module,
    batches: Iterable[Any],
    *,
    mode: str = "sequential",
) -> None:
    """Have ``plan`` fold predictions into the layers that read removed channels. See
    :func:`fxprune.plan`; ``batches`` are :class:`Batches`."""
    constants = plan.constants(model, every=True)
    readers, notes = find_readers(plan._trace, constants)
    with evaluating(model), torch.no_grad():
        work = (Sequential if mode == "sequential" else Parallel)(plan, model, constants, readers)
        work.run(iter(batches))
    plan._mixes, plan._calibration = work.mixes, uuid.uuid4().hex
    before, plan._folds = plan._folds, plan.folds(model)
    others = [note for note in plan.notes if note not in before.notes]
    plan.notes = list(dict.fromkeys([*plan._folds.notes, *others, *notes, *work.notes]))


def check_mode(mode: str) -> None:
    if mode not in MODES:
        raise SettingError(f"calibration_mode={mode!r} is unknown; use one of {', '.join(MODES)}")


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

    def sums(self, reader: Reader, *, same: bool = False) -> Sums:
        weight = live_weight(self.constants, reader.read)
        flat = placed(reader.read.axis.flat(weight), reader.order)
        return Sums(self.kept(reader), flat, same=same)

    def fit(self, reader: Reader, sums: Sums) -> Mix | None:
        read = reader.read
        target = sink_of(self.constants, read)
        if target is not None and not target[2] and hasattr(self.model, "config"):
            target = None  # a bias that is made anew is none that the configuration knows of
        # Zeros around the input say 0, which no constant does: kept channels stand for it too.
        dropped = self.plan.settings.bias == "drop"  # no bias is made or changed
        intercept = target is not None and not read.border and not dropped
        fit = sums.fit(intercept=intercept)
        if fit is None:
            why = "there are no samples of what it reads" if sums.finite else "it reads inf or NaN"
            note = f"not calibrated, for {why}: constants are folded"
            self.notes.append((read.call.name, note))
            if not sums.finite:
                warn(f"{read.call.name} is {note}; look for NaN in the inputs of calibration=")
            return None
        return Mix(
            read, reader.order, sums.index, fit.matrix, fit.offset, target if intercept else None,
            fit.error, fit.samples, fit.ridge,
        )  # fmt: skip


class Parallel(Calibration):
    """One pass of the model as it is: every layer is calibrated as if it were the only one."""

    def run(self, batches: Iterator[Any]) -> None:
        # The others read what they always did.
        readers = [r for rs in self.readers.values() for r in rs if bool(r.read.dead.any())]
        sums = {r.name: self.sums(r, same=True) for r in readers}
        module = self.plan._trace.on(self.model).graph_module()
        with tracking("calibrating") as tracked:
            for batch in tracked(batches):
                run = Run(module, batch)
                for node in self.graph.nodes:
                    for reader in self.readers.get(node, ()):
                        x = reader.samples(run) if reader.name in sums else None
                        if x is not None:
                            sums[reader.name].add(x, x, run.inputs)
                    run.step(node)
        for reader in readers:
            found = self.fit(reader, sums.pop(reader.name))
            if found is not None:
                self.mixes[reader.name] = found


class Sequential(Calibration):
    """All batches at once, layer by layer, in the model as it is and in the one pruned so far."""

    def run(self, batches: Iterator[Any]) -> None:
        plan, model = self.plan, self.model
        masked = masking.masked(plan, model, plan.folds(model, skip=self.names))
        bake(masked, others=True)
        self.masked = masked
        counting = Counting(plan, model, apply(plan, model)) if plan.approximate else None
        counted = set() if counting is None else set(counting.nodes)
        modules = [plan._trace.on(m).graph_module() for m in (model, masked)]
        nodes = self.graph.nodes
        with evaluating(masked), tracking("calibrating", len(nodes)) as tracked:
            before, after = modules
            runs = [(Run(before, batch), Run(after, batch)) for batch in batches]
            for node in tracked(nodes):
                if node.op == "output":
                    break
                for reader in self.readers.get(node, ()):
                    self._fold(reader, runs)
                for old, new in runs:
                    with torch.random.fork_rng():  # both draw the same
                        old.step(node)
                    found = None
                    if node in counted:
                        tensors = [new.env[source] for source in tensor_nodes(node)]
                        found = counting.run(node, tensors)  # type: ignore[union-attr]
                    new.step(node, found)

    def _fold(self, reader: Reader, runs: list[tuple[Run, Run]]) -> None:
        sums = self.sums(reader)
        moved = bool(reader.read.dead.any())
        looks_back = reader.looks_back(self.plan._relations)
        for old, new in runs:
            x = reader.samples(old)
            # What follows from the weight itself is not known before it: the model's own is taken.
            y = x if looks_back else reader.samples(new)
            if x is not None and y is not None:
                if len(y) != len(x):  # values choose what goes there, as to an expert: others now
                    y = x
                sums.add(x, y, old.inputs)
                moved = moved or not torch.equal(x, y)
        mix = self.fit(reader, sums) if moved else None
        if mix is None:
            return
        self.mixes[reader.name] = mix
        weight = read_attribute(self.masked, reader.name)
        weight.data = mixed(weight.data, mix)
        shift = mix.shift(self.constants)
        if shift is not None:
            masking.add_shift(self.masked, shift)
