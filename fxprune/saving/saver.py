"""Saving a pruned model: its tensors, and what was done to it, in one safetensors file.

Nothing in the file is code. :func:`fxprune.load` makes the model of its original again.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, fx, nn

from ..errors import ModelError
from ..modules.given import check_path
from ..modules.inspecting import dotted, shape_of
from ..modules.running import on_cpu
from ..modules.usable import check_bare
from ..parametrized.mask import mask_of, masked_names
from ..records import container
from ..records.history import Step, histories, steps
from ..records.places import Place, computed_names, names_of, places
from ..rewriting.rewrite import memory_format

SCHEMA = 1
MASK = ":mask"  # after a tensor's name: where it is not masked


@on_cpu()
def save(model: nn.Module, path: str | os.PathLike[str]) -> None:
    """Write a pruned model into one file, from which :func:`fxprune.load` makes it again.

    The file is a safetensors file: any reader of those gets the tensors, by their names in
    ``model.state_dict()``. Beside them it says, as JSON, what was pruned. What a state dict leaves
    out stays out (gradients, the training flag, buffers that are not persistent, unless pruning
    changed them), and a file that was there is replaced when the new one is whole.

    Args:
        model: what :func:`fxprune.prune`, :meth:`fxprune.PruningPlan.apply` or
            :func:`fxprune.compact` returned, as it is now: trained, pruned again, with masks of
            :mod:`fxprune.masks`, in another type, on a GPU; or a model that has such a one in it.
        path: where to.

    Raises:
        ModelError: it was not pruned, has changed in another way since, or holds what no
            safetensors file can: quantized or sparse tensors.
        FileError: the file cannot be written.
    """
    check_path(path)
    history = _history(model)
    found = places(model)
    _check_unchanged(model, found, history)
    pruned = {full(step, name) for step in history for name in (*step.kept, *step.resized)}
    tensors: dict[str, Tensor] = {}
    about: dict[str, Any] = {
        "schema": SCHEMA,
        "model": f"{type(model).__module__}.{type(model).__qualname__}",
        "steps": {at: [s.to_json() for s in some] for at, some in histories(model).items()},
        "ties": {},
        "masks": [],
        "channels_last": [],
        "others": {},  # the types of buffers that are not in the file
    }
    for names in names_of(found):
        first = names[0]
        if not any(found[name].persistent or name in pruned for name in names):
            about["others"][first] = str(found[first].tensor.dtype).removeprefix("torch.")
            continue
        tensor = _storable(first, found[first])
        about["ties"] |= dict.fromkeys(names[1:], first)
        if memory_format(tensor) != torch.contiguous_format:
            about["channels_last"].append(first)
        tensors[first] = tensor.cpu().resolve_conj().contiguous()
    for path_in, module in model.named_modules():
        for key in masked_names(module):
            name = dotted(path_in, key)
            about["masks"].append(name)
            tensors[name + MASK] = mask_of(module, key).cpu().contiguous()
    container.write(path, tensors, json.dumps(about, separators=(",", ":")))


def full(step: Step, name: str) -> str:
    """A name of a step in the whole model."""
    return dotted(step.path, name)


def _history(model: Any) -> list[Step]:
    if not isinstance(model, nn.Module):
        raise ModelError(f"model is a {type(model).__name__}, not a torch.nn.Module")
    check_bare(model)
    history = steps(model)
    if not history:
        graph = isinstance(model, fx.GraphModule)
        hint = "prune with as_graph=False" if graph else "save what fxprune.prune has returned"
        raise ModelError(
            f"this {type(model).__name__} does not say what was pruned of it: {hint}. "
            "For a model that is whole, torch.save(model.state_dict()) does"
        )
    for step in history:
        for name, value in step.attributes.items():
            if value is None:
                raise ModelError(
                    f"{full(step, name)} was set to something that is neither a number nor a flat "
                    "tuple of numbers, and no file can say it; use torch.save(model)"
                )
    return history


def _check_unchanged(model: nn.Module, found: Iterable[str], history: list[Step]) -> None:
    """Raise where a tensor has other widths than pruning has left it with."""
    stored, computed = {*found}, computed_names(model)
    resized = tuple(full(step, name) for step in history for name in step.resized)
    widths = {
        (full(step, name), dim): indices.count
        for step in history for name, dims in step.kept.items() for dim, indices in dims.items()
    }  # fmt: skip
    for (name, dim), width in widths.items():
        shape = shape_of(model, name)
        if shape is None or dim >= len(shape) or shape[dim] != width:
            now = "is gone" if shape is None else f"has shape {shape} now"
            raise ModelError(
                f"{name} {now}, and pruning has left it {width} wide in dimension {dim}: this "
                "model has changed since. Put the change into what builds it, and prune that"
            )
        if name in computed - stored:
            path, _, key = name.rpartition(".")
            beneath = dotted(path, f"parametrizations.{key}."), f"{name}_g"
            if not any(other.startswith(beneath) for other in resized):
                raise ModelError(
                    f"{name} is computed by what was put on it since it was pruned, and the "
                    "original has no place for that: take it off first, or put it on before pruning"
                )
        elif name not in stored:
            raise ModelError(
                f"{name} is computed by a hook, from tensors that the original does not have: take "
                "it off first (torch.nn.utils.prune.remove, or masks.from_torch_prune)"
            )
    for step in history:
        for name, before, *_ in (step.run or {}).get("axes", ()):  # which load plans with again
            name = full(step, name)
            shape = shape_of(model, name) or ()
            for dim, width in enumerate(before):
                if (name, dim) not in widths and shape[dim : dim + 1] != (width,):
                    raise ModelError(
                        f"{name} has shape {shape} now, and was {width} wide in dimension {dim} "
                        "when a forward was written for it: this model has changed since. Put the "
                        "change into what builds it, and prune that"
                    )
    for path, module in model.named_modules():
        if type(module).get_extra_state is not nn.Module.get_extra_state:
            raise ModelError(
                f"{path or type(model).__name__} has an extra state, which may be anything; "
                "use torch.save(model)"
            )


def _storable(name: str, place: Place) -> Tensor:
    tensor = place.tensor
    plain = type(tensor) in (Tensor, nn.Parameter, nn.Buffer) and tensor.layout == torch.strided
    if tensor.is_meta:
        raise ModelError(f"{name} is on the meta device and has no values; load weights first")
    if not plain or tensor.is_quantized or tensor.dtype == torch.complex32:
        kind = f"{type(tensor).__name__} of {tensor.dtype} and {tensor.layout}"
        raise ModelError(
            f"{name} is a {kind}, which no safetensors file holds. Save before such a conversion "
            "(quantization, say), or use torch.save(model)"
        )
    return tensor.detach()
