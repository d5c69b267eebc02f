"""The new widths around one call, as a pattern's ``resize`` and ``attributes`` see them."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NoReturn

from torch import Tensor, fx

from ..rules.call import Call, Named
from ..rules.channels import Channels
from ..rules.spec import Spec
from .orders import DIFFERENT, Mismatch

if TYPE_CHECKING:
    from .resizing import Resizing


@dataclass
class NewSizes:
    """The new widths around one call, for a pattern's ``resize`` and ``attributes``."""

    replay: Resizing
    node: fx.Node
    views: dict[str, tuple[int, ...]] | None = None
    input: tuple[int, ...] = ()

    @property
    def before(self) -> tuple[int, ...]:
        """Shape of the first argument in the model as it is."""
        return self.replay.before[self._first].shape

    @property
    def _first(self) -> fx.Node:
        return self.node.args[0] if self.node.args else self.node.kwargs["input"]  # type: ignore

    @property
    def result(self) -> Any:
        """New shape of the result; a list of shapes for a tuple of tensors."""
        if isinstance(self.node.meta["spec"], Spec):
            return self.replay.result_shape(self.node)
        return self.replay.result_shapes(self.node)

    def keep(self, dim: int) -> Left | None:
        """What stays of the first argument along ``dim``; None where all does."""
        return self._keep(self._first, dim)

    def keep_of_result(self, dim: int) -> Left | None:
        """What stays of the result along ``dim``; None where all does."""
        return self._keep(self.node, dim)

    def _keep(self, node: fx.Node, dim: int) -> Left | None:
        old = self.replay.before[node]
        if isinstance(old, Named):  # a parameter that code takes apart
            old = self.replay.as_it_was(old)
        axis = old.axis(dim) if isinstance(old, Channels) else None
        if axis is None:
            return None
        at = axis.dims.index(dim % len(old.shape))
        kept = self.replay.kept(axis.units).movedim(at, -1)
        rows = kept.reshape(-1, kept.shape[-1])
        rows = rows[rows.any(1)]  # but those that go as a whole
        some = rows.any(0, keepdim=True)
        if self.replay.left(axis.units).shape[at] == some.sum():  # it is another one that is ragged
            rows = some
        call = Call(self.replay, self.node, None, (), {})
        return None if bool(rows.all()) else Left(rows, axis.units, call)

    def parts(self, dim: int, count: int) -> int:
        """Of how many of ``count`` equal parts of the first argument something stays."""
        if self.replay is None:  # a layer alone, for how long it takes: which stay nobody knows
            return math.gcd(self.input[dim], count)
        left = self.keep(dim)
        return count if left is None else left.parts(count)

    def refuse(self, tensor: str, reason: str) -> NoReturn:
        """The layer cannot have these sizes: what its ``tensor`` was to lose stays."""
        call = Call(self.replay, self.node, None, (), {}, path=str(self.node.target))
        raise Mismatch(self.replay.labels_of(call, tensor), reason, call)


@dataclass
class OldSizes:
    """As :class:`NewSizes`, at the widths of the model as it is."""

    views: dict[str, tuple[int, ...]]
    input: tuple[int, ...]
    spec: Any

    @property
    def result(self) -> Any:
        return self.spec.shape if isinstance(self.spec, Spec) else [s.shape for s in self.spec]

    @property
    def before(self) -> tuple[int, ...]:
        return self.input

    def keep(self, dim: int) -> None:
        return None

    def parts(self, dim: int, count: int) -> int:
        return count

    def keep_of_result(self, dim: int) -> None:
        return None


class Left:
    """Which slices stay along one dimension of a tensor; where channels are cut in parts, in each
    of these. What is asked of it has to be the same in all of them."""

    def __init__(self, rows: Tensor, units: Tensor, call: Call) -> None:
        self._rows, self._units, self._call = rows, units, call

    def __len__(self) -> int:
        """How many there were."""
        return self._rows.shape[1]

    def __getitem__(self, at: int) -> bool:
        """Whether the slice that was at ``at`` stays."""
        return bool(self._same(self._rows[:, at]))

    def before(self, at: int) -> int:
        """How many of the slices before the one at ``at`` stay."""
        return int(self._same(self._rows[:, :at].sum(1)))

    def parts(self, count: int) -> int:
        """Of how many of ``count`` equal parts something stays."""
        some = self._rows.reshape(len(self._rows), count, -1).any(2)
        return int(self._same(some.sum(1)))

    def refuse(self, reason: str) -> NoReturn:
        """The call cannot have what is left of them."""
        raise Mismatch(self._units, reason, self._call)

    def _same(self, each: Tensor) -> Tensor:
        if bool((each != each[0]).any()):
            self.refuse(DIFFERENT)
        return each[0]
