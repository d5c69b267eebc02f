"""Configurations that tell the truth afterwards: ``model.config.hidden_size`` and the like.

Nothing is known of any configuration. A model that is built from ``config`` alone is built again,
without memory, with new widths in the place of the old ones, and compared with the pruned one: its
shapes, and the numbers that its code goes by. A scale of attention, say, that is computed from a
width stays what it was in a pruned model, and would come out otherwise in one that is built.
"""

from __future__ import annotations

import copy
import warnings
from collections.abc import Collection, Iterable, Iterator, Mapping
from itertools import combinations
from typing import Any

import torch
from torch import nn

from ..modules.inspecting import dotted

Place = tuple[str, int | None]  # dotted name, and the item of one that is a list

_TRIES = 40  # models built before the configuration is given up


def truthful(
    model: nn.Module,
    shapes: Mapping[str, tuple[int, ...]],
    numbers: Mapping[str, Any],
    widths: Iterable[tuple[int, int]],
    read: Collection[str],
    fixed: Collection[str],
) -> dict[str, Any] | str:
    """Values for the integers of ``model.config`` with which its class makes the pruned model.

    Args:
        shapes: of the pruned model's state dict.
        numbers: of its modules' attributes (:func:`attributes`).
        widths: (old, new) of everything that shrinks.
        read: names of the integers that the model's code reads as it runs: they have to come out
            right, as do all other numbers, of which nobody knows whether they are read.
        fixed: those of them that have to stay.

    Returns:
        ``{"config.hidden_size": 32, …}``; where no values do, what is wrong with the best. Empty
        where the model is not made of its configuration.
    """
    config = getattr(model, "config", None)
    if not hasattr(config, "__dict__"):
        return {}
    plain = _build(model, config, {})
    if plain is None or plain[0] != {k: tuple(t.shape) for k, t in model.state_dict().items()}:
        return {}
    now = attributes(model)  # what is other than built already is not for the configuration to say
    numbers = {k: v for k, v in numbers.items() if plain[1].get(k, v) == now.get(k, v)}
    new: dict[int, set[int]] = {}
    for before, after in widths:
        new.setdefault(before, set()).add(after)
    proposals = {
        place: next(iter(new[value])) for place, value in _integers(config)
        if len(new.get(value, ())) == 1 and place[0] not in fixed
    }  # fmt: skip

    def wrong(values: Mapping[Place, int]) -> tuple[list[str], int] | None:
        """Of attributes that come out other than in the pruned model, those that matter, and the
        number of the rest; None for other shapes."""
        built = _build(model, config, values)
        if built is None or built[0] != shapes:
            return None
        differ = {k: built[1][k] for k, v in numbers.items() if built[1].get(k, v) != v}
        matter = [k for k, v in differ.items() if type(v) is not int or k in read]
        return [f"{k} would be {differ[k]}, not {numbers[k]}" for k in matter], len(differ)

    why = "no numbers in it give its widths"
    for chosen in _subsets(proposals):
        best = wrong(chosen)
        if best is None or best[0]:
            why = best[0][0] if best else why
            continue
        for place in list(chosen):  # what does not have to change stays
            rest = {p: v for p, v in chosen.items() if p != place}
            without = wrong(rest)
            if without is not None and not without[0] and without <= best:
                chosen, best = rest, without
        return _values(config, chosen)
    return why


def attributes(model: nn.Module) -> dict[str, Any]:
    """Numbers among the attributes of the model's modules, by dotted name."""
    return {
        dotted(path, key): value for path, module in model.named_modules()
        for key, value in vars(module).items()
        if type(value) in (bool, int, float) and key != "training"
    }  # fmt: skip


def _subsets(proposals: dict[Place, int]) -> Iterator[dict[Place, int]]:
    """All proposals together, then without one of them, without two …"""
    tries = 0
    for left_out in range(len(proposals)):
        for gone in combinations(proposals, left_out):
            yield {p: v for p, v in proposals.items() if p not in gone}
            tries += 1
            if tries == _TRIES:
                return


def _integers(config: Any, prefix: str = "config") -> Iterator[tuple[Place, int]]:
    """Those of a configuration, of the lists in it and of configurations inside it."""
    for key, value in vars(config).items():
        name = f"{prefix}.{key}"
        if key.startswith("_"):
            continue
        if type(value) is int:
            yield (name, None), value
        elif isinstance(value, (list, tuple)) and value and all(type(v) is int for v in value):
            yield from (((name, i), v) for i, v in enumerate(value))
        elif isinstance(value, type(config).__mro__[-2]) and hasattr(value, "__dict__"):
            yield from _integers(value, name)


def _values(config: Any, chosen: Mapping[Place, int]) -> dict[str, Any]:
    """Whole attributes, lists included."""
    values: dict[str, Any] = {}
    for (name, index), number in chosen.items():
        if index is None:
            values[name] = number
            continue
        old = config
        for part in name.split(".")[1:]:
            old = getattr(old, part)
        old = values.get(name, old)
        values[name] = type(old)(number if i == index else n for i, n in enumerate(old))
    return values


def _build(
    model: nn.Module, config: Any, chosen: Mapping[Place, int]
) -> tuple[dict[str, tuple[int, ...]], dict[str, Any]] | None:
    """Shapes and attributes of a model of the class with other numbers in its configuration."""
    trial = copy.deepcopy(config)
    for name, value in _values(trial, chosen).items():
        *path, key = name.split(".")[1:]
        owner = trial
        for part in path:
            owner = getattr(owner, part)
        setattr(owner, key, value)
    try:
        with torch.device("meta"), warnings.catch_warnings(), torch.random.fork_rng(devices=[]):
            warnings.simplefilter("ignore")
            twin = type(model)(trial)
    except Exception:  # whatever a constructor raises says that this is no configuration of it
        return None
    return {name: tuple(t.shape) for name, t in twin.state_dict().items()}, attributes(twin)
