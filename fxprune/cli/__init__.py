"""The command ``fxprune``: inspect, prune, compact, bench and patterns."""

from __future__ import annotations

from collections.abc import Sequence


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command line; raises :class:`SystemExit` with 0, with 1 where pruning is refused or
    its proof fails, with 2 where something given cannot be used."""
    from .commands import fxprune

    fxprune.main(arguments, prog_name="fxprune")
