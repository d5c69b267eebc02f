"""Inputs to calibrate on: what of a user's batches the model takes."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from torch import Tensor, nn

from ..errors import InputError, SettingError
from . import tree
from .inspecting import device_of
from .running import describe

_PLAIN = (bool, int, float, complex, str, bytes, type(None))


def check_limit(limit: Any, name: str) -> None:
    if limit is not None and (type(limit) is not int or limit < 1):
        raise SettingError(f"{name}={limit!r} is no positive integer")


class Batches:
    """A user's batches, without labels and on the model's device; they can be gone through twice.

    Args:
        given: an iterable of inputs, or of ``(input, label)``.
        limit: how many to take; None for all.
        names: of the settings that these two are, for messages.
    """

    def __init__(
        self,
        given: Iterable[Any],
        model: nn.Module,
        example_input: Any,
        limit: int | None = None,
        names: tuple[str, str] = ("calibration", "calibration_batches"),
    ) -> None:
        self._name = names[0]
        if isinstance(given, (Tensor, str, Mapping)) or not isinstance(given, Iterable):
            raise SettingError(
                f"{names[0]}={type(given).__name__} is no iterable of batches; pass a DataLoader, "
                f"or a list of inputs: {names[0]}=[inputs]"
            )
        check_limit(limit, names[1])
        # What can be gone through once only is kept; a data loader is asked again.
        self._given = list(itertools.islice(given, limit)) if isinstance(given, Iterator) else given
        self._limit, self._example = limit, example_input
        self._device = device_of(model)

    def __iter__(self) -> Iterator[Any]:
        for batch in self._taken():
            given = as_input(batch, self._example, self._name)
            check_plain(given, self._example, self._name)
            yield self._moved(given)

    def whole(self) -> Iterator[Any]:
        """The batches as they are given, labels too."""
        for batch in self._taken():
            mapping = hasattr(batch, "keys")  # not each is a dict
            yield self._moved({k: batch[k] for k in batch.keys()} if mapping else batch)  # noqa: SIM118

    def _moved(self, batch: Any) -> Any:
        return tree.map_tensors(batch, lambda t: t.to(self._device))

    def _taken(self) -> Iterator[Any]:
        empty = True
        for batch in itertools.islice(self._given, self._limit):
            empty = False
            found = tree.tensors(dict(batch) if hasattr(batch, "keys") else batch)
            if found and not any(t.numel() for t in found):
                raise InputError(f"{self._name}: a batch, {describe(batch)}, holds no sample")
            yield batch
        if empty:
            raise SettingError(
                f"{self._name} has no batches; an iterator can be gone through once only"
            )


def as_input(batch: Any, example_input: Any, name: str) -> Any:
    """What of a batch is the model's input, told by the example: labels are left out."""
    if hasattr(example_input, "keys"):
        if not hasattr(batch, "keys"):
            batch = batch[0] if isinstance(batch, (tuple, list)) and batch else batch
        if not hasattr(batch, "keys"):
            raise InputError(
                f"{name}: example_input is a mapping, but a batch is {type(batch).__name__}"
            )
        missing = [key for key in example_input.keys() if key not in batch.keys()]  # noqa: SIM118
        if missing:
            raise InputError(f"{name}: a batch has no {missing[0]!r}, which example_input has")
        return {key: batch[key] for key in example_input.keys()}  # noqa: SIM118
    if isinstance(example_input, tuple):
        nested = [isinstance(b[0], (tuple, list)) if isinstance(b, (tuple, list)) and b else False
                  for b in (batch, example_input)]  # fmt: skip
        if nested == [True, False]:
            batch = batch[0]  # (input, label)
        if not isinstance(batch, (tuple, list)) or len(batch) < len(example_input):
            raise InputError(
                f"{name}: example_input is a tuple of {len(example_input)} arguments, and a "
                f"batch is not: {type(batch).__name__}"
            )
        return tuple(batch[: len(example_input)])
    if hasattr(batch, "keys"):
        raise InputError(f"{name}: a batch is a mapping, but example_input is a tensor")
    return batch[0] if isinstance(batch, (tuple, list)) and batch else batch


def labels_of(batch: Any, example_input: Any) -> tuple[Any, ...]:
    """What of a batch is not the model's input."""
    if hasattr(example_input, "keys"):
        if hasattr(batch, "keys"):
            rest = [key for key in batch.keys() if key not in example_input.keys()]  # noqa: SIM118
            return tuple(batch[key] for key in rest)
        return tuple(batch[1:]) if isinstance(batch, (tuple, list)) else ()
    if not isinstance(batch, (tuple, list)):
        return ()
    if isinstance(example_input, tuple):
        nested = batch and isinstance(batch[0], (tuple, list))
        of_tensors = example_input and not isinstance(example_input[0], (tuple, list))
        return tuple(batch[1:] if nested and of_tensors else batch[len(example_input) :])
    return tuple(batch[1:])


def check_plain(batch: Any, example_input: Any, name: str, where: str = "") -> None:
    """Flags, numbers and words of a batch have to be those of the example, with which the run was
    recorded."""
    if isinstance(example_input, _PLAIN):
        if type(batch) is not type(example_input) or batch != example_input:
            got = "a tensor" if isinstance(batch, Tensor) else repr(batch)
            raise InputError(
                f"{name}: a batch has {got} in the place of {example_input!r}"
                f"{where and ' at '}{where}, with which example_input was recorded; give every "
                "batch the same, or plan with another example_input"
            )
    elif hasattr(example_input, "keys") and hasattr(batch, "keys"):
        for key in example_input.keys() & batch.keys():
            check_plain(batch[key], example_input[key], name, f"{where}[{key!r}]")
    elif isinstance(example_input, (tuple, list)) and isinstance(batch, (tuple, list)):
        for i, (given, wanted) in enumerate(zip(batch, example_input, strict=False)):
            check_plain(given, wanted, name, f"{where}[{i}]")
