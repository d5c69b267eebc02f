"""What the source says of a call: which of its arguments a tensor was asked for.

``x.to(y.dtype)`` and ``x.to(torch.float32)`` get the same object, which does not know where it came
from. The source does: reads of ``y.dtype`` are kept by their place in it, and a call whose argument
is that expression, or a name that was given it, is one that goes by ``y``.
"""

from __future__ import annotations

import ast
import functools
import itertools
import linecache
from collections.abc import Iterator
from dataclasses import dataclass, field
from types import CodeType, FrameType
from typing import Any

from .frames import caller_of

Place = tuple[int | None, int | None, int | None, int | None]  # lines and columns, from and to
Key = tuple[str, Place]  # of an expression in a file


def place_of(frame: FrameType | None) -> Key | None:
    """Of the expression that ``frame`` is at; None where Python (3.10) does not know."""
    code = frame and frame.f_code
    if frame is None or code is None or not hasattr(code, "co_positions"):
        return None
    place = next(itertools.islice(code.co_positions(), frame.f_lasti // 2, None))
    return code.co_filename, place


def reads_behind(frame: FrameType) -> list[Key]:
    """Reads (``y.dtype``, ``y.type()``) that arguments of the call are which ``frame`` makes."""
    key = place_of(frame)
    if key is None:
        return []
    made = _source(key[0]).calls.get(key[1])
    if made is None:
        return []
    given = (*made.node.args, *(keyword.value for keyword in made.node.keywords))
    return [read for each in given for read in _behind(each, made.function, frame, 0)]


def is_message(frame: FrameType | None) -> bool:
    """Whether what ``frame`` is at is a part of something that is only said, to a log say."""
    key = place_of(frame)
    if key is None or None in key[1]:
        return False
    first, last, start, end = key[1]
    return any(
        (a, c) <= (first, start) and (last, end) <= (b, d)
        for a, b, c, d in _source(key[0]).messages
    )


_MESSAGES = frozenset(
    (
        "print",
        "debug",
        "info",
        "warning",
        "warn",
        "warning_once",
        "error",
        "exception",
        "log",
        "_assert",
    )
)
_SCOPES = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef, ast.Lambda)
_DEEP = 8  # names that are given names


@dataclass
class _Call:
    node: ast.Call
    function: Any  # that it is in


@dataclass
class _Source:
    calls: dict[Place, _Call] = field(default_factory=dict)
    messages: list[Any] = field(default_factory=list)


@functools.lru_cache(maxsize=64)
def imported(filename: str) -> frozenset[str]:
    """The names that ``import`` statements of a file give, but for those inside of functions."""
    try:
        waiting: list[ast.AST] = [ast.parse("".join(linecache.getlines(filename)))]
    except SyntaxError:
        return frozenset()
    found = set()
    while waiting:
        node = waiting.pop()
        if isinstance(node, (ast.Import, ast.ImportFrom)):
            found |= {(name.asname or name.name).partition(".")[0] for name in node.names}
        elif not isinstance(node, _SCOPES):
            waiting += ast.iter_child_nodes(node)
    return frozenset(found - {"*"})


@functools.lru_cache(maxsize=64)
def _source(filename: str) -> _Source:
    found = _Source()
    try:
        tree = ast.parse("".join(linecache.getlines(filename)))
    except SyntaxError:
        return found
    waiting: list[tuple[ast.AST, Any]] = [(tree, tree)]
    while waiting:
        node, function = waiting.pop()
        if isinstance(node, ast.Call):
            for place in places_of(node, node.func):
                found.calls[place] = _Call(node, function)
            if _name(node.func) in _MESSAGES:
                found.messages.append(places_of(node)[0])
        inside = node if isinstance(node, (ast.FunctionDef, ast.Lambda)) else function
        waiting += [(child, inside) for child in ast.iter_child_nodes(node)]
    return found


def places_of(node: Any, attribute: Any = None) -> list[Place]:
    """Where Python says that an expression is: one that is an attribute, or calls one, may begin
    with its name."""
    places = [(node.lineno, node.end_lineno, node.col_offset, node.end_col_offset)]
    if isinstance(attribute, ast.Attribute) and attribute.end_lineno != node.lineno:
        start = attribute.end_col_offset - len(attribute.attr)  # type: ignore[operator]
        places.append((attribute.end_lineno, node.end_lineno, start, node.end_col_offset))
    return places


def _name(function: ast.expr) -> str:
    return function.attr if isinstance(function, ast.Attribute) else getattr(function, "id", "")


def _behind(value: Any, function: Any, frame: FrameType, depth: int) -> Iterator[Key]:
    file = frame.f_code.co_filename
    if isinstance(value, ast.Attribute):
        yield from ((file, place) for place in places_of(value, value))
    elif isinstance(value, ast.Call) and not value.args and _name(value.func) == "type":
        yield from ((file, place) for place in places_of(value, value.func))
    elif isinstance(value, ast.Name) and depth < _DEEP:
        given = _given(function).get(value.id, [])
        if len(given) == 1:
            yield from _behind(given[0], function, frame, depth + 1)
        elif not given:
            yield from _passed(value.id, frame, depth + 1)


def _passed(name: str, frame: FrameType, depth: int) -> Iterator[Key]:
    """What the caller has passed as the argument ``name``."""
    code, caller = frame.f_code, caller_of(frame)
    key = place_of(caller)
    made = None if key is None else _source(key[0]).calls.get(key[1])
    if caller is None or made is None:
        return
    named = {k.arg: k.value for k in made.node.keywords}
    at = _position(code, name)
    if name in named:
        given = named[name]
    elif at is not None and at < len(made.node.args):
        given = made.node.args[at]
    else:
        return
    yield from _behind(given, made.function, caller, depth)


def _position(code: CodeType, name: str) -> int | None:
    names = code.co_varnames[: code.co_argcount]
    names = names[1:] if names[:1] in (("self",), ("cls",)) else names
    return names.index(name) if name in names else None


@functools.lru_cache(maxsize=1024)
def _given(function: Any) -> dict[str, list[ast.expr]]:
    """What each local name of a function is given, wherever it is; None, which generated code gives
    to what it needs no more, is nothing."""
    found: dict[str, list[ast.expr]] = {}
    for node in ast.walk(function):
        if isinstance(node, ast.Assign):
            pairs = [(target, node.value) for target in node.targets]
        elif isinstance(node, (ast.AnnAssign, ast.AugAssign, ast.NamedExpr)) and node.value:
            pairs = [(node.target, node.value)]
        else:
            continue
        for target, value in pairs:
            each: Any = [(target, value)]
            if isinstance(target, ast.Tuple) and isinstance(value, ast.Tuple):
                each = zip(target.elts, value.elts, strict=False)
            for one, its in each:
                if isinstance(its, ast.Constant) and its.value is None:
                    continue
                if isinstance(one, ast.Name):
                    found.setdefault(one.id, []).append(its)
                elif isinstance(one, ast.Tuple):  # of what it is given nothing is known
                    for name in (n for n in ast.walk(one) if isinstance(n, ast.Name)):
                        found.setdefault(name.id, []).append(ast.Constant(...))
    return found
