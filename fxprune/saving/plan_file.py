"""A plan in a file: what it has chosen as JSON, for other weights of the same architecture."""

from __future__ import annotations

import base64
import binascii
import hashlib
import json
import os
from collections.abc import Iterable
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from ..choosing.target import MEASURES, Reached
from ..errors import ModelError, PlanError
from ..modules.running import on_cpu
from ..planning.pruning_plan import PruningPlan
from ..records import chosen, container
from ..records.history import Step, expect, first_difference, kept_of
from ..records.indices import Malformed
from ..records.places import places
from ..rules.pattern_types import Pattern
from .restoring import Reason, restore

SCHEMA = 1
_KEYS = {"fxprune", "schema", "model", "chosen", "kept", "groups", "rounding", "target"}


def save(plan: PruningPlan, path: str | os.PathLike[str]) -> None:
    """See :meth:`fxprune.PruningPlan.save`."""
    if plan._mixes:
        raise PlanError(
            "a calibrated plan holds predictions as large as the layers that read them, for the "
            "weights that it was made with; save what it makes of them: fxprune.save"
        )
    kind = type(plan._trace.model)
    about = {
        "fxprune": "plan",
        "schema": SCHEMA,
        "model": f"{kind.__module__}.{kind.__qualname__}",
        "chosen": chosen.as_json(plan),
        "kept": Step(kept=kept_of(plan)).to_json(),
        "groups": [[g.name, g.frozen, _packed(g.importance)] for g in plan.groups],
        "rounding": plan.settings.rounding,
        "target": None if plan.target is None else vars(plan.target),
    }
    with container.replacing(path) as beside:
        beside.write_text(json.dumps({**about, "sha256": _sum(about)}) + "\n")


@on_cpu()
def load(
    path: str | os.PathLike[str],
    model: nn.Module,
    *,
    example_input: Any = None,
    patterns: Iterable[Pattern] = (),
) -> PruningPlan:
    """See :meth:`fxprune.PruningPlan.load`."""
    if not isinstance(model, nn.Module):
        raise ModelError(f"model is {model!r}, not a torch.nn.Module")
    with container.speaking_of(path):
        about = _read(path, 2 * container.room_for(len(places(model))))
        found = chosen.Chosen.from_json(about["chosen"])
        kept = Step.from_json(about["kept"]).kept
        groups = [_group(item) for item in expect(about["groups"], list, "groups")]
        rounding, target = _text(about["rounding"]), _target(about["target"])
        found.check(model)
        plan = restore(model, found, example_input, patterns=patterns, reasons=groups)
    if (now := kept_of(plan)) != kept:
        raise PlanError(
            f"the plan does not fit this {type(model).__name__}: other channels of "
            f"{first_difference(now, kept)} would be kept than when it was made; make a new plan"
        )
    plan.settings, plan.target = replace(plan.settings, rounding=rounding), target
    return plan


def _read(path: str | os.PathLike[str], room: int) -> dict[str, Any]:
    size = container.size_of(path)
    if size > room:
        raise Malformed(f"it has {size} bytes; no plan for such a model has more than {room}")
    try:
        text = Path(path).read_text("utf-8")
    except UnicodeDecodeError as error:
        raise Malformed(f"it is no text: {error}") from error
    about = container.parse(text)
    if not isinstance(about, dict) or about.get("fxprune") != "plan":
        raise Malformed("it is not of PruningPlan.save")
    if about.get("schema") != SCHEMA:
        raise Malformed(
            f"its schema is {str(about.get('schema'))[:20]!r}; this fxprune reads {SCHEMA}"
        )
    given = about.pop("sha256", None)
    if about.keys() != _KEYS or given != _sum(about):
        raise Malformed("its checksum is another: it has been changed")
    return about


def _sum(about: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(about, sort_keys=True).encode()).hexdigest()


def _packed(scores: torch.Tensor | None) -> str | None:
    if scores is None:
        return None
    return base64.b64encode(scores.numpy().astype("<f4").tobytes()).decode()


def _text(value: Any) -> str | None:
    return None if value is None else expect(value, str, "a text")


def _target(value: Any) -> Reached | None:
    if value is None:
        return None
    measure, *numbers = (field.name for field in fields(Reached))
    if expect(value, dict, "the target").keys() != {measure, *numbers}:
        raise Malformed("the target is not of the form that it has")
    for name in numbers:
        if type(value[name]) not in (int, float):
            raise Malformed(f"the target has {str(value[name])[:40]!r} for {name}")
    if value[measure] not in MEASURES:
        raise Malformed(f"the target is one of {str(value[measure])[:40]!r}")
    return Reached(**value)


def _group(item: Any) -> Reason:
    if not isinstance(item, list) or len(item) != 3 or type(item[0]) is not str:
        raise Malformed("a group is not [name, reason, scores]")
    name, frozen, scores = item
    if _text(scores) is None:
        return name, _text(frozen), None
    try:
        found = np.frombuffer(base64.b64decode(scores, validate=True), dtype="<f4")
    except (ValueError, binascii.Error) as error:
        raise Malformed(f"the scores of {name} cannot be read: {error}") from error
    return name, _text(frozen), found.astype(float)
