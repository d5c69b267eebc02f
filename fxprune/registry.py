"""What fxprune knows about ops: patterns, registered by module class, function or op name.

The engine asks here what a node of the trace means and knows no op itself. The built-in patterns
live in :mod:`fxprune.patterns`, one family a file, and are loaded on first use.
"""

from __future__ import annotations

import importlib
import pkgutil
import types
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import torch
from torch import nn

# A rule reads a call and states, through the algebra, how its channels hang together; it returns
# the channels of the call's result. See fxprune.algebra for the words it can use.
Rule = Callable[[Any, Any], Any]


@dataclass(frozen=True)
class Pattern:
    """What is known about one kind of node.

    Args:
        name: what the node is called in reports.
        rule: states the channel algebra of one call.
        kind: the word for this node in the name of a fusion (``"conv"``, ``"act"``, …).
        attributes: module attributes after shrinking; ``attributes(module, new) -> {name: value}``
            with the new widths in ``new``, a :class:`fxprune.widths.NewSizes`.
        resize: the arguments that hold sizes, as they have to be after shrinking;
            ``resize(call, new) -> {(position, name): value}``.
        absorb: name of the buffer that a constant added to the input can be subtracted from.
        bias: where a constant added to the output can go: True for the module's bias beside its
            weight, ``(position, name)`` of the argument for a function.
        refresh: called on a module after its tensors have changed.
        forward: a forward for widths that the class's own cannot express, which ``attributes``
            then gives as ``"forward"``; modules that have it follow the same rule.
        product: the result is 0 wherever an operand is.
    """

    name: str
    rule: Rule
    kind: str = ""
    attributes: Callable[..., dict[str, Any]] | None = None
    resize: Callable[..., Any] | None = None
    absorb: str | None = None
    bias: Any = None
    refresh: Callable[[nn.Module], None] | None = None
    forward: Callable[..., Any] | None = None
    product: bool = False
    source: str = field(default="", compare=False)


_modules: dict[type, Pattern] = {}
_functions: dict[Any, Pattern] = {}
_ops: dict[str, Pattern] = {}
_fusions: dict[str, tuple[str, ...]] = {}
_widths: set[str] = set()


def module(*classes: type, **settings: Any) -> Callable[[Rule], Rule]:
    """Register a rule for module classes; a registered class becomes a leaf of the trace."""

    def register(rule: Rule) -> Rule:
        for cls in classes:
            _modules[cls] = _pattern(rule, settings, cls.__name__)
        return rule

    return register


def op(*names: str, **settings: Any) -> Callable[[Rule], Rule]:
    """Register a rule for PyTorch's own ops by name: ``"cat"`` is ``torch.cat``, ``aten::cat`` …

    A name stands for the function, the method, the functional and the aten op called so, in place
    or not; PyTorch gives them one meaning.
    """

    def register(rule: Rule) -> Rule:
        for name in names:
            _ops[name] = _pattern(rule, settings, name)
        return rule

    return register


def function(*targets: Any, **settings: Any) -> Callable[[Rule], Rule]:
    """Register a rule for functions that are not PyTorch's own."""

    def register(rule: Rule) -> Rule:
        for target in targets:
            _functions[target] = _pattern(rule, settings, getattr(target, "__name__", str(target)))
        return rule

    return register


def fusion(*names: str) -> None:
    """Register runs of nodes, named by their kinds: ``"conv-act-conv"``."""
    for name in names:
        _fusions[name] = tuple(name.split("-"))


def width(*names: str) -> None:
    """Register names of module attributes that say a width; see :mod:`fxprune.announced`."""
    _widths.update(names)


def width_names() -> set[str]:
    load_builtins()
    return _widths


def _pattern(rule: Rule, settings: dict[str, Any], name: str) -> Pattern:
    return Pattern(name=name, rule=rule, source=rule.__module__, **settings)


@cache
def load_builtins() -> None:
    """Import every file of :mod:`fxprune.patterns`, each of which registers its family."""
    package = importlib.import_module("fxprune.patterns")
    for info in pkgutil.iter_modules(package.__path__):
        importlib.import_module(f"fxprune.patterns.{info.name}")


def for_module(instance: nn.Module) -> Pattern | None:
    """The pattern of a module: its class's or that of a base class whose ``forward`` it runs.

    A subclass with a forward of its own computes something else, and has no pattern.
    """
    load_builtins()
    forward = type(instance).forward
    for cls in type(instance).__mro__:
        if cls in _modules:
            pattern = _modules[cls]
            known = (getattr(cls, "forward", None), pattern.forward)
            return pattern if forward in known else None
    return None


def for_function(target: Any) -> Pattern | None:
    load_builtins()
    return _functions.get(target) or _ops.get(op_name(target))


def fusions() -> dict[str, Sequence[str]]:
    load_builtins()
    return dict(_fusions)


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
