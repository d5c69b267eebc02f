"""Random draws as what they are in the mean, so that two models that draw can be compared.

A pruned model draws fewer numbers than the masked one, and so others: for a dropout that is always
on, for the noise of an autoencoder.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

# Ops that do nothing but draw numbers.
_DRAWS = ("rand", "randn", "rand_like", "randn_like", "normal", "uniform", "exponential",
          "log_normal", "cauchy", "geometric")  # fmt: skip
_LEVEL = 0.5  # in the place of each; by 0, what they are multiplied with would be hidden


class Settled(TorchDispatchMode):
    """Inside, all numbers of a random tensor are the same, and dropout lets everything pass.

    Attributes:
        drawn: whether any were to be drawn.
    """

    drawn = False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        name = func._schema.name.partition("::")[2]
        if name == "native_dropout":
            self.drawn = True
            return args[0].clone(), torch.ones_like(args[0], dtype=torch.bool)
        value = func(*args, **kwargs)
        if not (isinstance(value, Tensor) and value.is_floating_point()):
            return value
        if name.strip("_") in _DRAWS:
            self.drawn = True
            value.fill_(_LEVEL)
        elif name.strip("_") == "bernoulli":
            self.drawn = True
            chance = (
                args[1] if len(args) > 1 else kwargs.get("p", args[0] if name[-1] != "_" else 0.5)
            )
            value.copy_(torch.as_tensor(chance))
        return value
