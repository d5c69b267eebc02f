"""What a pruned model remembers of its pruning: enough to make it of the original again.

Each pruning leaves a :class:`Step` on the model, as text, in a private attribute; copies, pickles
and training keep it. Two prunings become one step where that says the same. The text is written
when it is asked for, which it is of the models that are saved.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from numbers import Integral, Real
from typing import Any

import numpy as np
from torch import Tensor, nn

from ..code import Borrowed
from ..modules.inspecting import dotted, modules_of
from ..parametrized.mask import parametrizations
from ..parametrized.weight_norm import stored_names
from ..replaying.kept_indices import composed
from . import chosen
from .indices import Indices, Malformed, Table

STEPS = "_fxprune_steps"  # of a pruned model: texts, oldest first

Value = bool | int | float | list[Any]  # of an attribute


@dataclass(frozen=True)
class Step:
    """One pruning, or several in a row.

    Attributes:
        path: of the module that was pruned; all names are those in it.
        kept: for each tensor, ``{dim: indices}`` as in ``PruningPlan.kept``.
        resized: other tensors of which a part is left: what a parametrization computes a tensor
            of ``kept`` from, index buffers.
        attributes: new values by dotted name; None where text cannot say one.
        biases: sizes of those that are new.
        lent: modules that run the forward which their pattern lends them.
        code: modules whose forward was written anew.
        run: how it was recorded; None where no forward was written anew.
    """

    path: str = ""
    kept: dict[str, dict[int, Indices]] = field(default_factory=dict)
    resized: tuple[str, ...] = ()
    attributes: dict[str, Value | None] = field(default_factory=dict)
    biases: dict[str, int] = field(default_factory=dict)
    lent: tuple[str, ...] = ()
    code: tuple[str, ...] = ()
    run: Any = None

    def to_json(self) -> dict[str, Any]:
        table = Table()
        kept = {
            name: {str(dim): table.add(indices) for dim, indices in dims.items()}
            for name, dims in self.kept.items()
        }
        text = {name: value for name, value in vars(self).items() if value and name != "kept"}
        return {**text, "kept": kept, "sets": table.to_json()}

    @classmethod
    def from_json(cls, value: Any) -> Step:
        """Checked for form; whether it fits a model is another question."""
        known = expect(value, dict, "a step")
        if unknown := known.keys() - {*cls.__dataclass_fields__, "sets"}:
            raise Malformed(f"a step has {min(unknown)!r}, which nobody knows")
        sets = [Indices.from_json(item) for item in expect(known.get("sets"), list, "sets")]
        kept: dict[str, dict[int, Indices]] = {}
        for name, dims in expect(known.get("kept"), dict, "kept").items():
            for dim, index in expect(dims, dict, f"kept of {name}").items():
                fits = type(index) is int and 0 <= index < len(sets) and dim.isdecimal()
                if not fits or len(dim) > 2:
                    raise Malformed(f"kept of {name} has {dim!r}: {index!r}")
                kept.setdefault(name, {})[int(dim)] = sets[index]
        lists = {
            key: tuple(expect(name, str, key) for name in expect(known.get(key, []), list, key))
            for key in ("resized", "lent", "code")
        }
        attributes: dict[str, Value | None] = {
            name: _checked(value, name)
            for name, value in expect(known.get("attributes", {}), dict, "attributes").items()
        }
        biases = expect(known.get("biases", {}), dict, "biases")
        for name, size in biases.items():
            if expect(size, int, name) < 0:
                raise Malformed(f"{name} would have {size} entries")
        path = expect(known.get("path", ""), str, "path")
        return cls(path, kept, attributes=attributes, biases=biases, run=known.get("run"), **lists)

    def tensors(self) -> dict[str, dict[int, Tensor]]:
        return {name: _tensors(dims) for name, dims in self.kept.items()}

    def within(self, path: str) -> Step:
        """The same of a larger model, in which the pruned one lies at ``path``."""
        return replace(self, path=dotted(path, self.path))


def expect(value: Any, kind: type, what: str) -> Any:
    if type(value) is not kind:
        raise Malformed(f"{what}: {str(value)[:40]!r} is not of the kind {kind.__name__}")
    return value


def _checked(value: Any, name: str) -> Value | None:
    """A number, or a flat list of numbers, as JSON has it."""
    for item in value if isinstance(value, list) else [value]:
        if type(item) not in (bool, int, float) or not abs(item) < 2**53:
            raise Malformed(f"{name} would become {str(value)[:40]!r}, which is no number")
    return value


def _as_json(value: Any) -> Value | None:
    """What an attribute is set to; None where it is no number and no flat list of them."""
    if isinstance(value, (tuple, list)):
        items = [_as_json(item) for item in value]
        return None if any(type(item) in (list, type(None)) for item in items) else items
    if isinstance(value, (bool, np.bool_)):
        return bool(value)
    if isinstance(value, Integral):
        return int(value)
    return float(value) if isinstance(value, Real) else None


class Texts:
    """Those of a model's steps, written when they are asked for; pickled as a tuple of them."""

    def __init__(self, write: Callable[[], tuple[str, ...]]) -> None:
        self._write: Callable[[], tuple[str, ...]] | None = write
        self._written: tuple[str, ...] = ()

    def __iter__(self) -> Iterator[str]:
        if self._write is not None:
            self._written, self._write = self._write(), None
        return iter(self._written)

    def __deepcopy__(self, memo: Any) -> Texts:
        return self  # nothing changes what it says

    def __reduce__(self) -> Any:
        return tuple, (list(self),)


def note(
    plan: Any,
    model: nn.Module,
    attributes: dict[tuple[str, str], Any],
    biases: dict[tuple[str, str], int],
) -> Texts:
    """The history of ``model``, which ``plan`` has just pruned: with what it has set and made, by
    module path and name."""
    # The plan and its model are not held on to.
    kept, shapes, resized = dict(plan.kept), _shapes(plan), list(plan._replay.indices)
    modules = modules_of(model)
    for name in kept:
        path, _, key = name.rpartition(".")
        chain = parametrizations(modules[path])
        if key in chain:
            prefix = f"{path}." if path else ""
            resized += [prefix + name for name in stored_names(chain[key], key)]
    code = tuple(path for path, c in plan.code.items() if not isinstance(c, Borrowed))
    step = Step(
        resized=tuple(resized),
        attributes={dotted(p, k): _as_json(v) for (p, k), v in attributes.items()},
        biases={dotted(p, k): n for (p, k), n in biases.items()},
        lent=tuple(path for path in plan.code if path not in code),
        code=code,
        run=chosen.as_json(plan) if code else None,
    )
    before = _texts(modules)  # these are written now, or each pruning would hold all before it

    def write() -> tuple[str, ...]:
        last = replace(step, kept=_indices(kept, shapes))
        return as_texts(_merged([*in_order(_read(before)), last]))

    return Texts(write)


def kept_of(plan: Any) -> dict[str, dict[int, Indices]]:
    """``plan.kept``, with the widths of before."""
    return _indices(plan.kept, _shapes(plan))


def _shapes(plan: Any) -> dict[str, tuple[int, ...]]:
    return {axis.name: axis.tensor_shape for axis in plan._relations.sources}


def _indices(
    kept: dict[str, dict[int, Tensor]], shapes: dict[str, tuple[int, ...]]
) -> dict[str, dict[int, Indices]]:
    return {
        name: {dim: Indices.of(i, shapes[name][dim]) for dim, i in dims.items()}
        for name, dims in kept.items()
    }


def first_difference(mine: Any, theirs: Any) -> str:
    """The first name about which two steps say other things."""
    if not isinstance(mine, dict):
        return ", ".join(sorted(set(mine) ^ set(theirs))) or "their order"
    return next(name for name in [*theirs, *mine] if mine.get(name) != theirs.get(name))


def histories(model: nn.Module) -> dict[str, list[Step]]:
    """What was pruned of a model, and of the modules in it, by their path."""
    return _read(_texts(modules_of(model)))


def _texts(modules: dict[str, nn.Module]) -> dict[str, tuple[str, ...]]:
    """By path; of a module that lies at several, by the first."""
    paths: dict[nn.Module, str] = {}
    for path, module in modules.items():
        if vars(module).get(STEPS):
            paths.setdefault(module, path)
    return {path: tuple(vars(module)[STEPS]) for module, path in paths.items()}


def _read(found: dict[str, tuple[str, ...]]) -> dict[str, list[Step]]:
    return {p: [Step.from_json(json.loads(text)) for text in texts] for p, texts in found.items()}


def in_order(found: dict[str, list[Step]]) -> list[Step]:
    """The same, oldest first: a module comes before those in it, for what was known of its parts
    when the whole was pruned is among its own."""
    return [step.within(path) for path, several in found.items() for step in several]


def steps(model: nn.Module) -> list[Step]:
    """All that was pruned of a model and of the modules in it, oldest first."""
    return in_order(histories(model))


def as_texts(several: list[Step]) -> tuple[str, ...]:
    return tuple(json.dumps(step.to_json()) for step in several)


def _merged(several: list[Step]) -> list[Step]:
    """Steps of one module in a row become one, where none has to be run again."""
    *before, last = several
    if not before or last.code or before[-1].code or before[-1].path != last.path:
        return several
    first = before[-1]
    kept = dict(first.kept)
    for name, new in last.kept.items():
        old = first.kept.get(name, {})
        found = composed(_tensors(old), _tensors(new), _rows_between(old, new))
        sizes = {dim: indices.size for dim, indices in {**new, **old}.items()}
        kept[name] = {dim: Indices.of(i, sizes[dim]) for dim, i in found.items()}
    merged = Step(
        last.path,
        kept,
        resized=tuple(dict.fromkeys(first.resized + last.resized)),
        attributes=first.attributes | last.attributes,
        biases=first.biases | last.biases,
        lent=tuple(dict.fromkeys(first.lent + last.lent)),
    )
    return [*before[:-1], merged]


def _tensors(dims: dict[int, Indices]) -> dict[int, Tensor]:
    return {dim: indices.tensor() for dim, indices in dims.items()}


def _rows_between(old: dict[int, Indices], new: dict[int, Indices]) -> int:
    """How many rows a tensor has after the first cut; where that tells no groups apart, 0 (any)."""
    if 0 in new:
        return new[0].size
    if 0 in old:
        return old[0].count
    return max((indices.rows or 0 for indices in old.values()), default=0)


def shape_after(name: str, dims: dict[int, Indices], shape: tuple[int, ...]) -> tuple[int, ...]:
    """The new shape of a tensor; raises where its old one is not that of the step."""
    sizes = list(shape)
    for dim, indices in dims.items():
        if dim >= len(shape) or shape[dim] != indices.size:
            raise Malformed(
                f"of dimension {dim} of {name}, {indices.count} of {indices.size} were kept there, "
                f"and it has shape {shape} here"
            )
        sizes[dim] = indices.count
    return tuple(sizes)
