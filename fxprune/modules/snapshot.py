"""What modules hold, so that it can be put back after they have run."""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable, Sequence
from functools import partial
from operator import is_
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from .inspecting import OF_TORCH

# Generators of random numbers that a module may have: how their state is read and set.
_STATES: dict[type, tuple[Callable[[Any], Any], Callable[[Any, Any], Any]]] = {
    torch.Generator: (torch.Generator.get_state, torch.Generator.set_state),
    random.Random: (random.Random.getstate, random.Random.setstate),
    np.random.RandomState: (np.random.RandomState.get_state, np.random.RandomState.set_state),
    np.random.Generator: (
        lambda g: g.bit_generator.state,
        lambda g, state: setattr(g.bit_generator, "state", state),
    ),
}
_PLAIN = frozenset((bool, int, float, str, type(None), tuple))


class Snapshot:
    """Attributes, what is in containers, buffers, memories of parameters, and generators."""

    def __init__(self, modules: Sequence[nn.Module]) -> None:
        # Parameters, buffers, children and hooks are in dictionaries of their own, mostly empty.
        self._empty: list[dict] = []
        self._spaces: list[tuple[dict, dict]] = []
        self._lists: list[tuple[Any, list]] = []
        self._drawn: list[Callable[[], Any]] = []  # what sets generators back
        held: list[Tensor] = []
        for m in modules:
            own = vars(m)
            self._spaces.append((own, dict(own)))
            for key, value in own.items():
                if type(value) in _PLAIN:
                    continue
                if key not in OF_TORCH:
                    held += self._note(value)
                elif value and isinstance(value, dict):
                    self._spaces.append((value, dict(value)))
                elif isinstance(value, dict):
                    self._empty.append(value)
            # Some models count calls or keep caches in their buffers, even in eval mode.
            if not getattr(type(m), "keeps_buffers", False):  # a mask's are as large as its tensor
                held += [b for b in m._buffers.values() if b is not None]
            may_scale = "max_norm" in own or hasattr(type(m), "max_norm")
            if may_scale and m.max_norm is not None:  # an embedding: it scales rows it reads
                held += [p for p in m._parameters.values() if p is not None]
        self._tensors = [
            (t, t.data, t.detach().clone(), None if t.is_inference() else t._version,
             t.requires_grad) for t in {id(t): t for t in held}.values()
        ]  # fmt: skip
        parameters = (p for m in modules for p in m._parameters.values() if p is not None)
        self._memories = [(p, p.data) for p in parameters if p.layout == torch.strided]

    def _note(self, value: Any) -> list[Tensor]:
        """Of an attribute what is in it; the tensors whose values are to be put back."""
        if isinstance(value, dict):
            self._spaces.append((value, dict(value)))
            return [t for t in value.values() if type(t) is Tensor and _can_be_set_back(t)]
        if isinstance(value, (list, set, deque)):
            self._lists.append((value, list(value)))
            return [t for t in value if type(t) is Tensor and _can_be_set_back(t)]
        if type(value) in _STATES:
            read, write = _STATES[type(value)]
            self._drawn.append(partial(write, value, read(value)))
        # Those with a history are computed anew before each run (nn.utils.weight_norm).
        own = isinstance(value, Tensor) and value.is_leaf and _can_be_read(value)
        return [value] if own else []

    def restore(self) -> None:
        for set_back in self._drawn:
            set_back()
        for space in filter(None, self._empty):
            space.clear()
        for space, before in self._spaces:
            if not is_same(space, before):
                space.clear()
                space.update(before)
        for value, items in self._lists:
            if len(value) != len(items) or not all(map(is_, value, items)):
                value.clear()
                (value.update if isinstance(value, set) else value.extend)(items)
        for parameter, memory in self._memories:
            if parameter.data_ptr() != memory.data_ptr() or parameter.shape != memory.shape:
                parameter.data = memory
        with torch.no_grad():
            for tensor, memory, values, version, grad in self._tensors:
                if tensor.layout != torch.strided:
                    same = version is not None and tensor._version == version
                else:  # no version tells of writes through ``.data``, or of norms that train
                    if tensor.data_ptr() != memory.data_ptr() or tensor.shape != memory.shape:
                        tensor.data = memory
                    same = _alike(tensor, values)
                if not same:
                    tensor.copy_(values)
                if tensor.requires_grad != grad:
                    tensor.requires_grad_(grad)


def _can_be_set_back(t: Tensor) -> bool:
    return t.is_leaf and t.layout == torch.strided and _can_be_read(t)


def _can_be_read(t: Tensor) -> bool:
    return not t.is_meta and not t.is_nested


def _alike(a: Tensor, b: Tensor) -> bool:
    if a.dtype.itemsize == 1 and a.is_floating_point():  # which cannot be compared
        a, b = a.view(torch.uint8), b.view(torch.uint8)
    return torch.equal(a, b) or bool(((a == b) | ((a != a) & (b != b))).all())


def is_same(space: dict[str, Any], before: dict[str, Any]) -> bool:
    """Whether a dictionary holds the very objects that it held, in their order."""
    return space.keys() == before.keys() and all(map(is_, space.values(), before.values()))
