"""What modules keep of one run for the next: tensors made of others (a table of biases, say), in
attributes that were empty. They go by the widths that the run had."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import nn

from . import tree
from .inspecting import OF_TORCH

# By the path of a module and the name of an attribute, the type of what it is while it is empty.
Empty = dict[tuple[str, str], Any]

_MAY_BE_EMPTY = frozenset((type(None), dict, list))


def empty_attributes(modules: Mapping[str, nn.Module]) -> Empty:
    """Those that hold nothing as yet."""
    return {
        (path, name): type(value)
        for path, module in modules.items()
        for name, value in vars(module).items()
        if type(value) in _MAY_BE_EMPTY and not value and name not in OF_TORCH
    }


def filled_since(modules: Mapping[str, nn.Module], empty: Empty) -> Empty:
    """Those of ``empty`` that hold tensors now."""
    return {
        (path, name): kind
        for (path, name), kind in empty.items()
        if tree.tensors(vars(modules[path]).get(name))
    }
