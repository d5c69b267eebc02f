"""The file: tensors as safetensors has them, and a text beside them, with a checksum over both.

Complex numbers of double precision, which it has not, are written as pairs."""

from __future__ import annotations

import hashlib
import json
import os
import stat
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from ..errors import FileError
from ..modules.given import check_path
from .indices import Malformed

KEY = "fxprune"
_SUM = "fxprune.sha256"
_PAIRS = "fxprune.pairs"  # names of tensors whose numbers are written as two
_HEADER, _EACH = 1 << 20, 1 << 11  # bytes of a header: in any case, and for each tensor


def room_for(tensors: int) -> int:
    """How long a header may be when it is written: what it takes to read one grows with it. A
    reader, who does not know of masks and new biases, allows for twice as much."""
    return _HEADER + _EACH * tensors


@contextmanager
def speaking_of(path: str | os.PathLike[str]) -> Iterator[None]:
    """Errors inside are about this file."""
    check_path(path)
    try:
        yield
    except FileError:
        raise
    except (Malformed, SafetensorError) as error:
        raise FileError(f"{os.fspath(path)}: {error}") from error
    except OSError as error:
        raise FileError(f"{os.fspath(path)}: {error.strerror or error}") from error


@contextmanager
def replacing(path: str | os.PathLike[str]) -> Iterator[Path]:
    """A file beside, which takes the place of the one there when it is whole."""
    check_path(path)
    beside = Path(f"{os.fspath(path)}.{os.getpid()}.part")
    with speaking_of(path):
        try:
            yield beside
            os.replace(beside, path)
        finally:
            beside.unlink(missing_ok=True)


def write(path: str | os.PathLike[str], tensors: Mapping[str, Tensor], text: str) -> None:
    """Write a file, or leave the one that is there as it was."""
    with replacing(path) as beside:
        pairs = [name for name, t in tensors.items() if t.dtype == torch.complex128]
        about = {"format": "pt", KEY: text, _SUM: _digest(tensors, text)}
        if pairs:
            about[_PAIRS] = json.dumps(pairs)
        real = {name: torch.view_as_real(tensors[name]) for name in pairs}
        save_file({**tensors, **real}, beside, about)
        length, room = _header(beside), room_for(len(tensors))
        if length > room:
            raise Malformed(
                f"what there is to say of the pruning takes {length} bytes, of which {room} may "
                "be; save the whole module with torch.save"
            )


@dataclass(frozen=True)
class Container:
    """An open file: what it says is checked for form, its tensors are read one by one."""

    text: str
    sum: str
    shapes: dict[str, tuple[int, ...]]
    _pairs: frozenset[str]
    _file: Any

    def tensor(self, name: str) -> Tensor:
        """In memory of its file: to be copied."""
        tensor = self._file.get_tensor(name)
        return torch.view_as_complex(tensor) if name in self._pairs else tensor

    def check(self) -> None:
        """Raise where any bit is not what was written."""
        if _digest({name: self.tensor(name) for name in self.shapes}, self.text) != self.sum:
            raise Malformed("its checksum is another: it was damaged on the way")


@contextmanager
def reading(path: str | os.PathLike[str], tensors: int) -> Iterator[Container]:
    """A file of ours, for a model of so many tensors; raises Malformed where it is none."""
    length, room = _header(path), 2 * room_for(tensors)
    if length > room:
        raise Malformed(
            f"its header has {length} bytes; no file for a model of {tensors} tensors has more "
            f"than {room}"
        )
    with safe_open(path, "pt") as file:
        about = file.metadata() or {}
        if KEY not in about or _SUM not in about:
            raise Malformed("it is a safetensors file, but none of fxprune.save")
        slices = {name: file.get_slice(name) for name in file.keys()}  # noqa: SIM118
        shapes = {name: tuple(found.get_shape()) for name, found in slices.items()}
        pairs = parse(about.get(_PAIRS, "[]"))
        for name in pairs if isinstance(pairs, list) else [pairs]:
            if not isinstance(name, str) or shapes.get(name, ())[-1:] != (2,):
                raise Malformed(f"it has no pairs that are called {name!r:.200}")
            if slices[name].get_dtype() != "F64":
                raise Malformed(f"{name} holds no pairs of double precision")
            shapes[name] = shapes[name][:-1]
        yield Container(about[KEY], about[_SUM], shapes, frozenset(pairs), file)


def size_of(path: str | os.PathLike[str]) -> int:
    """Bytes of a file; raises for what is none."""
    kind = os.stat(path)
    if not stat.S_ISREG(kind.st_mode):
        raise Malformed("it is no file")
    return kind.st_size


def _header(path: str | os.PathLike[str]) -> int:
    """The length of a header, which fits into the file."""
    size = size_of(path)
    with open(path, "rb") as file:
        length = int.from_bytes(file.read(8), "little")
    if not 2 <= length <= size - 8:
        raise Malformed("it is cut off, or no safetensors file")
    return length


def _digest(tensors: Mapping[str, Tensor], text: str) -> str:
    """SHA-256 of the text, and of each tensor's name, type, shape and bytes."""
    digest = hashlib.sha256(text.encode())
    for name, tensor in sorted(tensors.items()):
        digest.update(f"\n{name} {tensor.dtype} {list(tensor.shape)}\n".encode())
        if tensor.numel():
            digest.update(tensor.reshape(-1).view(torch.uint8).numpy().data)
    return digest.hexdigest()


def parse(text: str) -> Any:
    """JSON with no name twice."""
    try:
        return json.loads(text, object_pairs_hook=_once)
    except (ValueError, RecursionError) as error:
        raise Malformed(f"its description cannot be read: {error}") from error


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    made = dict(pairs)
    if len(made) != len(pairs):
        raise Malformed("its description says something twice")
    return made
