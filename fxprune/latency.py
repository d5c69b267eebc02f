"""How long a model takes at other widths, from the times of its layers alone.

A layer is made at the widths in question, of the size that the model gives it, and timed once; its
time is kept on disk. The time of a model is that of its layers and of the rest: what the model
takes as it is beyond its layers, in proportion to the numbers that its calls return.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import math
import os
import platform
import sys
import tempfile
import types
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, fx, nn

from .algebra import computed_by_hook
from .benchmarking import seconds_of
from .channels import Channels
from .counting import Count, Lengths, product_of, tensor_lengths
from .discover import Relations
from .layout import view_dims
from .errors import SettingError, warn
from .recording import Trace
from .rewrite import memory_format
from .running import bind_inputs, copy_model, evaluating, tensors_of
from .spec import Spec
from .widths import NewSizes

_RUNGS = 16  # widths of a group that are tried

Timer = Callable[[nn.Module, tuple[Any, ...], dict[str, Any]], float]
Dims = list[tuple[int, "int | None"]]  # size, and the number of the length where it changes


class LatencyTable:
    """Seconds that layers take, measured where they are not known, and kept on disk.

    There is a file for each device and version of PyTorch, in ``~/.cache/fxprune`` or where the
    environment variable ``FXPRUNE_CACHE`` says. A time holds for a layer of a type, with its
    settings, widths, input shapes, dtypes and memory formats, and a number of CPU threads.

    Args:
        path: a folder for the files instead.
        timer: ``timer(module, args, kwargs) -> seconds`` of one call, instead of the clock: for a
            device that PyTorch does not run on. Its times are not kept on disk but in ``path``,
            if that is given.
    """

    def __init__(self, path: str | Path | None = None, *, timer: Timer | None = None) -> None:
        if timer is not None and not callable(timer):
            raise SettingError(f"timer={timer!r} is no function of a module and its inputs")
        self.timer = timer
        self.folder = None
        if path is not None or timer is None:
            default = os.environ.get("FXPRUNE_CACHE") or Path.home() / ".cache" / "fxprune"
            self.folder = Path(path if path is not None else default).expanduser()
        self.times: dict[str, float] = {}
        self.measured = 0  # how many were not known
        self._read: set[Path] = set()

    def __repr__(self) -> str:
        return f"LatencyTable({str(self.folder or '')!r}, {len(self.times)} layers)"

    def time(self, key: str, device: torch.device, make: Callable[[], Any]) -> float:
        """Of the layer that ``key`` names; ``make`` gives (module, args, kwargs)."""
        self.load(device)
        if key not in self.times:
            module, args, kwargs = make()
            with torch.no_grad():
                found = (self.timer or seconds_of)(module, args, kwargs)
            if not (isinstance(found, float | int) and math.isfinite(found) and found >= 0):
                raise SettingError(f"timer returned {found!r}, which is no number of seconds")
            self.times[key] = float(found)
            self.measured += 1
        return self.times[key]

    def file(self, device: torch.device) -> Path | None:
        if self.folder is None:
            return None
        name = torch.cuda.get_device_name(device) if device.type == "cuda" else _processor()
        words = f"{name} {device.type} torch {torch.__version__}"
        short = "".join(c if c.isalnum() or c in ".+" else "-" for c in words)[:80]
        return self.folder / f"{short}-{hashlib.sha1(words.encode()).hexdigest()[:8]}.json"

    def load(self, device: torch.device) -> None:
        """What is on disk, once; a file that cannot be read is measured anew."""
        file = self.file(device)
        if file is None or file in self._read:
            return
        self._read.add(file)
        try:
            found = json.loads(file.read_text())
            times = {str(key): float(value) for key, value in found.items()}
            if not all(math.isfinite(t) and t >= 0 for t in times.values()):
                raise ValueError("a time is no number of seconds")
        except FileNotFoundError:
            return
        except (OSError, ValueError, TypeError, AttributeError) as error:
            warn(f"{file} cannot be read ({error}): its layers are measured anew")
            return
        self.times = times | self.times

    def save(self, device: torch.device) -> None:
        """Write the file as a whole: another process may read it."""
        file = self.file(device)
        if file is None or not self.measured:
            return
        try:
            file.parent.mkdir(parents=True, exist_ok=True)
            with tempfile.NamedTemporaryFile("w", dir=file.parent, delete=False) as new:
                json.dump(self.times, new, indent=0)
            os.replace(new.name, file)
        except OSError as error:
            warn(f"{file} cannot be written ({error}): layers will be measured again next time")


def _processor() -> str:
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()


class Latency:
    """Seconds of one run, for any choice of units.

    Args:
        example_input: that the trace was recorded with.
        table: of times; a new one by default.
    """

    unsure = False

    def __init__(
        self,
        trace: Trace,
        relations: Relations,
        lengths: Lengths,
        example_input: Any,
        table: LatencyTable | None,
    ) -> None:
        self.trace, self.lengths = trace, lengths
        self.table = LatencyTable() if table is None else table
        if not isinstance(self.table, LatencyTable):
            raise SettingError(f"table={table!r} is no fxprune.LatencyTable")
        views = tensor_lengths(relations, lengths)
        self.layers = [
            _Layer(trace, node, relations, lengths, views)
            for node in trace.graph.nodes if _has_widths(trace, node)
        ]  # fmt: skip
        self.device = next((p.device for p in trace.model.parameters()), torch.device("cpu"))
        self.activity = _activity(trace, relations, lengths)
        self._bar: Any = None
        every = np.ones(int(relations.classes.max(initial=0)) + 1, dtype=bool)
        with evaluating(trace.model):
            key = f"{[layer.key(lengths.measure(every)) for layer in self.layers]}"
            key = f"whole {type(trace.model).__qualname__} {hashlib.sha1(key.encode()).hexdigest()}"
            total = self.table.time(
                key, self.device, lambda: (trace.model, *bind_inputs(example_input))
            )
        self.rest = max(0.0, total - self._layers(every)) / max(self.activity(every), 1.0)

    def rungs(self, width: int, step: int) -> list[int]:
        """Numbers of units that may stay."""
        count = min(_RUNGS, width)
        found = {math.ceil(width * i / count / step) * step for i in range(1, count + 1)}
        return sorted({min(n, width) for n in found})

    def __call__(self, kept: np.ndarray) -> float:
        return self._layers(kept) + self.rest * self.activity(kept)

    def _layers(self, kept: np.ndarray) -> float:
        now = self.lengths.measure(kept)
        keys = [layer.key(now) for layer in self.layers]
        missing = sum(key not in self.table.times for key in set(keys))
        with _progress(missing) as step:
            times = []
            for key, layer in zip(keys, self.layers, strict=True):
                known = key in self.table.times
                make = lambda layer=layer: layer.make(now)  # noqa: E731
                times.append(self.table.time(key, self.device, make))
                if not known:
                    step()
        if missing:
            self.table.save(self.device)
        return sum(times)


def _has_widths(trace: Trace, node: fx.Node) -> bool:
    """Whether a call can be made alone at other widths: a layer with weights of its own, on
    tensors."""
    pattern = trace.pattern(node) if node.op == "call_module" else None
    if pattern is None or pattern.attributes is None:
        return False
    module = trace.model.get_submodule(str(node.target))
    plain = not computed_by_hook(module) and not any(
        hasattr(part, "parametrizations") for part in module.modules()
    )
    tensors = all(isinstance(n.meta["spec"], Spec) for n in node.all_input_nodes)
    return plain and tensors and any(True for _ in module.parameters())


class _Layer:
    """One call of a layer, at any widths."""

    def __init__(
        self, trace: Trace, node: fx.Node, relations: Relations, lengths: Lengths,
        views: dict[str, Dims],
    ) -> None:  # fmt: skip
        self.node, self.module = node, trace.model.get_submodule(str(node.target))
        pattern = trace.pattern(node)
        assert pattern is not None and pattern.attributes is not None
        self.pattern, self.attributes = pattern, pattern.attributes
        self.tensors: dict[str, Tensor] = dict(tensors_of(self.module))
        self.views: dict[str, Dims] = {
            name: views.get(trace.names.get(id(t), ""), [(n, None) for n in t.shape])
            for name, t in self.tensors.items()
        }
        self.inputs: dict[fx.Node, tuple[Dims, torch.dtype]] = {}
        for source in node.all_input_nodes:
            spec, value = source.meta["spec"], relations.values[source]
            dims = (
                list(zip(value.shape, lengths.dims(value), strict=True))
                if isinstance(value, Channels) else [(n, None) for n in spec.shape]
            )  # fmt: skip
            self.inputs[source] = dims, spec.dtype
        self._form = next(map(memory_format, (t for t in self.tensors.values() if t.dim() == 4)), torch.contiguous_format)
        first = next(iter(self.tensors.values()))
        self.device = first.device
        plain = (int, float, str, bool, tuple, type(None))
        self._settings = {
            key: value for key, value in vars(self.module).items()
            if isinstance(value, plain) and not key.startswith("_") and key != "training"
        }  # fmt: skip
        self._kind = f"{type(self.module).__module__}.{type(self.module).__qualname__}"

    def _new(self, now: np.ndarray) -> tuple[dict[str, Any], dict[str, tuple[int, ...]]]:
        """New attributes, and new views of tensors."""
        views = {name: _sizes(dims, now) for name, dims in self.views.items()}
        first = _sizes(next(iter(self.inputs.values()))[0], now) if self.inputs else ()
        sizes = NewSizes(None, self.node, views, first)  # type: ignore[arg-type]
        return self.attributes(self.module, sizes), views

    def key(self, now: np.ndarray) -> str:
        """What its time depends on."""
        attributes, views = self._new(now)
        settings = {k: v for k, v in {**self._settings, **attributes}.items() if k != "forward"}
        inputs = [(_sizes(dims, now), str(dtype)) for dims, dtype in self.inputs.values()]
        dtypes = sorted({str(t.dtype) for t in self.tensors.values()})
        return (
            f"{self._kind} {sorted(settings.items())} {sorted(views.items())} of {dtypes} on "
            f"{inputs}, {self._form}, {torch.get_num_threads()} threads"
        )

    def make(self, now: np.ndarray) -> tuple[nn.Module, tuple[Any, ...], dict[str, Any]]:
        """The layer and its inputs, with random numbers."""
        attributes, views = self._new(now)
        memo: dict[int, Any] = {}
        for name, old in self.tensors.items():
            view = views[name]
            merged = view_dims(old.shape, tuple(n for n, _ in self.views[name]))
            new = self._random(tuple(math.prod(view[d] for d in dims) for dims in merged), old.dtype)
            memo[id(old)] = nn.Parameter(new) if isinstance(old, nn.Parameter) else new
        module = copy_model(self.module, memo).eval()
        for name, value in attributes.items():
            path, _, key = name.rpartition(".")
            owner = module.get_submodule(path)
            vars(owner)[key] = types.MethodType(value, owner) if key == "forward" else value
        if self.pattern.refresh is not None:
            self.pattern.refresh(module)
        given = {
            source: self._random(_sizes(dims, now), dtype)
            for source, (dims, dtype) in self.inputs.items()
        }
        args, kwargs = fx.node.map_arg(
            (tuple(self.node.args), dict(self.node.kwargs)), given.__getitem__
        )
        return module, args, kwargs

    def _random(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        if not dtype.is_floating_point:
            return torch.zeros(shape, dtype=dtype, device=self.device)
        found = torch.rand(shape, device=self.device).to(dtype)
        if self._form is not torch.contiguous_format and len(shape) == 4:
            return found.contiguous(memory_format=self._form)
        return found


def _sizes(dims: Dims, now: np.ndarray) -> tuple[int, ...]:
    return tuple(n if number is None else int(now[number]) for n, number in dims)


def _activity(trace: Trace, relations: Relations, lengths: Lengths) -> Count:
    """Numbers that all calls return."""
    terms = []
    for node in trace.graph.nodes:
        value = relations.values.get(node)
        if node.op.startswith("call") and isinstance(value, Channels):
            terms.append(product_of(zip(value.shape, lengths.dims(value), strict=True)))
    return Count(lengths, terms)


@contextlib.contextmanager
def _progress(total: int) -> Iterator[Callable[[], None]]:
    """A bar on the terminal where several layers are to be timed."""
    from rich.console import Console
    from rich.progress import Progress

    console = Console(stderr=True)
    hidden = total < 4 or not sys.stderr.isatty()
    with Progress(console=console, transient=True, disable=hidden) as bar:
        task = bar.add_task("timing layers", total=total)
        yield lambda: bar.advance(task)
