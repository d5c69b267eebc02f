"""What the benchmarks share: where they ran, progress, timing, memory, and their output files."""

from __future__ import annotations

import argparse
import ctypes
import ctypes.util
import gc
import json
import math
import os
import platform
import signal
import statistics
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.progress import MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

Call = Callable[[], Any]
clock = time.perf_counter


# -- where ----------------------------------------------------------------------------------------


def machine(*packages: str) -> dict[str, Any]:
    """Where the numbers come from: versions, processor, threads, GPU."""
    processor = platform.processor() or platform.machine()
    info = Path("/proc/cpuinfo")
    if info.exists():
        lines = [s for s in info.read_text().splitlines() if s.startswith("model name")]
        processor = lines[0].partition(":")[2].strip() if lines else processor
    return {
        **{name: installed(name) for name in ("torch", "fxprune", *packages)},
        "python": platform.python_version(),
        "system": platform.system(),
        "processor": processor,
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "gpu": torch.cuda.get_device_name() if torch.cuda.is_available() else None,
    }


def installed(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def described(where: dict[str, Any]) -> str:
    """The machine in one line."""
    versions = [f"{k} {v}" for k, v in where.items() if k not in _PLACE and v is not None]
    parts = [f"{where['processor']}, {where['cores']} cores, {where['threads']} threads",
             *versions, f"Python {where['python']}", where["system"]]  # fmt: skip
    return "; ".join(parts if where["gpu"] is None else [where["gpu"], *parts]) + "."


_PLACE = ("python", "system", "processor", "cores", "threads", "gpu")


# -- in and out -----------------------------------------------------------------------------------


def arguments(doc: str | None) -> argparse.ArgumentParser:
    """A parser with what every benchmark takes; its help is the script's docstring."""
    parser = argparse.ArgumentParser(
        description=doc, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the numbers there")
    parser.add_argument("--plot", type=Path, metavar="FILE", help="draw them there, as PNG")
    parser.add_argument("--threads", type=int, default=None, help="of the CPU")
    return parser


def terminal() -> Console:
    return Console(width=None if sys.stdout.isatty() else 160, highlight=False)


def grid(*headings: str, left: int = 1) -> Table:
    """An empty table; the first ``left`` columns are words, the others numbers."""
    table = Table(box=SIMPLE_HEAD, padding=(0, 1, 0, 0), pad_edge=False)
    for i, heading in enumerate(headings):
        if i < left:
            table.add_column(heading, no_wrap=True)
        else:  # a number on two lines is better than half of one
            table.add_column(heading, justify="right", overflow="fold")
    return table


def save(path: Path | None, where: dict[str, Any], **results: Any) -> None:
    """The numbers as JSON, with the machine that they are from."""
    if path is not None:
        path.write_text(json.dumps({"machine": where, **results}, indent=1) + "\n")


@contextmanager
def figure(path: Path | None, width: float, height: float, panels: int = 1) -> Iterator[list[Any]]:
    """The panels of a drawing that is written to ``path``; none where no path is given."""
    if path is None:
        yield []
        return
    import matplotlib

    matplotlib.use("agg")
    from matplotlib import pyplot

    pyplot.rcParams.update({"font.size": 9, "axes.spines.top": False, "axes.spines.right": False})
    drawing, axes = pyplot.subplots(
        1, panels, figsize=(width, height), layout="constrained", squeeze=False
    )
    yield list(axes[0])
    drawing.savefig(path, dpi=150)
    pyplot.close(drawing)


@contextmanager
def progress(console: Console) -> Iterator[Progress]:
    columns = [
        TextColumn("{task.description}"), *Progress.get_default_columns()[1:2],
        MofNCompleteColumn(), TimeElapsedColumn(),
    ]  # fmt: skip
    with Progress(*columns, console=console, transient=True) as bar:
        yield bar


def each(items: Iterable[Any], console: Console, name: Callable[[Any], str] = str) -> Iterator[Any]:
    """The items, with a bar that says which is at work."""
    items = list(items)
    with progress(console) as bar:
        task = bar.add_task("", total=len(items))
        for item in items:
            bar.update(task, description=name(item))
            yield item
            bar.advance(task)


# -- time and memory ------------------------------------------------------------------------------


class TimeUp(BaseException):
    """The time limit; no ``except Exception`` of those who are timed stops it."""


@contextmanager
def limit(seconds: float | None) -> Iterator[None]:
    """Raise :class:`TimeUp` inside after so long, where the system has alarms."""
    if seconds is None or not hasattr(signal, "setitimer"):
        yield
        return

    def stop(*_: Any) -> None:
        raise TimeUp

    before = signal.signal(signal.SIGALRM, stop)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def use_cpu_time() -> None:
    """Time what one core does, not the clock: for machines that others use too."""
    global clock
    clock = time.process_time
    torch.set_num_threads(1)


def seconds(call: Call) -> tuple[float, Any]:
    start = clock()
    result = call()
    return clock() - start, result


def in_turn(
    calls: dict[str, tuple[Callable[[], Any], Callable[[Any], Any]]], repeat: int
) -> dict[str, list[float]]:
    """Seconds of each call, ``repeat`` times, one after the other so that all see the same machine.

    Each is (prepare, run): what ``prepare`` makes, a fresh model say, is given to ``run`` and not
    timed. Garbage is collected before each run.
    """
    found: dict[str, list[float]] = {name: [] for name in calls}
    for _ in range(repeat):
        for name, (prepare, run) in calls.items():
            made = prepare()
            gc.collect()
            took, result = seconds(lambda run=run, made=made: run(made))
            del made, result
            found[name].append(took)
    return found


def peak_memory(call: Call) -> int | None:
    """Bytes that the process needs at most during ``call`` above what it held; None if unknown.

    It is the high-water mark of the resident set, which Linux lets a process reset, so Python's
    objects count as well as tensors. What was freed before is given back first: else ``call``
    would live in it and seem to need nothing.
    """
    gc.collect()
    _give_back()
    try:
        Path("/proc/self/clear_refs").write_text("5")
    except OSError:
        call()
        return None
    before = _resident("VmRSS")
    call()
    return max(0, _resident("VmHWM") - before)


def _resident(which: str) -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(which):
            return int(line.split()[1]) * 1024
    raise OSError(f"no {which} in /proc/self/status")


def _give_back() -> None:
    name = ctypes.util.find_library("c")
    trim = getattr(ctypes.CDLL(name), "malloc_trim", None) if name else None
    if trim is not None:
        trim(0)


# -- numbers --------------------------------------------------------------------------------------


def geometric_mean(values: Sequence[float]) -> float:
    return math.exp(statistics.fmean(map(math.log, values)))


def exponent(sizes: Sequence[float], times: Sequence[float]) -> float:
    """Of the power law that fits best: 1 is linear growth."""
    return statistics.linear_regression(
        [math.log(s) for s in sizes], [math.log(t) for t in times]
    ).slope


def show(value: float | None, shape: str = ".2f", unit: str = "") -> str:
    """A number for a table; nothing where there is none."""
    return "" if value is None else format(value, shape) + unit
