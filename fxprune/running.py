"""Running a user's model without leaving a trace on it."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from . import tree


def read_attribute(root: nn.Module, name: str) -> Any:
    value: Any = root
    for part in name.split("."):
        value = getattr(value, part)
    return value


def bind_inputs(model: nn.Module, example_input: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """``example_input`` as the arguments of the model's call."""
    if isinstance(example_input, dict) or (
        hasattr(example_input, "keys") and hasattr(example_input, "__getitem__")
    ):
        return (), {key: example_input[key] for key in example_input}
    if isinstance(example_input, tuple):
        return example_input, {}
    return (example_input,), {}


@contextlib.contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """Eval mode inside; every module's own flag, every buffer and the RNG state back afterwards."""
    flags = [(m, m.training) for m in model.modules()]
    # Some models count calls or keep caches in their buffers even in eval mode.
    buffers = [(b, b._version, b.detach().clone()) for b in model.buffers()]
    devices = {p.device.index for p in model.parameters() if p.device.type == "cuda"}
    fast_path = torch.backends.mha.get_fastpath_enabled()
    with torch.random.fork_rng(devices=sorted(d for d in devices if d is not None)):
        for m, _ in flags:
            m.__dict__["training"] = False
        torch.backends.mha.set_fastpath_enabled(False)  # it would hide the layers from the trace
        try:
            yield
        finally:
            torch.backends.mha.set_fastpath_enabled(fast_path)
            for m, flag in flags:
                m.__dict__["training"] = flag
            with torch.no_grad():
                for buffer, version, before in buffers:
                    if buffer._version != version:
                        buffer.copy_(before)


def describe(value: Any) -> str:
    """A short word for an input: shapes for tensors, class names for the rest."""
    if isinstance(value, torch.Tensor):
        return f"tensor {tuple(value.shape)} {str(value.dtype).removeprefix('torch.')}"
    if isinstance(value, (tuple, list)):
        return f"{type(value).__name__} of ({', '.join(describe(v) for v in value)})"
    if isinstance(value, dict):
        return "{" + ", ".join(f"{k}: {describe(v)}" for k, v in value.items()) + "}"
    return type(value).__name__


def outputs(model: nn.Module, example_input: Any) -> list[Tensor]:
    """Every tensor that the model returns, in eval mode without gradients."""
    args, kwargs = bind_inputs(model, example_input)
    with evaluating(model), torch.no_grad():
        result = model(*args, **kwargs)
        return [t.detach().clone() for t in tree.tensors(result)]
