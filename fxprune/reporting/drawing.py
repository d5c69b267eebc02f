"""The dependency graph as a picture, laid out by Graphviz."""

from __future__ import annotations

import os
from colorsys import hls_to_rgb
from html import escape
from itertools import pairwise
from pathlib import Path
from typing import Any

from ..errors import SettingError
from ..modules.given import check_path
from ..records.container import speaking_of
from .describing import axes_kept, group_of_axis, owner


def draw(plan: Any, path: str | os.PathLike[str] | None = None) -> Any:
    """See :meth:`fxprune.PruningPlan.draw`."""
    try:
        import graphviz
    except ModuleNotFoundError as error:
        raise SettingError(
            "plan.draw needs the graphviz package (pip install 'fxprune[draw]') and Graphviz's "
            "program dot"
        ) from error
    kind = "svg"
    if path is not None:
        check_path(path)
        kind = Path(path).suffix.removeprefix(".").lower()
    if kind not in graphviz.FORMATS:
        raise SettingError(f"path='{path}' does not end as pictures do: use .svg, .pdf or .png")
    picture = graphviz.Source(source(plan))
    if path is not None:
        try:
            with speaking_of(path):
                Path(path).write_bytes(picture.pipe(format=kind))
        except graphviz.ExecutableNotFound as error:
            raise SettingError(
                "Graphviz's program dot is not on the PATH: install the package graphviz of your "
                "system (apt install graphviz, brew install graphviz)"
            ) from error
    return picture


def source(plan: Any) -> str:
    """In the language of dot: a box a layer, with a field for what it reads and one for what it
    makes. A line leads through all fields of a group, in the order in which they run; layers that
    only scale channels (norms) are named in the box before them."""
    fields = _Fields(plan)
    return "\n".join([
        "digraph plan {",
        'graph [rankdir=TB, ranksep=0.35, nodesep=0.3, bgcolor="white"]',
        'node [shape=plain, fontname="Helvetica", fontsize=11]',
        'edge [dir=none, penwidth=1.6, fontname="Helvetica", fontsize=9, fontcolor="#5b626c"]',
        *fields.boxes(), *fields.lines(), "}",
    ])  # fmt: skip


class _Fields:
    """What stands in which box: a field is (layer, "in" or "out")."""

    def __init__(self, plan: Any) -> None:
        self.plan, self.sources = plan, plan._relations.sources
        self.counts, self.homes = axes_kept(plan), group_of_axis(plan)
        self.axis: dict[tuple[str, str], int] = {}  # the one whose width a field shows
        for i, axis in enumerate(self.sources):
            field = self.of(i)
            shown = self.axis.setdefault(field, i)
            if axis.role == "out" and self.sources[shown].role != "out":
                self.axis[field] = i
        boxed = {
            path for (path, _), i in self.axis.items()
            if self.sources[i].role not in ("scale", "shift", "stat")
        }  # fmt: skip
        self.runs: list[list[tuple[str, str]]] = []  # of each group, its fields
        self.scaled: dict[str, dict[str, None]] = {}  # by box, the norms behind it
        for axes in self._axes():
            run: list[tuple[str, str]] = []
            for field in dict.fromkeys(map(self.of, axes)):
                if field[0] in boxed or not run:
                    boxed.add(field[0])
                    run.append(field)
                else:
                    self.scaled.setdefault(run[-1][0], {})[field[0]] = None
            self.runs.append(run)
        paths = dict.fromkeys(path for path, _ in self.axis if path in boxed)
        self.number = {path: n for n, path in enumerate(paths)}

    def of(self, i: int) -> tuple[str, str]:
        return owner(self.sources[i].name), "in" if self.sources[i].role == "in" else "out"

    def _axes(self) -> list[list[int]]:
        """The axes of each group."""
        found: list[list[int]] = [[] for _ in self.plan.groups]
        for i, numbers in sorted(self.homes.items()):
            for number in numbers:
                found[number].append(i)
        return found

    def boxes(self) -> list[str]:
        return [f"n{n} [label=<{self._box(path)}>]" for path, n in self.number.items()]

    def _box(self, path: str) -> str:
        """What it reads, its name, the norms behind it, what it makes: a row each, so that lines go
        straight down."""
        rows = [("", "white", escape(path or "(the model)"))]
        for norm in self.scaled.get(path, ()):
            rows.append(
                ("", "white", f'<font point-size="9" color="#5b626c">{escape(norm)}</font>')
            )
        for side, at in (("in", 0), ("out", len(rows) + 1)):
            if (path, side) in self.axis:
                i = self.axis[path, side]
                text = ("reads " if side == "in" else "") + _width(self.counts[i])
                rows.insert(
                    at, (f' port="{side}"', self._colour(self.homes.get(i, []), 0.82), text)
                )
        cells = (f'<tr><td{port} bgcolor="{fill}">{text}</td></tr>' for port, fill, text in rows)
        style = 'border="0" cellborder="1" cellspacing="0" cellpadding="4" color="#8a9099"'
        return f"<table {style}>{''.join(cells)}</table>"

    def lines(self) -> list[str]:
        """From each field of a group to the next one; one line where several groups share it."""
        named = self._calls()
        found: dict[tuple[Any, Any], str] = {}
        for number, run in enumerate(self.runs):
            for a, b in pairwise(run):
                if (a[0] != b[0] or b in named) and (a, b) not in found:
                    label = f", label={_quoted(named[b])}" if b in named else ""
                    found[a, b] = f'color="{self._colour([number], 0.6)}"{label}'
        return [
            f"n{self.number[a]}:{side} -> n{self.number[b]}:{other} [{style}]"
            for ((a, side), (b, other)), style in found.items()
        ]

    def _calls(self) -> dict[tuple[str, str], str]:
        """By field, the call that couples it with earlier ones, where that is not a layer."""
        found: dict[tuple[str, str], str] = {}
        for (a, _), (b, _), data in self.plan.graph.edges(data=True):
            field = self.of(max(a, b))
            if data["via"] not in (field[0], self.of(min(a, b))[0]):
                found.setdefault(field, str(data["via"]))
        return found

    def _colour(self, numbers: list[int], lightness: float) -> str:
        """The same for what goes together; grey where nothing may go."""
        free = [n for n in numbers if self.plan.groups[n].frozen is None]
        hue, saturation = ((free[0] * 0.382 + 0.57) % 1, 0.6) if free else (0.6, 0.05)
        rgb = hls_to_rgb(hue, lightness, saturation)
        return "#" + "".join(f"{round(part * 255):02x}" for part in rgb)


def _quoted(text: str) -> str:
    return '"' + text.replace("\\", "\\\\").replace('"', '\\"') + '"'


def _width(counts: tuple[int, int]) -> str:
    before, after = counts
    return str(before) if before == after else f"{before} → {after}"
