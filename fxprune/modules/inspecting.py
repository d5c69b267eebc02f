"""Inspecting a module: its parts, tensors and attributes, by name."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize

OWN = ("_parameters", "_buffers", "_modules")  # where a module has its own parts


def dotted(path: str, name: str) -> str:
    """``name`` in the module at ``path``, which is empty for the model itself."""
    return f"{path}.{name}" if path and name else path or name


def modules_of(model: nn.Module) -> dict[str, nn.Module]:
    """``dict(model.named_modules(remove_duplicate=False))``, in a tenth of the time."""
    found: dict[str, nn.Module] = {}

    def visit(path: str, module: nn.Module) -> None:
        found[path] = module
        if module._modules:  # most have none
            for name, child in module._modules.items():
                if child is not None:
                    visit(f"{path}.{name}" if path else name, child)

    visit("", model)
    return found


def parts_of(model: nn.Module) -> list[nn.Module]:
    """``list(model.modules())``, in a tenth of the time."""
    found: dict[nn.Module, None] = {}

    def visit(module: nn.Module) -> None:
        if module not in found:
            found[module] = None
            if module._modules:
                for child in module._modules.values():
                    if child is not None:
                        visit(child)

    visit(model)
    return list(found)


def is_torchs_layer(m: nn.Module) -> bool:
    """Whether it is one of ``torch.nn``, without parts."""
    return type(m).__module__.startswith("torch.nn.") and not any(
        part is not None for part in m._modules.values()
    )


OF_TORCH = frozenset(vars(nn.Module()))  # parameters, hooks, children
ATOMS = frozenset((bool, int, float, str, type(None)))


def is_plain(value: Any) -> bool:
    """Whether it is a number, a word, or a tuple of such: nothing that could change or hold."""
    return type(value) in ATOMS or (type(value) is tuple and ATOMS.issuperset(map(type, value)))


def attributes_of(module: nn.Module) -> list[tuple[str, Any]]:
    """What a module has besides its own parts, numbers and words: its attributes, and hooks."""
    return [
        (key, value) for key, value in vars(module).items()
        if type(value) not in ATOMS
        and (value and key not in OWN if key in OF_TORCH else not is_plain(value))
    ]  # fmt: skip


def named_tensors(modules: Mapping[str, nn.Module]) -> Iterator[tuple[str, Tensor]]:
    """Parameters, then buffers; one that goes by several names has the first."""
    seen: set[int] = set()
    for kind in ("_parameters", "_buffers"):
        for path, module in modules.items():
            own = getattr(module, kind)
            for name, t in own.items() if own else ():
                if t is not None and id(t) not in seen:
                    seen.add(id(t))
                    yield f"{path}.{name}" if path else name, t


def all_tensors(module: nn.Module) -> dict[str, Tensor]:
    """Parameters and buffers of a module and its parts; one that goes by several names has them
    all."""
    return {
        dotted(path, key): t for path, part in modules_of(module).items()
        for key, t in (*part._parameters.items(), *part._buffers.items()) if t is not None
    }  # fmt: skip


def own_tensors(module: nn.Module) -> list[Tensor]:
    """Parameters and buffers of a module, without those of its parts."""
    own = (*module._parameters.values(), *module._buffers.values())
    return [t for t in own if t is not None]


def tensors_of(module: nn.Module) -> dict[str, Tensor]:
    """Parameters and buffers of a module and its parts, as they are stored."""
    return {**dict(module.named_parameters()), **dict(module.named_buffers())}


def tensor_names(module: nn.Module) -> list[str]:
    """Parameters and buffers as the code of a module and its parts reads them: absent ones too, and
    parametrized ones by their own name."""
    if not module._modules:
        return list(dict.fromkeys([*module._parameters, *module._buffers]))
    computed = [
        dotted(path, name) for path, part in module.named_modules()
        for name in getattr(part, "parametrizations", ())
    ]  # fmt: skip
    names = [*module._parameters, *module._buffers, *computed, *tensors_of(module)]
    return [n for n in dict.fromkeys(names) if ".parametrizations." not in f".{n}"]


_NO_TENSORS = ATOMS | {tuple, list, dict, set, OrderedDict}


def computed_by_hook(module: nn.Module) -> str:
    """Name of a tensor that is a plain attribute of a module, such as the weight of
    ``nn.utils.weight_norm``, or ``""``. (One number is none: a width, say, that is a tensor.)"""
    own = vars(module)
    kinds = {*map(type, own.values())} - _NO_TENSORS  # of most modules none is left
    if not any(issubclass(kind, Tensor) for kind in kinds):
        return ""
    tensors = ((key, value) for key, value in own.items() if isinstance(value, Tensor))
    return next((key for key, value in tensors if value.dim()), "")


def count_parameters(model: nn.Module) -> int:
    """How many numbers the parameters hold."""
    return sum(p.numel() for p in model.parameters())


def device_of(model: nn.Module) -> torch.device:
    return next((t.device for t in tensors_of(model).values()), torch.device("cpu"))


def read_attribute(root: nn.Module, name: str) -> Any:
    value: Any = root
    for part in name.split("."):
        own = value.__dict__ if isinstance(value, nn.Module) else {}
        for kind in _PARTS if "_modules" in own else ():  # where getattr() looks last
            if part in own[kind]:
                value = own[kind][part]
                break
        else:
            value = read_from(value, part)
    return value


_PARTS = ("_modules", "_parameters", "_buffers")


def read_from(owner: Any, name: str) -> Any:
    """An attribute. A parametrization computes it as in eval
    mode: in training mode some write to their buffers each time (spectral norm)."""
    if not isinstance(owner, nn.Module) or "parametrizations" not in owner._modules:
        return getattr(owner, name)
    if not parametrize.is_parametrized(owner, name):
        return getattr(owner, name)
    parts = list(owner.parametrizations[name].modules())  # type: ignore[index, union-attr]
    modes = [part.training for part in parts]
    try:
        for part in parts:
            vars(part)["training"] = False
        return getattr(owner, name)
    finally:
        for part, mode in zip(parts, modes, strict=True):
            vars(part)["training"] = mode


def shape_of(model: nn.Module, name: str) -> tuple[int, ...] | None:
    """None where the model has no such tensor."""
    try:
        found = read_attribute(model, name)
    except AttributeError:
        return None
    return tuple(found.shape) if isinstance(found, Tensor) else None
