"""The plan as a table for the terminal."""

from __future__ import annotations

import io
from typing import Any

_WIDTH = 100


def _number(count: int, noun: str) -> str:
    return f"{count} {noun}{'' if count == 1 else 's'}"


def table(plan: Any) -> str:
    """Each group with its layers, width before and after, importance and why it stays."""
    from rich import box  # here: a plan that is not printed need not wait for it
    from rich.console import Console
    from rich.table import Table

    view = Table(box=box.SIMPLE, show_edge=False, pad_edge=False)
    view.add_column("group", no_wrap=True, overflow="ellipsis", max_width=34)
    view.add_column("layers", justify="right")
    view.add_column("width", justify="right", no_wrap=True)
    view.add_column("importance", justify="right", no_wrap=True)
    view.add_column("why it stays", ratio=1, overflow="fold")
    for group in plan.groups:
        if group.name.endswith(" (input)"):
            continue  # what is only read (the image's channels) is nobody's question
        layers = len({name.rpartition(".")[0] for name, _ in group.members})
        width = str(group.width)
        if len(group.removed):
            width = f"{group.width} -> {group.kept}"
        scores = ""
        if group.importance is not None and len(group.removed):
            low, high = group.importance.min(), group.importance.max()
            scores = f"{low:.2g} … {high:.2g}"
        why = group.frozen or ("approximate: counts in " + ", ".join(group.approximate[:2])
                               if group.approximate and len(group.removed) else "")  # fmt: skip
        view.add_row(group.name, str(layers), width, scores, why)
    # Names are the model's own: "[red]" and ":on:" are no markup.
    console = Console(
        width=_WIDTH, file=io.StringIO(), color_system=None, markup=False, emoji=False
    )
    console.print(view)
    pruned = sum(len(g.removed) > 0 for g in plan.groups)
    console.print(
        f"{_number(pruned, 'group')} pruned, {_number(len(plan.kept), 'tensor')} changed; "
        f"{_number(len(plan.skipped), 'layer')} with all outputs kept (plan.skipped says why)"
    )
    if plan.target is not None:
        console.print(str(plan.target))
    if plan.settings.rounding:
        console.print(plan.settings.rounding)
    errors = plan.predicted_error
    if errors:
        worst = max(errors, key=errors.__getitem__)
        console.print(
            f"calibrated: predicted error of the layers that read {worst!r}: "
            f"{errors[worst] ** 0.5:.1%} of the standard deviation of their outputs (the largest); "
            f"of the last layer: {plan.last_error**0.5:.1%}"
        )
    for name, value in plan.attributes.items():
        console.print(f"{name} becomes {value}")
    for path in plan.code:
        console.print(f"{path or 'the model'} gets a forward with new sizes (plan.code)")
        stale = getattr(plan.code[path], "stale", ())
        if stale:
            console.print(f"  and no {' and no '.join(stale)}, with the old sizes, any more")
    return console.file.getvalue().rstrip()  # type: ignore[attr-defined]
