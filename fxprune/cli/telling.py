"""What the commands say: on stdout what was asked for, on stderr progress, warnings and errors."""

from __future__ import annotations

import contextlib
import functools
import sys
import traceback
import warnings
from collections.abc import Callable
from typing import Any

import click
from rich.console import Console, RenderableType
from rich.progress import BarColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

from ..errors import FileError, InputError, PruningError, PruningWarning, SettingError
from .mistakes import Mistake


class Steps:
    """A bar on a terminal's stderr that says which of the steps is at work. What the model's own
    code prints meanwhile goes there too: stdout is for what was asked for."""

    def __init__(self, *names: str) -> None:
        self.names = names
        console = Console(stderr=True)
        self._bar = Progress(
            SpinnerColumn(), TextColumn("{task.description:<8}"), BarColumn(), TimeElapsedColumn(),
            console=console, transient=True, disable=not console.is_terminal,
        )  # fmt: skip
        self._task = self._bar.add_task(names[0], total=len(names))

    def __call__(self, name: str) -> None:
        self._bar.update(self._task, description=name, completed=self.names.index(name))

    def __enter__(self) -> Steps:
        self._bar.start()
        self._prints = contextlib.redirect_stdout(sys.stderr)
        self._prints.__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        self._prints.__exit__(*error)
        self._bar.stop()


def told(command: Callable[..., Any]) -> Callable[..., Any]:
    """Errors that are no bug as a line or two, and pruning's warnings as lines too."""

    @functools.wraps(command)
    def run(debug: bool, **given: Any) -> Any:
        with warnings.catch_warnings():
            warnings.simplefilter("default" if debug else "ignore")
            warnings.simplefilter("always", PruningWarning)
            if not debug:
                warnings.showwarning = _warn
            try:
                return command(**given)
            except (PruningError, click.ClickException) as error:
                if debug:
                    traceback.print_exc()
                if isinstance(error, click.ClickException):
                    raise
                mistake = isinstance(error, (FileError, InputError, SettingError))
                kind = Mistake if mistake else click.ClickException  # whose exit status is 1
                raise kind(str(error)) from error

    return run


def _warn(message: Any, *_: Any, **__: Any) -> None:
    click.echo(f"Warning: {message}", err=True)


def show(view: RenderableType) -> None:
    Console(width=None if sys.stdout.isatty() else 120).print(view)


def sizes(parameters: list[int], macs: list[int]) -> str:
    """Parameters and multiply-accumulates before and after."""
    lines = [("parameters", parameters)]
    if macs[0]:
        lines.append(("multiply-accumulates", macs))
    wide = max(len(f"{before:,}") for _, (before, _) in lines)
    return "\n".join(
        f"{name + ':':<21} {before:>{wide},} -> {after:>{wide},} {after / max(before, 1):7.1%} left"
        for name, (before, after) in lines
    )


def number(count: int, one: str, many: str) -> str:
    return f"{count} {one if count == 1 else many}"


def groups(about: dict[str, Any]) -> str:
    """Each group with its axes and the calls that couple them."""
    paths = [layer["path"] for layer in about["layers"]]
    lines = []
    for group in about["groups"]:
        width = f"{group['width']} -> {group['kept']}"
        lines.append(f"{group['name']}: {width if group['kept'] < group['width'] else 'whole'}")
        if group["frozen"]:
            lines.append(f"  why: {group['frozen']} {group['line']}".rstrip())
        for at, name, dim, role in group["members"]:
            place = ".".join(part for part in (paths[at], name) if part)
            lines.append(f"  {place} dim {dim} ({role})")
        calls = ", ".join(via for via, _ in group["calls"])
        lines += [f"  coupled by: {calls}"] if calls else []
    return "\n".join(lines)


def skipped(about: dict[str, Any]) -> str:
    """Each layer that stays whole, and why; constants that cannot be moved are noted too."""
    lines = [f"{what or 'the model'}: {why}" for what, why in about["skipped"]]
    lines += [f"{what or 'the model'}: note: {why}" for what, why in about["notes"]]
    return "\n".join(lines) or "no layer stays whole"


def code(about: dict[str, Any]) -> str:
    """Attributes and forwards that change."""
    lines = [f"{name} = {value!r}" for name, value in about["attributes"].items()]
    for path, source in about["code"].items():
        lines.append(f"# {path or 'the model'}\n{source.rstrip()}")
    return "\n".join(lines) or "neither attributes nor code change"
