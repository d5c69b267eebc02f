"""How long a model takes at other widths, from the times of its layers alone.

A layer is made at the widths in question, of the size that the model gives it, and timed once; its
time is kept on disk. The time of a model is that of its layers and of the rest: what the model
takes as it is beyond its layers, in proportion to the numbers that its calls return.
"""

from __future__ import annotations

import hashlib
import math
import types
from contextlib import nullcontext
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor, fx, nn

from ..choosing.timing import LatencyTable
from ..modules.copying import copy_model
from ..modules.inspecting import computed_by_hook, tensors_of
from ..modules.running import bind_inputs, evaluating
from ..progress import tracking
from ..relating.relations import Relations
from ..replaying.new_sizes import NewSizes
from ..rewriting.rewrite import memory_format
from ..rules.channels import Channels
from ..rules.shapes import view_dims
from ..rules.spec import Spec
from ..tracing.trace import Trace
from .counting import Count, Lengths, product_of, tensor_lengths

_FEW = 3  # layers that are timed without a progress bar
_RUNGS = 16  # widths of a group that are tried, at least where it has as many

Dims = list[tuple[int, "int | None"]]  # size, and the number of the length where it changes


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
        views = tensor_lengths(relations, lengths)
        every = np.ones(int(relations.classes.max(initial=0)) + 1, dtype=bool)
        now = lengths.measure(every)
        found = [
            _Layer(trace, node, relations, lengths, views)
            for node in trace.graph.nodes if _has_widths(trace, node)
        ]  # fmt: skip
        self.layers = [layer for layer in found if layer.stands_alone(now)]
        self.device = next((p.device for p in trace.model.parameters()), torch.device("cpu"))
        self.activity = _activity(trace, relations, lengths)
        with evaluating(trace.model):
            specs = [node.meta.get("spec") for node in trace.graph.nodes]
            key = f"{trace.graph} {specs} {[layer.key(now) for layer in self.layers]}"
            key = f"whole {type(trace.model).__qualname__} {hashlib.sha1(key.encode()).hexdigest()}"
            total = self.table.time(
                key, self.device, lambda: (trace.model, *bind_inputs(example_input))
            )
        self.rest = max(0.0, total - self._layers(every)) / max(self.activity(every), 1.0)

    def rungs(self, width: int, step: int) -> list[int]:
        """Numbers of units that may stay: multiples of a power of two, which devices like."""
        apart = math.lcm(step, 2 ** max(0, int(math.log2(width / _RUNGS))))
        return [*range(apart, width, apart), width]

    def __call__(self, kept: np.ndarray) -> float:
        return self._layers(kept) + self.rest * self.activity(kept)

    def _layers(self, kept: np.ndarray) -> float:
        now = self.lengths.measure(kept)
        keys = [layer.key(now) for layer in self.layers]
        missing = sum(key not in self.table.times for key in set(keys))
        bar = tracking("timing layers") if missing > _FEW else nullcontext(iter)
        with bar as track:
            times = [
                self.table.time(key, self.device, partial(layer.make, now))
                for key, layer in track(list(zip(keys, self.layers, strict=True)))
            ]
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
            dims: Dims = [(n, None) for n in spec.shape]
            if isinstance(value, Channels):
                dims = list(zip(value.shape, lengths.dims(value), strict=True))
            self.inputs[source] = dims, spec.dtype
        forms = [memory_format(t) for t in self.tensors.values() if t.dim() == 4]
        self._form = forms[0] if forms else torch.contiguous_format
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

    def stands_alone(self, now: np.ndarray) -> bool:
        """Whether it runs on inputs of the same shapes; else its time is part of the rest."""
        module, args, kwargs = self.make(now)
        try:
            with torch.no_grad():
                module(*args, **kwargs)
        except Exception:  # whatever the layer's own code raises on other values
            return False
        return True

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
            shape = tuple(math.prod(view[d] for d in dims) for dims in merged)
            new = self._random(shape, old.dtype)
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
        same = torch.Generator(self.device).manual_seed(0)
        found = torch.rand(shape, generator=same, device=self.device).to(dtype)
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
