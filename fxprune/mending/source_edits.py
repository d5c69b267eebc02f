"""The source of a method: which expression made a recorded call, and others in its place."""

from __future__ import annotations

import ast
import builtins
import functools
import inspect
import linecache
import operator
import re
from collections import Counter
from collections.abc import Container, Iterable, Iterator
from fractions import Fraction
from itertools import starmap
from types import BuiltinFunctionType, CodeType, FunctionType, ModuleType
from typing import Any

import torch
from torch import fx

from ..code import RESIZED, UNTAKEN, compiled, definition
from ..modules.near import within
from ..modules.source import imported, places_of
from ..replaying.faults import WrongSize, same_sizes, unless_open
from ..replaying.replay import Replay
from ..rules import sizes
from ..rules.ops import argument_at, op_name
from ..rules.registry import for_function
from ..tracing.trace import is_size, set_item

Site = tuple[CodeType, int]  # of a call: the code that makes it, and the place of its instruction


class CannotPatch(Exception):
    """The source does not tell where the sizes are, or they are not all that is wrong."""


@functools.lru_cache(maxsize=512)
def parsed(function: FunctionType) -> tuple[str, ast.FunctionDef, dict[int, list[Any]]]:
    """Its source, what is defined there, and the places of its instructions by code: its own and
    that of what is inside (comprehensions, lambdas)."""
    code = function.__code__
    lines = linecache.getlines(code.co_filename, function.__globals__)
    if not lines or not hasattr(code, "co_positions"):
        raise CannotPatch
    source = "".join(inspect.getblock(lines[code.co_firstlineno - 1 :]))
    try:
        defined = definition(source)
        if not isinstance(defined, ast.FunctionDef) or defined.decorator_list:
            raise CannotPatch
        imports = imported(code.co_filename)
        again = compiled(source, function, imports=imports).__code__
    except SyntaxError as error:  # a lambda, say
        raise CannotPatch from error
    if not _same_code(again, code):  # the file is another now
        raise CannotPatch
    own = code.co_varnames[0] if code.co_argcount else ""
    names = [n.arg for n in ast.walk(defined) if isinstance(n, ast.arg) and n.arg == own]
    if len(names) != 1 or own in _stored(defined):  # not everywhere the module
        raise CannotPatch
    pairs: Any = zip(within(code), within(again), strict=True)
    return source, defined, {id(mine): list(new.co_positions()) for mine, new in pairs}


class Method:
    """The source of a method, and what is replaced in it."""

    def __init__(self, cls: type, name: str) -> None:
        self.function = inspect.getattr_static(cls, name)
        self.source, defined, self._positions = parsed(self.function)
        self._own = [*defined.args.posonlyargs, *defined.args.args][0]
        self._nodes = {
            place: node for node in ast.walk(defined)
            if isinstance(node, (ast.Call, ast.Subscript, ast.BinOp, ast.AugAssign))
            for place in places_of(node, getattr(node, "func", None))
        }  # fmt: skip
        self._operands = {
            side for node in ast.walk(defined) if isinstance(node, ast.BinOp)
            for side in (node.left, node.right)
        }  # fmt: skip
        self._tried = {
            each for node in ast.walk(defined) if isinstance(node, ast.Try)
            for statement in node.body for each in ast.walk(statement)
        }  # fmt: skip
        self._edits: dict[tuple[int, int], str] = {}
        self._shapes = _names_of_shapes(defined)
        self._local = {
            getattr(node, "id", getattr(node, "name", getattr(node, "arg", ""))): node
            for node in ast.walk(defined)
            if (isinstance(node, (ast.FunctionDef, ast.arg)) and node is not defined)
            or (isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store))
        }

    def nodes_at(self, sites: Iterable[tuple[int, int]]) -> list[ast.AST]:
        mine = [self._at(*site) for site in sites if site[0] in self._positions]
        return [node for node in mine if node is not None]

    def _at(self, code: int, instruction: int) -> ast.AST | None:
        """The expression (or augmented assignment) of an instruction."""
        return self._nodes.get(self._positions[code][instruction // 2])

    def sized(self) -> list[ast.AST]:
        """Calls that take sizes, as far as their names tell, where numbers are written or held."""
        return [node for node in dict.fromkeys(self._nodes.values()) if self._held(node)]

    def guard(self, node: Any) -> None:
        """An error where a call that holds sizes gets a tensor."""
        at = node.value if isinstance(node, ast.Subscript) else node.func
        if isinstance(at, ast.Attribute) and isinstance(node, ast.Call):
            at = at.value
            if self._is_module(at):  # a function, which takes the tensor first
                at = next(iter(node.args), None)
        elif isinstance(node, ast.Call):
            at = next(iter(node.args), None)
        if at is None or isinstance(at, ast.Starred) or node in self._tried:
            raise CannotPatch  # what is tried may have been made, and have failed
        self._edit(*self._span(at), f"{self._own.arg}.{UNTAKEN}({self._old(at)})")

    def _is_module(self, at: ast.expr) -> bool:
        """Whether an expression is a module of Python's, such as ``torch`` or ``nn.functional``."""
        while isinstance(at, ast.Attribute):
            at = at.value
        return isinstance(self._global(at), ModuleType)

    def _global(self, at: ast.expr) -> Any:
        """The object behind a global name, or behind an attribute of one; None for local ones."""
        if isinstance(at, ast.Attribute):
            return getattr(self._global(at.value), at.attr, None)
        name = getattr(at, "id", "")
        return None if name in self._local else self.function.__globals__.get(name)

    def _meant(self, call: ast.Call) -> Any:
        """The function that is called, as far as its name tells: a tensor's method, where it is no
        function of somebody else (``einops.repeat``, a helper called ``split``)."""
        known, name = self._global(call.func), _called(call)
        if isinstance(call.func, ast.Name) and isinstance(self._local.get(name), ast.FunctionDef):
            return None
        return getattr(torch.Tensor, name, None) if known is None else known

    def _held(self, node: ast.AST) -> list[ast.expr]:
        """The arguments of a call in which sizes may be."""
        given: list[Any] = []
        if isinstance(node, ast.Subscript) and not _is_shape(node.value):
            parts: list[Any] = [p for p in ast.walk(node.slice) if isinstance(p, ast.Slice)]
            given = [e for p in parts for e in (p.lower, p.upper, p.step)]
        elif (
            isinstance(node, ast.Call) and isinstance(node.func, (ast.Attribute, ast.Name))
            and takes_sizes(self._meant(node))
        ):  # fmt: skip
            given = [*node.args, *(k.value for k in node.keywords)]
        return [e for e in given if e is not None and _may_hold_a_size(e, self._shapes)]

    def replace(self, site: Site, fault: WrongSize, replay: Replay) -> None:
        node, (position, name) = self._at(id(site[0]), site[1]), fault.place
        recorded = fault.node
        if isinstance(node, ast.Call):
            self._check_call(node, recorded)
            if fault.instead is not None:
                self._rename(node, fault.instead)
            # ``torch.Tensor.view(x, …)`` has the tensor among its arguments.
            unbound = self._global(node.func) is not None
            shift = recorded.op == "call_method" and not unbound
            named = {k.arg: k.value for k in node.keywords}
            places = _one_by_one(node.args, len(recorded.args) - shift)
            if fault.instead is not None and name in named:
                raise CannotPatch
            if name in named:
                argument = named[name]
            elif position - shift < len(places):
                argument = places[position - shift]
            else:
                self._add(node, name, fault.needed)
                return
        elif isinstance(node, ast.Subscript) and recorded.target in (operator.getitem, set_item):
            argument = node.slice
        elif isinstance(node, ast.BinOp) and type(node.op) is _BINARY.get(op_name(recorded.target)):
            argument = (node.left, node.right)[position]
        elif (
            isinstance(node, ast.AugAssign) and position == 1
            and type(node.op) is _BINARY.get(op_name(recorded.target))
        ):  # fmt: skip
            argument = node.value
        else:
            raise CannotPatch
        given = argument_at(recorded, position, name)
        self._write(argument, given, fault.computed, fault.needed, replay)

    def keep(self, site: Site, now: Any, then: Any) -> None:
        """The only argument of a function of Python's own, which would be another one now."""
        node: Any = self._at(id(site[0]), site[1])
        if not isinstance(node, ast.Call) or node.keywords or len(node.args) != 1:
            raise CannotPatch
        name, called = getattr(node.func, "id", ""), self._global(node.func)
        if called is None and name not in self._local:
            called = getattr(builtins, name, None)
        if not (called in sizes.LOSING or isinstance(called, BuiltinFunctionType)):
            raise CannotPatch
        at = node.args[0]
        text = f"{self._own.arg}.{RESIZED}({self._old(at)}, {now!r}, {then!r})"
        self._edit(*self._span(at), text)

    def _add(self, node: ast.Call, name: str, needed: Any) -> None:
        """An argument that the code leaves to its default."""
        if not name or not _can_be_written(needed):
            raise CannotPatch
        given = [*node.args, *(k.value for k in node.keywords)]
        end = self._span(node)[1] - 1
        start = max((self._span(each)[1] for each in given), default=end)
        behind = re.sub(rb"#.*", b"", self.source.encode()[start:end])
        comma = ", " if given and b"," not in behind else ""
        self._edit(end, end, f"{comma}{name}={needed!r}")

    def _check_call(self, node: ast.Call, recorded: fx.Node) -> None:
        names = {_called(node), getattr(node.func, "attr", "")}
        target = recorded.target
        if (target if isinstance(target, str) else getattr(target, "__name__", "")) not in names:
            raise CannotPatch
        if any(k.arg is None for k in node.keywords):
            raise CannotPatch

    def _rename(self, node: ast.Call, name: str) -> None:
        if not isinstance(node.func, ast.Attribute):
            raise CannotPatch
        end = self._offset(node.func.end_lineno, node.func.end_col_offset)
        self._edit(end - len(node.func.attr.encode()), end, name)

    def _write(self, at: ast.expr, given: Any, computed: Any, needed: Any, replay: Replay) -> None:
        """What is needed in the place of an expression, of as little of it as is wrong."""
        if isinstance(at, ast.Slice) and isinstance(needed, slice):
            for part, key in ((at.lower, "start"), (at.upper, "stop"), (at.step, "step")):
                old, new = getattr(computed, key), getattr(needed, key)
                if old != new and part is None:
                    raise CannotPatch
                if old != new:  # -1 is a position here, and open nowhere
                    self._replace(part, getattr(given, key), old, new, replay)  # type: ignore[arg-type]
            return
        several = isinstance(needed, (tuple, list)) and isinstance(given, (tuple, list))
        if several and isinstance(at, (ast.Tuple, ast.List)):
            places = _one_by_one(at.elts, len(given))
            if len(places) == len(needed) == len(computed):
                for parts in zip(places, given, computed, needed, strict=True):
                    if not same_sizes(parts[2], parts[3], parts[1]):
                        self._write(*parts, replay)
                return
        self._replace(at, given, computed, unless_open(computed, needed), replay)

    def _replace(
        self, at: ast.expr, given: Any, computed: Any, needed: Any, replay: Replay
    ) -> None:
        if isinstance(at, ast.Starred) or not _can_be_written(needed):
            raise CannotPatch
        if isinstance(at, ast.Slice) and not _is_constant(at):
            raise CannotPatch
        self._edit(*self._span(at), self._text(at, given, computed, needed, replay))

    def _text(self, at: ast.expr, given: Any, computed: Any, needed: Any, replay: Replay) -> str:
        old, made_of = self._old(at), list(sizes_in(given))
        free = any(starmap(replay.is_free, made_of))
        if "training" in old:
            raise CannotPatch
        if _is_constant(at) or (made_of and not free):
            return repr(needed)
        if not free:  # a variable: of what, the run does not tell
            return f"{self._own.arg}.{RESIZED}({old}, {computed!r}, {needed!r})"
        # Some of it is the batch's: its product with the number that makes it right.
        whole = isinstance(needed, int) and isinstance(computed, int) and computed
        if not whole or not _is_product(given):
            raise CannotPatch
        factor = Fraction(needed, computed)
        old = old if isinstance(at, (ast.Name, ast.Attribute, ast.Call)) else f"({old})"
        over = "" if factor.denominator == 1 else f" // {factor.denominator}"
        text = f"{old} * {factor.numerator}{over}" if factor.numerator != 1 else f"{old}{over}"
        return f"({text})" if at in self._operands else text

    def _old(self, node: ast.expr) -> str:
        start, end = self._span(node)
        return self.source.encode()[start:end].decode()

    def _edit(self, start: int, end: int, text: str) -> None:
        if any(a < end and start < b and (a, b) != (start, end) for a, b in self._edits):
            raise CannotPatch
        if self._edits.setdefault((start, end), text) != text:
            raise CannotPatch

    def _span(self, node: ast.expr) -> tuple[int, int]:
        return (
            self._offset(node.lineno, node.col_offset),
            self._offset(node.end_lineno, node.end_col_offset),
        )

    def _offset(self, line: int | None, column: int | None) -> int:
        assert line is not None and column is not None
        lines = self.source.encode().splitlines(keepends=True)
        return sum(map(len, lines[: line - 1])) + column

    def text(self) -> str:
        """The source as it has to be."""
        text = self.source.encode()
        for start, end in sorted(self._edits, reverse=True):
            text = text[:start] + self._edits[start, end].encode() + text[end:]
        return text.decode()


def _one_by_one(expressions: list[ast.expr], count: int) -> list[ast.expr]:
    """The expression of each of ``count`` values; of those that one with a star gives (``*rest``),
    the star's."""
    stars = [i for i, each in enumerate(expressions) if isinstance(each, ast.Starred)]
    if not stars:
        return expressions
    first, behind = stars[0], expressions[stars[-1] + 1 :]
    given = count - first - len(behind)  # by stars
    return [*expressions[:first], *[expressions[first]] * given, *behind]


def takes_sizes(function: Any) -> bool:
    """Whether arguments of a function of PyTorch's are sizes, where a number may be wrong; those of
    functions that rearrange dimensions are names of these."""
    pattern = for_function(function)
    return pattern is not None and pattern.resize is not None and pattern.kind != "permute"


def _same_code(a: CodeType, b: CodeType) -> bool:
    within = [[c for c in code.co_consts if isinstance(c, CodeType)] for code in (a, b)]
    plain = [[c for c in code.co_consts if not isinstance(c, CodeType)] for code in (a, b)]
    return (
        a.co_code == b.co_code and a.co_names == b.co_names and a.co_varnames == b.co_varnames
        and repr(plain[0]) == repr(plain[1]) and len(within[0]) == len(within[1])
        and all(starmap(_same_code, zip(*within, strict=True)))
    )  # fmt: skip


def _is_shape(value: ast.expr) -> bool:
    """``x.shape``, ``x.size()``, and items of these."""
    value = value.value if isinstance(value, ast.Subscript) else value
    called = value.func if isinstance(value, ast.Call) else value
    name = "size" if isinstance(value, ast.Call) else "shape"
    of_self = isinstance(called, ast.Attribute) and getattr(called.value, "id", "") == "self"
    return isinstance(called, ast.Attribute) and called.attr == name and not of_self


def _called(node: ast.Call) -> Any:
    """The method of a tensor that a call may be of, by its name."""
    function: Any = node.func
    return getattr(function, "attr", getattr(function, "id", ""))


_BINARY = {
    "add": ast.Add, "sub": ast.Sub, "mul": ast.Mult, "div": ast.Div, "truediv": ast.Div,
    "floordiv": ast.FloorDiv, "floor_divide": ast.FloorDiv, "pow": ast.Pow,
}  # fmt: skip


def _may_hold_a_size(expression: ast.expr, shapes: Container[str]) -> bool:
    """Whether more is in it than what is read of shapes as it runs, 0, 1 and -1."""
    if _is_shape(expression):
        return False
    if isinstance(expression, ast.Constant):
        return type(expression.value) is int and expression.value > 1
    if isinstance(expression, ast.Name):
        return expression.id not in shapes
    if isinstance(expression, ast.Attribute):
        return True
    parts = [e for e in ast.iter_child_nodes(expression) if isinstance(e, ast.expr)]
    return any(_may_hold_a_size(part, shapes) for part in parts)


def _names_of_shapes(function: ast.FunctionDef) -> set[str]:
    """Local names that are given sizes of tensors, and nothing else: ``b, n, c = x.shape``."""
    of_shapes = Counter(
        name.id for node in ast.walk(function)
        if isinstance(node, ast.Assign) and _is_shape(node.value)
        for target in node.targets for name in ast.walk(target) if isinstance(name, ast.Name)
    )  # fmt: skip
    return {name for name, times in _stored(function).items() if times == of_shapes[name]}


def _stored(function: ast.FunctionDef) -> Counter[str]:
    """How often a function gives each name something."""
    names = (node for node in ast.walk(function) if isinstance(node, ast.Name))
    return Counter(name.id for name in names if isinstance(name.ctx, ast.Store))


def sizes_in(value: Any) -> Iterator[tuple[fx.Node, int]]:
    """The sizes that a recorded argument is made of: whose, and along which dimension."""
    waiting, seen = [value], set()
    while waiting:
        node = waiting.pop()
        if isinstance(node, (tuple, list)):
            waiting += node
        elif isinstance(node, slice):
            waiting += [node.start, node.stop, node.step]
        elif isinstance(node, fx.Node) and node not in seen:
            seen.add(node)
            if is_size(node):
                yield node.args  # type: ignore[misc]
            else:
                waiting += node.all_input_nodes


def _is_constant(expression: ast.expr) -> bool:
    """Whether it is numbers alone."""
    parts = (node for node in ast.walk(expression) if isinstance(node, ast.expr))
    number = (ast.Constant, ast.UnaryOp, ast.BinOp, ast.Tuple, ast.List, ast.Slice)
    return all(isinstance(node, number) for node in parts)


def _is_product(value: Any) -> bool:
    if isinstance(value, fx.Node) and value.target is operator.mul:
        return all(map(_is_product, value.args))
    return isinstance(value, int) or (isinstance(value, fx.Node) and value.target == "size")


def _can_be_written(value: Any) -> bool:
    if isinstance(value, (tuple, list)):
        return all(map(_can_be_written, value))
    return type(value) in (int, float)
