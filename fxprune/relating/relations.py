"""What hangs together in a recorded run: unit classes, what couples them, and why some stay."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property
from typing import NamedTuple

import numpy as np
import torch
from torch import fx

from ..rules.call import leaves
from ..rules.channels import FROZEN, Channels, SourceAxis, components_of
from .meanings import Decisions
from .sayings import Sayings


@dataclass
class Note:
    """Something said of labels: why they stay, or that a call counts them."""

    units: torch.Tensor
    reason: str
    where: str
    line: str = ""
    node: fx.Node | None = None


class Stays(NamedTuple):
    """Slices of a parameter's axis that stay, and why."""

    key: tuple[str, tuple[int, ...], tuple[int, ...]]
    slices: np.ndarray
    reason: str


@dataclass
class Bin:
    """Rows of unit classes that have to keep equally many each; ``where`` says what asks for it."""

    rows: np.ndarray
    where: str


@dataclass
class Product:
    """Two operands whose products are summed, and the dimensions ``(of x, of w)`` that meet."""

    x: Channels
    w: Channels
    pairs: list[tuple[int, int]]


@dataclass
class Follower:
    """Slices ``blank`` that are all alike: as many as the array ``units`` has left along ``dim``,
    one of the several that it lies over."""

    blank: torch.Tensor
    units: torch.Tensor
    dim: int


@dataclass
class Relations:
    """What the first walk found: unit classes, what couples them, and why some stay."""

    sources: list[SourceAxis]
    classes: np.ndarray  # label -> class; class 0 stays
    component: np.ndarray  # class -> group, -1 for those that stay
    owners: np.ndarray  # label -> index of the parameter axis, -1 for those of no parameter
    group_of: np.ndarray  # label -> group, of those that stay too
    members: np.ndarray  # rows (group, index of a parameter axis that has slices of it)
    bins: list[Bin]
    frozen: list[Note]
    approximate: list[Note]
    parts: list[torch.Tensor]  # slices that something is done to and not to others
    # Labels that met at each call, pair by pair.
    meetings: dict[fx.Node, list[tuple[np.ndarray, np.ndarray]]]
    arrivals: dict[int, torch.Tensor]  # first label of an axis -> labels of what it met first
    # Calls that leave channels in their places: what is left of them stands as it stood, if it did
    # in what goes in and in these parameter axes (first labels).
    plain: dict[fx.Node, set[int]]
    values: dict = field(repr=False, default_factory=dict)
    decisions: Decisions = field(repr=False, default_factory=dict)
    products: dict[fx.Node, list[Product]] = field(repr=False, default_factory=dict)
    followers: list[Follower] = field(repr=False, default_factory=list)
    # Of each tensor that a pattern has spoken of, the first shape that it was seen in.
    views: dict[str, tuple[int, ...]] = field(repr=False, default_factory=dict)
    # First labels of axes that patterns have called biases, though they make units with others.
    added: set[int] = field(repr=False, default_factory=set)
    # Labels of the slices that calls put around channels: whether these go is all that the amounts
    # of such a call depend on.
    around: dict[fx.Node, np.ndarray] = field(repr=False, default_factory=dict)
    # Dimensions of nodes, without channels, that weights read.
    read_dims: set[tuple[fx.Node, int]] = field(repr=False, default_factory=set)
    # What the first walk heard beside; None where roles changed on the way, and with them what
    # slices say.
    said: Sayings | None = field(repr=False, default=None)

    @cached_property
    def linked(self) -> np.ndarray:
        """A number for each label: the same for those that hang together by what met what."""
        met = [pair for pairs in self.meetings.values() for pair in pairs]
        empty = np.zeros(0, dtype=np.int64)
        left, right = (np.concatenate([empty, *(pair[i] for pair in met)]) for i in range(2))
        real = (left != FROZEN) & (right != FROZEN)
        return components_of(left[real], right[real], len(self.classes))

    @cached_property
    def kinds(self) -> np.ndarray:
        """A number for each class: the same for those that have slices of the same parameter axes,
        such as all heads of one attention, or all slices of one state."""
        keys = np.random.default_rng(0).integers(1, 2**63, len(self.sources))
        found = np.zeros(int(self.classes.max(initial=0)) + 1, dtype=np.int64)
        for axis, key in zip(self.sources, keys, strict=True):
            classes = self.of(axis).reshape(-1)
            found[classes] = found[classes] ^ key
        return found

    def quieten(self) -> None:
        """Let go of what was said: many numbers for each slice of each value."""
        self.said = None
        for value in self.values.values():
            for item in leaves(value):
                for axis in item.axes if isinstance(item, Channels) else ():
                    axis.said = None

    def of(self, axis: SourceAxis) -> np.ndarray:
        """The unit class of each slice of a parameter axis, in the shape of its dimensions."""
        found = self.classes[axis.first : axis.first + axis.size]
        return found if len(axis.dims) == 1 else found.reshape(axis.shape)

    def maker(self, path: str) -> SourceAxis | None:
        """The axis of the outputs of the layer at ``path``."""
        axes = (a for a in self.sources if a.role == "out" and a.name.rpartition(".")[0] == path)
        return next(axes, None)
