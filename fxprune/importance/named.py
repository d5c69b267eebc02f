"""What ``importance=`` can be, and the scores of a model's groups by it."""

from __future__ import annotations

import fnmatch
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from difflib import get_close_matches
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ..errors import PruningError, SettingError
from ..relating.biases import with_biases
from ..rules.channels import SourceAxis
from .criterion import Context, Criterion, Importance, Unscored
from .slices import Slices, slices
from .weights import FPGM, LAMP, BNScale, Magnitude, Random

NAMED: dict[str, Criterion] = {
    "l1": Magnitude(order=1),
    "l2": Magnitude(order=2),
    "lamp": LAMP(),
    "fpgm": FPGM(),
    "bn_scale": BNScale(),
    "random": Random(),
}
_WITH_DATA = {
    "taylor": "Taylor(batches, loss=...)",
    "fisher": "Fisher(batches, loss=...)",
    "activation": "Activation(batches)",
    "apoz": "Activation(batches, statistic='apoz')",
    "wanda": "Wanda(batches)",
}


def resolve(importance: Any) -> Any:
    """A criterion by name, or one as it is; the values of a mapping likewise.

    Raises:
        SettingError: it is none.
    """
    if isinstance(importance, Mapping):
        return {key: _resolve_one(key, value) for key, value in importance.items()}
    if isinstance(importance, str) and importance == "reconstruction":
        return NAMED["l2"]  # where no layer that reads the units was seen
    if isinstance(importance, str) and importance in NAMED:
        return NAMED[importance]
    if isinstance(importance, type) and issubclass(importance, Criterion):
        name = importance.__name__
        raise SettingError(f"importance={name} is a class; pass an instance: {name}(...)")
    if callable(importance):
        return importance
    if isinstance(importance, str) and importance.lower() in _WITH_DATA:
        wanted = _WITH_DATA[importance.lower()]
        raise SettingError(
            f"importance={importance!r} needs data: pass fxprune.importance.{wanted}"
        )
    known = ", ".join([*sorted(NAMED), "reconstruction"])
    raise SettingError(
        f"importance={importance!r} is unknown; use one of {known}, a criterion of "
        "fxprune.importance, a mapping from group names to criteria or scores, or a callable that "
        "takes a list of fxprune.importance.Slices and returns one score a unit"
    )


def _resolve_one(key: Any, value: Any) -> Any:
    if not isinstance(key, str):
        raise SettingError(f"importance: the key {key!r} is no group name or glob")
    if value is None:  # as plan.groups have it for groups that were not scored
        return NAMED["l2"]
    if isinstance(value, Mapping) or (isinstance(value, str) and value == "reconstruction"):
        raise SettingError(f"importance: {value!r} cannot be that of the one group {key!r}")
    if isinstance(value, (Tensor, np.ndarray, list, tuple)):
        return value
    return resolve(value)


def check_lasting(importance: Any, *, widths: bool = False) -> None:
    """Raise where an importance cannot be asked at more steps than one; ``widths``: which change
    the number of units."""
    found = resolve(importance)
    for key, value in found.items() if isinstance(found, Mapping) else [("", found)]:
        if isinstance(getattr(value, "batches", None), Iterator):
            raise SettingError(
                f"importance: the batches of {type(value).__name__} are an iterator, and every "
                "step goes through them: pass a list, or a DataLoader"
            )
        if widths and not callable(value):
            raise SettingError(
                f"importance: the scores of {key!r} are of the units that there are now, and a "
                "second step finds fewer: pass a criterion or a function, or take one step"
            )


class Scorer:
    """Scores groups by name.

    Args:
        importance: a setting; see :func:`resolve`.
        axes: of each group that will be scored, by name.
        others: names of groups that will not be.
    """

    def __init__(
        self,
        importance: Any,
        context: Context,
        axes: Mapping[str, Sequence[SourceAxis]],
        others: Sequence[str] = (),
    ) -> None:
        found = resolve(importance)
        if isinstance(found, Mapping):
            _check_keys(found, [*axes, *others])
            chosen = {name: _choose(found, name) for name in axes}
        else:
            chosen = dict.fromkeys(axes, found)
        told = with_biases(context.trace, context.relations)
        tensors = {a.name: context.trace.tensor(a.name) for own in axes.values() for a in own}
        self._axes = axes = {
            name: [told(a) for a in own if tensors[a.name].dtype != torch.bool]
            for name, own in axes.items()
        }  # flags, such as a mask that a model keeps, weigh nothing
        size = int(context.relations.classes.max(initial=0)) + 1
        every = {a.first: a for own in axes.values() for a in own}
        self._slices = {  # once for all groups that have a part in an axis; units are classes
            first: slices(tensors[a.name], a, context.classes(a), size)
            for first, a in sorted(every.items())
        }
        self._index = np.full(size, -1)
        self._of_all: dict[int, np.ndarray] = {}  # scores by unit class, of criteria
        self._by_name: dict[str, Any] = {}
        prepared: dict[int, Any] = {}
        for name, criterion in chosen.items():
            if hasattr(criterion, "prepare") and id(criterion) not in prepared:
                mine = [n for n, other in chosen.items() if other is criterion]
                own = {a.first: a for n in mine for a in axes[n]}
                prepared[id(criterion)] = criterion.prepare(
                    replace(context, axes=list(own.values()))
                )
            self._by_name[name] = prepared.get(id(criterion), criterion)

    def __call__(self, name: str, units: np.ndarray) -> np.ndarray:
        """One number for each of a group's units, which are given as classes.

        Raises:
            Unscored: the criterion has nothing to say of the group.
        """
        criterion = self._by_name[name]
        if isinstance(criterion, Criterion) and criterion.unitwise:
            return check(self._at_once(criterion)[units], len(units), name)
        if callable(criterion):
            return scores(criterion, self._group(name, units), name)
        return check(criterion, len(units), name)

    def _at_once(self, criterion: Criterion) -> np.ndarray:
        if id(criterion) not in self._of_all:
            self._of_all[id(criterion)] = criterion(list(self._slices.values()))
        return self._of_all[id(criterion)]

    def _group(self, name: str, units: np.ndarray) -> list[Slices]:
        self._index[units] = np.arange(len(units))
        own = [self._slices[a.first].among(self._index, len(units)) for a in self._axes[name]]
        self._index[units] = -1
        return own


def _check_keys(importance: Mapping[str, Any], names: Sequence[str]) -> None:
    for key in importance:
        if not any(key == name or fnmatch.fnmatchcase(name, key) for name in names):
            near = get_close_matches(key, names, 3)
            hint = f"; did you mean {', '.join(map(repr, near))}?" if near else ""
            raise SettingError(
                f"importance: {key!r} matches no group{hint}. Names are those of plan.groups."
            )


def _choose(importance: Mapping[str, Any], name: str) -> Any:
    if name in importance:
        return importance[name]
    found = [value for key, value in importance.items() if fnmatch.fnmatchcase(name, key)]
    return found[0] if found else NAMED["l2"]


def changed(importance: Any, change: Callable[[np.ndarray, list[Slices]], Any]) -> Any:
    """An importance of which ``change(scores, group)`` gives the scores that count."""
    found = resolve(importance)
    if isinstance(found, Mapping):
        return {key: _Changed(value, change) for key, value in {**found, "*": NAMED["l2"]}.items()}
    return _Changed(found, change)


class _Changed:
    def __init__(self, importance: Any, change: Callable[[np.ndarray, list[Slices]], Any]) -> None:
        self._importance, self._change = importance, change

    def prepare(self, context: Context) -> _Changed:
        if hasattr(self._importance, "prepare"):
            return _Changed(self._importance.prepare(context), self._change)
        return self

    def __call__(self, group: list[Slices]) -> Any:
        found = self._importance(group) if callable(self._importance) else self._importance
        return self._change(check(found, group[0].count, group[0].name), group)


def scores(importance: Importance, group: list[Slices], name: str) -> np.ndarray:
    """One number for each unit of a group; ``name`` is the group's in messages."""
    try:
        found = importance(group)
    except (Unscored, PruningError):
        raise
    except Exception as error:  # whatever the user's own function raises
        raise SettingError(
            f"importance raised {type(error).__name__} for group {name!r}: {error}"
        ) from error
    return check(found, group[0].count, name)


def check(scores: Any, count: int, name: str) -> np.ndarray:
    """Scores as a float array of the right length."""
    if isinstance(scores, Tensor):
        scores = scores.detach().cpu().double().numpy()
    try:
        array = np.asarray(scores, dtype=np.float64)
    except (TypeError, ValueError) as error:
        raise SettingError(
            f"importance returned {type(scores).__name__} for group {name!r}; it has to return one "
            "number a unit"
        ) from error
    if array.shape != (count,):
        raise SettingError(
            f"importance returned shape {array.shape} for group {name!r}; it has {count} units"
        )
    if np.isnan(array).any():
        raise SettingError(f"importance returned NaN for group {name!r}: do its weights hold NaN?")
    return array
