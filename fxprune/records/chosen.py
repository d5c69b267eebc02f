"""What a plan has chosen, by axes of tensors, as text: enough to come to the same plan again."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import nn

from ..choosing.settings import ATTENTION, BIASES
from ..errors import PlanError
from ..modules.inspecting import shape_of
from ..relating.relations import Relations
from ..rules.channels import SourceAxis
from . import example
from .indices import Indices, Malformed, Table

FLAGS = ("removed", "silent", "carriers")


def as_json(plan: Any, *, with_example: bool = True) -> dict[str, Any]:
    """Of each axis with units that go: its tensor and place, and which of its slices they are."""
    table, axes = Table(), []
    flags = [plan._removed, plan._silent, plan._carriers]
    for axis in plan._relations.sources:
        found = [f[plan._relations.of(axis)] for f in flags]
        if any(f.any() for f in found):
            sets = [table.add(Indices.of_flags(f)) if f.any() else None for f in found]
            place = [list(axis.tensor_shape), list(axis.view), list(axis.dims)]
            axes.append([axis.name, *place, sets])
    settings = plan.settings
    return {
        "attention": settings.attention,
        "bias": settings.bias,
        "exact": settings.exact,
        "outputs": None if settings.outputs is None else list(settings.outputs),
        "masked": plan._telling.masked,
        "dtype": main_dtype(plan._trace.model),
        "example": example.as_json(plan._example_input) if with_example else None,
        "axes": axes,
        "sets": table.to_json(),
    }


def main_dtype(model: nn.Module) -> str:
    """The type of the first parameter of real numbers, which that of an input goes with."""
    for tensor in model.parameters():
        if tensor.is_floating_point():
            return str(tensor.dtype).removeprefix("torch.")
    return ""


@dataclass(frozen=True)
class Chosen:
    """The same, read and checked for form."""

    attention: str
    bias: str
    exact: bool
    outputs: tuple[str | int, ...] | None
    masked: bool
    dtype: torch.dtype | None
    example: Any
    axes: list[tuple[str, tuple[int, ...], tuple[int, ...], tuple[int, ...], list[Indices | None]]]

    @classmethod
    def from_json(cls, value: Any) -> Chosen:
        names = {"attention": str, "bias": str, "exact": bool, "masked": bool, "dtype": str,
                 "axes": list, "sets": list}  # fmt: skip
        wrong = not isinstance(value, dict) or value.keys() != {*names, "outputs", "example"}
        if wrong or any(type(value[k]) is not kind for k, kind in names.items()):
            raise Malformed("a run is recorded in a way that nobody knows")
        outputs = value["outputs"]
        if outputs is not None and not (
            isinstance(outputs, list) and all(type(name) in (str, int) for name in outputs)
        ):
            raise Malformed(f"outputs are {outputs!r}")
        if value["attention"] not in ATTENTION or value["bias"] not in BIASES:
            raise Malformed("a run has settings that nobody knows")
        dtype = getattr(torch, value["dtype"], None) if value["dtype"] else None
        if value["dtype"] and not (isinstance(dtype, torch.dtype) and dtype.is_floating_point):
            raise Malformed(f"a run is of type {value['dtype']!r}")
        sets = [Indices.from_json(item) for item in value["sets"]]
        axes = [_axis(item, sets) for item in value["axes"]]
        return cls(
            value["attention"], value["bias"], value["exact"],
            None if outputs is None else tuple(outputs), value["masked"], dtype,
            value["example"], axes,
        )  # fmt: skip

    def check(self, model: nn.Module) -> None:
        """Raise where a model's tensors are of other shapes."""
        for name, shape, *_ in self.axes:
            found = shape_of(model, name)
            if found != shape:
                given = "no such tensor" if found is None else f"shape {found}"
                raise PlanError(
                    f"the plan was made for a model in which {name} has shape {shape}; this "
                    f"{type(model).__name__} has {given}"
                )

    def flags(self, relations: Relations) -> dict[str, np.ndarray]:
        """For each unit class, whether it is removed, silent, a carrier."""
        size = int(relations.classes.max()) + 1 if len(relations.classes) else 1
        known = {a.key: a for a in relations.sources}
        result = {key: np.zeros(size, dtype=bool) for key in FLAGS}
        for name, _, view, dims, sets in self.axes:
            axis = known.get((name, view, dims))
            if axis is None:
                raise PlanError(
                    f"{name} is used in another way than when the plan was made; pass the example "
                    "input of then as example_input=, or make a new plan"
                )
            for key, indices in zip(FLAGS, sets, strict=True):
                if indices is not None:
                    result[key][relations.of(axis).reshape(-1)[_flags(indices, axis)]] = True
        # The same slices of each axis, and no others.
        for name, _, view, dims, sets in self.axes:
            axis = known[name, view, dims]
            for key, indices in zip(FLAGS, sets, strict=True):
                want = np.zeros(axis.size, dtype=bool) if indices is None else indices.flags
                if (result[key][relations.of(axis).reshape(-1)] != want).any():
                    raise PlanError(
                        f"the channels of {name} are coupled in another way than when the plan was "
                        "made; make a new plan"
                    )
        return result


def _flags(indices: Indices, axis: SourceAxis) -> np.ndarray:
    if indices.rows is not None or indices.size != axis.size:
        raise Malformed(f"{indices.size} flags for the {axis.size} slices of {axis.name}")
    return indices.flags


def _is_list_of(value: Any, kind: type) -> bool:
    return isinstance(value, list) and all(type(item) is kind for item in value)


def _axis(item: Any, sets: list[Indices]) -> Any:
    if not isinstance(item, list) or len(item) != 5 or type(item[0]) is not str:
        raise Malformed("an axis is not [name, shape, view, dims, sets]")
    name, *places, chosen = item
    if not all(_is_list_of(place, int) for place in places) or not isinstance(chosen, list):
        raise Malformed(f"an axis of {name} has no shape")
    if len(chosen) != len(FLAGS) or any(
        i is not None and not (type(i) is int and 0 <= i < len(sets)) for i in chosen
    ):
        raise Malformed(f"an axis of {name} has no units")
    shape, view, dims = map(tuple, places)
    return name, shape, view, dims, [None if i is None else sets[i] for i in chosen]
