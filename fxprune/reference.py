"""What the pruned model has to compute, got without pruning."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from .proof import outputs


def reference(plan: Any, model: nn.Module, example_input: Any) -> list[Tensor]:
    """Outputs of the masked model; calls that count channels count the kept ones only."""
    masked = plan.mask(model)
    with torch.no_grad():
        return outputs(masked, example_input)
