"""Hearing of calls that PyTorch does not tell of: modules, Python functions and autograd functions.
Those that have a pattern become one node of the trace instead of what runs inside them."""

from __future__ import annotations

import contextlib
import functools
import sys
import types
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from typing import Any

import torch
from torch.nn import functional as F

from ..modules.near import package_of
from ..rules.ops import Applied, sets_up_context
from .asking import hold_literals

# What functions of PyTorch that are written in Python ask before they do anything.
_ASKS = ("has_torch_function", "has_torch_function_unary", "has_torch_function_variadic")

# What is told: the function, something that runs it, and the arguments of this call.
Tell = Callable[[Any, Callable[..., Any], Any, Any], Any]


@contextlib.contextmanager
def told(functions: Iterable[Any], tell: Tell) -> Iterator[None]:
    """While inside, ``tell`` is called in the place of each function, whoever calls it and however
    it got hold of it."""
    with contextlib.ExitStack() as stack:
        for function in functions:
            if isinstance(function, type):
                stack.enter_context(_autograd(function, tell))
            else:
                stack.enter_context(_python(function, tell))
        yield


@contextlib.contextmanager
def _python(function: Any, tell: Tell) -> Iterator[None]:
    """A function's code is what all that refer to it share: it is swapped for one that tells."""
    code, defaults, kwdefaults = function.__code__, function.__defaults__, function.__kwdefaults__
    run = types.FunctionType(
        code, function.__globals__, function.__name__, defaults, function.__closure__
    )
    run.__kwdefaults__ = kwdefaults
    key = f"_fxprune_tell_{id(function)}"
    function.__globals__[key] = partial(tell, function, run)
    function.__defaults__, function.__kwdefaults__ = None, None
    function.__code__ = _telling(key, len(code.co_freevars))
    try:
        yield
    finally:
        function.__code__ = code
        function.__defaults__, function.__kwdefaults__ = defaults, kwdefaults
        del function.__globals__[key]


@functools.lru_cache(maxsize=1024)
def _telling(key: str, variables: int) -> types.CodeType:
    """Code of a function that calls the global ``key``, with as many variables of a closure."""
    names = ", ".join(f"v{i}" for i in range(variables))
    text = f"""
def outer({names}):
    def told(*args, **kwargs):
        {names or "pass"}
        return {key}(args, kwargs)
    return told
"""
    made: dict[str, Any] = {}
    exec(compile(text, "<told by fxprune>", "exec"), made)
    return made["outer"](*[None] * variables).__code__


@contextlib.contextmanager
def _autograd(function: type[torch.autograd.Function], tell: Tell) -> Iterator[None]:
    """``apply`` may have been taken from the class before; what it calls is ``forward``."""
    run, own = function.forward, vars(function).get("forward")
    context = not sets_up_context(function)

    def forward(*args: Any, **kwargs: Any) -> Any:
        head, rest = (args[:1], args[1:]) if context else ((), args)
        return tell(Applied(function), partial(run, *head), rest, kwargs)

    function.forward = staticmethod(forward)  # type: ignore[method-assign]
    try:
        yield
    finally:
        if own is None:
            del function.forward
        else:
            function.forward = own  # type: ignore[method-assign]


def autograd_functions() -> list[type]:
    """All but PyTorch's own: a graph of what they do inside would lose their backward pass."""
    waiting: list[type] = [torch.autograd.Function]
    found: list[type] = []
    while waiting:
        made: list[type] = waiting.pop().__subclasses__()
        waiting += made
        found += [f for f in made if package_of(f) != "torch"]
    return found


@contextlib.contextmanager
def calls_of(cls: Any, tell: Callable[..., Any]) -> Iterator[None]:
    """While inside, ``tell`` is called in the place of each object of a class: with its
    ``__call__``, it, and its arguments."""
    original = cls.__call__

    def __call__(self: Any, *args: Any, **kwargs: Any) -> Any:
        return tell(original, self, args, kwargs)

    cls.__call__ = __call__
    try:
        yield
    finally:
        cls.__call__ = original


@contextlib.contextmanager
def variables(tell: Callable[[Any, Any], None]) -> Iterator[None]:
    """While inside, ``tell`` gets each tensor that old code wraps (``Variable(x)``), which PyTorch
    does not tell of, and what comes out: another object on the same memory."""
    meta: Any = type(torch.autograd.Variable)
    original = meta.__call__

    def __call__(cls: Any, *args: Any, **kwargs: Any) -> Any:
        made = original(cls, *args, **kwargs)
        for value in (*args, *kwargs.values()):
            if isinstance(value, torch.Tensor):
                tell(value, made)
        return made

    meta.__call__ = __call__
    try:
        yield
    finally:
        del meta.__call__


def uncompiled() -> contextlib.AbstractContextManager[Any]:
    """While inside, functions that ``torch.compile`` has made run as they were written."""
    if "torch._dynamo" not in sys.modules:  # nothing is compiled, and its import takes seconds
        return contextlib.nullcontext()
    return torch.compiler.set_stance("force_eager")


def scripted_from(function: torch.jit.ScriptFunction) -> Callable[..., Any] | None:
    """The Python function that ``torch.jit.script`` made it from, None where ``torch.jit.trace``
    made it, which wrote down one run."""
    source = getattr(function, "_torchdynamo_inline", None)
    made = torch.jit._state._try_get_jit_cached_function(source) if source else None
    same = made is not None and made.qualified_name == function.qualified_name
    return source if same else None


def is_python_of_torch(function: Any) -> bool:
    """Whether a function of ``torch.nn.functional`` is Python that calls others of PyTorch's."""
    return (
        isinstance(function, types.FunctionType) and function.__globals__ is vars(F)
        and not set(_ASKS).isdisjoint(function.__code__.co_names)
    )  # fmt: skip


@functools.cache
def entered(function: types.FunctionType) -> types.FunctionType:
    """The same function, of which a mode hears the calls that it makes instead of itself."""
    own = {**function.__globals__, **dict.fromkeys(_ASKS, lambda *_: False)}
    made = types.FunctionType(
        function.__code__, own, function.__name__, function.__defaults__, function.__closure__
    )
    made.__kwdefaults__ = function.__kwdefaults__
    hold_literals(made)
    return made
