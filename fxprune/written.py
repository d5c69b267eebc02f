"""Whether a type or a device that a call gets is written in the code, or comes from a tensor.

``x.to(y.dtype)`` and ``x.to(torch.float32)`` get the same object, which does not know where it came
from: the source tells.
"""

from __future__ import annotations

import ast
import functools
import itertools
import linecache
from collections.abc import Iterator
from types import FrameType
from typing import Any

import torch

Place = tuple[int | None, int | None, int | None, int | None]  # lines and columns, from and to


def is_written(value: torch.dtype | torch.device | str, frame: FrameType | None) -> bool:
    """Whether the call that ``frame`` makes now has ``value`` as a literal among its arguments, or
    as a name that was given one. Where the source is not there to be asked, it counts as one."""
    code = frame and frame.f_code
    if frame is None or code is None or not hasattr(code, "co_positions"):  # Python 3.10
        return True
    place = next(itertools.islice(code.co_positions(), frame.f_lasti // 2, None))
    call, function = _calls(code.co_filename).get(place, (None, None))
    if call is None:
        return True
    found = set(_words(call.args, call.keywords))
    names = [word for word in found if word in _assigned(function)]
    found.update(word for name in names for word in _words([_assigned(function)[name]], []))
    if isinstance(value, str):
        return value in found
    kind = type(value).__name__  # dtype, device
    return kind not in found and not found.isdisjoint(_names(value))


@functools.lru_cache(maxsize=64)
def _calls(filename: str) -> dict[Place, tuple[ast.Call, Any]]:
    """Calls of a file by place, each with the function that it is in."""
    try:
        tree = ast.parse("".join(linecache.getlines(filename)))
    except SyntaxError:
        return {}
    found: dict[Place, tuple[ast.Call, Any]] = {}
    waiting: list[tuple[ast.AST, Any]] = [(tree, tree)]
    while waiting:
        node, function = waiting.pop()
        if isinstance(node, ast.Call):
            place = (node.lineno, node.end_lineno, node.col_offset, node.end_col_offset)
            found[place] = (node, function)
        inside = node if isinstance(node, (ast.FunctionDef, ast.Lambda)) else function
        waiting += [(child, inside) for child in ast.iter_child_nodes(node)]
    return found


@functools.lru_cache(maxsize=1024)
def _assigned(function: Any) -> dict[str, ast.expr]:
    """What each local name of a function is given, the last time."""
    given = [node for node in ast.walk(function) if isinstance(node, ast.Assign)]
    return {t.id: node.value for node in given for t in node.targets if isinstance(t, ast.Name)}


def _words(args: list[ast.expr], keywords: list[ast.keyword]) -> Iterator[Any]:
    for argument in (*args, *(keyword.value for keyword in keywords)):
        for node in ast.walk(argument):
            if isinstance(node, ast.Attribute):
                yield node.attr
            elif isinstance(node, ast.Name):
                yield node.id
            elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                yield node.value


@functools.cache
def _names(value: torch.dtype | torch.device) -> set[str]:
    if isinstance(value, torch.device):
        return {value.type, str(value), "device"}
    names = {name for name, known in vars(torch).items() if known is value}
    return names | {str(value).removeprefix("torch.")}
