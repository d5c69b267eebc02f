"""Structured pruning for PyTorch that is right.

``fxprune.prune(model, example_input, sparsity=0.5)`` returns a smaller model of the same class, and
proves that it computes what the masked model computes.
"""

import fxprune.patterns as patterns

from . import importance, masks
from .api import prune
from .benchmarking import BenchmarkResult, benchmark
from .budgets.target import Reached, Target
from .budgets.timing import LatencyTable
from .calibration.batchnorm import recalibrate_batchnorm
from .compacting import compact
from .errors import (
    FileError,
    InputError,
    ModelError,
    PatternError,
    PlanError,
    ProofError,
    PruningError,
    PruningWarning,
    SettingError,
)
from .pattern_check import check_pattern
from .pattern_types import Pattern, pattern
from .planning import plan
from .pruner import Pruner
from .pruning_plan import ChannelGroup, PruningPlan
from .registry import register, unregister
from .saving.loader import load
from .saving.saver import save
from .tracing import trace

__version__ = "0.1.0"
__all__ = [
    "BenchmarkResult",
    "ChannelGroup",
    "FileError",
    "InputError",
    "LatencyTable",
    "ModelError",
    "Pattern",
    "PatternError",
    "PlanError",
    "ProofError",
    "Pruner",
    "PruningError",
    "PruningPlan",
    "PruningWarning",
    "Reached",
    "SettingError",
    "Target",
    "benchmark",
    "check_pattern",
    "compact",
    "importance",
    "load",
    "masks",
    "pattern",
    "patterns",
    "plan",
    "prune",
    "recalibrate_batchnorm",
    "register",
    "save",
    "trace",
    "unregister",
]
