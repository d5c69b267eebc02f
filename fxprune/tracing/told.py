"""Integers that tensors tell a call: ``x.transpose(self.dim, -1)``, where ``dim`` is a buffer."""

from __future__ import annotations

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


def is_fixed(node: fx.Node) -> bool:
    """Whether a tensor is made of nothing but the model's own: every run has the same."""
    if node.op in ("get_attr", "placeholder"):
        return node.op == "get_attr"
    inputs = node.all_input_nodes
    return bool(inputs or op_name(node.target) == "tensor") and all(map(is_fixed, inputs))
