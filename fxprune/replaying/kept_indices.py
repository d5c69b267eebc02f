"""From kept slices of the axes that patterns see to kept indices of each tensor's dimensions."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from ..relating.relations import Relations
from ..rules.channels import SourceAxis
from ..rules.shapes import view_dims
from .replay import Replay

_PIECE = 2**18  # elements


def members(axes: list[SourceAxis]) -> list[tuple[str, int]]:
    """``(tensor name, dimension)`` of each axis; of several dimensions, the last."""
    return list(dict.fromkeys((axis.name, tensor_dim(axis)) for axis in axes))


def tensor_dim(axis: SourceAxis) -> int:
    """The dimension of the tensor that an axis lies on: that of its last view dimension."""
    if axis.view == axis.tensor_shape and len(axis.dims) == 1:
        return axis.dims[0]
    merged = view_dims(axis.tensor_shape, axis.view)
    last = [d for d in axis.dims if axis.view[d] > 1][-1]
    return next(i for i, dims in enumerate(merged) if last in dims)


def by_dimension(replay: Replay, relations: Relations) -> dict[str, dict[int, Tensor]]:
    """``{tensor name: {dim: kept old indices}}`` for all that changes; see ``PruningPlan.kept``."""
    result: dict[str, dict[int, Tensor]] = {}
    for axis in relations.sources:
        order = replay.order[axis.first]
        if not _changes(axis, order):
            continue
        dims = result.setdefault(axis.name, {})
        dims[tensor_dim(axis)] = _indices(axis, order)
        if len(axis.dims) > 1:
            dims.update(_rows(axis, order))
    return result


def same_indices(a: dict[int, Tensor], b: dict[int, Tensor]) -> bool:
    """Whether two tensors keep the same of themselves, wherever the indices lie."""
    return a.keys() == b.keys() and all(torch.equal(a[dim].cpu(), b[dim].cpu()) for dim in a)


def composed(old: dict[int, Tensor], new: dict[int, Tensor], rows: int) -> dict[int, Tensor]:
    """What of a tensor is left after two cuts, each as :func:`by_dimension` gives it; the tensor
    has ``rows`` rows between them."""
    result = {**old, **new}
    for dim in old:
        known, fresh = old[dim], new.get(dim)
        if known.dim() == 2:  # a row for each group, of which some may have gone
            group = new.get(0, torch.arange(rows)) // (rows // len(known))
            known = known[group.unique_consecutive()]
            if fresh is None:
                result[dim] = known
            elif fresh.dim() == 2:
                result[dim] = known.gather(1, fresh)
            else:
                result[dim] = known[:, fresh]
        elif fresh is not None:
            result[dim] = known[fresh]
    return result


def _rows(axis: SourceAxis, order: Tensor) -> dict[int, Tensor]:
    """Of an axis along several dimensions of the tensor, what is left of the leading ones."""
    merged = view_dims(axis.tensor_shape, axis.view)
    found = {}
    for i, d in enumerate(axis.dims[:-1]):
        if order.shape[i] < axis.view[d] and (d,) in [tuple(dims) for dims in merged]:
            dim = next(k for k, dims in enumerate(merged) if d in dims)
            found[dim] = _leading(axis, order, i)
    return found


def _leading(axis: SourceAxis, order: Tensor, i: int) -> Tensor:
    """What is left along the ``i``-th dimension, of which slices go whole."""
    return axis.along(order.movedim(i, 0).reshape(order.shape[i], -1)[:, 0], i)


def _changes(axis: SourceAxis, order: Tensor) -> bool:
    if order.numel() != axis.size:
        return True
    return not torch.equal(order.reshape(-1) + axis.first, axis.labels().reshape(-1))


def _dims(pair: tuple[SourceAxis, Tensor]) -> tuple[int, ...]:
    return pair[0].dims


def _indices(axis: SourceAxis, order: Tensor) -> Tensor:
    """Kept positions of an axis as indices of the tensor dimension it lies on."""
    if axis.view == axis.tensor_shape and len(axis.dims) == 1:
        return order.clone()
    merged = view_dims(axis.tensor_shape, axis.view)
    dim = tensor_dim(axis)
    dims = merged[dim]
    outside = [d for d in axis.dims if d not in dims and axis.view[d] > 1]
    if outside:  # positions count within each row of another dimension
        width = math.prod(axis.view[d] for d in axis.dims if d in dims)
        within = order % width
        rows = within.reshape(-1, within.shape[-1])
        return rows[0] if bool((rows == rows[0]).all()) else rows
    # Spread over the view dimensions of this tensor dimension that have no axis (gates).
    sizes = [axis.view[d] for d in dims]
    grid = torch.arange(math.prod(sizes)).reshape(sizes)
    inside = [dims.index(d) for d in axis.dims if d in dims]
    grid = grid.movedim(inside, list(range(len(sizes) - len(inside), len(sizes))))
    lead = grid.shape[: len(sizes) - len(inside)]
    picked = grid.reshape(*lead, -1)[..., order.reshape(-1)]
    if len(inside) == len(sizes) or inside[-1] == len(sizes) - 1:
        return picked.reshape(-1)
    return picked.movedim(-1, inside[0]).reshape(-1)


def shrink(tensor: Tensor, axes: list[SourceAxis], replay: Replay) -> Tensor:
    """The slices of a tensor that stay, in their order."""
    view = axes[0].view
    small = tensor if tensor.shape == view else tensor.reshape(view)
    orders = [(axis, order) for axis in axes if _changes(axis, order := replay.order[axis.first])]
    if sorted(axis.dims for axis, _ in orders) == [(0,), (1,)]:
        (first, second) = (order.to(tensor.device) for _, order in sorted(orders, key=_dims))
        small = _rows_and_columns(small, first, second)
        orders = []
    done: set[int] = set()  # dimensions whose rows are taken: the axes of one tensor can share one
    for axis, order in orders:
        small = _take(small, axis, order, done)
    if tensor.shape == view:
        return small
    merged = view_dims(tensor.shape, view)
    shape = [math.prod(small.shape[d] for d in dims) for dims in merged]
    return small.reshape(shape)


def _rows_and_columns(x: Tensor, rows: Tensor, columns: Tensor) -> Tensor:
    """``x[rows][:, columns]``, so many rows at a time as stay in the cache; all positions at once
    (``x[rows[:, None], columns]``) take longer."""
    several = max(1, _PIECE // max(1, x[0].numel()))
    if len(rows) <= several:
        return x.index_select(0, rows).index_select(1, columns)
    small = x.new_empty(len(rows), len(columns), *x.shape[2:])
    for some, part in zip(rows.split(several), small.split(several), strict=True):
        torch.index_select(x.index_select(0, some), 1, columns, out=part)
    return small


def _take(x: Tensor, axis: SourceAxis, order: Tensor, done: set[int]) -> Tensor:
    """Gather kept positions (row-major over the axis's own dimensions, as they were) of ``x``."""
    order = order.to(x.device)
    if len(axis.dims) == 1:
        return x.index_select(axis.dims[0], order)
    *lead, last = axis.dims
    width = axis.view[last]
    index = order % width
    for i, d in enumerate(lead):
        if d not in done:
            x = x.index_select(d, _leading(axis, order, i))
            done.add(d)
    rows = index.reshape(-1, index.shape[-1])
    if bool((rows == rows[0]).all()):  # the same of each: much faster than one by one
        every = torch.equal(rows[0].cpu(), torch.arange(width))
        return x if every else x.index_select(last, rows[0])
    shape = [1] * x.dim()
    for size, d in zip(index.shape, axis.dims, strict=True):
        shape[d] = size
    full = list(x.shape)
    full[last] = index.shape[-1]
    return torch.take_along_dim(x, index.reshape(shape).expand(full), last)
