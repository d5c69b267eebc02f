"""Choosing the units from which the layers behind can best predict all the others.

For a layer that reads channels with covariance Σ through a weight W, keeping the channels K leaves

    e(K) = tr(WᵀW (Σ − Σ[:, K] Σ[K, K]⁻¹ Σ[K, :]))

of its output's variance when W is folded with the best prediction of the rest. Units are taken one
after the other, each the one that lowers the sum of e over all layers that read its group the most:
a pivoted Cholesky factorisation of Σ whose pivots are weighted by W. Choosing filters by what the
next layer makes of them is from ThiNet (Luo et al., arXiv 1707.06342), and the solve that goes with
it from the optimal brain surgeon (Hassibi & Stork 1993).
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

import numpy as np
import torch
from torch import Tensor, fx

from ..modules.running import evaluating
from ..relating.constants import Constants, all_reads
from ..relating.fold import placed
from ..relating.readers import Reader, Run, find_readers, live_weight
from ..relating.relations import Relations
from ..tracing.trace import Trace
from .regression import Products

ROUNDS = 64  # in which the units of a group are taken, several at a time where it has more
_TINY = 1e-9  # of the mean variance: what two channels say alike is not told apart further


class Reconstruction:
    """Scores of units: the relative error that is left when a unit is taken, higher for those that
    are taken earlier.

    Args:
        batches: of inputs, already as the model takes them.
    """

    def __init__(self, trace: Trace, relations: Relations, batches: Iterable[Any]) -> None:
        self.relations = relations
        self._scores: dict[bytes, np.ndarray | None] = {}
        with torch.no_grad():
            constants = all_reads(trace, relations)
            self.readers, _ = find_readers(trace, constants)
            self.problems = self._collect(trace, constants, batches)

    def _collect(
        self, trace: Trace, constants: Constants, batches: Iterable[Any]
    ) -> list[tuple[np.ndarray, Tensor, Tensor]]:
        """For each reader: the class of each channel, Σ, and WᵀW over its output's variance."""
        by_node: dict[fx.Node, list[int]] = {}
        for i, reader in enumerate(self.readers):
            by_node.setdefault(reader.read.call.node, []).append(i)
        products: list[Products | None] = [None] * len(self.readers)
        module = trace.graph_module()
        with evaluating(trace.model):
            for batch in batches:
                run = Run(module, batch)
                for node in trace.graph.nodes:
                    for i in by_node.get(node, ()):
                        x = self.readers[i].samples(run)
                        if x is not None:
                            rows = math.prod(self.readers[i].read.axis.shape[:-1])
                            x = x.reshape(len(x), rows, x.shape[1] // rows).movedim(0, 1)
                            into = products[i] = products[i] or Products(rows, x.shape[2])
                            into.add(x)
                    run.step(node)
        found = []
        for reader, sums in zip(self.readers, products, strict=True):
            if sums is None or not sums.count or not sums.finite:
                continue
            weight = placed(
                reader.read.axis.flat(live_weight(constants, reader.read)), reader.order
            )
            metric = (weight @ weight.transpose(1, 2)).double().cpu()
            covariance = sums.covariance()
            spread = float((metric * covariance).sum())
            if spread > 0:
                classes = self._classes(reader)
                found.append((classes, torch.block_diag(*covariance),
                              torch.block_diag(*metric) / spread))  # fmt: skip
        return found

    def _classes(self, reader: Reader) -> np.ndarray:
        classes = self.relations.of(reader.read.axis).reshape(-1)
        return classes if reader.order is None else classes[reader.order[:, 0].numpy()]

    def curve(self, units: np.ndarray) -> np.ndarray | None:
        """The error that is left with the best 0, 1, … n units."""
        scores = self.scores(units)
        return None if scores is None else np.append(-np.sort(-scores), 0.0)

    def scores(self, units: np.ndarray) -> np.ndarray | None:
        """One score for each unit class; None where no layer that reads them was seen."""
        key = units.tobytes()
        if key not in self._scores:
            self._scores[key] = self._score(units)
        return self._scores[key]

    def _score(self, units: np.ndarray) -> np.ndarray | None:
        alike: dict[bytes, list[tuple[Tensor, Tensor]]] = {}  # layers that read the same in order
        for classes, covariance, metric in self.problems:
            inside = np.isin(classes, units) | (classes == 0)
            if np.isin(classes, units).any():
                at = torch.from_numpy(np.flatnonzero(inside))
                part = covariance[at][:, at], metric[at][:, at]
                alike.setdefault(classes[inside].tobytes(), []).append(part)
        problems = []
        for key, parts in alike.items():
            own = np.frombuffer(key, dtype=self.relations.classes.dtype)
            problem = _Problem(*(torch.stack(side) for side in zip(*parts, strict=True)))
            problem.take(torch.from_numpy(np.flatnonzero(own == 0)))  # these stay in any case
            index = [torch.from_numpy(np.flatnonzero(own == u)) for u in units]
            problems.append((problem, index))
        return _order(problems, len(units)) if problems else None


def _order(problems: list[tuple[_Problem, list[Tensor]]], count: int) -> np.ndarray:
    left, scores = np.ones(count, dtype=bool), np.zeros(count)
    step = max(1, count // ROUNDS)
    while left.any():
        error = sum(problem.error for problem, _ in problems)
        gains = sum(problem.gains(index) for problem, index in problems)
        order = np.argsort(np.where(left, -gains, np.inf), kind="stable")
        chosen = order[: min(step, int(left.sum()))]
        # Ranks tell apart those that are taken together, and those that nothing is left for.
        rank = np.arange(len(chosen)) / len(chosen)
        scores[chosen] = max(error, 0.0) + 1e-9 * (left.sum() - rank) / count
        left[chosen] = False
        for problem, index in problems:
            problem.take(torch.cat([index[i] for i in chosen]))
    return scores


class _Problem:
    """What is left of the channels of some layers (layers, n, n), given those taken so far."""

    def __init__(self, covariance: Tensor, metric: Tensor) -> None:
        self.left = covariance.clone()  # Σ, less what is predicted
        self.seen = covariance @ metric @ covariance  # Σ M Σ
        self.error = float((metric * covariance).sum())
        mean = covariance.diagonal(dim1=1, dim2=2).mean(1)
        self.least = _TINY * mean.clamp(min=1e-30)

    def gains(self, index: list[Tensor]) -> np.ndarray:
        """By how much taking each unit lowers the error, its channels one by one."""
        own, seen = (t.diagonal(dim1=1, dim2=2) for t in (self.left, self.seen))
        least = self.least[:, None]
        each = torch.where(own > least, seen / own.clamp(min=least), 0.0).sum(0).numpy()
        return np.array([each[i.numpy()].sum() for i in index])

    def take(self, index: Tensor) -> None:
        if not len(index):
            return
        v, h = self.left[:, :, index], self.seen[:, :, index]
        # Channels that say nothing of their own, or the same, leave nothing to divide by.
        inverse = torch.linalg.pinv(v[:, index], atol=self.least, hermitian=True)
        solved = inverse @ v.transpose(1, 2)
        inner = h[:, index]
        self.error -= float((inverse * inner).sum())
        # Σ − V D⁻¹ Vᵀ for Σ, and the same on both sides of Σ M Σ.
        half = h - solved.transpose(1, 2) @ inner / 2
        self.seen.baddbmm_(half, solved, alpha=-1)
        self.seen.baddbmm_(solved.transpose(1, 2), half.transpose(1, 2), alpha=-1)
        self.left.baddbmm_(v, solved, alpha=-1)
