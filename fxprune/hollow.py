"""Zeros in place of what costs the most to compute: a recording needs shapes, and no values.

Convolutions, matrix products and attention take nearly all of a forward pass. They are asked on
PyTorch's meta device what they return, and zeros of that form go on in its place through the rest
of the model, which runs as it is. All that comes of them is hollow. Where a value would matter, the
model runs again for real: where Python or code that nobody has a pattern for looks at a hollow
tensor, where one becomes truth or whole numbers (which index and select), and where anything is
raised.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, NoReturn

import torch
from torch import Tensor, fx, nn
from torch.nn.modules import module as _module
from torch.nn.utils.parametrize import is_parametrized

from . import tree
from .ops import op_name
from .spec import Spec

_CONVOLUTIONS = {
    nn.Conv1d, nn.Conv2d, nn.Conv3d, nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d,
    torch.conv1d, torch.conv2d, torch.conv3d, torch.conv_transpose1d, torch.conv_transpose2d,
    torch.conv_transpose3d,
}  # fmt: skip
_COSTLY = _CONVOLUTIONS | {
    nn.Linear, nn.MultiheadAttention, nn.LSTM, nn.GRU, nn.RNN, nn.functional.linear, torch.matmul,
    torch.bmm, torch.mm, torch.addmm, torch.baddbmm, Tensor.matmul, Tensor.__matmul__, Tensor.bmm,
    Tensor.mm,
}  # fmt: skip
_NUMBERS = (int, float, tuple, str)
# Of its first argument such a call takes shape and type only.
_FRESH = {
    "zeros_like", "ones_like", "full_like", "empty_like", "rand_like", "randn_like", "new_zeros",
    "new_ones", "new_empty", "new_full", "new_tensor",
}  # fmt: skip


class ValuesNeeded(BaseException):
    """Those of a hollow tensor. No Exception, which the model's own code might handle."""


def possible(modules: Iterable[nn.Module]) -> bool:
    """Whether nothing but the model looks at its run: no hooks of the user's."""
    spaces = [(m._forward_hooks, m._forward_pre_hooks) for m in modules]
    spaces.append((_module._global_forward_hooks, _module._global_forward_pre_hooks))
    hooks = (hook for pair in spaces for space in pair for hook in space.values())
    return all(type(hook).__module__.startswith("torch.nn.utils.") for hook in hooks)


def stand_in(called: Any, args: Any, kwargs: Any, forms: dict[Any, Any]) -> Any:
    """Zeros of the form of what a function or a module returns, or None where it has to run.

    Args:
        forms: those of all calls so far, for layers repeat.
    """
    module = called if isinstance(called, nn.Module) else None
    kind = called if module is None else _class_of(module)
    if kind not in _COSTLY or "out" in kwargs or torch.is_autocast_enabled("cpu"):
        return None  # autocast computes in another dtype on the CPU, and not on the meta device
    own = {} if module is None else dict(module.named_parameters())
    given = [*tree.tensors((args, kwargs)), *own.values()]
    dtypes = {t.dtype for t in given if t.dtype != torch.bool}  # which masks are
    if len(dtypes) != 1 or not dtypes.pop().is_floating_point or not all(map(_plain, given)):
        return None
    if kind in _CONVOLUTIONS and any(map(_is_channels_last, given)):
        return None  # for which the meta device says other strides than the CPU has
    # A module's numbers (strides, groups) are plain attributes.
    numbers = [v for v in (vars(module) if module else {}).values() if isinstance(v, _NUMBERS)]
    settings = repr((tree.map_tensors((args, kwargs), lambda _: "tensor"), numbers))
    key = kind, settings, tuple((t.shape, t.stride(), t.dtype) for t in given)
    if key not in forms:
        args, kwargs = tree.map_tensors((args, kwargs), _meta)
        if module is None:
            forms[key] = called(*args, **kwargs)
        else:
            metas = {name: _meta(t) for name, t in own.items()}
            forms[key] = torch.func.functional_call(module, metas, args, kwargs)
    return tree.map_tensors(forms[key], _zeros)


def _class_of(module: nn.Module) -> type | None:
    """The class whose forward a module runs, on parameters that are its own."""
    if "forward" in vars(module) or module._forward_pre_hooks or is_parametrized(module):
        return None
    return next(c for c in type(module).__mro__ if "forward" in vars(c))


class Hollow:
    """Which nodes of a run stand for hollow tensors."""

    def __init__(self) -> None:
        self.nodes: set[fx.Node] = set()
        self.forms: dict[Any, Any] = {}
        self.asked = False

    def spread_to(self, node: fx.Node) -> None:
        if not self.nodes.isdisjoint(node.all_input_nodes):
            self.nodes.add(node)

    def mark(self, node: fx.Node, hollow: bool) -> None:
        """What is known of a node better than by its inputs."""
        (self.nodes.add if hollow else self.nodes.discard)(node)

    def is_read(self, target: Any, inputs: tuple[Any, Any]) -> bool:
        """Whether the result of a call of ``target`` is hollow because its inputs are."""
        if not self.nodes:
            return False
        args, kwargs = inputs
        read: list[fx.Node] = []
        fx.map_arg((args[1:] if op_name(target) in _FRESH else args, kwargs), read.append)
        hollow = self.nodes.intersection(read)
        if any(_is_whole(node.meta["spec"]) for node in hollow):
            self.ask()
        return bool(hollow)

    def ask(self) -> NoReturn:
        """A value is needed."""
        self.asked = True  # for a model that goes on after all
        raise ValuesNeeded


def _is_whole(spec: Any) -> bool:
    """Truth or whole numbers."""
    return isinstance(spec, Spec) and not (spec.dtype.is_floating_point or spec.dtype.is_complex)


def _plain(t: Tensor) -> bool:
    plain = type(t) in (Tensor, nn.Parameter) and t.device.type == "cpu"
    return plain and t.layout == torch.strided


def _is_channels_last(t: Tensor) -> bool:
    usual = torch.empty(t.shape, device="meta").stride()
    return t.dim() > 2 and t.stride() != usual and t.movedim(1, -1).is_contiguous()


def _meta(t: Tensor) -> Tensor:
    return torch.empty_strided(t.shape, t.stride(), dtype=t.dtype, device="meta")


def _zeros(t: Tensor) -> Tensor:
    return torch.empty_strided(t.shape, t.stride(), dtype=t.dtype).zero_()
