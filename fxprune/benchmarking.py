"""What pruning bought: latency, work and size of a model before and after, measured together."""

from __future__ import annotations

import contextlib
import io
import statistics
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from .errors import InputError, ModelError, SettingError
from .modules import tree
from .modules.copying import copy_model
from .modules.given import check_flag, is_number, is_whole
from .modules.inspecting import count_parameters, device_of
from .modules.running import bind_inputs, evaluating, without_gradients

MODES = ("eager", "compile", "cuda_graph")
_BLOCK = 0.01  # seconds that one timed block of runs takes at least
_SHORT = 0.001  # the same, where one of many layers is timed
_BLOCKS = 5  # of each model, at least: quartiles of fewer say nothing

Call = Callable[[], Any]


@dataclass(frozen=True)
class Measured:
    """One of the two models.

    Attributes:
        median: seconds of one run.
        quartiles: of the blocks that were timed, in seconds of one run.
        runs: how many were timed.
        macs: multiply-accumulates of one run, as :mod:`torch.utils.flop_counter` counts them.
        parameters: how many numbers the parameters hold.
    """

    median: float
    quartiles: tuple[float, float]
    runs: int
    macs: int
    parameters: int

    @property
    def spread(self) -> float:
        """The interquartile range, relative to the median."""
        return (self.quartiles[1] - self.quartiles[0]) / self.median


@dataclass(frozen=True)
class BenchmarkResult:
    """What :func:`benchmark` measured, and under which conditions."""

    before: Measured
    after: Measured
    device: str
    mode: str
    dtype: str
    channels_last: bool
    threads: int

    @property
    def speed_up(self) -> float:
        """How many times faster the pruned model is."""
        return self.before.median / self.after.median

    @property
    def reduction(self) -> float | None:
        """How many times less work it does; None where PyTorch's counter knows none of its ops."""
        return self.before.macs / self.after.macs if self.after.macs else None

    @property
    def efficiency(self) -> float | None:
        """The speed-up divided by the reduction in MACs: 1 where all saved work is saved time."""
        return self.speed_up / self.reduction if self.reduction else None

    def _repr_html_(self) -> str:
        from .html.table import table

        rows = [
            (
                name,
                f"{one.median * 1e3:.3f} ms",
                f"{one.macs / 1e6:,.1f} M",
                f"{one.parameters:,}",
                "",
            )
            for name, one in (("before", self.before), ("after", self.after))
        ]
        caption = f"{self.speed_up:.2f} times as fast: {self.mode} on {self.device}, {self.dtype}"
        return table(("", "latency", "MACs", "parameters", ""), rows, caption)

    def __str__(self) -> str:
        from rich import box
        from rich.console import Console
        from rich.table import Table

        view = Table(box=box.SIMPLE, show_edge=False, pad_edge=False, caption_justify="left")
        view.add_column("")
        for heading in ("latency", "quartiles", "MACs", "parameters"):
            view.add_column(heading, justify="right", no_wrap=True)
        for name, one in (("before", self.before), ("after", self.after)):
            low, high = one.quartiles
            view.add_row(
                name, f"{one.median * 1e3:.3f} ms", f"{low * 1e3:.3f}–{high * 1e3:.3f}",
                f"{one.macs / 1e6:,.1f} M", f"{one.parameters:,}",
            )  # fmt: skip
        fewer = self.before.parameters / max(self.after.parameters, 1)
        work = "" if self.reduction is None else f"{self.reduction:.2f}x"
        view.add_row("ratio", f"{self.speed_up:.2f}x", "", work, f"{fewer:.2f}x")
        cores = f", {self.threads} thread{'s' * (self.threads != 1)}" * (self.device == "cpu")
        layout = ", channels last" * self.channels_last
        console = Console(file=io.StringIO(), width=100, force_terminal=False)
        console.print(view)
        text = console.file.getvalue()  # type: ignore[attr-defined]
        lines = "\n".join(line.rstrip() for line in text.splitlines())
        return f"{lines}\n{self.mode} on {self.device}{cores}, {self.dtype}{layout}"


def benchmark(
    before: nn.Module,
    after: nn.Module,
    example_input: Any,
    *,
    mode: str = "eager",
    device: torch.device | str | None = None,
    dtype: torch.dtype | None = None,
    channels_last: bool = False,
    threads: int | None = None,
    seconds: float = 1.0,
) -> BenchmarkResult:
    """How much faster, lighter and smaller ``after`` is than ``before``.

    Copies of both run in eval mode without gradients. They take turns, block by block, so that what
    else the machine does hits both; a block is timed by :class:`torch.utils.benchmark.Timer` on the
    CPU and by CUDA events on a GPU.

    Args:
        before, after: any two modules that run on ``example_input``. They are left untouched.
        example_input: a tensor, a tuple of positional or a mapping of keyword arguments.
        mode: ``"eager"``; ``"compile"``, by :func:`torch.compile`; or ``"cuda_graph"``, the eager
            run captured once and replayed.
        device: where to run; by default where the models are.
        dtype: of floating-point parameters and inputs (``torch.bfloat16``); by default as they are.
        channels_last: lay out parameters and inputs of four dimensions so.
        threads: of the CPU; by default those that PyTorch uses now.
        seconds: how long each model is timed, at least, after a warm-up.

    Raises:
        PruningError: a setting means nothing here, or a model does not run; the message says why.
    """
    if device is None:
        device = device_of(before) if isinstance(before, nn.Module) else "cpu"
    where = _check(mode, device, dtype, channels_last, threads, seconds)
    threads = torch.get_num_threads() if threads is None else int(threads)
    args, kwargs = _moved(bind_inputs(example_input), where, dtype, channels_last)
    with _undisturbed(where), torch.no_grad():
        calls, sizes = [], []
        for name, model in (("before", before), ("after", after)):
            copied = _copy(model, name, where, dtype, channels_last)
            with _threads(threads):
                try:
                    sizes.append(_size(copied, args, kwargs))
                    calls.append(_ready(copied, args, kwargs, mode))
                except Exception as error:
                    raise InputError(
                        f"{name} does not run on example_input ({mode}, {where}): "
                        f"{type(error).__name__}: {error}"
                    ) from error
        timed = _time(calls, where, threads, float(seconds))
    dtypes = {t.dtype for t in (*copied.parameters(), *tree.tensors((args, kwargs)))
              if t.is_floating_point()}  # fmt: skip
    shown = ", ".join(sorted(str(d).removeprefix("torch.") for d in dtypes))
    first, second = (Measured(*t, *s) for t, s in zip(timed, sizes, strict=True))
    return BenchmarkResult(first, second, str(where), mode, shown, channels_last, threads)


def macs(model: nn.Module, example_input: Any) -> int:
    """Multiply-accumulates of one run, by :mod:`torch.utils.flop_counter`; the model is as it was.

    The counter does not know the fused kernels of attention on the CPU: their work is counted as
    that of the products they stand for.
    """
    return macs_by_module(model, example_input)[0]


def macs_by_module(model: nn.Module, example_input: Any) -> tuple[int, dict[str, int]]:
    """The same, and that of each module by its name."""
    args, kwargs = bind_inputs(example_input)
    counter = _counted(model, args, kwargs)
    top = f"{type(model).__name__}."
    found = {
        name.removeprefix(top): sum(flops.values()) // 2
        for name, flops in counter.get_flop_counts().items() if name.startswith(top)
    }  # fmt: skip
    return counter.get_total_flops() // 2, found


def _counted(model: nn.Module, args: Any, kwargs: Any) -> Any:
    from torch.nn.attention import SDPBackend, sdpa_kernel
    from torch.utils.flop_counter import FlopCounterMode

    with (
        evaluating(model),  # without the fast path of attention, which is no op that it knows
        without_gradients(model),
        sdpa_kernel(SDPBackend.MATH),
        FlopCounterMode(display=False) as counter,
    ):
        model(*args, **kwargs)
    return counter


def _size(model: nn.Module, args: Any, kwargs: Any) -> tuple[int, int]:
    work = _counted(model, args, kwargs).get_total_flops() // 2
    return work, count_parameters(model)


# -- settings -------------------------------------------------------------------------------------


def _check(
    mode: str, device: Any, dtype: Any, channels_last: Any, threads: Any, seconds: Any
) -> torch.device:
    if mode not in MODES:
        raise SettingError(f"mode={mode!r} is unknown; use {', '.join(map(repr, MODES))}")
    if dtype is not None and not (isinstance(dtype, torch.dtype) and dtype.is_floating_point):
        raise SettingError(f"dtype={dtype!r} is not a floating-point type such as torch.bfloat16")
    check_flag("channels_last", channels_last)
    if threads is not None and (not is_whole(threads) or threads < 1):
        raise SettingError(f"threads={threads!r} is not a positive integer")
    if not is_number(seconds) or not 0 < float(seconds) < 1e6:
        raise SettingError(f"seconds={seconds!r} is no length of time above 0")
    try:
        where = torch.device(device)
    except (RuntimeError, TypeError) as error:
        raise SettingError(f"device={device!r} is not a device such as 'cpu' or 'cuda'") from error
    if where.type not in ("cpu", "cuda"):
        raise SettingError(f"device={device!r}: only the CPU and CUDA can be timed")
    if where.type == "cuda" and not torch.cuda.is_available():
        raise SettingError(f"device={device!r}: PyTorch sees no GPU here")
    if mode == "cuda_graph" and where.type != "cuda":
        raise SettingError(f"mode='cuda_graph' needs a CUDA device; this is {str(where)!r}")
    return where


def _copy(
    model: Any, name: str, device: torch.device, dtype: torch.dtype | None, channels_last: bool
) -> nn.Module:
    if not isinstance(model, nn.Module):
        raise ModelError(f"{name} is a {type(model).__name__}, not a torch.nn.Module")
    if isinstance(model, torch._dynamo.OptimizedModule):
        raise ModelError(f"{name} is compiled; pass {name}._orig_mod with mode='compile'")
    try:
        copied = copy_model(model).eval()
    except ModelError as error:
        raise ModelError(f"{name} cannot be copied, and it is a copy that is run") from error
    copied = copied.to(device=device, dtype=dtype)
    return copied.to(memory_format=torch.channels_last) if channels_last else copied  # type: ignore


def _moved(
    inputs: Any, device: torch.device, dtype: torch.dtype | None, channels_last: bool
) -> Any:
    def move(tensor: Tensor) -> Tensor:
        tensor = tensor.to(device, dtype if tensor.is_floating_point() else None)
        if channels_last and tensor.dim() == 4:
            tensor = tensor.contiguous(memory_format=torch.channels_last)
        return tensor

    return tree.map_tensors(inputs, move)


@contextlib.contextmanager
def _threads(number: int) -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(number)
    try:
        yield
    finally:
        torch.set_num_threads(before)


@contextlib.contextmanager
def _undisturbed(device: torch.device) -> Iterator[None]:
    """On ``device``, with the states of the random number generators kept."""
    on_gpu = device.type == "cuda"
    with (
        torch.random.fork_rng(devices=[device] if on_gpu else []),
        torch.cuda.device(device) if on_gpu else contextlib.nullcontext(),
    ):
        yield


# -- timing ---------------------------------------------------------------------------------------


def _ready(model: nn.Module, args: Any, kwargs: Any, mode: str) -> Call:
    """A call that runs the model in ``mode``, warmed up."""
    # dynamic=False: the second model of a class would get kernels for any width, which are slower.
    run = torch.compile(model, dynamic=False) if mode == "compile" else model
    if mode == "cuda_graph":
        return _captured(run, args, kwargs)
    for _ in range(3):
        run(*args, **kwargs)
    return lambda: run(*args, **kwargs)


def _captured(run: Call, args: Any, kwargs: Any) -> Call:
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):  # PyTorch asks for a warm-up on another stream
        for _ in range(3):
            run(*args, **kwargs)
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        result = run(*args, **kwargs)

    def replay() -> Any:
        graph.replay()
        return result  # which the graph writes to, so it has to live

    return replay


def _time(
    calls: list[Call], device: torch.device, threads: int, least: float
) -> list[tuple[float, tuple[float, float], int]]:
    """For each call (median, quartiles, runs), block by block in turn."""
    timers = [_timer(call, device, threads) for call in calls]
    numbers = [max(1, round(_BLOCK / max(time(1), 1e-7))) for time in timers]
    blocks: list[list[float]] = [[] for _ in calls]
    while any(len(b) < _BLOCKS or sum(b) * n < least
              for b, n in zip(blocks, numbers, strict=True)):  # fmt: skip
        for time, number, found in zip(timers, numbers, blocks, strict=True):
            found.append(time(number))
    result = []
    for found, number in zip(blocks, numbers, strict=True):
        low, middle, high = statistics.quantiles(found, n=4, method="inclusive")
        result.append((middle, (low, high), len(found) * number))
    return result


def seconds_of(module: nn.Module, args: Any, kwargs: Any) -> float:
    """The least time of one call, where the inputs are: short, for one of many, and what else the
    machine does can only add to it."""
    device = next((t.device for t in tree.tensors((args, kwargs))), torch.device("cpu"))
    call = _ready(module, args, kwargs, "eager")
    time = _timer(call, device, torch.get_num_threads())
    number = max(1, round(_SHORT / max(time(1), 1e-7)))
    return min(time(number) for _ in range(2 * _BLOCKS))


def _timer(call: Call, device: torch.device, threads: int) -> Callable[[int], float]:
    """A function from a number of runs to the mean seconds of one."""
    if device.type == "cuda":
        return lambda number: _by_events(call, number)
    from torch.utils.benchmark import Timer

    timer = Timer("call()", globals={"call": call}, num_threads=threads)
    return lambda number: timer.timeit(number).mean


def _by_events(call: Call, number: int) -> float:
    start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    torch.cuda.synchronize()
    start.record()
    for _ in range(number):
        call()
    stop.record()
    stop.synchronize()
    return start.elapsed_time(stop) / 1e3 / number
