"""Mending what the model's code would do wrongly at the chosen widths.

Producers make their channels in an order that fits, attributes that all their uses agree on are
set, and where the code would do wrong even so, other code is written.
"""

from __future__ import annotations

import contextlib
from collections.abc import Container, Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np
from torch import Tensor, fx

from ..code import Code, Patched
from ..relating.relations import Relations
from ..replaying.faults import Fault
from ..replaying.orders import Mismatch
from ..replaying.replay import Replay
from ..tracing.runs import OtherRuns
from ..tracing.trace import CannotRewrite, Trace
from .forwards import rewrite
from .patching import patch
from .source_edits import CannotPatch


class Unfit(Exception):
    """The model cannot have the chosen widths: ``units`` have to stay."""

    def __init__(self, units: np.ndarray, reason: str, where: str, line: str) -> None:
        super().__init__(reason)
        self.units = units
        self.reason = reason
        self.where = where
        self.line = line


@dataclass
class Mended:
    """The trace at the chosen widths, and what makes the model right there."""

    replay: Replay
    attributes: dict[str, Any]
    code: dict[str, Code | Patched]
    orders: dict[int, Tensor]  # of producers whose slices are not to stand as they stood
    straighten: set[fx.Node]  # calls of new code whose results are put in order


class Mending:
    """Args:
    trace: the recorded run.
    relations: of the first walk.
    kept: for each unit class, whether it stays.
    others: further runs of the model, for what the trace does not tell of code.
    """

    def __init__(
        self,
        trace: Trace,
        relations: Relations,
        kept: np.ndarray,
        others: OtherRuns,
    ) -> None:
        self.trace = trace
        self.relations = relations
        self.kept = kept
        self.others = others
        self.orders: dict[int, Tensor] = {}
        self.straighten: set[fx.Node] = set()
        self.attributes: dict[str, Any] = {}
        self.set_for: dict[str, list[np.ndarray]] = {}  # units that an attribute was set for

    def mend(self) -> Mended:
        """What makes the model right at the chosen widths.

        Raises:
            Unfit: nothing does.
        """
        whole = bool(self.kept.all())  # no size is another: whatever looks so is right as it is
        try:
            replay = self._replay() if whole else self._with_attributes()
        except Mismatch as mismatch:
            raise Unfit(
                mismatch.units, mismatch.reason, mismatch.where, mismatch.line
            ) from mismatch
        try:
            code = {} if whole else self._write_code(replay)
        except Unfit:  # where code could be written its sizes would be plain numbers
            tried = self._with_parts(replay)
            if tried is replay:
                raise
            replay, code = tried, self._write_code(tried)
        return Mended(replay, self.attributes, code, self.orders, self.straighten)

    def _replay(self, before: Replay | None = None) -> Replay:
        """The trace at the chosen widths, with channels in an order that fits: producers make them
        so, or the code that moves them (a channel shuffle) has its result put in order. ``before``
        is one that the attributes set since are all that is new for."""
        while True:
            replay = before or Replay(
                self.trace, self.relations, self.kept, self.attributes, self.orders, self.straighten
            )
            try:
                replay.run() if before is None else replay.resume(self.attributes)
                return replay
            except Mismatch as mismatch:
                before = None
                if mismatch.reorder is not None and mismatch.reorder[0] not in self.orders:
                    first, order = mismatch.reorder
                    self.orders[first] = order
                elif mismatch.misplaced is None or mismatch.misplaced in self.straighten:
                    raise
                else:  # with whatever else this line of the code puts in an order of its own
                    line = mismatch.misplaced.meta.get("where")
                    self.straighten |= {
                        node for node in self.trace.graph.nodes
                        if node is mismatch.misplaced or (line and node.meta.get("where") == line)
                    }  # fmt: skip

    def _with_attributes(self) -> Replay:
        """The trace at the chosen widths, with the attributes set that all their uses agree on."""
        replay = self._replay()
        unfit: set[str] = set()
        while fresh := self._fresh_attributes(replay, unfit):
            self.attributes |= fresh
            try:
                replay = self._replay(replay)
            except Mismatch:  # other code reads them for something else
                unfit |= fresh.keys()
                self.attributes = {k: v for k, v in self.attributes.items() if k not in unfit}
                replay = self._replay()
        return replay

    def _fresh_attributes(self, replay: Replay, unfit: Container[str]) -> dict[str, Any]:
        """Attributes that are to have a new value, on which all their uses agree so far."""
        wanted: dict[tuple[str, int | None], set[Any]] = {}
        for fault in replay.faults():
            for name, index, value in fault.proposals():
                wanted.setdefault((name, index), set()).add(value)
                if fault.units.size:
                    self.set_for.setdefault(name, []).append(fault.units)
        fresh: dict[str, Any] = {}
        for (name, index), values in wanted.items():
            if len(values) > 1 or name in self.attributes or name in unfit:
                continue
            path, _, key = name.rpartition(".")
            own = replay.module_sizes.get(path, {}).get(key)
            if self.trace.is_layer(path) and own not in values:
                continue  # a layer's attribute is what its tensors say, or no width at all
            (value,) = values
            if index is not None:
                old = fresh.get(name, self.trace.tensor(name))
                value = type(old)(value if i == index else n for i, n in enumerate(old))
            fresh[name] = value
        return fresh

    def _with_parts(self, replay: Replay) -> Replay:
        """The trace with attributes set that sizes are made of (``heads * size``), as long as that
        leaves fewer sizes wrong. Which of them is to have a new value only a trial tells; those of
        one name are tried in all modules at once."""
        best, fewest = replay, len(replay.faults())
        while fewest:
            replay = best
            known, orders, straighten = self.attributes, self.orders, self.straighten
            found = known, orders, straighten
            for trial in self._trials(replay):
                self.attributes = known | trial
                self.orders, self.straighten = dict(orders), set(straighten)
                with contextlib.suppress(Mismatch):  # other code reads them for something else
                    tried = self._replay()
                    if len(tried.faults()) < fewest:
                        best, fewest = tried, len(tried.faults())
                        found = self.attributes, self.orders, self.straighten
            self.attributes, self.orders, self.straighten = found
            if best is replay:
                break
        return best

    def _trials(self, replay: Replay) -> Iterable[dict[str, Any]]:
        """For each name, the attributes of that name with what their first use may need."""
        trials: dict[str, dict[str, Any]] = {}
        for fault in replay.faults():
            for name, value in fault.parts(replay.values):
                path, _, key = name.rpartition(".")
                known = self.trace.tensor(name)
                if type(known) is not int or not 0 < value < known or self.trace.is_layer(path):
                    continue
                if name not in self.attributes:
                    trials.setdefault(key, {}).setdefault(name, value)
                    self.set_for.setdefault(name, []).append(fault.units)
        return trials.values()

    def _write_code(self, replay: Replay) -> dict[str, Code | Patched]:
        """New code where the model's own would do wrong, by the path of the module: its own with
        other sizes in it, or a forward of the recorded graph."""
        written: dict[str, Code | Patched] = {}
        by_call: dict[int, list[Fault]] = {}
        by_path: dict[str, list[Fault]] = {}
        for fault in replay.faults():
            if fault.told:
                raise self._unfit(fault, "the input says how much that is")
            by_call.setdefault(fault.call, []).append(fault)
            by_path.setdefault(self.trace.calls[fault.call].path, []).append(fault)
        for path, found in by_path.items():
            with contextlib.suppress(CannotPatch):
                written[path] = patch(self.trace, path, found, replay, self.others)
        for path, found in by_path.items():
            if path not in written:
                try:
                    written[path] = rewrite(self.trace, path, by_call, replay, self.others)
                except CannotRewrite as error:
                    raise self._unfit(found[0], str(error)) from error
        return written

    def _unfit(self, fault: Fault, why: str) -> Unfit:
        place = fault.line.rpartition("/")[2]
        units = fault.units
        others = [u for name in fault.attributes() for u in self.set_for.get(name, ())]
        alone = np.setdiff1d(np.concatenate(others), units) if others else units[:0]
        if alone.size:  # what is wrong here has been set for them
            units = alone
        elif not units.size:  # an attribute of its own: it was set for these
            units = np.concatenate([units, *(u for found in self.set_for.values() for u in found)])
        return Unfit(units, f"{fault.words}, and {why}", place, fault.line)
