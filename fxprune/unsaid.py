"""What code does that a recorded graph has no place for: then it is not written anew."""

from __future__ import annotations

from dataclasses import is_dataclass
from typing import Any

import torch

from . import tree

OWN_CONTEXT = "calls under a context of its own (autocast, inference mode)"


def odd_container(output: Any) -> str:
    """What a graph returns in its place is a plain dict or list."""
    kind = type(output)
    if kind in (dict, list, tuple, torch.Size) or hasattr(kind, "_fields"):
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
