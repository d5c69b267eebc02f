"""Structured pruning for PyTorch that is right.

``fxprune.prune(model, example_input, sparsity=0.5)`` returns a smaller model of the same class, and
proves that it computes what the masked model computes.
"""

import fxprune.patterns as patterns

from . import importance, masks
from .api import prune
from .benchmarking import BenchmarkResult, benchmark
from .calibration.batchnorm import recalibrate_batchnorm
from .checking.pattern_check import check_pattern
from .choosing.target import Reached, Target
from .choosing.timing import LatencyTable
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
from .planning.make import plan
from .planning.pruning_plan import ChannelGroup, PruningPlan
from .rules.pattern_types import Pattern, pattern
from .rules.registry import register, unregister
from .saving.loader import load
from .saving.saver import save
from .tracing.as_graph import trace
from .training.compacting import compact
from .training.pruner import Pruner

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
