"""The registered patterns as a table."""

from __future__ import annotations

from rich import box
from rich.markup import escape
from rich.table import Table

from ..rules import registry
from ..rules.pattern_types import Pattern
from ..rules.targets import label

HEADINGS = ("for", "what it says", "from")


def rows(word: str = "") -> list[tuple[str, str, str]]:
    """Every registered pattern: its targets, what it says, and where it is written."""
    found = []
    for made in sorted(registry.every(), key=lambda p: (not p.is_builtin, p.source)):
        row = ", ".join(map(label, made.targets)), made.summary, _source(made)
        if any(word in cell for cell in row):
            found.append(row)
    return found


def table(shown: list[tuple[str, str, str]]) -> Table:
    view = Table(box=box.SIMPLE, show_edge=False, pad_edge=False)
    for heading, ratio in zip(HEADINGS, (3, 4, 2), strict=True):
        view.add_column(heading, ratio=ratio, overflow="fold")
    for row in shown:
        view.add_row(*map(escape, row))
    return view


def _source(made: Pattern) -> str:
    return made.source.removeprefix("fxprune.") if made.is_builtin else made.source
