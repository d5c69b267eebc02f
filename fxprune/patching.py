"""The model's own code with other sizes in it: the few expressions that come out wrong are replaced
in the source, and all else that the code does stays.

Python tells at which expression of the source each recorded call was made. Where that does not lead
to the code of a method (a function that others call, a decorator, no source, Python 3.10), or more
is wrong than a size, :mod:`fxprune.forwards` writes the module's forward from the recorded graph.
"""

from __future__ import annotations

import ast
import functools
import inspect
import linecache
import operator
from collections import Counter
from collections.abc import Callable, Container, Iterable, Iterator, Sequence
from fractions import Fraction
from itertools import starmap
from types import CodeType, FunctionType, MethodType, ModuleType
from typing import Any

import torch
from torch import fx, nn

from .code import RESIZED, UNTAKEN, Patched, compiled, definition, inside
from .faults import Fault, WrongSize, same_sizes
from .flags import may_read_mode
from .hooked import is_hooked
from .inspecting import dotted
from .mask import parametrizations
from .near import package_of
from .ops import op_name
from .recording import Trace
from .registry import for_function
from .replay import Replay

Site = tuple[CodeType, int]  # of a call: the code that makes it, and the place of its instruction


class CannotPatch(Exception):
    """The source does not tell where the sizes are, or they are not all that is wrong."""


def patch(
    trace: Trace,
    path: str,
    faults: Sequence[Fault],
    replay: Replay,
    trained: Callable[[], Trace | None],
) -> Patched:
    """The methods of the module at ``path`` in which ``faults`` lie, with the right sizes.

    Args:
        trained: gives the trace of the model in training mode, None where it does not run so.

    Raises:
        CannotPatch
    """
    module = trace.modules[path]
    if "forward" in vars(module) or any(map(is_hooked, parametrizations(module).values())):
        raise CannotPatch
    _check_parts(trace, path)
    texts = _before(type(module))
    wrong: dict[Site, list[WrongSize]] = {}
    for fault in faults:
        if not isinstance(fault, WrongSize) or fault.node.meta.get("site") is None:
            raise CannotPatch
        wrong.setdefault(fault.node.meta["site"], []).append(fault)
    methods: dict[str, _Method] = {}
    for (code, at), found in wrong.items():
        _check_every_run(trace, module, (code, at), found)
        name = _name_of(type(module), code)
        if name is None:
            raise CannotPatch
        method = methods.setdefault(name, _Method(type(module), name))
        for fault in _of_first(found):
            method.replace((code, at), fault, replay)
    _guard_untaken(trace, path, methods, trained)
    texts |= {name: method.text() for name, method in methods.items()}
    originals = sorted((name, method.source) for name, method in methods.items())
    return Patched(tuple(sorted(texts.items())), tuple(originals))


def _before(cls: Any) -> dict[str, str]:
    """What an earlier pruning has patched."""
    code = vars(cls).get("_fxprune_code", Patched(()))
    if not isinstance(code, Patched):  # a forward of names of its own
        raise CannotPatch
    return dict(code.methods)


def _of_first(found: list[WrongSize]) -> list[WrongSize]:
    return [fault for fault in found if fault.node is found[0].node]


def _check_every_run(trace: Trace, module: nn.Module, site: Site, found: list[WrongSize]) -> None:
    """The same sizes have to be right each time that the module makes the call."""
    nodes: dict[fx.Node, list[Any]] = {}
    for node in trace.graph.nodes:
        if node.meta.get("site") == site:
            owner = trace.module_of(node)
            if owner is module:
                nodes[node] = []
            elif _name_of(type(owner), site[0]) is None:  # a part's method, called from elsewhere
                raise CannotPatch
    for fault in found:
        nodes[fault.node].append((fault.place, fault.needed, fault.instead))
    first, *others = nodes.values()
    if any(other != first for other in others):
        raise CannotPatch


def _name_of(cls: type, code: CodeType) -> str | None:
    """Of the method of a class that has this code. None where it is none, or where other names
    lead to it as well (an alias, a table of functions, a base's method by ``super()``)."""
    own = [f for _, f in _functions(cls) if any(c is code for c in inside(f.__code__))]
    function: Any = own[0] if own else None
    named = [
        (base, name) for base in cls.__mro__ for name, value in vars(base).items()
        if value is function or function in _held_in(value)
    ]  # fmt: skip
    if function is None or len(named) != 1:
        return None
    base, name = named[0]
    derived = [c for c in cls.__mro__[: cls.__mro__.index(base)] if "_fxprune_base" not in vars(c)]
    by_super = any("super" in f.__code__.co_names for c in derived for _, f in _functions_of(c))
    return None if by_super or inspect.getattr_static(cls, name) is not function else name


def _functions(cls: type) -> Iterator[tuple[str, FunctionType]]:
    """The methods of a class and its bases, but for PyTorch's, as far as they are plain functions
    and none that Python calls by itself."""
    for base in cls.__mro__:
        if package_of(base) != "torch" and base is not object:
            yield from _functions_of(base)


def _functions_of(cls: type) -> Iterator[tuple[str, FunctionType]]:
    for name, value in vars(cls).items():
        if isinstance(value, FunctionType) and not name.startswith(("__", "_fxprune")):
            yield name, value


def _names(cls: type) -> set[str]:
    """What the methods of a class name; those of bases that others hide only with ``super``."""
    seen = {name: function for name, function in reversed([*_functions(cls)])}
    for functions in (seen.values(), (function for _, function in _functions(cls))):
        codes = (code for function in functions for code in inside(function.__code__))
        named = {name for code in codes for name in code.co_names}
        if "super" not in named:
            break
    return named


def _held_in(value: Any) -> list[Any]:
    """Functions in a table, or behind a ``functools.partialmethod``."""
    if isinstance(value, dict):
        return [v for v in value.values() if isinstance(v, FunctionType)]
    if isinstance(value, (list, tuple)):
        return [v for v in value if isinstance(v, FunctionType)]
    return [value.func] if isinstance(value, functools.partialmethod) else []


def _guard_untaken(
    trace: Trace, path: str, methods: dict[str, _Method], trained: Callable[[], Trace | None]
) -> None:
    """Calls that the example did not make may hold sizes, too, which nobody knows to be wrong: an
    error where they are made after all. Training mode is no example: what it makes has to be right.
    """
    cls: Any = type(trace.modules[path])
    made = _made(trace, path)
    in_training: set[tuple[int, int]] = set()
    for name in dict.fromkeys(name for name, _ in _functions(cls)):
        function: Any = inspect.getattr_static(cls, name)
        if not isinstance(function, FunctionType):
            continue
        try:
            method = methods.get(name) or _Method(cls, name)
        except CannotPatch:
            if _takes_sizes(function):
                raise
            continue
        taken = method.nodes_at(made)
        untaken = [node for node in method.sized() if node not in taken]
        if untaken and may_read_mode(trace.modules[path]) and not in_training:
            other = trained()
            in_training = set() if other is None else _made(other, path)
        there = method.nodes_at(in_training)
        aside = untaken and _name_of(cls, function.__code__) is None
        if aside or any(node in there for node in untaken):
            raise CannotPatch
        for node in untaken:
            method.guard(node)
            methods[name] = method


def _takes_sizes(function: FunctionType) -> bool:
    """Whether code names a method of tensors that takes sizes."""
    names = {name for code in inside(function.__code__) for name in code.co_names}
    found = (for_function(getattr(torch.Tensor, name, None)) for name in names)
    return any(pattern is not None and pattern.resize is not None for pattern in found)


def _check_parts(trace: Trace, path: str) -> None:
    """What a part makes that the run did not come by is as wide as ever, in the place of what is
    narrow now, maybe."""
    module = trace.modules[path]
    named = _names(type(module))
    for name, part in module._modules.items():
        runs = part is None or not any(True for _ in part.parameters())
        if name in named and not runs and dotted(path, name) not in trace.called:
            folder = isinstance(part, (nn.ModuleList, nn.ModuleDict))
            inner = any(dotted(dotted(path, name), key) in trace.called for key in part._modules)  # type: ignore[union-attr]
            if not (folder and inner):
                raise CannotPatch
    if not named.isdisjoint(("is_grad_enabled", "requires_grad")):  # which a recording has off
        raise CannotPatch
    bound = (v for v in vars(module).values() if isinstance(v, MethodType))
    if any(v.__func__ in [f for _, f in _functions(type(module))] for v in bound):
        raise CannotPatch


def _made(trace: Trace, path: str) -> set[tuple[int, int]]:
    """The calls that the code of a module makes: which code, and which of its instructions. What a
    part of it makes by a method of its own is among them, and of others of its kind nothing."""
    module = trace.modules[path]
    found = set()
    for node in trace.graph.nodes:
        if node.meta.get("site") is not None:
            owner, (code, at) = trace.module_of(node), node.meta["site"]
            if owner is module or _name_of(type(owner), code) is None:
                found.add((id(code), at))
    return found


def fits(cls: type, code: Patched) -> bool:
    """Whether a class has the methods that patches were made from."""
    for name, source in code.originals:
        try:
            if _parsed(inspect.getattr_static(cls, name))[0] != source:
                return False
        except (CannotPatch, AttributeError):
            return False
    return True


@functools.lru_cache(maxsize=512)
def _parsed(function: FunctionType) -> tuple[str, ast.FunctionDef, dict[int, list[Any]]]:
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
        ways = [compiled(source, function, imports=known).__code__ for known in (True, False)]
    except SyntaxError as error:  # a lambda, say
        raise CannotPatch from error
    again = next((way for way in ways if _same_code(way, code)), None)
    if again is None:  # the file is another now
        raise CannotPatch
    own = code.co_varnames[0] if code.co_argcount else ""
    names = [n.arg for n in ast.walk(defined) if isinstance(n, ast.arg) and n.arg == own]
    if len(names) != 1 or own in _stored(defined):  # not everywhere the module
        raise CannotPatch
    pairs: Any = zip(inside(code), inside(again), strict=True)
    return source, defined, {id(mine): list(new.co_positions()) for mine, new in pairs}


class _Method:
    """The source of a method, and what is replaced in it."""

    def __init__(self, cls: type, name: str) -> None:
        self.function = inspect.getattr_static(cls, name)
        self.source, defined, self._positions = _parsed(self.function)
        self._own = [*defined.args.posonlyargs, *defined.args.args][0]
        self._nodes = {
            place: node for node in ast.walk(defined)
            if isinstance(node, (ast.Call, ast.Subscript, ast.BinOp)) for place in _places(node)
        }  # fmt: skip
        self._edits: dict[tuple[int, int], str] = {}
        self._shapes = _names_of_shapes(defined)

    def nodes_at(self, sites: Iterable[tuple[int, int]]) -> list[ast.expr]:
        mine = [self._at(*site) for site in sites if site[0] in self._positions]
        return [node for node in mine if node is not None]

    def _at(self, code: int, instruction: int) -> ast.expr | None:
        """The expression of an instruction."""
        return self._nodes.get(self._positions[code][instruction // 2])

    def sized(self) -> list[ast.expr]:
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
        if at is None or isinstance(at, ast.Starred):
            raise CannotPatch
        self._edit(*self._span(at), f"{self._own.arg}.{UNTAKEN}({self._old(at)})")

    def _is_module(self, at: ast.expr) -> bool:
        """Whether an expression is a module of Python's, such as ``torch`` or ``nn.functional``."""
        while isinstance(at, ast.Attribute):
            at = at.value
        known = self.function.__globals__.get(getattr(at, "id", ""))
        return isinstance(at, ast.Name) and isinstance(known, ModuleType)

    def _held(self, node: ast.expr) -> list[ast.expr]:
        """The arguments of a call in which sizes may be."""
        given: list[Any] = []
        if isinstance(node, ast.Subscript) and not _is_shape(node.value):
            parts: list[Any] = [p for p in ast.walk(node.slice) if isinstance(p, ast.Slice)]
            given = [e for p in parts for e in (p.lower, p.upper, p.step)]
        elif isinstance(node, ast.Call) and isinstance(node.func, (ast.Attribute, ast.Name)):
            pattern = for_function(getattr(torch.Tensor, _called(node), None))
            if pattern is not None and pattern.resize is not None:
                given = [*node.args, *(k.value for k in node.keywords)]
        return [e for e in given if e is not None and _may_hold_a_size(e, self._shapes)]

    def replace(self, site: Site, fault: WrongSize, replay: Replay) -> None:
        node, (position, name) = self._at(id(site[0]), site[1]), fault.place
        recorded = fault.node
        if isinstance(node, ast.Call):
            self._check_call(node, recorded)
            if fault.instead is not None:
                self._rename(node, fault.instead)
            shift = recorded.op == "call_method"
            named = {k.arg: k.value for k in node.keywords}
            if fault.instead is not None and name in named:
                raise CannotPatch
            if name in named:
                argument = named[name]
            elif position - shift < len(node.args):
                argument = node.args[position - shift]
            else:
                self._add(node, name, fault.needed)
                return
        elif isinstance(node, ast.Subscript) and op_name(recorded.target) in ("getitem", "setitem"):
            argument = node.slice
        elif isinstance(node, ast.BinOp) and type(node.op) is _BINARY.get(op_name(recorded.target)):
            argument = (node.left, node.right)[position]
        else:
            raise CannotPatch
        given = recorded.args[position] if position < len(recorded.args) else recorded.kwargs[name]
        self._write(argument, given, fault.computed, fault.needed, replay)

    def _add(self, node: ast.Call, name: str, needed: Any) -> None:
        """An argument that the code leaves to its default."""
        if not name or not _can_be_written(needed):
            raise CannotPatch
        end = self._span(node)[1] - 1
        before = self.source.encode()[:end].rstrip()
        comma = "" if before[-1:] in b",(" else ", "
        self._edit(end, end, f"{comma}{name}={_literal(needed)}")

    def _check_call(self, node: ast.Call, recorded: fx.Node) -> None:
        names = {_called(node), getattr(node.func, "attr", "")}
        target = recorded.target
        if (target if isinstance(target, str) else getattr(target, "__name__", "")) not in names:
            raise CannotPatch
        if any(isinstance(a, ast.Starred) for a in node.args) or any(
            k.arg is None for k in node.keywords
        ):
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
                if old != new:
                    self._write(part, getattr(given, key), old, new, replay)  # type: ignore[arg-type]
            return
        several = isinstance(needed, (tuple, list)) and isinstance(at, (ast.Tuple, ast.List))
        if several and len(at.elts) == len(needed) == len(computed) == len(given):  # type: ignore[attr-defined]
            for parts in zip(at.elts, given, computed, needed, strict=True):  # type: ignore[attr-defined]
                if not same_sizes(parts[2], parts[3], parts[1]):
                    self._write(*parts, replay)
            return
        if isinstance(at, ast.Starred) or not _can_be_written(needed):
            raise CannotPatch
        self._edit(*self._span(at), self._text(at, given, computed, needed, replay))

    def _text(self, at: ast.expr, given: Any, computed: Any, needed: Any, replay: Replay) -> str:
        old, made_of = self._old(at), list(_sizes_in(given))
        if "training" in old:
            raise CannotPatch
        if _is_constant(at) or (made_of and not any(starmap(replay.is_free, made_of))):
            return _literal(needed)
        if not any(starmap(replay.is_free, made_of)):  # a variable: of what, the run does not tell
            return f"{self._own.arg}.{RESIZED}({old}, {_literal(computed)}, {_literal(needed)})"
        # Some of it is the batch's: its product with the number that makes it right.
        whole = isinstance(needed, int) and isinstance(computed, int) and computed
        if not whole or not _is_product(given):
            raise CannotPatch
        factor = Fraction(needed, computed)
        old = old if isinstance(at, (ast.Name, ast.Attribute, ast.Call)) else f"({old})"
        over = "" if factor.denominator == 1 else f" // {factor.denominator}"
        return f"{old} * {factor.numerator}{over}" if factor.numerator != 1 else f"{old}{over}"

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


def _places(node: Any) -> list[tuple[int, int, int, int]]:
    """Where Python says that an expression is: a call of a method may begin with its name."""
    places = [(node.lineno, node.end_lineno, node.col_offset, node.end_col_offset)]
    function = getattr(node, "func", None)
    if isinstance(function, ast.Attribute) and function.end_lineno != node.lineno:
        start = function.end_col_offset - len(function.attr)  # type: ignore[operator]
        places.append((function.end_lineno, node.end_lineno, start, node.end_col_offset))  # type: ignore[arg-type]
    return places


def _same_code(a: CodeType, b: CodeType) -> bool:
    inside = [[c for c in code.co_consts if isinstance(c, CodeType)] for code in (a, b)]
    plain = [[c for c in code.co_consts if not isinstance(c, CodeType)] for code in (a, b)]
    return (
        a.co_code == b.co_code and a.co_names == b.co_names and a.co_varnames == b.co_varnames
        and repr(plain[0]) == repr(plain[1]) and len(inside[0]) == len(inside[1])
        and all(starmap(_same_code, zip(*inside, strict=True)))
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
    return function.attr if isinstance(function, ast.Attribute) else function.id


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


def _sizes_in(value: Any) -> Iterator[tuple[fx.Node, int]]:
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
            if node.op == "call_method" and node.target == "size":
                yield node.args  # type: ignore[misc]
            else:
                waiting += node.all_input_nodes


def _is_constant(expression: ast.expr) -> bool:
    """Whether it is numbers alone."""
    inside = (node for node in ast.walk(expression) if isinstance(node, ast.expr))
    number = (ast.Constant, ast.UnaryOp, ast.BinOp, ast.Tuple, ast.List)
    return all(isinstance(node, number) for node in inside)


def _is_product(value: Any) -> bool:
    if isinstance(value, fx.Node) and value.target is operator.mul:
        return all(map(_is_product, value.args))
    return isinstance(value, int) or (isinstance(value, fx.Node) and value.target == "size")


def _can_be_written(value: Any) -> bool:
    if isinstance(value, (tuple, list)):
        return all(map(_can_be_written, value))
    return type(value) in (int, float)


def _literal(value: Any) -> str:
    return repr(list(value) if isinstance(value, list) else value)
