"""Running a user's model without leaving a trace on it."""

from __future__ import annotations

import contextlib
import gc
import inspect
import random
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextvars import ContextVar
from dataclasses import is_dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, fx, nn

from ..errors import SettingError
from . import tree
from .inspecting import is_torchs_layer, parts_of
from .snapshot import Snapshot

# Running a model sets and draws what is the process's: modes, seeds, the code of modules' calls.
LOCK = threading.RLock()


def run_node(
    node: fx.Node, module: Any, args: Any, kwargs: Any, tensors: dict[str, Tensor] | None = None
) -> Any:
    """What a node of a trace calls, on real arguments; ``module`` with other ``tensors``."""
    if node.op == "call_module":
        if tensors:
            return torch.func.functional_call(module, tensors, args, kwargs)
        return module(*args, **kwargs)
    if node.op == "call_method":
        return getattr(args[0], str(node.target))(*args[1:], **kwargs)
    return node.target(*args, **kwargs)  # type: ignore[operator]


def bind_inputs(example_input: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """``example_input`` as arguments of the model's call: copies, which it may write to."""
    if hasattr(example_input, "keys") and hasattr(example_input, "__getitem__"):
        given: Any = {key: example_input[key] for key in example_input.keys()}  # noqa: SIM118
    else:
        given = example_input if isinstance(example_input, tuple) else (example_input,)
    given = tree.map_tensors(given, lambda t: t.detach().clone())
    return ((), given) if isinstance(given, dict) else (tuple(given), {})


@contextlib.contextmanager
def uncollected() -> Iterator[None]:
    """Without Python's garbage collector: what is made inside stays till the end, and it would look
    at it all again and again, the more of it the deeper the model is."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


_users_device: ContextVar[torch.device | None] = ContextVar("users_device", default=None)


@contextlib.contextmanager
def on_cpu() -> Iterator[None]:
    """Labels and constants are on the CPU, whatever ``torch.set_default_device`` says; what the
    model makes as it runs is where it says."""
    device = torch.get_default_device()
    if device.type == "cpu":
        yield
        return
    token = _users_device.set(device)
    try:
        with torch.device("cpu"):
            yield
    finally:
        _users_device.reset(token)


@contextlib.contextmanager
def evaluating(model: nn.Module, *, training: bool = False) -> Iterator[None]:
    """Eval mode inside; or training mode, but for PyTorch's own layers: a norm might not run in it.
    Afterwards all is as it was: flags, buffers, whatever the modules have set on themselves or put
    into their containers while running, and the state of the random number generators. What the
    model's own code writes into parameters stays written, for a copy of all of them would be
    needed; those that it sets are set back. Other threads wait: some of this is the process's, and
    what is noted during another's run would be that run's."""
    with LOCK:
        yield from _evaluating(model, training)


@contextlib.contextmanager
def without_gradients(model: nn.Module) -> Iterator[None]:
    """No gradients, and no parameter that asks for one: PyTorch says of a view of such a parameter,
    also where no gradients are recorded, that it has one, and its counter of operations then looks
    for where that comes from. Inside :func:`evaluating`, for the parameters are the user's."""
    asking = [p for p in model.parameters() if p.requires_grad]
    with torch.no_grad():
        for p in asking:
            p.requires_grad_(False)
        try:
            yield
        finally:
            for p in asking:
                p.requires_grad_(True)


def _evaluating(model: nn.Module, training: bool) -> Iterator[None]:
    modules = parts_of(model)
    before = Snapshot(modules)
    parameters = (p for m in modules for p in m._parameters.values() if p is not None)
    devices = {p.device.index for p in parameters if p.device.type == "cuda"}
    device = _users_device.get() or contextlib.nullcontext()
    with _seeds(sorted(d for d in devices if d is not None)), device:
        fast_path = torch.backends.mha.get_fastpath_enabled()
        for m in modules:
            vars(m)["training"] = training and not is_torchs_layer(m)
        torch.backends.mha.set_fastpath_enabled(False)  # it would hide the layers from the trace
        try:
            yield
        finally:
            torch.backends.mha.set_fastpath_enabled(fast_path)
            before.restore()


@contextlib.contextmanager
def _seeds(devices: Sequence[int]) -> Iterator[None]:
    """Afterwards all generators of random numbers are where they were."""
    python, numpys = random.getstate(), np.random.get_state()
    try:
        with torch.random.fork_rng(devices=devices):
            yield
    finally:
        random.setstate(python)
        np.random.set_state(numpys)


def describe(value: Any) -> str:
    """A short word for an input: shapes for tensors, class names for the rest."""
    if isinstance(value, torch.Tensor):
        return f"tensor {tuple(value.shape)} {str(value.dtype).removeprefix('torch.')}"
    if isinstance(value, (tuple, list)):
        return f"{type(value).__name__} of ({', '.join(describe(v) for v in value)})"
    if isinstance(value, dict):
        return "{" + ", ".join(f"{k}: {describe(v)}" for k, v in value.items()) + "}"
    return type(value).__name__


def without_state(model: nn.Module, result: Any) -> Any:
    """What a model returns, less what it keeps for its own next call.

    That is an object (a cache of keys and values, say) under the name of an argument, its own or a
    part's: its widths are the model's own affair.
    """
    if not isinstance(result, Mapping):
        return result
    plain = (Tensor, Mapping, list, tuple, int, float, str, type(None))
    objects = {
        key
        for key, value in result.items()
        if not (isinstance(value, plain) or is_dataclass(value))
    }
    if not objects:
        return result
    forwards = dict.fromkeys(type(m).forward for m in parts_of(model))  # it may hand on a part's
    arguments = {name for forward in forwards for name in inspect.signature(forward).parameters}
    kept = {key: value for key, value in result.items() if key not in objects & arguments}
    if len(kept) == len(result):
        return result
    return type(result)(**kept) if is_dataclass(result) else kept


def wanted(
    model: nn.Module, result: Any, only: Sequence[str | int] | None, *, training: bool = False
) -> Any:
    """What of a model's result has to stay as it is: the entries called ``only``, or those at these
    places of a tuple; or all but its own state. In training mode models return other things."""
    whole = result
    if only is None:
        return without_state(model, result)
    if isinstance(result, (tuple, list)):
        names = getattr(result, "_fields", ())
        result = {**dict(enumerate(result)), **dict(zip(names, result, strict=False))}
    elif not isinstance(result, Mapping):
        result = tree.attributes(result) if is_dataclass(result) else {}
    missing = [name for name in only if name not in result]
    if missing and training:
        return without_state(model, whole)
    if missing:
        known = f"only {', '.join(map(repr, result))}" if result else "one thing without a name"
        raise SettingError(
            f"outputs: {type(model).__name__} returns no {missing[0]!r}, but {known}"
        )
    return {name: result[name] for name in only}


def outputs(
    model: nn.Module, example_input: Any, only: Sequence[str | int] | None = None
) -> list[Tensor]:
    """Every tensor that the model returns and that has to stay, in eval mode without gradients."""
    args, kwargs = bind_inputs(example_input)
    with evaluating(model), torch.no_grad():
        result = wanted(model, model(*args, **kwargs), only)
        return [t.detach().clone() for t in tree.tensors(result)]
