"""What a layer makes of constants, and of variances, that it reads."""

from __future__ import annotations

import math
from contextlib import nullcontext

import torch
from torch import Tensor

from ..rules.shapes import view_dims
from .constants import Constants, Read

_PIECE = 2**17  # elements


def delta_of(
    constants: Constants, read: Read, constant: Tensor | None, variances: Tensor | None = None
) -> tuple[Tensor | None, Tensor | None]:
    """What a constant (n,) adds to each live output: Σ W · constant over columns and kernel; and
    what ``variances`` (several, n) add to that of the output: Σ W² · variance. Dead ones get 0."""
    if constant is None and variances is None:
        return None, None
    axis, out = read.axis, read.out
    makes = sorted(_making_dims(read))
    shared = [d for d in makes if d in axis.dims]  # the groups of a grouped convolution
    own = [d for d in makes if d not in axis.dims]
    summed = [d for d in axis.dims if d not in shared]
    kernel = [d for d in range(len(axis.view)) if d not in makes and d not in axis.dims]
    w = constants.read(axis.name).reshape(axis.view).permute(*shared, *own, *summed, *kernel)
    groups, height, columns = (math.prod(axis.view[d] for d in ds) for ds in (shared, own, summed))
    w = w.reshape(groups, height, -1)
    dtype, long = torch.promote_types(w.dtype, torch.float32), w.shape[2] // columns
    rows = torch.arange(height, device=w.device)
    dead = None if out is None else constants.is_removed(out).to(w.device)
    if dead is not None and out is not None and list(out.dims) == own and not shared:
        rows = torch.nonzero(~dead.reshape(-1)).reshape(-1)

    def laid(values: Tensor) -> Tensor:
        """(groups, several, columns of w)."""
        seen = values.reshape(-1, *axis.shape)
        if shared:
            seen = seen.movedim([1 + axis.dims.index(d) for d in shared], [*range(len(shared))])
        seen = seen.reshape(groups, -1, columns).to(w.device, dtype)
        return seen if long == 1 else seen.repeat_interleave(long, 2)

    def of_outputs(found: list[Tensor]) -> Tensor:
        """(several, outputs), from what each run of rows gives."""
        live = found[0] if len(found) == 1 else torch.cat(found, 2)
        if len(rows) < height:
            live = live.new_zeros(groups, live.shape[1], height).index_copy_(2, rows, live)
        if not shared and (dead is None or len(rows) < height):
            return live[0]
        delta = live.reshape(*[axis.view[d] for d in shared], -1, *[axis.view[d] for d in own])
        delta = delta.movedim(len(shared), 0)
        delta = delta.permute(0, *[1 + [*shared, *own].index(d) for d in makes])
        if dead is not None and out is not None:
            shape = [axis.view[d] if d in out.dims else 1 for d in makes]
            delta = delta.masked_fill(dead.reshape(shape), 0.0)
        return delta.reshape(len(delta), -1)

    plain, squared = (None if v is None else laid(v) for v in (constant, variances))
    sums: list[Tensor] = []
    squares: list[Tensor] = []
    several = max(1, _PIECE // max(1, groups * w.shape[2]))
    kind = w.device.type
    coarse = (
        torch.autocast(kind, enabled=False) if torch.is_autocast_enabled(kind) else nullcontext()
    )
    with coarse:  # which what becomes a bias is not to be
        # A few rows at a time, which stay in the cache.
        for start in range(0, len(rows), several):
            part = w.index_select(1, rows[start : start + several]).to(dtype)
            if plain is not None:
                sums.append(plain @ part.transpose(1, 2))
            if squared is not None:
                squares.append(squared @ part.square_().transpose(1, 2))
    return (
        None if plain is None else of_outputs(sums)[0],
        None if squared is None else of_outputs(squares),
    )


def _making_dims(read: Read) -> set[int]:
    """The dimensions of the weight's view along which its outputs lie."""
    merged = view_dims(read.axis.tensor_shape, read.axis.view)
    if read.out is None:  # a single unit, of which a layer may make several (the gates of a cell)
        return set() if set(merged[0]) & set(read.axis.dims) else set(merged[0])
    out = read.out.dims
    same = {d for dims in merged if set(dims) & set(out) for d in dims}
    return set(out) | (same - set(read.axis.dims))
