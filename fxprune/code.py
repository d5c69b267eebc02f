"""Forwards that take the place of a module's own: as source, with what new code asks as it runs.

Models that were saved with such a forward, and the source itself, name what is in this file.
"""

from __future__ import annotations
import __future__

import ast
import copy
import functools
import inspect
import linecache
import operator
import textwrap
import types
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import Tensor, fx

from .errors import PruningError
from .modules.deriving import derived
from .modules.frames import REWRITTEN


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

    def methods_for(self, base: type) -> dict[str, Any]:
        space = {
            k: __import__(v[7:], fromlist=["_"]) if isinstance(v, str) and v[:7] == "module:" else v
            for k, v in self.names
        }
        exec(compile(self.source, _shown_as_file(self.source), "exec"), space)
        return {"forward": space["forward"]}


@dataclass(frozen=True)
class Patched:
    """Methods of the module's own class as source, with other sizes in it."""

    methods: tuple[tuple[str, str], ...]  # name, source
    originals: tuple[tuple[str, str], ...] = ()  # what they were made from
    stale = ()

    @property
    def source(self) -> str:
        return "\n".join(textwrap.dedent(text) for _, text in self.methods)

    def methods_for(self, base: type) -> dict[str, Any]:
        return {
            name: compiled(text, inspect.getattr_static(base, name)) for name, text in self.methods
        }


def definition(source: str) -> ast.stmt:
    """What a source defines, indented as it may be: strings of several lines stay as they are."""
    if not source[:1].isspace():
        return ast.parse(source).body[0]
    block: Any = ast.parse(f"if 1:\n{source}").body[0]
    return ast.increment_lineno(block, -1).body[0]


def compiled(
    source: str, function: types.FunctionType, *, imports: frozenset[str] = frozenset()
) -> types.FunctionType:
    """A method with other source: it sees the same globals, defaults, and variables of closures.

    Args:
        imports: the names that came by ``import`` statements of the file. Python makes other code,
            of the same meaning, of calls on those.
    """
    free = function.__code__.co_freevars
    # Names of two underscores go by that of the class, less underscores in front, and super() by
    # what a class's code has beside it. With some more, no code means this class by its own name.
    name = (function.__qualname__.split(".")[-2:-1] or ["_"])[0].strip("<>") or "_"
    given = ", ".join(variable for variable in free if variable != "__class__")
    outer: Any = ast.parse(f"def outer({given}):\n class ______{name}: pass").body[0]
    outer.body[0].body = [definition(source)]
    known = [ast.Import([ast.alias(name)]) for name in sorted(imports)]
    tree = ast.fix_missing_locations(ast.Module([*known, outer], []))
    flags = function.__code__.co_flags & _FUTURE
    code = compile(tree, _shown_as_file(source), "exec", flags=flags, dont_inherit=True)
    for _ in range(3):  # the function's code is inside the class's, and that in the outer one's
        code = next(c for c in code.co_consts if isinstance(c, types.CodeType))
    cells = dict(zip(free, function.__closure__ or (), strict=True))
    new = types.FunctionType(
        code, function.__globals__, function.__name__, function.__defaults__,
        tuple(cells[name] for name in code.co_freevars),
    )  # fmt: skip
    new.__kwdefaults__, new.__doc__ = function.__kwdefaults__, function.__doc__
    new.__annotations__, new.__qualname__ = function.__annotations__, function.__qualname__
    new.__module__ = function.__module__
    return new


_FUTURE = functools.reduce(
    lambda a, b: a | b, (getattr(__future__, n).compiler_flag for n in __future__.all_feature_names)
)


def _shown_as_file(source: str) -> str:
    """The name under which tracebacks and debuggers find it."""
    name = f"{REWRITTEN} {abs(hash(source))}>"
    linecache.cache[name] = (len(source), None, source.splitlines(True), name)
    return name


@dataclass(frozen=True)
class Borrowed:
    """A forward of fxprune's own, for a layer whose class has none for its new widths."""

    forward: Callable[..., Any]

    @property
    def source(self) -> str:
        return inspect.getsource(self.forward)

    stale = ()

    def methods_for(self, base: type) -> dict[str, Any]:
        return {"forward": self.forward}


Written = Code | Borrowed | Patched


def rewritten_class(base: type, code: Written) -> type:
    """A subclass of ``base``, under its name, that runs ``code``. It pickles and deep-copies."""
    base = vars(base).get("_fxprune_base", base)  # of a module rewritten before
    return _make_class(base, code)


@cache
def _make_class(base: Any, code: Written) -> type:
    def __reduce_ex__(self: Any, protocol: int) -> Any:
        return _restore, (base, code), self.__dict__

    space = {
        **{name: _stale(base, name) for name in code.stale},
        "__module__": base.__module__,
        "__qualname__": base.__qualname__,
        "__doc__": base.__doc__,
        "__reduce_ex__": __reduce_ex__,
        "_fxprune_base": base,
        "_fxprune_code": code,
        "_fxprune_stale": code.stale,
        UNTAKEN: _untaken,
        RESIZED: _resized,
        **code.methods_for(base),
    }
    if issubclass(base, fx.GraphModule):  # whose copies, code and pickles are made from its graph
        space |= {"__deepcopy__": _copied, "code": property(lambda self: code.source)}
        space |= {"recompile": _of_old_sizes, "__reduce_ex__": _of_old_sizes}
    return derived(base, base.__name__, space)


UNTAKEN, RESIZED = "_fxprune_untaken", "_fxprune_resized"


def _untaken(self: Any, value: Any) -> Any:
    """What patched code calls for a tensor, or a size, that meets sizes in a part of the code that
    the recorded run did not come by; lists and token ids have such slices, too, and no channels."""
    if isinstance(value, Tensor) and not (value.is_floating_point() or value.is_complex()):
        return value
    if not isinstance(value, (Tensor, int, torch.Size)):
        return value
    raise PruningError(
        f"{type(self).__name__} was pruned on an input, in a mode and with settings that left this "
        "part of its code out, so nobody knows whether the sizes in it still fit; prune the model "
        "as it is to run"
    )


def _resized(self: Any, size: Any, before: Any, now: Any) -> Any:
    """What patched code calls for a size that a variable holds."""
    if not (size == before or (isinstance(size, (tuple, list)) and list(size) == list(before))):
        raise PruningError(
            f"{type(self).__name__} was pruned where a size was {before!r}, which is {now!r} now; "
            f"it is {size!r} here, and nobody knows what it has to be. Prune the model as it is "
            "to run"
        )
    return now


def _copied(self: Any, memo: dict[int, Any]) -> Any:
    new = memo[id(self)] = object.__new__(type(self))
    vars(new).update(copy.deepcopy(vars(self), memo))
    return new


def _of_old_sizes(self: Any, *_: Any) -> Any:
    raise PruningError(
        f"the graph of this {type(self).__name__} has the sizes from before it was pruned, and its "
        "forward was written anew. Record it again, by fxprune.trace(model, example_input) or "
        "torch.fx.symbolic_trace, or prune the module that it was traced from"
    )


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


def _restore(base: type, code: Written) -> Any:
    cls = rewritten_class(base, code)
    return object.__new__(cls)


def expect_argument(value: Any, recorded: Any, name: str) -> None:
    """The new code is that of one run: an argument that changed its way has to be the same."""
    if not _same(value, recorded):
        raise PruningError(
            f"this code was written from a run with {name}={recorded!r}, and cannot take "
            f"{value!r}; plan with the example input that you need"
        )


def expect_answer(answer: Any, recorded: Any, question: str) -> None:
    """The code asked something of sizes, and went the way of the answer."""
    if not _same(answer, recorded):
        raise PruningError(
            f"this code was written from a run in which {question} was {recorded!r}; it is "
            f"{answer!r} now. Record or prune the model as it is to run, on an input of such a size"
        )


# What code asks of sizes that a graph can ask again.
QUESTIONS: dict[str, Callable[..., Any]] = {
    function.__name__: function
    for function in (
        operator.eq, operator.ne, operator.lt, operator.le, operator.gt, operator.ge,
        operator.truth, int, float, len,
    )
}  # fmt: skip


def expect_again(function: str, recorded: Any, question: str, *operands: Any) -> None:
    """A question of the code's as one call of a graph, which is recorded as such where somebody
    records it (as pickling a graph does)."""
    for operand in operands:
        if isinstance(operand, fx.Proxy):
            given = (function, recorded, question, *operands)
            operand.tracer.create_proxy("call_function", expect_again, given, {})
            return
    expect_answer(QUESTIONS[function](*operands), recorded, question)


def _same(now: Any, recorded: Any) -> bool:
    if now is recorded:
        return True
    if isinstance(now, Tensor) and torch.jit.is_tracing():  # where sizes are tensors
        now = now.item()
    if isinstance(now, Tensor) or isinstance(recorded, Tensor):
        return False
    if isinstance(recorded, bool):  # traced sizes make answers of a kind of their own
        return (True if now else False) == recorded  # noqa: SIM210 (which compilers follow)
    return bool(now == recorded) or (now != now and recorded != recorded)  # NaN


def _keys(arguments: Any) -> tuple[Any, ...]:
    """The names of keyword arguments, the places of positional ones."""
    return tuple(arguments) if isinstance(arguments, dict) else tuple(range(len(arguments)))


def take(x: Tensor, dim: int, positions: list[int]) -> Tensor:
    """Slices of ``x`` at ``positions`` along ``dim``: channels in the order the next layer has."""
    # A list in an index can be followed, and changed, where the result is pruned again.
    index: tuple[Any, ...] = (*[slice(None)] * dim, positions)
    return x[index]
