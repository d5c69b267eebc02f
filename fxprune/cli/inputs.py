"""Inputs, weights and values as they are written at the command line."""

from __future__ import annotations

import contextlib
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from ..modules import tree
from .mistakes import Mistake

FORM = "[NAME=]DIMS[:DTYPE[:LOW-HIGH]]"
_INPUT = re.compile(
    r"(?:(?P<name>[A-Za-z_]\w*)=)?(?P<dims>\d+(?:,\d+)*)(?::(?P<dtype>\w+))?(?::(?P<low>-?\d+)-(?P<high>-?\d+))?"
)
_INTEGERS = (0, 9)  # a range that any vocabulary has


def dtype(name: str) -> torch.dtype:
    found = getattr(torch, name, None)
    if not isinstance(found, torch.dtype):
        raise Mistake(f"{name!r} is not a type of torch such as float32, bfloat16 or int64")
    return found


def example(texts: Sequence[str]) -> Any:
    """Random inputs of the given shapes: a tuple, or a mapping where they have names."""
    try:
        made = [_one(text) for text in texts]
    except RuntimeError as error:  # PyTorch's for what memory cannot hold
        raise Mistake(f"--input cannot be made: {_first_line(error)}") from error
    names = [name for name, _ in made]
    if any(names) and not all(names):
        raise Mistake("--input: give names to all inputs or to none")
    if len(set(names)) < len(names) and any(names):
        raise Mistake("--input: a name stands there twice")
    return dict(made) if any(names) else tuple(tensor for _, tensor in made)


def _one(text: str) -> tuple[str | None, Tensor]:
    match = _INPUT.fullmatch(text.strip())
    if match is None:
        raise Mistake(
            f"--input {text!r} is not of the form {FORM}, such as 1,3,224,224 or "
            "ids=1,16:int64:0-99"
        )
    shape = [int(n) for n in match["dims"].split(",")]
    kind = dtype(match["dtype"] or "float32")
    if kind.is_floating_point:
        if match["low"] is not None:
            raise Mistake(f"--input {text!r}: only integers have a range")
        return match["name"], torch.randn(shape).to(kind)
    if kind.is_complex:
        return match["name"], torch.randn(shape, dtype=kind)
    if kind == torch.bool:
        return match["name"], torch.ones(shape, dtype=kind)
    low, high = _INTEGERS if match["low"] is None else (int(match["low"]), int(match["high"]))
    if low > high:
        raise Mistake(f"--input {text!r}: no integer is from {low} to {high}")
    return match["name"], torch.randint(low, high + 1, shape, dtype=kind)


def moved(inputs: Any, device: torch.device, kind: torch.dtype | None) -> Any:
    def move(tensor: Tensor) -> Tensor:
        return tensor.to(device, kind if tensor.is_floating_point() else None)

    return tree.map_tensors(inputs, move)


def device(name: str) -> torch.device:
    try:
        found = torch.device(name)
        torch.zeros(1, device=found)
    except (RuntimeError, AssertionError) as error:
        raise Mistake(f"--device {name!r} cannot be used: {_first_line(error)}") from error
    return found


def load_weights(model: nn.Module, path: Path) -> None:
    """The model's weights from a file of safetensors or :func:`torch.save`."""
    state = _masks_applied(_state(path))
    own = model.state_dict()
    missing, unknown = own.keys() - state.keys(), state.keys() - own.keys()
    other = [k for k in own.keys() & state.keys() if own[k].shape != state[k].shape]
    if missing or unknown or other:
        parts = [
            f"{len(names)} {what} ({', '.join(sorted(names)[:3])}{', …' * (len(names) > 3)})"
            for names, what in (
                (missing, "missing"), (unknown, "unknown"), (other, "of another shape"),
            )
            if names
        ]  # fmt: skip
        raise Mistake(f"{path} does not fit {type(model).__name__}: {'; '.join(parts)}")
    model.load_state_dict(state)


def _state(path: Path) -> dict[str, Tensor]:
    with _reading(path):
        if path.suffix == ".safetensors":
            from safetensors.torch import load_file

            return load_file(path)
        found = torch.load(path, map_location="cpu", weights_only=True)
    for key in ("state_dict", "model_state_dict", "model"):
        if isinstance(found, Mapping) and isinstance(found.get(key), Mapping):
            found = found[key]
    if not isinstance(found, Mapping) or not all(isinstance(t, Tensor) for t in found.values()):
        raise Mistake(f"{path} holds no state dict, but a {type(found).__name__}")
    return dict(found)


@contextlib.contextmanager
def _reading(path: Path) -> Iterator[None]:
    try:
        yield
    except Exception as error:  # unpickling what is no pickle can end in any
        raise Mistake(f"{path} cannot be read: {_first_line(error)}") from error


def _masks_applied(state: dict[str, Tensor]) -> dict[str, Tensor]:
    """The weights that ``torch.nn.utils.prune`` has computed from these."""
    names = [k.removesuffix("_orig") for k in state if k.endswith("_orig")]
    masked = [k for k in names if f"{k}_mask" in state]
    product = {k: state[f"{k}_orig"] * state[f"{k}_mask"] for k in masked}
    inner = {f"{k}_{part}" for k in masked for part in ("orig", "mask")}
    return {k: t for k, t in state.items() if k not in inner} | product


def value(text: str) -> Any:
    """A value as JSON has it; a bare word is a string."""
    try:
        return json.loads(text)
    except json.JSONDecodeError:
        return text


def pairs(texts: Sequence[str], option: str) -> dict[str, Any]:
    found = {}
    for text in texts:
        key, equals, given = text.partition("=")
        if not equals or not key:
            raise Mistake(f"{option} {text!r} is not of the form KEY=VALUE")
        found[key] = value(given)
    return found


def _first_line(error: BaseException) -> str:
    return next((line.strip() for line in str(error).splitlines() if line.strip()), repr(error))
