"""Which entries of a tensor a mask keeps: one function a method.

Each takes ``scores`` (a tensor) and ``keep`` (bool, of the same shape: what earlier masks left) and
returns the entries to keep now. Only what earlier masks left is ranked. Ties go to exact counts.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from ..errors import SettingError
from ..modules.given import is_number, is_whole

_SHORT = 8  # entries of a block that are ranked by comparing each with each


def count(amount: float, size: int) -> int:
    """How many of ``size`` an amount is: a fraction in [0, 1], or a number of them.

    Raises:
        SettingError: it is neither, or more than there are.
    """
    whole = is_whole(amount)
    if not is_number(amount) or amount < 0 or (not whole and amount > 1):
        raise SettingError(f"amount={amount!r} is neither a fraction in [0, 1] nor a count")
    if whole and amount > size:
        raise SettingError(f"amount={amount} is more than the {size} that are left")
    return int(amount) if whole else round(float(amount) * size)


def smallest(scores: Tensor, keep: Tensor, amount: float) -> Tensor:
    """Without the entries of smallest absolute score (Han et al., arXiv 1506.02626)."""
    left = scores.reshape(-1) if bool(keep.all()) else scores[keep]
    gone = torch.topk(left.abs(), count(amount, left.numel()), largest=False).indices
    return _without(keep, gone)


def random_entries(scores: Tensor, keep: Tensor, amount: float, generator: Any = None) -> Tensor:
    """Without entries drawn at random."""
    size = int(keep.sum())
    kind = scores.dtype if scores.is_floating_point() else torch.float32
    drawn = torch.rand(size, dtype=kind, device=scores.device, generator=generator)
    return _without(keep, torch.topk(drawn, count(amount, size)).indices)


def _without(keep: Tensor, gone: Tensor) -> Tensor:
    """``keep`` without some of its kept entries, counted among these."""
    whole = bool(keep.all())  # nothing to count around
    size = keep.numel() if whole else int(keep.sum())
    left = torch.ones(size, dtype=torch.bool, device=keep.device)
    left[gone] = False
    return left.reshape(keep.shape) if whole else keep.masked_scatter(keep, left)


def slices_of_norm(scores: Tensor, keep: Tensor, amount: float, n: Any, dim: int) -> Tensor:
    """Without the slices along ``dim`` of smallest Lₙ norm (Li et al., arXiv 1608.08710), for
    any order of :func:`torch.linalg.vector_norm`, ``"fro"`` or ``"nuc"``."""
    dim, left = _slices(scores, keep, dim)
    part = _rows(scores, dim, left)
    rest = [d for d in range(scores.dim()) if d != dim]
    if n not in ("fro", "nuc") and not is_number(n):
        raise SettingError(f"n={n!r} is no order of a norm: a number, 'fro' or 'nuc'")
    part = part if part.is_floating_point() or part.is_complex() else part.float()
    if n == "nuc" and len(rest) != 2:
        raise SettingError(f"n='nuc' is a norm of matrices, and slices have {len(rest)} dimensions")
    if n == "nuc":
        norms = torch.linalg.matrix_norm(part, ord="nuc", dim=rest)
    else:
        norms = torch.linalg.vector_norm(part, ord=2 if n == "fro" else n, dim=rest)
    return _without_slices(keep, dim, left, norms, amount)


def random_slices(
    scores: Tensor, keep: Tensor, amount: float, dim: int, generator: Any = None
) -> Tensor:
    """Without slices along ``dim`` drawn at random."""
    dim, left = _slices(scores, keep, dim)
    drawn = torch.rand(len(left), generator=generator)
    return _without_slices(keep, dim, left, drawn.to(scores.device), amount)


def slices_near_median(
    scores: Tensor, keep: Tensor, amount: float, dim: int, distance: Any
) -> Tensor:
    """Without the slices along ``dim`` that are nearest to all others: FPGM (He et al., arXiv
    1811.00250). ``distance``: 1, 2 or ``f(rows) -> (n, n)``."""
    dim, left = _slices(scores, keep, dim)
    flat = _rows(scores, dim, left).movedim(dim, 0).reshape(len(left), -1)
    flat = flat if flat.dtype.itemsize >= 4 and flat.is_floating_point() else flat.float()
    if not callable(distance) and distance not in (1, 2):
        raise SettingError(f"distance={distance!r} is neither 1, 2 nor a function of the rows")
    apart = distance(flat) if callable(distance) else torch.cdist(flat, flat, p=float(distance))
    return _without_slices(keep, dim, left, apart.abs().sum(1), amount)


def _slices(scores: Tensor, keep: Tensor, dim: int) -> tuple[int, Tensor]:
    """(dimension, slices along it of which anything is left)."""
    if scores.dim() < 2:
        raise SettingError("slices need a tensor of two dimensions at least; this one has fewer")
    if not is_whole(dim) or not -scores.dim() <= dim < scores.dim():
        raise SettingError(f"dim={dim} is no dimension of a tensor of shape {tuple(scores.shape)}")
    dim %= scores.dim()
    rows = keep.movedim(dim, 0).flatten(1).any(1)
    return dim, torch.nonzero(rows).reshape(-1)


def _rows(scores: Tensor, dim: int, left: Tensor) -> Tensor:
    return scores if len(left) == scores.shape[dim] else scores.index_select(dim, left)


def _without_slices(keep: Tensor, dim: int, left: Tensor, ranks: Tensor, amount: float) -> Tensor:
    stay = torch.topk(ranks, len(left) - count(amount, len(left))).indices
    rows = torch.zeros(keep.shape[dim], dtype=torch.bool, device=keep.device)
    rows[left[stay]] = True
    shape = [1] * keep.dim()
    shape[dim] = len(rows)
    return keep & rows.reshape(shape)


def blocks(
    scores: Tensor, keep: Tensor, level: float, shape: tuple[int, int], zeros: int, norm: Any
) -> Tensor:
    """Without ``zeros`` entries of each of the blocks of smallest norm, on the last two dimensions.

    The share ``level`` of the blocks is cut; of each, the ``zeros`` smallest entries. Blocks at
    the far edges may be ragged. ``norm``: 1, 2 or ``f(tensor) -> tensor`` of the same shape.
    """
    size = block_size(shape)
    if not is_whole(zeros) or not 0 <= zeros <= size:
        raise SettingError(f"zeros_per_block={zeros!r} is not between 0 and the {size} of a block")
    if not is_number(level) or not 0 <= level <= 1:
        raise SettingError(f"sparsity_level={level!r} is not in [0, 1]")
    if not callable(norm) and norm not in (1, 2):
        raise SettingError(f"norm={norm!r} is neither 1, 2 nor a function of the tensor")
    if scores.dim() < 2:
        raise SettingError("blocks need a tensor of two dimensions at least; this one has fewer")
    if not level or not zeros:
        return keep
    values = norm(scores) if callable(norm) else scores.abs() if norm == 1 else scores * scores
    if not bool(keep.all()):
        values = torch.where(keep, values, 0)
    inside = _in_blocks(values, shape, torch.nan)  # (blocks, entries)
    if level == 1:
        stay = _all_but_smallest(inside, zeros)
    else:
        means = inside.nanmean(1) if inside.numel() != values.numel() else inside.mean(1)
        number = max(0, min(len(means) - 1, round(level * len(means))))
        chosen = _smallest_of(means, number)
        stay = ~chosen[:, None].expand_as(inside)
        if zeros < size:
            stay = stay | _all_but_smallest(inside, zeros)
    return keep & _out_of_blocks(stay, scores.shape, shape)


def block_size(shape: Any) -> int:
    """How many entries a block has."""
    pair = isinstance(shape, (tuple, list)) and len(shape) == 2 and all(map(is_whole, shape))
    if not pair or min(shape) < 1:
        raise SettingError(f"sparse_block_shape={shape!r} is not two numbers of 1 at least")
    return shape[0] * shape[1]


def _smallest_of(values: Tensor, number: int) -> Tensor:
    """Where the ``number`` smallest are; of equal ones the first. Faster than ``topk`` of many."""
    if not number:
        return torch.zeros_like(values, dtype=torch.bool)
    limit = torch.kthvalue(values, number).values
    below, level = values < limit, values == limit
    return below | (level & (level.cumsum(0) <= number - below.sum()))


def _all_but_smallest(rows: Tensor, zeros: int) -> Tensor:
    """Where the entries of each row are not among its ``zeros`` smallest; NaN is the largest."""
    size = rows.shape[1]
    if size > _SHORT or zeros == size:
        low = torch.topk(rows, zeros, dim=1, largest=False).indices
        return torch.ones_like(rows, dtype=torch.bool).scatter_(1, low, False)
    rows = rows.nan_to_num(nan=torch.inf, posinf=torch.inf)
    rank = torch.zeros_like(rows, dtype=torch.int8)  # counting beats sorting in rows this short
    for i in range(size):
        one = rows[:, i : i + 1]
        rank[:, :i] += one < rows[:, :i]
        rank[:, i:] += one <= rows[:, i:]
    return rank > zeros


def _in_blocks(x: Tensor, shape: tuple[int, int], fill: float) -> Tensor:
    """The blocks of the last two dimensions as rows, ragged ones filled up."""
    h, w = shape
    right, down = -x.shape[-1] % w, -x.shape[-2] % h
    x = F.pad(x, (0, right, 0, down), value=fill) if right or down else x
    cut = x.unflatten(-1, (-1, w)).unflatten(-3, (-1, h))
    return cut.transpose(-2, -3).reshape(-1, h * w)


def _out_of_blocks(rows: Tensor, whole: torch.Size, shape: tuple[int, int]) -> Tensor:
    h, w = shape
    high, wide = -(-whole[-2] // h), -(-whole[-1] // w)
    x = rows.reshape(*whole[:-2], high, wide, h, w).transpose(-2, -3)
    return x.reshape(*whole[:-2], high * h, wide * w)[..., : whole[-2], : whole[-1]]


def diagonal(scores: Tensor, keep: Tensor, nearliness: int) -> Tensor:
    """The ``nearliness`` diagonals (an odd number) around the main one."""
    if not is_whole(nearliness):
        raise SettingError(f"nearliness={nearliness!r} is no number of diagonals")
    reach = nearliness // 2
    if scores.dim() != 2:
        raise SettingError("a diagonal needs a tensor of two dimensions")
    if nearliness > 0 and (nearliness % 2 == 0 or reach >= min(scores.shape)):
        raise SettingError(
            f"nearliness={nearliness} is no odd number that fits in shape {tuple(scores.shape)}"
        )
    if nearliness <= 0:
        return torch.zeros_like(keep)
    return keep.tril(reach).triu(-reach)


Method = Callable[[Tensor, Tensor], Tensor]
