"""What code does that a recorded graph has no place for: then it is not written anew."""

from __future__ import annotations

import operator
from collections import deque
from collections.abc import Iterable
from dataclasses import is_dataclass
from typing import Any

import torch
from torch import nn

from ..modules import tree
from ..modules.inspecting import OF_TORCH
from ..rules.sizes import TracedSize

# What tells of sizes without saying of which.
READ_PAST_SIZES = frozenset(("stride", "nbytes", "storage_offset", "untyped_storage", "storage"))
HAS_HOOKS = "has hooks that change what it reads or returns"
OWN_CONTEXT = "calls under a context of its own (autocast, inference mode)"


def odd_container(output: Any) -> str:
    """What a graph returns in its place is a plain dict or list."""
    kind = type(output)
    if kind in (dict, list, tuple, torch.Size, TracedSize) or hasattr(kind, "_fields"):
        return next(filter(None, map(odd_container, tree.children(output))), "")
    if isinstance(output, (dict, list, tuple)) and not is_dataclass(output):
        return f"returns a container of its own ({kind.__name__})"
    return ""


def contexts() -> tuple[Any, ...]:
    return (
        torch.is_inference_mode_enabled(),
        torch.is_autocast_enabled("cpu"),
        torch.is_autocast_enabled("cuda"),
    )


class Kept:
    """Lists, sets and mappings that modules keep: whether code has put something in or taken it
    out since somebody looked last."""

    def __init__(self, modules: Iterable[nn.Module]) -> None:
        self._kept = [
            (name, value) for module in modules for name, value in vars(module).items()
            if name not in OF_TORCH and isinstance(value, (list, dict, set, deque))
            and not (value and all(type(item) is int for item in value))  # sizes
        ]  # fmt: skip
        self._seen = self._inside()

    def _inside(self) -> list[list[Any]]:
        return [tree.children(value) for _, value in self._kept]

    def changed(self) -> str:
        """The name of one that was."""
        if not self._kept:
            return ""
        before, self._seen = self._seen, self._inside()
        for (name, _), old, new in zip(self._kept, before, self._seen, strict=True):
            if len(old) != len(new) or not all(map(operator.is_, old, new)):
                return name
        return ""
