"""Hooks of a layer: its call can be one node of the trace where they do nothing but look on."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import nn

from . import tree


class HooksAct(Exception):
    """Hooks of a layer change what goes in or comes out."""


def call_hooked(original: Callable, m: nn.Module, *args: Any, **kwargs: Any) -> Any:
    """The call of a leaf whose hooks look on. Where they act, it has to be followed inside, hooks
    and all: :class:`HooksAct`."""
    result, acted = call_watched(original, m, *args, **kwargs)
    if acted:
        raise HooksAct
    return result


def call_watched(original: Callable, m: nn.Module, *args: Any, **kwargs: Any) -> tuple[Any, bool]:
    """The call of a module, and whether its hooks pass something else to its forward, or on from
    it, than they get."""
    forward, inside = m.forward, []
    alive = []  # or another tensor could be taken for one of these

    def noted(*given: Any, **named: Any) -> Any:
        inside.append(_identities((given, named)))
        result = forward(*given, **named)
        inside.append(_identities(result))
        alive.append((given, named, result))
        return result

    own = vars(m).get("forward")
    before = _identities((args, kwargs))
    vars(m)["forward"] = noted
    try:
        result = original(m, *args, **kwargs)
    finally:
        vars(m).pop("forward")
        if own is not None:
            vars(m)["forward"] = own
    return result, inside != [before, _identities(result)]


def _identities(value: Any) -> list[tuple[int, int]]:
    """Which tensors there are, and which of their values."""
    found = tree.tensors(value)
    return [(id(t), 0 if t.is_inference() else t._version) for t in found]
