"""The rooms of the package: each imports only from those that docs/how-it-works.md has above it."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "fxprune"


def rooms() -> list[str]:
    text = (ROOT / "docs" / "how-it-works.md").read_text().partition("## Where things are")[2]
    cells = [line.split("|")[1] for line in text.splitlines() if line.startswith("| `")]
    return [name.strip("/") for cell in cells for name in re.findall(r"`([a-z/]+)`", cell)]


def imported(path: Path) -> Iterator[str]:
    """The rooms that a file imports from as it is loaded."""
    inside = path.relative_to(PACKAGE).parent.parts
    for node in ast.parse(path.read_text()).body:
        if isinstance(node, ast.ImportFrom) and node.level:
            base = inside[: len(inside) + 1 - node.level]
            name = ".".join([*base, *([node.module] if node.module else [])])
            yield from ([name] if name else [alias.name for alias in node.names])


def test_every_room_is_on_the_map():
    here = {p.stem for p in PACKAGE.iterdir() if p.suffix == ".py" or (p / "__init__.py").exists()}
    assert here - {"__init__", "__main__", "patterns"} == set(rooms())


def test_rooms_import_from_those_above_them_only():
    order = {name: i for i, name in enumerate(rooms())}
    wrong = []
    for path in PACKAGE.rglob("*.py"):
        room = path.relative_to(PACKAGE).with_suffix("").parts[0]
        if room in order:
            above = {name.split(".")[0] for name in imported(path)} - {room}
            wrong += [(str(path.relative_to(PACKAGE)), name) for name in above
                      if order.get(name, len(order)) > order[room]]  # fmt: skip
    assert not wrong
