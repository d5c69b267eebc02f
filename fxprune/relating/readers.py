"""The weights that read channels, and where these are in a run."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, fx

from ..errors import InputError
from ..modules import tree
from ..modules.running import bind_inputs
from ..rules.channels import Channels
from ..tracing.trace import Trace, uses_of
from .constants import Constants, Read
from .relations import Relations

MOST = 4096  # channels that are predicted each for itself: their covariance has so many squared


@dataclass
class Reader:
    """A weight that reads channels, and where they are.

    Attributes:
        read: what is known of it.
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

    def looks_back(self, relations: Relations) -> bool:
        """Whether the weight reads what its own layer has made, a step before."""
        read = self.read
        if self.source is not None or read.out is None:
            return False
        classes = relations.of(read.out), relations.of(read.axis)
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


def find_readers(trace: Trace, constants: Constants) -> tuple[list[Reader], list[tuple[str, str]]]:
    """The weights whose channels can be predicted, and why others cannot."""
    uses = uses_of(trace)
    reads: dict[str, list[Read]] = {}
    for read in constants.reads:
        reads.setdefault(read.axis.name, []).append(read)
    readers, notes = [], []
    for name, several in reads.items():
        read = several[0]
        reader = reader_of(constants, read)
        if name not in trace.names.values():
            why = "its weight is computed"
        elif len(uses.get(name, ())) != 1 or any(
            other.call.node is not read.call.node or not torch.equal(other.arrive, read.arrive)
            for other in several
        ):
            why = "its weight is used in several places"
        elif reader is None:
            why = "what it reads is inside it"
        else:
            readers.append(reader)
            continue
        if bool(read.dead.any()):
            notes.append((read.call.name, f"not calibrated, for {why}: constants are folded"))
    return readers, notes


def reader_of(constants: Constants, read: Read) -> Reader | None:
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
    """The recorded run on one batch, node by node. A value lives until the last node that uses it
    has run. ``name``: of the setting that the batch is of, for messages."""

    def __init__(self, module: fx.GraphModule, batch: Any, name: str = "calibration") -> None:
        super().__init__(module)
        self._setting = name
        args, kwargs = bind_inputs(batch)
        self.args_iter = _taken([*args, *kwargs.values()])
        first = next(iter(tree.tensors((args, kwargs))), None)
        self.inputs = 1 if first is None or not first.dim() else first.shape[0]

    def step(self, node: fx.Node, result: Any = None) -> Any:
        try:
            self.env[node] = self.run_node(node) if result is None else result
        except Exception as error:  # whatever the model's own calls raise
            raise InputError(
                f"{self._setting}: a batch does not run as example_input does: "
                f"{type(error).__name__}: {error}"
            ) from error
        for done in self.user_to_last_uses.get(node, []):
            del self.env[done]
        return self.env[node] if node.users else self.env.pop(node)


def _taken(values: list[Any]) -> Iterator[Any]:
    """The values one after the other, each in nobody's hands afterwards."""
    while values:
        yield values.pop(0)
