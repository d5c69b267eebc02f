"""Where a model holds its tensors, by name, as they are beneath masks of ours."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from ..modules.inspecting import dotted, modules_of
from ..modules.tensor_attributes import fixed_tensors
from ..parametrized.mask import Mask, is_of_masks, parametrizations, unmasked
from ..parametrized.weight_norm import hooked_weights


@dataclass(frozen=True)
class Place:
    """One entry of a module's parameters, buffers or attributes."""

    space: dict[str, Tensor | None]
    key: str
    persistent: bool = True

    @property
    def tensor(self) -> Tensor:
        found = self.space[self.key]
        assert found is not None
        return found


def places(model: nn.Module) -> dict[str, Place]:
    """Every tensor of the model by name; a tied one under each of its names.

    What is under a mask of ours alone goes by the name that it has without.
    """
    found: dict[str, Place] = {}
    for path, module in model.named_modules():
        if isinstance(module, Mask):
            continue
        alone = is_of_masks(module)
        spaces: Any = (module._parameters, module._buffers)
        for space in spaces:
            for key, tensor in space.items():
                if tensor is None:
                    continue
                name = dotted(path, key)
                if alone and key == "original":
                    name = unmasked(path)
                persistent = key not in module._non_persistent_buffers_set
                found[name] = Place(space, key, persistent)
    for fixed in fixed_tensors(modules_of(model)):
        found[fixed.name] = Place(vars(fixed.module), fixed.key, False)
    return found


def computed_names(model: nn.Module) -> set[str]:
    """Names of tensors that parametrizations compute, or hooks that fxprune knows."""
    return {
        dotted(path, key)
        for path, module in model.named_modules()
        for key in (*parametrizations(module), *hooked_weights(module))
    }  # fmt: skip


def names_of(found: dict[str, Place]) -> Iterator[tuple[str, ...]]:
    """The names of each tensor, the first one first."""
    groups: dict[int, list[str]] = {}
    for name, place in found.items():
        groups.setdefault(id(place.tensor), []).append(name)
    yield from (tuple(names) for names in groups.values())
