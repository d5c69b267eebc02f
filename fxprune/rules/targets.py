"""What a pattern can be for: module classes, functions, ops, and runs of these."""

from __future__ import annotations

import types
from typing import Any

import torch
from torch import nn

from ..errors import PatternError
from .ops import op_name


def is_run(target: Any) -> bool:
    return isinstance(target, tuple) or (isinstance(target, str) and "-" in target)


def run_of(target: Any) -> tuple[Any, ...]:
    return target if isinstance(target, tuple) else tuple(target.split("-"))


def label(target: Any) -> str:
    """What reports call it."""
    if isinstance(target, tuple):
        return "-".join(map(label, target))
    if isinstance(target, str):
        return target
    return str(getattr(target, "__name__", None) or getattr(target, "_name", None) or target)


def check_target(target: Any) -> None:
    """What is never heard of, or is nothing, has no pattern."""
    if isinstance(target, list):
        raise PatternError(f"a run of nodes is a tuple: {tuple(target)!r}")
    if is_run(target):
        for item in run_of(target):
            if is_run(item) or not (isinstance(item, str) or _is_heard(item)):
                raise PatternError(f"{item!r} in a run is no kind, module class, function or op")
    elif isinstance(target, str) and "::" not in target:
        spellings = (target, f"{target}_", f"_{target}", f"__{target}__")
        if not any(hasattr(place, name) for place in _PLACES for name in spellings):
            raise PatternError(f"PyTorch has no op that is called {target!r}")
    elif not _is_heard(target):
        raise PatternError(
            f"{target!r} is no module class, function, autograd function, op, name of an op or run "
            "of these; of a partial, a cached function or a bound method, take the function inside"
        )


def _is_heard(target: Any) -> bool:
    if isinstance(target, str):
        return True  # a custom op, which need not be there yet
    if isinstance(target, type):
        return issubclass(target, (nn.Module, torch.autograd.Function))
    if isinstance(getattr(target, "_opoverload", target), _OPS):
        return True
    return isinstance(target, types.FunctionType) or bool(op_name(target))


_PLACES = (torch, torch.Tensor, nn.functional, torch.linalg, nn.utils.rnn, torch.ops.aten)
_OPS = (torch._ops.OpOverload, torch._ops.OpOverloadPacket)
