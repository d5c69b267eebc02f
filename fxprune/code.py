"""Forwards that take the place of a module's own: as source, with what new code asks as it runs.

Models that were saved with such a forward, and the source itself, name what is in this file.
"""

from __future__ import annotations

import copy
import functools
import inspect
import linecache
import types
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import Tensor, fx

from .errors import PruningError
from .frames import REWRITTEN


@dataclass(frozen=True)
class Code:
    """A forward as source, with the names it uses: importable objects, modules by ``module:``.

    ``stale`` are methods that the module's own forward calls and in which lies what came out wrong:
    the new one does without them.
    """

    source: str
    names: tuple[tuple[str, Any], ...]
    stale: tuple[str, ...] = ()

    @staticmethod
    def of(graph: fx.Graph, stale: tuple[str, ...]) -> Code:
        code = graph.python_code("self")
        names = tuple(
            (k, f"module:{v.__name__}" if isinstance(v, types.ModuleType) else v)
            for k, v in sorted(code.globals.items())
        )
        return Code(code.src.strip() + "\n", names, stale)

    def function(self) -> Any:
        space = {
            k: __import__(v[7:], fromlist=["_"]) if isinstance(v, str) and v[:7] == "module:" else v
            for k, v in self.names
        }
        filename = f"{REWRITTEN} {abs(hash(self.source))}>"
        linecache.cache[filename] = (len(self.source), None, self.source.splitlines(True), filename)
        exec(compile(self.source, filename, "exec"), space)
        return space["forward"]


@dataclass(frozen=True)
class Borrowed:
    """A forward of fxprune's own, for a layer whose class has none for its new widths."""

    forward: Callable[..., Any]

    @property
    def source(self) -> str:
        return inspect.getsource(self.forward)

    def function(self) -> Any:
        return self.forward


def rewritten_class(base: type, code: Code | Borrowed) -> type:
    """A subclass of ``base``, under its name, that runs ``code``. It pickles and deep-copies."""
    base = vars(base).get("_fxprune_base", base)  # of a module rewritten before
    return _make_class(base, code)


@cache
def _make_class(base: Any, code: Code | Borrowed) -> type:
    def __reduce_ex__(self: Any, protocol: int) -> Any:
        return _restore, (base, code), self.__dict__

    stale = () if isinstance(code, Borrowed) else code.stale
    space = {
        **{name: _stale(base, name) for name in stale},
        "__module__": base.__module__,
        "__qualname__": base.__qualname__,
        "__doc__": base.__doc__,
        "__reduce_ex__": __reduce_ex__,
        "_fxprune_base": base,
        "_fxprune_stale": stale,
        "forward": code.function(),
    }
    if issubclass(base, fx.GraphModule):  # whose copies are made from its graph
        space["__deepcopy__"] = _copied
    return type(base.__name__, (base,), space)


def _copied(self: Any, memo: dict[int, Any]) -> Any:
    new = memo[id(self)] = object.__new__(type(self))
    vars(new).update(copy.deepcopy(vars(self), memo))
    return new


def _stale(base: Any, name: str) -> Any:
    old = inspect.getattr_static(base, name)
    function = getattr(old, "fget", None) or getattr(old, "__func__", old)

    @functools.wraps(inspect.unwrap(function))
    def stale(self: Any, *args: Any, **kwargs: Any) -> Any:
        raise PruningError(
            f"{base.__name__}.{name} holds sizes that this model had before it was pruned. Its "
            f"forward was written anew and does not call {name} any more; call the model itself, "
            "or write the sizes as attributes or shapes and prune it again"
        )

    return property(stale) if isinstance(old, property) else stale


def _restore(base: type, code: Code | Borrowed) -> Any:
    cls = rewritten_class(base, code)
    return object.__new__(cls)


def expect_argument(value: Any, recorded: Any, name: str) -> None:
    """The new code is that of one run: an argument that changed its way has to be the same."""
    if not _same(value, recorded):
        raise PruningError(
            f"this forward was rewritten from a run with {name}={recorded!r}, and cannot take "
            f"{value!r}; plan with the example input that you need"
        )


def expect_answer(answer: Any, recorded: Any, question: str) -> None:
    """The code asked something of sizes, and went the way of the answer."""
    if not _same(answer, recorded):
        raise PruningError(
            f"this forward was rewritten from a run in which {question} was {recorded!r}; it is "
            f"{answer!r} now. Prune the model as it is to run, on an input of such a size"
        )


def _same(now: Any, recorded: Any) -> bool:
    return now is recorded or now == recorded or (now != now and recorded != recorded)  # NaN


def _keys(arguments: Any) -> tuple[Any, ...]:
    """The names of keyword arguments, the places of positional ones."""
    return tuple(arguments) if isinstance(arguments, dict) else tuple(range(len(arguments)))


def take(x: Tensor, dim: int, positions: list[int]) -> Tensor:
    """Slices of ``x`` at ``positions`` along ``dim``: channels in the order the next layer has."""
    return x.index_select(dim, torch.tensor(positions, device=x.device))
