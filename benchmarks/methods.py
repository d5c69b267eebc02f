"""Every criterion in every scope, each asked for as many multiply-accumulates as the others.

A method is the name of a criterion and of a scope: ``"taylor global"``. What a criterion needs to
measure is measured once for a network; the fraction at which the work is equal is then searched for
with its scores.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from real import Real, run
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

import fxprune
from fxprune.importance import Activation, Fisher, Magnitude, Random, Taylor, Unscored, Wanda

SCOPES = ("local", "global", "isomorphic")
CRITERIA: dict[str, Callable[[Real, int], Any]] = {
    "random": lambda real, seed: Random(seed=seed),
    "l1": lambda real, seed: "l1",
    "l2": lambda real, seed: "l2",
    "l2/mean": lambda real, seed: Magnitude(normalize="mean"),
    "lamp": lambda real, seed: "lamp",
    "fpgm": lambda real, seed: "fpgm",
    "bn_scale": lambda real, seed: "bn_scale",
    "taylor": lambda real, seed: Taylor(lessons(real), loss=real.loss),
    "fisher": lambda real, seed: Fisher(lessons(real), loss=real.loss),
    "mean_abs": lambda real, seed: Activation(real.calibration),
    "variance": lambda real, seed: Activation(real.calibration, statistic="variance"),
    "apoz": lambda real, seed: Activation(real.calibration, statistic="apoz"),
    "wanda": lambda real, seed: Wanda(real.calibration),
}
NAMES = [f"{criterion} {scope}" for criterion in CRITERIA for scope in SCOPES]
CLOSE, FAR = 0.005, 0.05  # relative difference in work: the search ends; the cell stays empty
STEPS = 12  # of the search


class Impossible(Exception):
    """Why a method has no network."""


def lessons(real: Real) -> list[Any]:
    if not real.lessons:
        raise Impossible("it has no labels to take a loss of")
    return real.lessons


class Methods:
    """Of one network.

    Args:
        settings: more of them, for ``fxprune.plan``, of the networks that are returned.
    """

    def __init__(self, real: Real, seed: int, **settings: Any) -> None:
        self.real, self.seed, self.settings = real, seed, settings
        self._scores: dict[str, Any] = {}

    def prune(self, name: str, sparsity: float) -> nn.Module:
        """The network with as much work as if every group had lost the share ``sparsity``."""
        criterion, scope = name.rsplit(" ", 1)
        if criterion not in self._scores:
            importance = CRITERIA[criterion](self.real, self.seed)
            self._scores[criterion] = scores(self._plan(0.0, importance=importance))
        chosen = {"importance": self._scores[criterion], "scope": scope}
        wanted = work(self.real, self._small(sparsity))
        share, off = self._search(
            lambda s: work(self.real, self._small(s, **chosen)), wanted, sparsity
        )
        if off > FAR:
            raise Impossible(f"no sparsity leaves the work wanted, it is off by {off:.0%}")
        return self._small(share, **chosen, **self.settings)

    def _plan(self, sparsity: float, **settings: Any) -> fxprune.PruningPlan:
        return fxprune.plan(self.real.model, self.real.example_input, sparsity=sparsity, **settings)

    def _small(self, sparsity: float, **settings: Any) -> nn.Module:
        return self._plan(sparsity, **settings).apply(self.real.model)

    def _search(
        self, at: Callable[[float], float], wanted: float, guess: float
    ) -> tuple[float, float]:
        """The fraction with about the work that is wanted, and how far off it is."""
        low, high, share = 0.0, 1.0, guess
        best = (guess, np.inf)
        for _ in range(STEPS):
            left = at(share)
            best = min(best, (share, abs(left / wanted - 1)), key=lambda pair: pair[1])
            if best[1] < CLOSE:
                break
            low, high = (share, high) if left > wanted else (low, share)
            share = (low + high) / 2
        return best


def scores(plan: fxprune.PruningPlan) -> dict[str, Any]:
    """The importance of a plan as that of the next; what it could not score stays whole again."""

    def unscored(reason: str) -> Callable[[Any], Any]:
        def importance(group: Any) -> Any:
            raise Unscored(reason)

        return importance

    return {
        g.name: unscored(g.frozen or "") if g.importance is None else g.importance
        for g in plan.groups
    }


def work(real: Real, model: nn.Module) -> float:
    """Multiply-accumulates; of recurrent networks, of which PyTorch counts none, parameters."""
    if real.kind == "recurrent":
        return float(sum(p.numel() for p in model.parameters()))
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        run(model, real.example_input)
    return counter.get_total_flops() / 2
