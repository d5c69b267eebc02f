"""An example input as text: its form, the integers in it, and of real numbers the shapes alone."""

from __future__ import annotations

import base64
import binascii
import zlib
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from ..modules.running import bind_inputs
from .indices import Malformed

LARGEST = 1 << 22  # elements in all; a run on more is for the caller to ask for
_STORED = 1 << 20  # bytes of integers in all
_PLAIN = (bool, int, float, str, type(None))


class _Unknown(Exception):
    """Something that text cannot say."""


def as_json(example_input: Any) -> Any:
    """``[positional arguments, keyword arguments]``, or None where text cannot say what they are.

    Integers and flags (token ids, masks, lengths) are kept: what a model does can depend on them.
    Of real numbers the shape and the type are.
    """
    args, kwargs = bind_inputs(example_input)
    room = [LARGEST, _STORED]
    try:
        return [_as_json(args, room), _as_json(kwargs, room)]
    except _Unknown:
        return None


def _as_json(value: Any, room: list[int]) -> Any:
    if type(value) is Tensor and value.layout == torch.strided and not value.is_quantized:
        room[0] -= value.numel()
        data = None
        if not value.is_floating_point() and not value.is_complex():
            raw = value.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
            room[1] -= len(raw)
            data = base64.b64encode(zlib.compress(raw)).decode()
        if min(room) < 0:
            raise _Unknown
        return ["tensor", str(value.dtype).removeprefix("torch."), list(value.shape), data]
    if type(value) in (tuple, list):
        return [type(value).__name__, [_as_json(item, room) for item in value]]
    if isinstance(value, Mapping) and all(type(key) is str for key in value):
        return ["dict", {key: _as_json(item, room) for key, item in value.items()}]
    if type(value) in _PLAIN:
        return ["value", value]
    raise _Unknown


def from_json(text: Any, device: torch.device) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Arguments of that form; real numbers are drawn anew, the same each time."""
    generator = torch.Generator().manual_seed(0)
    room = [LARGEST, _STORED]
    if not isinstance(text, list) or len(text) != 2:
        raise Malformed("the example input is no pair of arguments")
    args, kwargs = (_from_json(part, device, generator, room) for part in text)
    if not isinstance(args, tuple) or not isinstance(kwargs, dict):
        raise Malformed("the example input is no tuple and dict of arguments")
    return args, kwargs


def _from_json(text: Any, device: torch.device, generator: torch.Generator, room: list[int]) -> Any:
    if not isinstance(text, list) or not text:
        raise Malformed("a part of the example input has no kind")
    kind, *rest = text
    if kind == "tensor" and len(rest) == 3:
        return _tensor(rest[0], rest[1], rest[2], generator, room).to(device)
    if kind == "value" and len(rest) == 1 and type(rest[0]) in _PLAIN:
        return rest[0]
    (items,) = rest if len(rest) == 1 else (None,)
    if kind in ("tuple", "list") and isinstance(items, list):
        made = [_from_json(item, device, generator, room) for item in items]
        return tuple(made) if kind == "tuple" else made
    if kind == "dict" and isinstance(items, dict):
        return {key: _from_json(item, device, generator, room) for key, item in items.items()}
    raise Malformed(f"a part of the example input is of the kind {kind!r}")


def _tensor(
    name: Any, shape: Any, data: Any, generator: torch.Generator, room: list[int]
) -> Tensor:
    dtype = getattr(torch, name, None) if isinstance(name, str) else None
    if not isinstance(dtype, torch.dtype):
        raise Malformed(f"the example input has tensors of type {name!r}")
    if not isinstance(shape, list) or not all(type(n) is int and 0 <= n < 2**31 for n in shape):
        raise Malformed(f"the example input has a tensor of shape {shape!r}")
    count = 1
    for n in shape:
        count *= n
    room[0] -= count
    if room[0] < 0:
        raise Malformed(f"the example input has more than {LARGEST} numbers")
    if data is None:
        if not dtype.is_floating_point and not dtype.is_complex:
            raise Malformed("the example input lacks its integers")
        return torch.randn(shape, generator=generator).to(dtype)
    size = count * dtype.itemsize
    room[1] -= size
    if room[1] < 0 or dtype.is_floating_point or dtype.is_complex:
        raise Malformed("the example input holds more than it may")
    try:
        unpack = zlib.decompressobj()
        raw = unpack.decompress(base64.b64decode(data, validate=True), size + 1)
    except (TypeError, ValueError, binascii.Error, zlib.error) as error:
        raise Malformed(f"the integers of the example input cannot be read: {error}") from error
    if len(raw) != size:
        raise Malformed(f"the example input has {len(raw)} bytes for a tensor of {size}")
    if not raw:
        return torch.zeros(shape, dtype=dtype)
    flat = torch.frombuffer(bytearray(raw), dtype=torch.uint8)
    return (flat != 0 if dtype is torch.bool else flat.view(dtype)).reshape(shape)
