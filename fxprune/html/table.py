"""Small tables of HTML, for notebooks."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from html import escape
from typing import Any

_ROWS = 40  # a notebook is no place for more


def plan(made: Any) -> str:
    """What ``print(plan)`` says, as a table."""
    shown = [g for g in made.groups if not g.name.endswith(" (input)")]
    rows = [
        (
            g.name,
            len({name.rpartition(".")[0] for name, _ in g.members}),
            f"{g.width} → {g.kept}" if len(g.removed) else g.width,
            g.frozen or "",
        )
        for g in shown[:_ROWS]
    ]
    pruned = sum(len(g.removed) > 0 for g in shown)
    more = f"; {len(shown) - _ROWS} groups are not shown" if len(shown) > _ROWS else ""
    caption = f"{pruned} of {len(shown)} groups pruned, {len(made.kept)} tensors changed{more}"
    return table(("group", "layers", "width", "why it stays"), rows, caption)


def table(headings: Sequence[str], rows: Iterable[Sequence[Any]], caption: str) -> str:
    """A table; words are escaped. The first and last columns are words, the others numbers."""
    left, right = ' style="text-align: left"', ' style="text-align: right; white-space: nowrap"'

    def line(cells: Sequence[Any], tag: str) -> str:
        last = len(cells) - 1
        return "".join(
            f"<{tag}{left if i in (0, last) else right}>{escape(str(cell))}</{tag}>"
            for i, cell in enumerate(cells)
        )

    body = "".join(f"<tr>{line(row, 'td')}</tr>" for row in rows)
    return (
        f"<table><caption{left}>{escape(caption)}</caption>"
        f"<thead><tr>{line(headings, 'th')}</tr></thead><tbody>{body}</tbody></table>"
    )
