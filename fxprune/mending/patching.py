"""The model's own code with other sizes in it: the few expressions that come out wrong are replaced
in the source, and all else that the code does stays.

Python tells at which expression of the source each recorded call was made. Where that does not lead
to the code of a method (a function that others call, a decorator, no source, Python 3.10), or more
is wrong than a size, :mod:`.forwards` writes the module's forward from the recorded graph.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Iterable, Iterator, Sequence
from types import CodeType, FunctionType, SimpleNamespace
from typing import Any

import torch
from torch import fx, nn

from ..code import Patched
from ..modules.holding import inside
from ..modules.inspecting import dotted
from ..modules.near import methods_of_forward, package_of, within
from ..parametrized.mask import parametrizations
from ..parametrized.weight_norm import is_hooked
from ..replaying.faults import Fault, WrongAnswer, WrongSize
from ..replaying.replay import Replay
from ..rules import sizes
from ..tracing.flags import may_read_mode
from ..tracing.runs import OtherRuns
from ..tracing.trace import Trace
from .source_edits import CannotPatch, Method, Site, parsed, takes_sizes


def patch(
    trace: Trace,
    path: str,
    faults: Sequence[Fault],
    replay: Replay,
    others: OtherRuns,
) -> Patched:
    """The methods of the module at ``path`` in which ``faults`` lie, with the right sizes.

    Raises:
        CannotPatch
    """
    return _Patching(trace, path, others).patched(faults, replay)


def fits(cls: type, code: Patched) -> bool:
    """Whether a class has the methods that patches were made from."""
    for name, source in code.originals:
        try:
            if parsed(inspect.getattr_static(cls, name))[0] != source:
                return False
        except (CannotPatch, AttributeError):
            return False
    return True


class _Patching:
    """Of one module."""

    def __init__(self, trace: Trace, path: str, others: OtherRuns) -> None:
        self.trace, self.path, self.others = trace, path, others
        self.module = trace.modules[path]
        self.cls: Any = type(self.module)
        self.methods: dict[str, Method] = {}
        self._names: dict[type, dict[int, str]] = {}

    def patched(self, faults: Sequence[Fault], replay: Replay) -> Patched:
        self._check()
        texts = _before(self.cls)
        wrong: dict[Site, list[WrongSize]] = {}
        for fault in faults:
            if isinstance(fault, WrongAnswer):
                self._keep_answer(fault, replay)
                continue
            if not isinstance(fault, WrongSize) or fault.node.meta.get("site") is None:
                raise CannotPatch
            wrong.setdefault(fault.node.meta["site"], []).append(fault)
        for site, found in wrong.items():
            self._check_every_run(site, found)
            method = self._method_of(site)
            for fault in found:
                if fault.node is found[0].node:
                    method.replace(site, fault, replay)
        self._guard_untaken()
        texts |= {name: method.text() for name, method in self.methods.items()}
        originals = {name: method.source for name, method in self.methods.items()}
        return Patched(tuple(sorted(texts.items())), tuple(sorted(originals.items())))

    def _method_of(self, site: Site | None) -> Method:
        name = None if site is None else self._name_of(self.cls, site[0])
        if name is None:
            raise CannotPatch
        if name not in self.methods:
            self.methods[name] = Method(self.cls, name)
        return self.methods[name]

    def _keep_answer(self, fault: WrongAnswer, replay: Replay) -> None:
        """A plain number that the code makes of a width (``math.sqrt(head_dim)``) is what it was
        when it was recorded: what has come of it stands in the trace."""
        asked = fault.question
        free = (replay.is_free(o.source, o.dim) for o in sizes.dimensions(asked.operands))
        if asked.function not in sizes.LOSING or any(free):
            raise CannotPatch
        for call in self.trace.calls:
            for question in call.questions if call.path == self.path else ():
                if question.key == asked.key:
                    then = sizes.plain(question.operands[0])
                    self._method_of(question.site).keep(question.site, fault.operands[0], then)

    def _check(self) -> None:
        module = self.module
        if "forward" in vars(module) or any(map(is_hooked, parametrizations(module).values())):
            raise CannotPatch
        own = {function for _, function in _functions(self.cls)}
        globals_ = (f.__globals__.get(name) for f in own for name in f.__code__.co_names)
        kept = (*vars(module).values(), *(v for v in globals_ if isinstance(v, _TABLES)))
        if not own.isdisjoint(_functions_in(kept)):
            raise CannotPatch  # which would stay the old ones
        named = _named(self.cls)
        if not named.isdisjoint(("is_grad_enabled", "requires_grad")):  # a recording has it off
            raise CannotPatch
        for name, part in module._modules.items():
            if name in named and part is not None and not self._runs(dotted(self.path, name), part):
                raise CannotPatch

    def _runs(self, path: str, part: nn.Module) -> bool:
        """Whether the run came by a part. What another one makes is as wide as ever, in the place
        of what is narrow now, maybe."""
        if path in self.trace.called or not any(True for _ in part.parameters()):
            return True
        folder = isinstance(part, (nn.ModuleList, nn.ModuleDict))
        return folder and any(dotted(path, key) in self.trace.called for key in part._modules)

    def _check_every_run(self, site: Site, found: list[WrongSize]) -> None:
        """The same sizes have to be right each time that the module makes the call."""
        nodes: dict[fx.Node, list[Any]] = {}
        for node in self.trace.graph.nodes:
            if node.meta.get("site") == site:
                owner = self.trace.module_of(node)
                if owner is self.module:
                    nodes[node] = []
                elif self._name_of(type(owner), site[0]) is None:  # called from elsewhere
                    raise CannotPatch
        for fault in found:
            nodes[fault.node].append((fault.place, fault.needed, fault.instead))
        first, *others = nodes.values()
        if any(other != first for other in others):
            raise CannotPatch

    def _guard_untaken(self) -> None:
        """Calls that the example did not make may hold sizes, too, which nobody knows to be wrong:
        an error where they are made after all. Training mode is no example: what it makes has to be
        right."""
        made, in_training = self._made(self.trace), None
        for name in dict.fromkeys(name for name, _ in _functions(self.cls)):
            function: Any = inspect.getattr_static(self.cls, name)
            if not isinstance(function, FunctionType):
                continue
            try:
                method = self.methods.get(name) or Method(self.cls, name)
            except CannotPatch:
                if _takes_sizes(function):
                    raise
                continue
            taken = method.nodes_at(made)
            untaken = [node for node in method.sized() if node not in taken]
            if not untaken:
                continue
            if in_training is None:
                other = self.others.training if may_read_mode(self.module) else None
                in_training = set() if other is None else self._made(other)
            there = method.nodes_at(in_training)
            aside = self._name_of(self.cls, function.__code__) is None
            if aside or any(node in there for node in untaken):
                raise CannotPatch
            for node in untaken:
                method.guard(node)
            self.methods[name] = method

    def _made(self, trace: Trace) -> set[tuple[int, int]]:
        """The calls that the code of the module makes: which code, and which of its instructions.
        What a part of it makes by a method of its own is among them, and of others of its kind
        nothing."""
        module = trace.modules[self.path]
        found = set()
        for node in trace.graph.nodes:
            if node.meta.get("site") is not None:
                owner, (code, at) = trace.module_of(node), node.meta["site"]
                if owner is module or self._name_of(type(owner), code) is None:
                    found.add((id(code), at))
        return found

    def _name_of(self, cls: type, code: CodeType) -> str | None:
        """Of the method of a class that has this code. None where it is none, or where other names
        lead to it as well (an alias, a table of functions, a base's method by ``super()``)."""
        if cls not in self._names:
            runs = methods_of_forward(cls)  # what others define is there already, and stays
            self._names[cls] = {
                id(inner): name for name, function in _functions(cls)
                if _is_known_by(cls, function) == name for inner in within(function.__code__)
                if inner is function.__code__ or function in runs
            }  # fmt: skip
        return self._names[cls].get(id(code))


def _before(cls: Any) -> dict[str, str]:
    """What an earlier pruning has patched."""
    code = vars(cls).get("_fxprune_code", Patched(()))
    if not isinstance(code, Patched):  # a forward of names of its own
        raise CannotPatch
    return dict(code.methods)


def _is_known_by(cls: type, function: FunctionType) -> str | None:
    """The one name that leads to a method."""
    named = [
        (base, name) for base in cls.__mro__ for name, value in vars(base).items()
        if value is function or function in _held_in(value)
    ]  # fmt: skip
    if len(named) != 1:
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


def _named(cls: type) -> set[str]:
    """What the methods of a class name; those of bases that others hide only with ``super``."""
    seen = {name: function for name, function in reversed([*_functions(cls)])}
    for functions in (seen.values(), (function for _, function in _functions(cls))):
        codes = (code for function in functions for code in within(function.__code__))
        named = {name for code in codes for name in code.co_names}
        if "super" not in named:
            break
    return named


_TABLES = (dict, list, tuple, functools.partial, SimpleNamespace)


def _functions_in(values: Iterable[Any]) -> set[FunctionType]:
    """Those that attributes, or globals, hold: in a table, bound to a module, wrapped."""
    waiting, found, seen = [*values], set(), set()
    while waiting:
        value = waiting.pop()
        if id(value) in seen or isinstance(value, nn.Module):
            continue
        seen.add(id(value))
        if isinstance(value, FunctionType):
            found.add(value)
        waiting += inside(value)
        if isinstance(value, SimpleNamespace):
            waiting += vars(value).values()
        if hasattr(value, "cache_info"):  # of ``functools.lru_cache``
            waiting.append(getattr(value, "__wrapped__", None))
    return found


def _held_in(value: Any) -> list[Any]:
    """Functions in a table, or behind a ``functools.partialmethod``."""
    if isinstance(value, dict):
        return [v for v in value.values() if isinstance(v, FunctionType)]
    if isinstance(value, (list, tuple)):
        return [v for v in value if isinstance(v, FunctionType)]
    return [value.func] if isinstance(value, functools.partialmethod) else []


def _takes_sizes(function: FunctionType) -> bool:
    """Whether code names a method of tensors that takes sizes."""
    names = {name for code in within(function.__code__) for name in code.co_names}
    return any(takes_sizes(getattr(torch.Tensor, name, None)) for name in names)
