"""Structured pruning for PyTorch that is right.

``fxprune.prune(model, example_input, sparsity=0.5)`` returns a smaller model of the same class, and
proves that it computes what the masked model computes.
"""

from .api import prune
from .errors import (
    InputError,
    ModelError,
    PlanError,
    ProofError,
    PruningError,
    PruningWarning,
    SettingError,
)
from .planner import plan
from .pruning_plan import ChannelGroup, PruningPlan
from .recorder import trace

__version__ = "0.1.0"
__all__ = [
    "ChannelGroup",
    "InputError",
    "ModelError",
    "PlanError",
    "ProofError",
    "PruningError",
    "PruningPlan",
    "PruningWarning",
    "SettingError",
    "plan",
    "prune",
    "trace",
]
