"""A copy of a model that computes on its own.

``copy.deepcopy`` leaves functions as they are. One that a model keeps and that holds a part of it
(``self.mlpf = lambda x: m.proj(m.fc(x))``, a hook that calls another layer) would go on running the
original's layers in the copy: it gets a copy of its own, which holds the copy's.
"""

from __future__ import annotations

import copy
import copyreg
import functools
import types
import weakref
from collections.abc import Mapping
from typing import Any

from torch import Tensor, nn

from ..errors import ModelError
from . import tree
from .holding import content, inside
from .inspecting import ATOMS, OWN, attributes_of, dotted, is_plain, modules_of, own_tensors
from .near import global_names, methods_of_forward, package_of


def copy_model(model: nn.Module, memo: dict[int, Any] | None = None) -> nn.Module:
    """A deep copy; ``memo`` holds what stands for a tensor, by the tensor's id."""
    memo = dict(memo or {})
    modules = modules_of(model)
    holders = _Holders(modules)
    weak: list[tuple[nn.Module, str, Any]] = []
    kinds: Any = dict.fromkeys(map(type, modules.values()))
    for function in (method for cls in kinds for method in methods_of_forward(cls)):
        holders.check_globals(function)
    for module in modules.values():
        for key, value in attributes_of(module):
            # What a hook computes before each run (nn.utils.weight_norm) has a history, which
            # deepcopy refuses; it is computed anew.
            if isinstance(value, Tensor) and not value.is_leaf:
                memo.setdefault(id(value), value.detach().clone())
            elif holders.hold(value) and isinstance(value, weakref.ref):
                weak.append((module, key, value()))
    made = {id(function): holders.anew(function) for function in holders.functions}
    try:
        known = memo | made
        try:
            copied = _copied(model, memo := dict(known))
        except RuntimeError:
            left: dict[int, Any] = _left_by_runs(model)
            if not left:
                raise
            copied = _copied(model, memo := left | known)
        holders.fill(memo)
        theirs = modules_of(copied)
        _check(modules, theirs, memo)
        for path, module in modules.items():  # a __deepcopy__ may set it anew
            if path in theirs and theirs[path].training != module.training:
                theirs[path].training = module.training
        for module, key, value in weak:
            vars(memo[id(module)])[key] = weakref.ref(memo[id(value)])
        for module in theirs.values() if made else ():
            for name, value in vars(module).items():
                if isinstance(value, types.MethodType) and id(value.__func__) in made:
                    vars(module)[name] = types.MethodType(made[id(value.__func__)], value.__self__)
    except ModelError:
        raise
    except Exception as error:  # whatever the model's own code raises
        raise ModelError(
            f"{type(model).__name__} cannot be copied ({type(error).__name__}: {error}); "
            "pass inplace=True to change the model itself, and verify=False with it: the proof "
            "needs a copy, too"
        ) from error
    return copied


def _left_by_runs(model: nn.Module) -> dict[int, Tensor]:
    """Without its history, each result that a run with gradients has left in a list or an object of
    a module (attention maps, a distribution); by the id of the tensor."""
    return {
        id(t): t.detach().clone() for module in modules_of(model).values()
        for _, value in attributes_of(module) for t in tree.tensors(value) if not t.is_leaf
    }  # fmt: skip


def _copied(model: nn.Module, memo: dict[int, Any]) -> nn.Module:
    """``copy.deepcopy(model, memo)``, in a third of the time: of modules that leave it to ``copy``
    how they are copied, only what has to be copied is given to it."""
    plain: list[nn.Module] = []

    def visit(module: nn.Module) -> None:
        cls: Any = type(module)
        if id(module) not in memo and _is_plain(cls):
            memo[id(module)] = object.__new__(cls)
            plain.append(module)
            for child in module._modules.values():
                if child is not None:
                    visit(child)

    visit(model)
    for module in reversed(plain):  # parts first, as deepcopy does it
        state = {}
        for key, value in _state(module).items():
            if type(value) in ATOMS:
                state[key] = value
            elif key in OWN:
                parts = value.items() if value else ()
                state[key] = {name: copy.deepcopy(part, memo) for name, part in parts}
            elif key in _HOOKS and not value:  # that nobody has set; a handle may know them
                state[key] = memo.setdefault(id(value), type(value)())
            elif is_plain(value):
                state[key] = value
            else:
                state[key] = copy.deepcopy(value, memo)
        memo[id(module)].__setstate__(state)
        kind: Any = type(module)
        for name in _slots(kind):  # which deepcopy would leave out
            if hasattr(module, name):
                value = copy.deepcopy(getattr(module, name), memo)
                object.__setattr__(memo[id(module)], name, value)
    return copy.deepcopy(model, memo)  # which the memo has, or whose class has a way of its own


_HOOKS = frozenset(k for k, v in vars(nn.Module()).items() if isinstance(v, (dict, set))) - {*OWN}
_state: Any = getattr(nn.Module, "__getstate__", vars)
_WAYS = ("__reduce_ex__", "__reduce__", "__new__", "__getnewargs__", "__getnewargs_ex__",
         "__getstate__", "__deepcopy__")  # fmt: skip


@functools.lru_cache(maxsize=1024)
def _is_plain(cls: Any) -> bool:
    """Whether a class leaves it to ``copy`` how its modules are copied: attribute by attribute."""
    ways = (getattr(cls, way, None) is getattr(nn.Module, way, None) for way in _WAYS)
    return all(ways) and cls not in copyreg.dispatch_table


@functools.lru_cache(maxsize=1024)
def _slots(cls: Any) -> tuple[str, ...]:
    """Attributes that the modules of a class keep beside their dictionary."""
    members = (vars(base).items() for base in cls.__mro__)
    return tuple(
        name for each in members for name, value in each
        if isinstance(value, types.MemberDescriptorType)
    )  # fmt: skip


def _check(
    modules: Mapping[str, nn.Module], theirs: Mapping[str, nn.Module], memo: dict[int, Any]
) -> None:
    """Raise where a ``__deepcopy__`` of the model's own makes no copy of what it is given."""
    ways = {cls: getattr(cls, "__deepcopy__", nn.Module) for cls in map(type, modules.values())}
    own = {cls for cls, way in ways.items() if package_of(way) not in ("torch", "fxprune")}
    for path, module in modules.items() if own else ():
        if type(module) not in own:
            continue
        for name, part in modules_of(module).items():
            other = theirs.get(dotted(path, name))
            if other is None:
                continue
            for key, t in {**part._parameters, **part._buffers}.items():
                made = {**other._parameters, **other._buffers}.get(key)
                if other is part or (t is not None and memo.get(id(t)) is not made):
                    raise ModelError(
                        f"{path or 'the model'} cannot be copied: the __deepcopy__ of "
                        f"{type(module).__name__} gives back something else than a copy, whose "
                        "tensors are not copies of these. Pass inplace=True to change the model "
                        "itself, and verify=False with it"
                    )


class _Holders:
    """Functions that hold a part of a model: in their closure, or as a default."""

    def __init__(self, modules: Mapping[str, nn.Module]) -> None:
        self.functions: list[types.FunctionType] = []
        self.made: list[types.FunctionType] = []
        self.cells: dict[int, types.CellType] = {}
        parts = [part for m in modules.values() for part in (m, *own_tensors(m))]
        self._answers: dict[int, bool] = dict.fromkeys(map(id, parts), True)

    def hold(self, value: Any) -> bool:
        """Whether ``value`` is a part of the model or holds one, as far as Python's own
        containers and functions go."""
        if isinstance(value, (int, float, str)):
            return False
        known = self._answers.get(id(value))
        if known is None:
            asked = len(self._answers)
            self._answers[id(value)] = False  # what holds itself holds nothing by that
            if isinstance(value, types.FunctionType):
                self.check_globals(value)
            known = any([self.hold(item) for item in inside(value)])
            if known:  # what holds this one was told that it holds nothing
                for key in [*self._answers][asked:]:
                    self._answers[key] or self._answers.pop(key)
            self._answers[id(value)] = known
            if known and isinstance(value, types.FunctionType):
                self.functions.append(value)
        return known

    def check_globals(self, function: types.FunctionType) -> None:
        """Raise where code reads a part of the model by the name of a global, which is the
        original's in every copy."""
        for name in global_names(function.__code__):
            if self._answers.get(id(function.__globals__.get(name))):
                raise ModelError(
                    f"{function.__qualname__} reads the global {name!r}, which is a part of the "
                    "model: a copy would run the original's. Have it read an attribute of self, or "
                    "pass inplace=True and verify=False"
                )

    def anew(self, function: types.FunctionType) -> types.FunctionType:
        """The same function, with cells of its own for what it holds of the model."""
        new = types.FunctionType(
            function.__code__,
            function.__globals__,
            argdefs=function.__defaults__,
            closure=function.__closure__ and tuple(map(self._own, function.__closure__)),
        )
        for name in (*functools.WRAPPER_ASSIGNMENTS, "__kwdefaults__"):
            setattr(new, name, getattr(function, name))
        vars(new).update(vars(function))
        self.made.append(new)
        return new

    def _own(self, cell: types.CellType) -> types.CellType:
        """Another cell for one that holds something of the model, with that for now."""
        held = content(cell)
        if not any(map(self.hold, held)):
            return cell
        return self.cells.setdefault(id(cell), types.CellType(*held))

    def fill(self, memo: dict[int, Any]) -> None:
        """What the functions hold is the copy's, once ``memo`` knows it."""

        def copied(value: Any) -> Any:
            return copy.deepcopy(value, memo) if self.hold(value) else value

        for cell in self.cells.values():
            cell.cell_contents = copied(cell.cell_contents)
        for new in self.made:
            new.__defaults__ = new.__defaults__ and tuple(map(copied, new.__defaults__))
            named = new.__kwdefaults__
            new.__kwdefaults__ = named and {key: copied(value) for key, value in named.items()}
