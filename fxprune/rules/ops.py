"""What functions and ops are called, and what their arguments are."""

from __future__ import annotations

import inspect
import types
from collections.abc import Iterable
from typing import Any

import torch
from torch import nn

# Operators of tensors that are written in Python, such as ``2 ** x``, by the function they are.
OPERATORS = {
    function: name for name, function in vars(torch.Tensor).items()
    if name.startswith("__") and name != "__len__" and inspect.isfunction(function)
}  # fmt: skip


class Applied:
    """The ``apply`` of an autograd function, as fx can write it: the class's own has no module."""

    def __init__(self, function: type[torch.autograd.Function]) -> None:
        self.function = function
        self.__module__ = function.__module__
        self.__name__ = self.__qualname__ = function.__name__

    def __call__(self, *args: Any) -> Any:
        return self.function.apply(*args)

    def __eq__(self, other: Any) -> bool:
        return isinstance(other, Applied) and other.function is self.function

    def __hash__(self) -> int:
        return hash(self.function)

    def __reduce__(self) -> Any:
        return Applied, (self.function,)


def key_of(target: Any) -> Any:
    """What stands for a function: a custom op is the same by each of its names."""
    op = getattr(target, "_opoverload", target)
    if isinstance(op, torch._ops.OpOverload):
        return op._schema.name
    if isinstance(op, torch._ops.OpOverloadPacket):
        return op._qualified_op_name
    if isinstance(op, Applied):
        return op.function
    return op if getattr(op, "__hash__", None) is not None else id(op)


def op_name(target: Any) -> str:
    """The name of one of PyTorch's own ops (``add`` for ``Tensor.__iadd__``), or ``""``."""
    if isinstance(target, str):
        return target.strip("_")
    if isinstance(target, torch._ops.OpOverload):
        namespace, _, name = target._schema.name.partition("::")
        return name.strip("_") if namespace in ("aten", "prims") else ""
    if isinstance(target, torch._ops.OpOverloadPacket):
        name = target._qualified_op_name
        return name.partition("::")[2].strip("_") if name.startswith("aten::") else ""
    if not _is_torch(target):
        return ""
    name = target.__name__
    if name == "__get__":  # a property of the tensor, such as x.T
        return target.__self__.__name__
    return name.strip("_")


def _is_torch(target: Any) -> bool:
    if isinstance(target, (types.MethodDescriptorType, types.WrapperDescriptorType)):
        return issubclass(torch.Tensor, target.__objclass__)
    if isinstance(target, types.MethodWrapperType):
        return True
    owner = getattr(target, "__module__", None) or getattr(
        getattr(target, "__self__", None), "__name__", ""
    )
    return isinstance(owner, str) and owner.partition(".")[0] in ("torch", "_operator")


def sets_up_context(function: type[torch.autograd.Function]) -> bool:
    """Whether its forward goes without ``ctx``, which ``setup_context`` gets."""
    return function.setup_context is not torch.autograd.Function.setup_context


def argument_at(call: Any, position: int, name: str) -> Any:
    """What a call, or the node of one, is given by position or name; None where it is not."""
    return call.args[position] if position < len(call.args) else call.kwargs.get(name)


def argument_names(target: Any, given: int = 0, named: Iterable[str] = ()) -> list[str] | None:
    """Names of the arguments that a module class's forward, a function or an op takes, in order;
    None where nothing tells.

    Of an op with several overloads, those of the first that takes ``given`` arguments and those
    that are ``named``.
    """
    if isinstance(target, type) and issubclass(target, nn.Module):
        return list(inspect.signature(target.forward).parameters)[1:]
    target = target.function if isinstance(target, Applied) else target
    if isinstance(target, type) and issubclass(target, torch.autograd.Function):
        own = list(inspect.signature(target.forward).parameters)
        return own if sets_up_context(target) else own[1:]
    op = getattr(target, "_opoverload", target)
    if isinstance(op, torch._ops.OpOverload):
        return _schema_names(op)
    if not isinstance(op, torch._ops.OpOverloadPacket):
        op = getattr(torch.ops.aten, op_name(target) or "?", None)
        # Methods of C may have a signature, too (from Python 3.13 on), with ``self`` for ``input``.
        documented = op is not None and inspect.ismethoddescriptor(target)
        if callable(target) and not isinstance(target, type) and not documented:
            try:
                return list(inspect.signature(target).parameters)
            except (TypeError, ValueError):  # of C
                pass
    found = [_schema_names(getattr(op, name)) for name in op.overloads()] if op else []
    fitting = [names for names in found if len(names) >= given and set(named) <= set(names)]
    return next(iter(fitting or found), None)


def _schema_names(op: torch._ops.OpOverload) -> list[str]:
    """As PyTorch's documentation calls them: the first one is ``input``, not ``self``."""
    names = [argument.name for argument in op._schema.arguments]
    return ["input" if name == "self" else name for name in names]
