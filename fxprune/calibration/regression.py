"""Predicting channels from those that stay: streamed sums, and the ridge regression on them.

With X all channels that a layer reads in the model as it is, and X̃ those that it will read, over
many inputs, ``A`` and ``b`` minimise E‖X − (A X̃ + b)‖² + ridge · ‖A − S‖², where S puts each kept
channel in its own place. For a linear layer W the folded W·A is then also the best for its output,
for W (A X̃ + b) is what it computes.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache

import torch
from torch import Tensor

# Ridges that are tried, over the mean variance of the kept channels. A small one lets channels that
# hardly move count for much, and with them what rounding makes of them: not in short numbers.
RIDGES = (1e-7, 1e-5, 1e-4, 1e-3, 1e-2, 1e-1, 1.0, 10.0, 100.0)
_LEAST = {torch.float64: 1e-7, torch.float32: 1e-5}
_FIRST = 1e-2  # to be tried
_CHUNK = 8192  # samples of which products are summed at once
_BLOCK = 1024  # rows of a product that are made at once
_LEFT_OUT = 4  # every so manieth sample is for choosing the ridge


@dataclass
class Fit:
    """The best prediction of all channels from the kept ones.

    Attributes:
        matrix: (rows, n, k): A above, in the precision of the weight, but float32 at least.
        offset: (rows, n): b above.
        error: expected squared error of the reading layer's output, over the output's variance.
        ridge: the one that predicted left-out samples best.
        samples: how many there were.
    """

    matrix: Tensor
    offset: Tensor
    error: float
    ridge: float
    samples: int


class Products:
    """Means and covariances of samples, in float64, streamed: sums of outer products.

    Args:
        rows, width: the samples are (rows, m, width), and rows do not mix.
    """

    def __init__(self, rows: int, width: int) -> None:
        self.count = 0
        self.sum = torch.zeros(rows, width, dtype=torch.float64)
        self.product = torch.zeros(rows, width, width, dtype=torch.float64)  # upper blocks
        self.pivot: Tensor | None = None  # near the mean, so that little is lost in squares
        self.finite = True

    def add(self, samples: Tensor) -> None:
        for z in samples.split(_CHUNK, 1):
            if not z.shape[1]:
                continue
            z = _real(z)
            if self.pivot is None:
                self.pivot = z.mean(1, keepdim=True)
            z = z - self.pivot
            self.finite = self.finite and bool(z.isfinite().all())
            self.count += z.shape[1]
            self.sum += z.sum(1).double().cpu()
            _add_product(self.product, z, z)

    def covariance(self) -> Tensor:
        """(rows, width, width)."""
        mean = self.sum / self.count
        return _second(_mirrored(self.product), self.count, mean, mean, -1.0)


class Part:
    """What is summed over some of the samples, for the kept channels F of the pruned model, all
    channels X of the model as it is, and what is missing of them, D = X − S F.

    Attributes:
        kept, cross: Σ F Fᵀ (rows, k, k), upper blocks, and Σ D Fᵀ (rows, t, k).
        missing, all: Σ ‖W D‖² and Σ ‖W X‖² over all rows.
    """

    def __init__(self, rows: int, kept: int, targets: int) -> None:
        self.count, self.missing, self.all, self.finite = 0, 0.0, 0.0, True
        self.kept = torch.zeros(rows, kept, kept, dtype=torch.float64)
        self.cross = torch.zeros(rows, targets, kept, dtype=torch.float64)
        self.sum_kept = torch.zeros(rows, kept, dtype=torch.float64)
        self.sum_missing = torch.zeros(rows, targets, dtype=torch.float64)

    def add(self, f: Tensor, d: Tensor, missing: Tensor, every: Tensor) -> None:
        self.count += f.shape[1]
        self.finite = self.finite and bool(d.isfinite().all() and f.isfinite().all())
        self.sum_kept += f.sum(1).double().cpu()
        self.sum_missing += d.sum(1).double().cpu()
        self.missing += float(missing.square().sum(dtype=torch.float64))
        self.all += float(every.square().sum(dtype=torch.float64))
        _add_product(self.kept, f, f)
        _add_product(self.cross, d, f)

    def __iadd__(self, other: Part) -> Part:
        self.count += other.count
        self.missing += other.missing
        self.all += other.all
        self.finite = self.finite and other.finite
        for name in ("kept", "cross", "sum_kept", "sum_missing"):
            getattr(self, name).add_(getattr(other, name))
        return self


class Sums:
    """What a layer reads in the model as it is and in the pruned one, apart for samples to fit and
    for samples to choose the ridge by.

    Args:
        kept: bool (rows, n): the channels that stay, equally many in each row. Rows are separate
            problems: the groups of a grouped convolution.
        weight: (rows, n, m), what the layer makes of them.
        same: what is read before and after is the same: sums over those that go are enough.
    """

    def __init__(self, kept: Tensor, weight: Tensor, *, same: bool = False) -> None:
        self.rows, self.width = kept.shape
        self.index = torch.nonzero(kept)[:, 1].reshape(self.rows, -1)
        every = torch.arange(self.width).expand(self.rows, -1)
        self.targets = torch.nonzero(~kept)[:, 1].reshape(self.rows, -1) if same else every
        self.same, self.dtype = same, weight.dtype
        self.reader = _narrow(weight.detach().double().cpu())
        self.parts = [Part(self.rows, self.index.shape[1], self.targets.shape[1]) for _ in range(2)]
        self.pivots: tuple[Tensor, Tensor] | None = None  # of X and of F, near their means
        self.inputs = 0

    @property
    def finite(self) -> bool:
        return all(part.finite for part in self.parts)

    def add(self, before: Tensor, after: Tensor, inputs: int) -> None:
        """Samples (m, rows · n) of the channels in the model as it is, and in the pruned one;
        ``inputs``: how many inputs they come from, one after the other."""
        x, y = (t.reshape(len(t), self.rows, self.width).movedim(0, 1) for t in (before, after))
        for part, chosen in zip(self.parts, _split(len(before), inputs, self.inputs), strict=True):
            for some in chosen.split(_CHUNK):
                if len(some):
                    self._add(part, _real(x[:, some]), _real(_columns(y[:, some], self.index)))
        self.inputs += max(inputs, 1)

    def _add(self, part: Part, x: Tensor, f: Tensor) -> None:
        if self.pivots is None:
            self.pivots = x.mean(1, keepdim=True), f.mean(1, keepdim=True)
        x, f = x - self.pivots[0], f - self.pivots[1]
        reader = self.reader.to(x)  # (rows, m, n)
        seen = f @ _columns(reader, self.index).transpose(1, 2)
        every = x @ reader.transpose(1, 2)
        part.add(f, self._missing(x, f), every - seen, every)

    def _missing(self, x: Tensor, f: Tensor) -> Tensor:
        """D (rows, m, t) of samples X (rows, m, n) and F (rows, m, k)."""
        if self.same:
            return _columns(x, self.targets)
        index = self.index.to(x.device)[:, None].expand(-1, x.shape[1], -1)
        return x.scatter_add(2, index, -f)

    def fit(self, *, intercept: bool = True) -> Fit | None:
        """The regression, with the ridge that is best for what the layer makes on the samples left
        out; None where there is nothing to go by. It uses the sums up."""
        whole, unseen = self.parts
        count = whole.count + unseen.count
        if count < 2 or not self.finite:
            return None
        ridges = [ridge for ridge in RIDGES if ridge >= _LEAST.get(self.dtype, 1e-3)]
        ridge, error = ridges[0], None
        if min(whole.count, unseen.count) > 1:
            ridge, error = self._left_out(intercept, ridges)
        whole += unseen
        self.parts = []
        moments = self._moments(whole, intercept)
        solver = _Ridge(moments.kept)
        extra = solver.solve(ridge, moments.cross)
        while extra is None:  # rounding asks for more
            ridge *= 10
            extra = solver.solve(ridge, moments.cross)
        if error is None:
            error = self._error(moments, self._read(extra))
        matrix = torch.zeros(self.rows, self.width, self.index.shape[1], dtype=extra.dtype)
        matrix.scatter_(1, self.index[:, None], 1.0)
        rows = self.targets[:, :, None].expand(-1, -1, extra.shape[2])
        matrix.scatter_add_(1, rows, extra)
        offset = torch.zeros(self.rows, self.width, dtype=extra.dtype)
        if intercept:
            found = moments.mean_missing - (extra @ moments.mean_kept[..., None])[..., 0]
            offset.scatter_(1, self.targets, found)
        kind = torch.float64 if self.dtype == torch.float64 else torch.float32
        return Fit(matrix.to(kind), offset, max(error, 0.0), ridge, count)

    def _left_out(self, intercept: bool, ridges: list[float]) -> tuple[float, float]:
        """The ridge that predicts the samples left out best, and its error there."""
        fitted, unseen = (self._moments(part, intercept) for part in self.parts)
        cross = self._read(fitted.cross)  # W A needs no more of it
        fitted.cross, unseen.cross = cross, self._read(unseen.cross)
        solver = _Ridge(fitted.kept)

        @cache
        def error(i: int) -> float:
            found = solver.solve(ridges[i], cross)
            return math.inf if found is None else self._error(unseen, found)

        best = _lowest(error, len(ridges), ridges.index(max(_FIRST, ridges[0])))
        return ridges[best], error(best)

    def _read(self, matrix: Tensor) -> Tensor:
        """W times a matrix (rows, t, k) over what is missing."""
        return _columns(self.reader, self.targets) @ matrix

    def _error(self, of: Moments, read: Tensor) -> float:
        """E‖W (D − A F)‖² over E‖W X‖², for ``read`` = W A."""
        cross = of.cross if of.cross.shape == read.shape else self._read(of.cross)
        left = of.missing - 2 * float((read * cross).sum()) + float(((read @ of.kept) * read).sum())
        return left / max(of.all, 1e-30)

    def _moments(self, of: Part, intercept: bool) -> Moments:
        assert self.pivots is not None
        pivot_x, pivot_f = (p[:, 0].double().cpu() for p in self.pivots)
        at_kept = torch.zeros_like(pivot_x).scatter_(1, self.index, pivot_f)
        pivot_d = (pivot_x if self.same else pivot_x - at_kept).gather(1, self.targets)
        near_f, near_d = of.sum_kept / of.count, of.sum_missing / of.count
        mean_f, mean_d = near_f + pivot_f, near_d + pivot_d
        kept = _second(_mirrored(of.kept), of.count, near_f, near_f, -1.0)
        cross = _second(of.cross, of.count, near_d, near_f, -1.0)
        missing, every = of.missing / of.count, of.all / of.count
        for sign, d, f in ((-1, near_d, near_f), (1, mean_d, mean_f)):
            made = self._read(d[..., None])
            missing += sign * float(made.square().sum())
            made += _columns(self.reader, self.index) @ f[..., None]
            every += sign * float(made.square().sum())
            if intercept:
                break
        if not intercept:  # about zero
            kept.baddbmm_(mean_f[:, :, None], mean_f[:, None])
            cross.baddbmm_(mean_d[:, :, None], mean_f[:, None])
        return Moments(kept, cross, missing, every, mean_f, mean_d)


@dataclass
class Moments:
    kept: Tensor  # (rows, k, k): F Fᵀ
    cross: Tensor  # (rows, t, k): D Fᵀ, or W D Fᵀ
    missing: float  # ‖W D‖²
    all: float  # ‖W X‖²
    mean_kept: Tensor
    mean_missing: Tensor


def _real(samples: Tensor) -> Tensor:
    return samples if samples.dtype in (torch.float32, torch.float64) else samples.float()


def _columns(samples: Tensor, index: Tensor) -> Tensor:
    """Of samples (rows, m, n), those columns of each row that ``index`` (rows, k) says."""
    return samples.gather(2, index.to(samples.device)[:, None].expand(-1, samples.shape[1], -1))


def _add_product(total: Tensor, u: Tensor, v: Tensor) -> None:
    """Add Σ u vᵀ over samples to ``total``, some rows at a time: nothing of its size is made. Of a
    symmetric one, only blocks on and above the diagonal."""
    for i in range(0, u.shape[2], _BLOCK):
        first = i if u is v else 0
        block = u[:, :, i : i + _BLOCK].transpose(1, 2) @ v[:, :, first:]
        total[:, i : i + _BLOCK, first:].add_(block.to(total.device))


def _mirrored(total: Tensor) -> Tensor:
    """A symmetric sum with its blocks below the diagonal, in place."""
    for i in range(0, total.shape[1], _BLOCK):
        j = i + _BLOCK
        total[:, j:, i:j] = total[:, i:j, j:].transpose(1, 2)
    return total


def _second(total: Tensor, count: int, a: Tensor, b: Tensor, sign: float) -> Tensor:
    """The mean of products, and the product of two vectors."""
    return torch.baddbmm(total, a[:, :, None], b[:, None], beta=1 / count, alpha=sign)


def _split(samples: int, inputs: int, before: int) -> tuple[Tensor, Tensor]:
    """Samples for fitting, and those left out: whole inputs, where there are enough of them."""
    each = max(1, samples // max(inputs, 1))
    out = (torch.arange(samples) // each + before) % _LEFT_OUT == _LEFT_OUT - 1
    return torch.nonzero(~out)[:, 0], torch.nonzero(out)[:, 0]


def _narrow(weight: Tensor) -> Tensor:
    """(rows, m, n) that reads as ``weight`` (rows, n, m) does, with m no more than n: of what a
    layer makes, only how large it is matters here."""
    alive = (weight != 0).any(1).any(0)
    weight = weight[:, :, alive]
    if weight.shape[2] <= weight.shape[1]:
        return weight.transpose(1, 2)
    square = weight @ weight.transpose(1, 2)
    diagonal = square.diagonal(dim1=1, dim2=2)  # a little more of it, so that there is a root
    diagonal += 1e-12 * diagonal.sum(1, keepdim=True) + 1e-30
    return torch.linalg.cholesky(square).transpose(1, 2)


def _lowest(value: Callable[[int], float], count: int, start: int) -> int:
    """Where a function of 0 … count - 1 is lowest, going down from ``start``: the first of these
    where several are."""
    at = start
    while True:
        near = [i for i in (at - 1, at, at + 1) if 0 <= i < count]
        best = min(near, key=value)
        if best == at:
            return at
        at = best


class _Ridge:
    """The regression of what is missing on what is kept. Kept channels are taken at one size, so
    that a loud one does not drown the others."""

    def __init__(self, kept: Tensor) -> None:
        size = kept.diagonal(dim1=1, dim2=2).clamp(min=0).sqrt()
        least = 1e-6 * size.amax(1, keepdim=True)
        size = torch.where(size > least, size, 1.0 / least.clamp(min=1e-30)).clamp(max=1e30)
        self.size, self.kept = size, kept
        self.scale = (kept.diagonal(dim1=1, dim2=2) / size / size).mean(1, keepdim=True)

    def solve(self, ridge: float, cross: Tensor) -> Tensor | None:
        """The matrix (rows, t, k) that predicts what ``cross`` is of; None where rounding leaves
        no solution."""
        scaled = self.kept / self.size[:, :, None]
        scaled /= self.size[:, None]
        scaled.diagonal(dim1=1, dim2=2).add_(ridge * self.scale.clamp(min=1e-30))
        factor, wrong = torch.linalg.cholesky_ex(scaled)
        del scaled
        if bool(wrong.any()):
            return None
        right = (cross / self.size[:, None]).transpose(1, 2)
        return torch.cholesky_solve(right, factor).transpose(1, 2) / self.size[:, None]
