"""Random draws as what they are in the mean, so that two models that draw can be compared.

A pruned model draws fewer numbers than the masked one, and so others: for a dropout that is always
on, for the noise of an autoencoder.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from ..errors import ProofError, warn

# Ops that do nothing but draw numbers.
_DRAWS = ("rand", "randn", "rand_like", "randn_like", "normal", "uniform", "exponential",
          "log_normal", "cauchy", "geometric")  # fmt: skip
# In the place of each; by 0, what they are multiplied with would be hidden. Several, for code that
# compares a draw with a number lets everything pass, or nothing.
LEVELS = (0.2, 0.8)


class Settled(TorchDispatchMode):
    """Inside, all numbers of a random tensor are the same, and dropout lets everything pass.

    Args:
        level: of numbers between 0 and 1, and how many deviations above the mean.

    Attributes:
        drawn: whether any were to be drawn.
    """

    def __init__(self, level: float) -> None:
        super().__init__()
        self.level, self.drawn = level, False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        name = func._schema.name.partition("::")[2]
        self.drawn |= torch.Tag.nondeterministic_seeded in func.tags
        if name == "native_dropout":
            return args[0].clone(), torch.ones_like(args[0], dtype=torch.bool)
        value = func(*args, **kwargs)
        if not (isinstance(value, Tensor) and value.is_floating_point()):
            return value
        if name.strip("_") in _DRAWS:
            value.fill_(self.level)
            if name.strip("_") == "normal":
                mean, deviation = self._moments(name, args, kwargs)
                value.copy_(mean + self.level * deviation)
        elif name.strip("_") == "bernoulli":
            chance = (
                args[1] if len(args) > 1 else kwargs.get("p", args[0] if name[-1] != "_" else 0.5)
            )
            value.copy_(torch.as_tensor(chance, dtype=value.dtype))
        return value

    def _moments(self, name: str, args: Any, kwargs: Any) -> tuple[Any, Any]:
        given = args[1:] if name.endswith("_") else args
        mean = given[0] if given else kwargs.get("mean", 0.0)
        return mean, given[1] if len(given) > 1 else kwargs.get("std", 1.0)


def settled_error(model: nn.Module, compared: Callable[[], float], allowed: float) -> float | None:
    """The error of a model that draws random numbers for each channel, where one number stands in
    the place of all; None for one that draws none.

    Raises:
        ProofError: they differ all the same.
    """
    drawn, error = False, 0.0
    for level in LEVELS:
        with Settled(level) as mode:
            try:
                error = max(error, compared())
            except ProofError as failed:
                if not mode.drawn:
                    raise
                raise ProofError(
                    f"{type(model).__name__} draws random numbers as it runs, for each channel: "
                    "the pruned model draws others. With one number in place of all they cannot be "
                    f"compared, either: {failed}"
                ) from failed
        drawn = drawn or mode.drawn
    if not drawn:
        return None
    if not error <= allowed:
        kind = type(model).__name__
        raise ProofError(
            f"the pruned {kind} differs from the masked one by {error:.2g} (relative; "
            f"{allowed:.0e} is allowed). {kind} draws random numbers as it runs, and they differ "
            "with one number in place of all: what removed channels say may depend on what is "
            "drawn. Nothing was changed; ignore= the layers before such a call, or pass "
            "verify=False to go without a proof."
        )
    warn(
        f"{type(model).__name__} draws random numbers as it runs, for each channel: the pruned "
        "model draws others. They were compared with one number in place of all"
    )
    return error
