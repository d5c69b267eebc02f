"""Whether a file is of a model: every name, size and attribute in it is held against the model's.

Nothing is made and nothing is changed here.
"""

from __future__ import annotations

import inspect
import math
from dataclasses import dataclass
from itertools import chain
from numbers import Integral, Real
from typing import Any

import torch
from torch import nn

from ..errors import PlanError
from ..modules.inspecting import dotted, shape_of
from ..records import container
from ..records.container import Container
from ..records.history import Step, Value, expect, in_order, shape_after
from ..records.indices import Malformed
from ..records.places import computed_names, places
from .saver import MASK, SCHEMA, full


@dataclass(frozen=True)
class Description:
    """What the file says beside its tensors, checked for form."""

    model: str
    steps: dict[str, list[Step]]
    ties: dict[str, str]
    masks: list[str]
    channels_last: list[str]
    others: dict[str, str]


def described(file: Container) -> Description:
    about = expect(container.parse(file.text), dict, "its description")
    if about.get("schema") != SCHEMA:
        raise Malformed(
            f"it is written by schema {str(about.get('schema'))[:20]!r}; this fxprune reads "
            f"{SCHEMA}"
        )
    if about.keys() != {"schema", *Description.__dataclass_fields__}:
        raise Malformed("its description says other things than fxprune does")
    found = {
        path: [Step.from_json(item) for item in expect(items, list, "steps")]
        for path, items in expect(about["steps"], dict, "steps").items()
    }
    lists = {key: expect(about[key], list, key) for key in ("masks", "channels_last")}
    names = {key: expect(about[key], dict, key) for key in ("ties", "others")}
    for item in chain(*lists.values(), *(names[key].values() for key in names)):
        expect(item, str, "a name")
    return Description(expect(about["model"], str, "model"), found, **lists, **names)


class Fitting:
    """One file, and one model: whether the one is of the other."""

    def __init__(self, model: nn.Module, file: Container, about: Description) -> None:
        self.model, self.file, self.about = model, file, about
        self.places = places(model)
        self.modules = dict(model.named_modules(remove_duplicate=False))
        self.steps = in_order(about.steps)
        masks = [name + MASK for name in about.masks]
        # Each tensor of the file with all its names in the model.
        self.names = {name: [name] for name in file.shapes if name not in masks}
        for name, first in about.ties.items():
            if first not in self.names:
                raise Malformed(f"{name} is tied to {first}, which it lacks")
            self.names[first].append(name)
        if missing := [name for name in masks if name not in file.shapes]:
            raise Malformed(f"it lacks {missing[0]}")
        self.new: dict[str, tuple[dict[str, Any], str]] = {}  # places of biases
        self.known = computed_names(model)
        self.computed: dict[str, tuple[int, ...]] = {}  # shapes of what parametrizations make

    def misfit(self, what: str) -> PlanError:
        return PlanError(
            f"the file is of a {self.about.model[:200]} and does not fit this "
            f"{type(self.model).__name__}: {what}"
        )

    def check(self) -> None:
        """Raise where the file is not of the model."""
        self._check_names()
        self._check_shapes()

    def _check_names(self) -> None:
        """Every tensor has its place, and every place its tensor."""
        known = {name for names in self.names.values() for name in names}
        for name, place in self.places.items():
            if name not in known and place.persistent:
                raise self.misfit(f"the file has no {name}")
            if name not in known and place.tensor.is_meta:
                raise self.misfit(f"{name}, which the file does not hold, is on the meta device")
        for name in sorted(known - self.places.keys()):
            self.new[name] = self.slot(name)
            shape = self.file.shapes.get(name, ())
            room = max(map(math.prod, self._beside(name)), default=0)
            if len(shape) != 1 or shape[0] > room or not self._is_real(name):
                raise self.misfit(f"{name}, which would be new, has shape {shape}")
        places = [full(step, path) for step in self.steps for path in ("", *step.lent, *step.code)]
        for path in (*self.about.steps, *places):
            if path not in self.modules:
                raise self.misfit(f"the file has a module {path}, and the model has not")
        for name in self.about.masks:
            if shape_of(self.model, name) is None or name not in {*self.places, *self.known}:
                raise self.misfit(f"{name} is masked there")

    def _beside(self, name: str) -> list[tuple[int, ...]]:
        """Shapes in the file of the other tensors of a module, those included that its weights are
        computed from."""
        path, _, key = name.rpartition(".")
        computed = self.modules.get(dotted(path, "parametrizations"))
        names = [k for k in vars(self.modules[path])["_parameters"] if k != key]
        if computed is not None:
            names += [f"parametrizations.{k}" for k, _ in computed.named_parameters()]
        return [self.file.shapes.get(dotted(path, k), ()) for k in names]

    def slot(self, name: str) -> tuple[dict[str, Any], str]:
        """Where a new bias goes: an entry of a module that is empty."""
        path, _, key = name.rpartition(".")
        space = vars(self.modules[path])["_parameters"] if path in self.modules else {}
        if space.get(key, self) is not None:
            raise self.misfit(f"the file has {name}, and the model has no place for it")
        return space, key

    def _check_shapes(self) -> None:
        """Every size is one of the model's own, or what the steps leave of it."""
        shapes = {name: tuple(place.tensor.shape) for name, place in self.places.items()}
        loose: set[str] = set()
        for name, first in self.about.ties.items():
            if shapes.get(name) != shapes.get(first):
                raise self.misfit(f"{name} is {first} there")
        for step in self.steps:
            loose |= {self._first(full(step, name)) for name in step.resized}
            for name, size in step.biases.items():
                self.slot(full(step, name))
                shapes[full(step, name)] = (size,)
            for name, dims in step.kept.items():
                name = full(step, name)
                first = self._first(name)
                if first not in shapes and first in self.known:
                    shapes[first] = self.computed[first] = shape_of(self.model, first) or ()
                if first not in shapes:
                    self.slot(first)  # a bias that masks have made
                    continue
                try:
                    shapes[first] = shape_after(name, dims, shapes[first])
                except Malformed as error:
                    raise self.misfit(str(error)) from error
        self.computed = {name: shapes[name] for name in self.computed}
        for name in self.names:
            self._check_one(name, shapes.get(name), name in loose)
        for name in self.about.masks:
            found, wanted = self.file.shapes[name + MASK], shapes.get(name, self.computed.get(name))
            dtype = self.file.tensor(name + MASK).dtype
            if found != wanted or dtype != torch.bool:
                raise self.misfit(
                    f"the mask of {name} has shape {found} and type {dtype}, and would have "
                    f"{wanted} and {torch.bool} here"
                )

    def _first(self, name: str) -> str:
        return self.about.ties.get(name, name)

    def _check_one(self, name: str, wanted: tuple[int, ...] | None, loose: bool) -> None:
        if wanted is None:
            return  # a bias that masks have made
        found = self.file.shapes[name]
        fits = found == wanted
        if loose and len(found) == len(wanted):
            fits = all(n <= m for n, m in zip(found, wanted, strict=True))
        if not fits:
            raise self.misfit(f"{name} has shape {found} there, and would have {wanted} here")
        there = self.file.tensor(name).dtype
        here = self.places[name].tensor.dtype if name in self.places else there
        if here != there and not (here.is_floating_point and self._is_real(name)):
            raise self.misfit(f"{name} is of type {there} there, and of {here} here")
        if name in self.about.channels_last and len(found) not in (4, 5):
            raise Malformed(f"{name} of shape {found} has its channels last")

    def _is_real(self, name: str) -> bool:
        return self.file.tensor(name).dtype.is_floating_point

    def attribute(
        self, part: nn.Module, step: Step, name: str, value: Value | None
    ) -> tuple[Any, str, Any]:
        """Owner, key and value of an attribute: one that is there, of its kind, no larger."""
        *path, key = name.split(".")
        owner: Any = part
        for i, piece in enumerate(path):
            space = vars(owner) if hasattr(owner, "__dict__") else {}
            owner = space.get("_modules", {}).get(piece, space.get(piece))
            if owner is None:
                whole = full(step, ".".join(path[: i + 1]))
                raise self.misfit(f"the file has {whole}, and the model has not")
        old = vars(owner).get(key, inspect.getattr_static(owner, key, None))
        new = tuple(value) if isinstance(value, list) and isinstance(old, tuple) else value
        largest = max((n for shape in self.file.shapes.values() for n in shape), default=0)
        if not _may_become(old, new, largest):
            raise self.misfit(f"{full(step, name)} is {value!r} there and {str(old)[:40]} here")
        return owner, key, new


def _may_become(old: Any, new: Any, largest: int) -> bool:
    """Whether an attribute of the model may have a new value: a number, or several, of the kind
    that it has, and no size that none of its tensors has."""
    if isinstance(old, (tuple, list)):
        alike = isinstance(new, (tuple, list)) and len(new) == len(old)
        return alike and all(_may_become(a, b, largest) for a, b in zip(old, new, strict=True))
    kinds: Any = ((bool, bool), (Integral, int), (Real, float))  # a file has NumPy's as Python's
    kind = next((kind for wide, kind in kinds if isinstance(old, wide)), None)
    return type(new) is kind and abs(new) <= max(abs(old), largest)
