"""Where channels can be cut in more ways than one: which way it is."""

from __future__ import annotations

from dataclasses import dataclass, field

from torch import fx


@dataclass(frozen=True)
class Cuts:
    """Which way axes are cut. Each walk over a trace goes by them, and what it finds stuck is cut
    in another way by the next.

    Attributes:
        attention: whole ``"heads"`` go, or slices of each: ``"head_dim"``.
        together: of a tensor that code uses by itself, the dimensions that one axis lies over.
        rigid: tensors that stay as they are, for what they meet can shrink then.
        tied: stacks of tensors that have the same channels.
        grouped: whether products with a stack of matrices are those of groups of channels.
        whole: whether groups of convolutions go as a whole, where no channels of each can.
        sliced: whether sums over slices of heads keep equally many of each.
        around: calls that put slices around channels, where these have to stay, and why.
    """

    attention: str = "heads"
    together: dict[str, tuple[int, ...]] = field(default_factory=dict)
    rigid: frozenset[str] = frozenset()
    tied: frozenset[fx.Node] = frozenset()
    grouped: dict[fx.Node, bool] = field(default_factory=dict)
    whole: dict[fx.Node, bool] = field(default_factory=dict)
    sliced: dict[fx.Node, bool] = field(default_factory=dict)
    around: dict[fx.Node, str] = field(default_factory=dict)
