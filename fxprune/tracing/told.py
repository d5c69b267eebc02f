"""Integers that tensors tell a call: ``x.transpose(self.dim, -1)``, where ``dim`` is a buffer."""

from __future__ import annotations

from collections.abc import Container, Iterable
from typing import Any

import torch
from torch import fx
from torch.utils._python_dispatch import TorchDispatchMode

from ..rules.ops import op_name


def may_be_a_number(t: torch.Tensor) -> bool:
    return not t.dim() and not t.is_floating_point() and not t.is_complex()


class NumbersRead(TorchDispatchMode):
    """The tensors that calls take for numbers, with what they tell."""

    def __init__(self) -> None:
        super().__init__()
        self.read: list[tuple[torch.Tensor, int]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        value = func(*args, **(kwargs or {}))
        if func is torch.ops.aten._local_scalar_dense.default:
            self.read.append((args[0], value))
        return value


def tell_apart(nodes: Iterable[fx.Node], written: Container[str]) -> None:
    """Of the numbers that calls were told, those that are the same in every run (``"numbers"``)
    from those that the input makes or the model counts (``"told"``).

    Args:
        written: names of the tensors that the model writes to.
    """

    def is_fixed(source: fx.Node) -> bool:
        if source.op in ("get_attr", "placeholder"):
            return source.op == "get_attr" and source.target not in written
        inputs = source.all_input_nodes
        return bool(inputs or op_name(source.target) == "tensor") and all(map(is_fixed, inputs))

    for node in nodes:
        told = node.meta.pop("told")
        for source, number in told.items():
            kind = "numbers" if is_fixed(source) else "told"
            node.meta.setdefault(kind, {})[source] = number
