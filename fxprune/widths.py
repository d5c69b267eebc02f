"""The new widths around one call, as a pattern's ``resize`` and ``attributes`` see them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from torch import Tensor, fx

from .channels import Channels
from .spec import Spec

if TYPE_CHECKING:
    from .replay import Replay


@dataclass
class NewSizes:
    """The new widths around one call, for a pattern's ``resize`` and ``attributes``."""

    replay: Replay
    node: fx.Node
    views: dict[str, tuple[int, ...]] | None = None
    input: tuple[int, ...] = ()

    @property
    def result(self) -> Any:
        """New shape of the result; a list of shapes for a tuple of tensors."""
        if isinstance(self.node.meta["spec"], Spec):
            return self.replay.result_shape(self.node)
        return self.replay.result_shapes(self.node)

    def keep(self, position: int, dim: int) -> Tensor | None:
        """For each old slice of an argument along ``dim`` whether it stays; None where all do."""
        source = self.node.args[position]
        old = self.replay.before[source]
        axis = old.axis(dim) if isinstance(old, Channels) else None
        if axis is None:
            return None
        kept = self.replay.kept(axis.units)
        others = [i for i, d in enumerate(axis.dims) if d != dim % len(old.shape)]
        any_kept = kept.any(others[0]) if len(others) == 1 else kept
        if len(others) > 1:
            any_kept = kept.flatten(0).new_tensor(
                [bool(kept.select(axis.dims.index(dim), i).any()) for i in range(old.shape[dim])]
            )
        return None if bool(any_kept.all()) else any_kept
