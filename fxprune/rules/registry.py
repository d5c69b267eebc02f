"""Which pattern a module, function or op has: the global register, and scopes on top of it.

The engine asks here what a node of the trace means and knows no op itself. The built-in patterns
live in :mod:`fxprune.patterns`, one family a file, and are loaded on first use; then those that
installed packages provide under the entry point group ``fxprune.patterns``.
"""

from __future__ import annotations

import contextlib
import importlib
import importlib.metadata
import pkgutil
import types
from collections.abc import Callable, Iterable, Iterator
from contextvars import ContextVar
from dataclasses import dataclass, field
from functools import cache, lru_cache
from typing import Any

import torch
from torch import nn
from torch.nn.utils import parametrize

from ..errors import PatternError
from ..modules.near import read_by_forward
from .ops import key_of, op_name
from .pattern_types import Pattern, pattern
from .targets import is_run, run_of

ENTRY_POINTS = "fxprune.patterns"


@dataclass
class Layer:
    """Patterns by target."""

    modules: dict[type, Pattern] = field(default_factory=dict)
    functions: dict[Any, Pattern] = field(default_factory=dict)
    ops: dict[str, Pattern] = field(default_factory=dict)
    runs: dict[tuple[Any, ...], Pattern] = field(default_factory=dict)

    def place(self, target: Any) -> tuple[dict[Any, Pattern], Any]:
        """The dictionary for a target, and its key there."""
        if is_run(target):
            return self.runs, run_of(target)  # type: ignore[return-value]
        if isinstance(target, str) and "::" not in target:
            return self.ops, target  # type: ignore[return-value]
        if isinstance(target, type) and issubclass(target, nn.Module):
            return self.modules, target  # type: ignore[return-value]
        return self.functions, key_of(target)

    def add(self, made: Pattern, *, override: bool) -> None:
        for target in made.targets:
            known = find(target)
            if known is not None and not override:
                raise PatternError(
                    f"{made.name} has a pattern already, from {known.source}; "
                    "override=True replaces it"
                )
        for target in made.targets:
            space, key = self.place(target)
            space[key] = made

    def remove(self, target: Any) -> None:
        space, key = self.place(target)
        if key not in space:
            raise PatternError(f"{target!r} has no pattern that could be unregistered")
        del space[key]


_global = Layer()
_scopes: ContextVar[tuple[Layer, ...]] = ContextVar("fxprune patterns", default=())
_widths: set[str] = set()


def register(*targets: Any, override: bool = False, **what: Any) -> Any:
    """Have fxprune know ``targets`` from now on.

    A registered module class, function or custom op becomes one node of the trace.

    Args:
        targets: what :func:`fxprune.pattern` takes, or patterns that it has made.
        override: replace a pattern that a target has already.
        what: the settings of :func:`fxprune.pattern`.

    Returns:
        The :class:`fxprune.Pattern`; without ``layout``, ``rule`` or ``steps`` a decorator for a
        rule, which returns the rule.

    Raises:
        PatternError: the pattern cannot be, or a target has one and ``override`` is False.
    """
    if targets and all(isinstance(t, Pattern) for t in targets):
        if what:
            raise PatternError(f"{targets[0].name} is made already; it takes no {', '.join(what)}")
        for made in targets:
            _add(made, override)
        return targets[0] if len(targets) == 1 else targets
    made = pattern(*targets, **what)
    if isinstance(made, Pattern):
        _add(made, override)
        return made

    def decorate(rule: Callable[..., Any]) -> Callable[..., Any]:
        _add(made(rule), override)
        return rule

    return decorate


def _add(made: Pattern, override: bool) -> None:
    if not made.is_builtin:
        load()
    _global.add(made, override=override)


def unregister(*targets: Any) -> None:
    """Forget the patterns of ``targets`` (or of patterns): what :func:`fxprune.register` took."""
    load()
    for target in [t for given in targets for t in getattr(given, "targets", (given,))]:
        _global.remove(target)


def as_patterns(given: Any) -> tuple[Any, ...]:
    """The setting ``patterns`` of a call: one, or several."""
    if isinstance(given, Pattern):
        return (given,)
    if given is not None and not isinstance(given, Iterable):
        raise PatternError(f"patterns={given!r} is no Pattern, nor several")
    return tuple(given or ())


@contextlib.contextmanager
def scope(*patterns: Pattern, override: bool = False) -> Iterator[None]:
    """Patterns that hold inside the ``with`` block only, in this thread or task."""
    load()
    layer = Layer()
    token = _scopes.set((*_scopes.get(), layer))
    try:
        for made in patterns:
            if not isinstance(made, Pattern):
                raise PatternError(f"{made!r} is no Pattern; fxprune.pattern(...) makes one")
            layer.add(made, override=override)
        yield
    finally:
        _scopes.reset(token)


def _layers() -> tuple[Layer, ...]:
    """The innermost scope first."""
    return (*reversed(_scopes.get()), _global)


def width(*names: str) -> None:
    """Register attributes that say a width, by name: :mod:`fxprune.planning.width_attributes`."""
    _widths.update(names)


def width_names() -> set[str]:
    load()
    return _widths


@cache
def load() -> None:
    """Import every file of :mod:`fxprune.patterns`, each of which registers its family; then what
    other packages provide."""
    package = importlib.import_module("fxprune.patterns")
    for info in pkgutil.iter_modules(package.__path__):
        importlib.import_module(f"fxprune.patterns.{info.name}")
    load_provided()


def load_provided() -> None:
    """What installed packages provide: a module that registers patterns, or a function that does,
    under the entry point group ``fxprune.patterns``."""
    for entry in importlib.metadata.entry_points(group=ENTRY_POINTS):
        try:
            found = entry.load()
            if callable(found):
                found()
        except Exception as error:  # whatever a package's own code raises
            raise PatternError(
                f"the patterns {entry.name!r} of an installed package ({entry.value}) cannot be "
                f"loaded: {type(error).__name__}: {error}"
            ) from error


def for_module(instance: nn.Module) -> Pattern | None:
    """The pattern of a module: its class's or that of a base class whose ``forward`` it runs.

    A subclass with a forward of its own, or with another meaning of what the forward goes by (a
    ``weight`` that is computed), computes something else, and has no pattern.
    """
    load()
    forward = getattr(instance.forward, "__func__", instance.forward)  # it may have been replaced
    layers = _layers()
    for cls in type(instance).__mro__:
        for layer in layers:
            if cls in layer.modules:
                made = layer.modules[cls]
                known = (getattr(cls, "forward", None), made.forward)
                alone = _leaves_alone(type(instance), cls)  # type: ignore[arg-type]
                return made if forward in known and alone else None
    return None


@lru_cache(maxsize=512)
def _leaves_alone(subclass: type, cls: type) -> bool:
    """Whether a subclass defines nothing that the forward of its base class reads or calls."""
    names = read_by_forward(cls)
    for between in subclass.__mro__[: subclass.__mro__.index(cls)]:
        for name, value in vars(between).items():
            getter = getattr(value, "fget", None)
            if getattr(getter, "__module__", "") == parametrize.__name__:
                continue  # parametrized tensors are known by their names
            if name in names or name in ("__getattr__", "__getattribute__"):
                return False
    return True


def for_function(target: Any) -> Pattern | None:
    load()
    key, name = key_of(target), op_name(target)
    for layer in _layers():
        made = layer.functions.get(key) or layer.ops.get(name)
        if made is not None:
            return made
    return None


def find(target: Any) -> Pattern | None:
    """The pattern that is registered for a target as :func:`register` takes it."""
    for layer in _layers():
        space, key = layer.place(target)
        if key in space:
            return space[key]
    return None


def every() -> list[Pattern]:
    """All patterns that hold here, each once."""
    load()
    spaces = [s for x in _layers() for s in (x.modules, x.functions, x.ops, x.runs)]
    return list({id(p): p for space in spaces for p in space.values()}.values())


def runs() -> dict[tuple[Any, ...], Pattern]:
    load()
    found: dict[tuple[Any, ...], Pattern] = {}
    for layer in reversed(_layers()):
        found |= layer.runs
    return found


def python_functions() -> list[Any]:
    """Registered functions and autograd functions that PyTorch does not tell of when they run."""
    load()
    found = [t for layer in _layers() for made in layer.functions.values() for t in made.targets]
    found += [item for run in runs() for item in run]
    return [t for t in dict.fromkeys(f for f in found if _hashable(f)) if is_python(t)]


def is_python(target: Any) -> bool:
    if isinstance(target, type):
        return issubclass(target, torch.autograd.Function)
    module = getattr(target, "__module__", None) or ""
    return isinstance(target, types.FunctionType) and module.partition(".")[0] not in (
        "torch", "fxprune",
    )  # fmt: skip


def _hashable(value: Any) -> bool:
    return getattr(value, "__hash__", None) is not None
