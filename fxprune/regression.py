"""Predicting channels from those that stay: streamed sums, and the ridge regression on them.

With X all channels that a layer reads in the model as it is, and X̃ those that it will read, over
many inputs, ``A`` and ``b`` minimise E‖X − (A X̃ + b)‖² + ridge · ‖A − S‖², where S puts each kept
channel in its own place. For a linear layer W the folded W·A is then also the best for its output,
for W (A X̃ + b) is what it computes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

# Ridges that are tried, over the mean variance of the kept channels. A small one lets channels that
# hardly move count for much, and with them what rounding makes of them: not in short numbers.
RIDGES = (1e-7, 1e-5, 1e-4, 1e-3, 1e-2, 1e-1, 1.0, 10.0, 100.0)
_LEAST = {torch.float64: 1e-7, torch.float32: 1e-5}
_CHUNK = 8192  # samples of which products are summed at once
_LEFT_OUT = 4  # every so manieth sample is for choosing the ridge


@dataclass
class Fit:
    """The best prediction of all channels from the kept ones.

    Attributes:
        matrix: (rows, n, n), with columns of zeros for channels that go: A above.
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
        self.product = torch.zeros(rows, width, width, dtype=torch.float64)
        self.pivot: Tensor | None = None  # near the mean, so that little is lost in squares
        self.finite = True

    def add(self, samples: Tensor) -> None:
        for z in samples.split(_CHUNK, 1):
            if not z.shape[1]:
                continue
            z = z if z.dtype in (torch.float32, torch.float64) else z.float()
            if self.pivot is None:
                self.pivot = z.mean(1, keepdim=True)
            z = z - self.pivot
            self.finite = self.finite and bool(z.isfinite().all())
            self.count += z.shape[1]
            self.sum += z.sum(1).double().cpu()
            self.product += (z.transpose(1, 2) @ z).double().cpu()

    def mean(self) -> Tensor:
        """(rows, width)."""
        assert self.pivot is not None
        return self.sum / self.count + self.pivot[:, 0].double().cpu()

    def covariance(self) -> Tensor:
        """(rows, width, width)."""
        mean = self.sum / self.count
        return self.product / self.count - mean[:, :, None] * mean[:, None, :]

    def __add__(self, other: Products) -> Products:
        """Of both samples, which have the same pivot."""
        total = Products(*self.sum.shape)
        total.count, total.pivot = self.count + other.count, self.pivot
        total.sum, total.product = self.sum + other.sum, self.product + other.product
        return total


class Sums:
    """What a layer reads in the model as it is and in the pruned one, apart for samples to fit and
    for samples to choose the ridge by.

    Args:
        kept: bool (rows, n): the channels that stay, equally many in each row. Rows are separate
            problems: the groups of a grouped convolution.
        same: what is read before and after is the same: half of the sums are enough.
    """

    def __init__(self, kept: Tensor, *, same: bool = False) -> None:
        self.kept, self.same = kept, same
        self.rows, self.width = kept.shape
        count = int(kept[0].sum())
        self.index = torch.nonzero(kept)[:, 1].reshape(self.rows, count)
        size = self.width if same else count + self.width
        self.parts = [Products(self.rows, size) for _ in range(2)]
        self.inputs = 0

    @property
    def finite(self) -> bool:
        return all(part.finite for part in self.parts)

    def add(self, before: Tensor, after: Tensor, inputs: int) -> None:
        """Samples (m, rows · n) of the channels in the model as it is, and in the pruned one;
        ``inputs``: how many inputs they come from, one after the other."""
        index = self.index.to(after.device)[:, None]
        x, y = (t.reshape(len(t), self.rows, self.width).movedim(0, 1) for t in (before, after))
        z = x if self.same else torch.cat([y.gather(2, index.expand(-1, y.shape[1], -1)), x], 2)
        for part, chosen in zip(self.parts, _split(len(before), inputs, self.inputs), strict=True):
            if part.pivot is None:
                part.pivot = next((p.pivot for p in self.parts if p.pivot is not None), None)
            part.add(z[:, chosen])
        self.inputs += max(inputs, 1)

    def fit(self, weight: Tensor, *, intercept: bool = True) -> Fit | None:
        """The regression, with the ridge that is best for the output of ``weight`` (rows, n, m) on
        the samples left out; None where there is nothing to go by."""
        everything = self.parts[0] + self.parts[1]
        if everything.count < 2 or not self.finite:
            return None
        least = _LEAST.get(weight.dtype, 1e-3)
        ridges = [ridge for ridge in RIDGES if ridge >= least]
        reader = _narrow(weight.double().cpu())
        ridge, error = ridges[0], None
        if min(part.count for part in self.parts) > 1:
            ridge, error = self._left_out(reader, intercept, ridges)
        moments = self._moments(everything, intercept)
        found = _Ridge(moments)
        extra = found.at(ridge)
        if error is None:
            error = found.errors(moments, reader, [ridge])[0] / _spread(moments, reader)
        matrix = torch.diag_embed(self.kept.double().cpu())
        index = self.index.cpu()[:, None].expand(-1, self.width, -1)
        matrix = matrix.scatter_add(2, index, extra)
        offset = moments.mean_missing - (extra @ moments.mean_kept[..., None])[..., 0]
        offset = offset if intercept else offset * 0
        return Fit(matrix, offset, max(error, 0.0), ridge, everything.count)

    def _left_out(
        self, reader: Tensor, intercept: bool, ridges: list[float]
    ) -> tuple[float, float]:
        """The ridge that predicts the samples left out best, and its error there."""
        fitted, unseen = (self._moments(part, intercept) for part in self.parts)
        errors = _Ridge(fitted).errors(unseen, reader, ridges)
        best = min(range(len(errors)), key=errors.__getitem__)
        return ridges[best], errors[best] / _spread(unseen, reader)

    def _moments(self, of: Products, intercept: bool) -> Moments:
        """Of the kept channels F, of all channels X, and of what is missing D = X − S F."""
        mean, second = of.mean(), of.covariance()
        if self.same:
            every = torch.arange(self.width).expand(self.rows, -1)
            index = torch.cat([self.index.cpu(), every], 1)
            mean = mean.gather(1, index)
            second = second.gather(1, index[:, :, None].expand(-1, -1, self.width))
            second = second.gather(2, index[:, None].expand(-1, index.shape[1], -1))
        if not intercept:  # about zero
            second = second + mean[:, :, None] * mean[:, None, :]
        k = self.index.shape[1]
        select = torch.zeros(self.rows, self.width, k, dtype=torch.float64)
        select.scatter_(1, self.index.cpu()[:, None], 1.0)
        cross = second[:, k:, :k] - select @ second[:, :k, :k]
        left = second[:, k:, k:] - second[:, k:, :k] @ select.transpose(1, 2)
        missing = left - (select @ cross.transpose(1, 2))
        return Moments(
            second[:, :k, :k], cross, missing, second[:, k:, k:], mean[:, :k],
            mean[:, k:] - (select @ mean[:, :k, None])[..., 0],
        )  # fmt: skip


@dataclass
class Moments:
    kept: Tensor  # (rows, k, k): F Fᵀ
    cross: Tensor  # (rows, n, k): D Fᵀ
    missing: Tensor  # (rows, n, n): D Dᵀ
    all: Tensor  # (rows, n, n): X Xᵀ
    mean_kept: Tensor
    mean_missing: Tensor


def _split(samples: int, inputs: int, before: int) -> tuple[Tensor, Tensor]:
    """Samples for fitting, and those left out: whole inputs, where there are enough of them."""
    each = max(1, samples // max(inputs, 1))
    out = (torch.arange(samples) // each + before) % _LEFT_OUT == _LEFT_OUT - 1
    return torch.nonzero(~out)[:, 0], torch.nonzero(out)[:, 0]


def _narrow(weight: Tensor) -> Tensor:
    """(rows, m, n) that reads as ``weight`` (rows, n, m) does, with m no more than n: of what a
    layer makes, only how large it is matters here."""
    if weight.shape[2] <= weight.shape[1]:
        return weight.transpose(1, 2)
    values, vectors = torch.linalg.eigh(weight @ weight.transpose(1, 2))
    return values.clamp(min=0).sqrt()[..., None] * vectors.transpose(1, 2)


def _spread(moments: Moments, reader: Tensor) -> float:
    """Of what the layer makes."""
    return max(float(((reader @ moments.all) * reader).sum()), 1e-30)


class _Ridge:
    """The regression of what is missing on what is kept, for any ridge: one factorisation. Kept
    channels are taken at one size, so that a loud one does not drown the others."""

    def __init__(self, moments: Moments) -> None:
        size = moments.kept.diagonal(dim1=1, dim2=2).clamp(min=0).sqrt()
        least = 1e-6 * size.amax(1, keepdim=True)
        size = torch.where(size > least, size, 1.0 / least.clamp(min=1e-30)).clamp(max=1e30)
        self.values, vectors = torch.linalg.eigh(moments.kept / size[:, :, None] / size[:, None, :])
        self.values = self.values.clamp(min=0)
        self.scale = self.values.mean(1, keepdim=True).clamp(min=1e-30)
        self.vectors = vectors / size[:, :, None]  # so that A = T (Λ + λ)⁻¹ Qᵀ in either size
        self.turned = moments.cross @ self.vectors

    def at(self, ridge: float) -> Tensor:
        """The matrix (rows, n, k) that predicts what is missing."""
        return (self.turned / self._denominator(ridge)) @ self.vectors.transpose(1, 2)

    def errors(self, of: Moments, reader: Tensor, ridges: Sequence[float]) -> list[float]:
        """E‖W (D − A F)‖² on samples with moments ``of``, for each ridge."""
        q = self.vectors
        read = reader @ self.turned  # W A is this over the denominator, turned back
        cross = reader @ of.cross @ q
        inner = q.transpose(1, 2) @ of.kept @ q
        fixed = float(((reader @ of.missing) * reader).sum())
        found = []
        for ridge in ridges:
            a = read / self._denominator(ridge)
            found.append(fixed - 2 * float((a * cross).sum()) + float(((a @ inner) * a).sum()))
        return found

    def _denominator(self, ridge: float) -> Tensor:
        return (self.values + ridge * self.scale)[:, None]
