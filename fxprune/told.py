"""Hearing of calls that PyTorch does not tell of: Python functions and autograd functions that have
a pattern. They become one node of the trace instead of what runs inside them."""

from __future__ import annotations

import contextlib
import types
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from typing import Any

from .ops import Applied

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
    made: dict[str, Any] = {}
    text = f"def {function.__name__}(*args, **kwargs):\n    return {key}(args, kwargs)\n"
    exec(compile(text, "<told by fxprune>", "exec"), made)
    function.__globals__[key] = partial(tell, function, run)
    function.__defaults__, function.__kwdefaults__ = None, None
    function.__code__ = made[function.__name__].__code__
    try:
        yield
    finally:
        function.__code__ = code
        function.__defaults__, function.__kwdefaults__ = defaults, kwdefaults
        del function.__globals__[key]


@contextlib.contextmanager
def _autograd(function: Any, tell: Tell) -> Iterator[None]:
    run, own = function.apply, vars(function).get("apply")

    def apply(*args: Any, **kwargs: Any) -> Any:
        return tell(Applied(function), run, args, kwargs)

    function.apply = staticmethod(apply)
    try:
        yield
    finally:
        if own is None:
            del function.apply
        else:
            function.apply = own
