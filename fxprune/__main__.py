"""The command line: ``python -m fxprune patterns``."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from rich import box
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from . import registry
from .pattern_types import Pattern
from .targets import label


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m fxprune", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    listing = commands.add_parser("patterns", help="what is known about ops, and where from")
    listing.add_argument("word", nargs="?", default="", help="only those whose line has this word")
    given = parser.parse_args(arguments)
    console = Console(width=None if sys.stdout.isatty() else 120)
    console.print(patterns(given.word))
    return 0


def patterns(word: str = "") -> Table:
    """Every registered pattern: its targets, what it says, and where it is written."""
    view = Table(box=box.SIMPLE, show_edge=False, pad_edge=False)
    view.add_column("for", ratio=3, overflow="fold")
    view.add_column("what it says", ratio=4, overflow="fold")
    view.add_column("from", overflow="fold", ratio=2)
    for made in sorted(registry.every(), key=lambda p: (not p.is_builtin, p.source)):
        targets, source = ", ".join(map(label, made.targets)), _source(made)
        if word in targets or word in made.summary or word in source:
            view.add_row(*map(escape, (targets, made.summary, source)))
    return view


def _source(made: Pattern) -> str:
    return made.source.removeprefix("fxprune.") if made.is_builtin else made.source


if __name__ == "__main__":
    sys.exit(main())
