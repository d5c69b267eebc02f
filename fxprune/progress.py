"""A progress bar for what takes its time."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterable, Iterator
from typing import Any


@contextlib.contextmanager
def tracking(words: str, total: int | None = None) -> Iterator[Callable[[Iterable], Iterable[Any]]]:
    """A bar on a terminal's stderr, for what goes through the function that this gives."""
    from rich.console import Console
    from rich.progress import Progress

    console = Console(stderr=True)
    with Progress(console=console, transient=True, disable=not sys.stderr.isatty()) as bar:
        yield lambda items: bar.track(items, total, description=words)
