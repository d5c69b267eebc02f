"""The notation of layouts: ``"n (out k) h w"`` names the dimensions of a tensor."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

from ..errors import PatternError

Layout = tuple[tuple[str, ...], ...]  # for each dimension, the names that it is cut into

_TOKEN = re.compile(r"\(([^()]*)\)|(\.\.\.)|([A-Za-z_][A-Za-z_0-9]*)|\S")


def parse(text: Any, what: str) -> Layout:
    """``"n (out k) h"`` as ``(("n",), ("out", "k"), ("h",))``; ``what`` names it in messages."""
    if not isinstance(text, str):
        raise PatternError(f"{what}: a layout is a string such as 'n c h w', not {text!r}")
    dims: list[tuple[str, ...]] = []
    for match in _TOKEN.finditer(text):
        inside, dots, word = match.groups()
        names = tuple(inside.split()) if inside is not None else (dots or word or "",)
        if not names or not all(n == "..." or n.isidentifier() for n in names):
            raise PatternError(
                f"{what}: {match.group()!r} in {text!r} is no name; write names with spaces "
                "between them, '(c k)' for a dimension that is cut in two, '...' for any number"
            )
        dims.append(names)
    every = [n for names in dims for n in names]
    twice = next((n for n in every if every.count(n) > 1), None)
    if twice:
        raise PatternError(f"{what}: {twice!r} stands twice in {text!r}")
    return tuple(dims)


def written(layout: Layout) -> str:
    """The text of a layout."""
    return " ".join(names[0] if len(names) == 1 else f"({' '.join(names)})" for names in layout)


def spread(layout: Layout, rank: int) -> Layout | None:
    """``layout`` for a tensor of ``rank`` dimensions: ``...`` as so many names; None: it has
    another number of dimensions."""
    if ("...",) not in layout:
        return layout if len(layout) == rank else None
    at = layout.index(("...",))
    extra = rank - len(layout) + 1
    if extra < 0:
        return None
    return (*layout[:at], *((f"...{i}",) for i in range(extra)), *layout[at + 1 :])


def cut(
    layout: Layout, shape: Sequence[int], known: dict[str, int]
) -> list[tuple[str, int]] | None:
    """Each name with its size, in order; None where the shape cannot be cut so."""
    found: list[tuple[str, int]] = []
    for names, size in zip(layout, shape, strict=True):
        rest = size
        open_ = [n for n in names if n not in known] if len(names) > 1 else list(names)
        for n in names:
            if n not in open_:
                if known[n] < 1 or rest % known[n]:
                    return None
                rest //= known[n]
        if len(open_) > 1 or (not open_ and rest != 1):
            return None
        found += [(n, rest if n in open_ else known[n]) for n in names]
    return found
