"""Shapes: broadcasting, reshaping, and bringing dimensions of two tensors into one space."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from .channels import Channels, remap


def broadcast_shape(shapes: Sequence[tuple[int, ...]]) -> tuple[int, ...]:
    rank = max(map(len, shapes), default=0)
    padded = [(1,) * (rank - len(s)) + tuple(s) for s in shapes]
    return tuple(max(sizes) if 0 not in sizes else 0 for sizes in zip(*padded, strict=True))


def with_rank(x: Channels, rank: int) -> Channels:
    """``x`` with as many dimensions of size 1 in front as it needs."""
    by = rank - len(x.shape)
    if not by:
        return x
    axes = tuple(a.on(tuple(d + by for d in a.dims)) for a in x.axes)
    return Channels((1,) * by + x.shape, axes, x.scalar)


def clusters(operands: Sequence[Channels]) -> list[tuple[int, ...]]:
    """The sets of dimensions that the operands' axes connect."""
    every = {axis.dims for x in operands for axis in x.axes}
    if all(len(dims) == 1 for dims in every):
        return sorted(every)
    clusters: list[set[int]] = []
    for dims in every:
        joined = set(dims)
        apart = []
        for cluster in clusters:
            if cluster & joined:
                joined |= cluster
            else:
                apart.append(cluster)
        clusters = [*apart, joined]
    return sorted(tuple(sorted(c)) for c in clusters)


def place(x: Channels, pairs: dict[int, int], base: int) -> tuple[Channels, int]:
    """``x`` with its paired dimensions first and the others from ``base`` on."""
    rest = [d for d in range(len(x.shape)) if d not in pairs]
    where = {**pairs, **{d: base + i for i, d in enumerate(rest)}}
    shape = [1] * (base + len(rest))
    for d, to in where.items():
        shape[to] = x.shape[d]
    return remap(x, where, tuple(shape)), len(rest)


def pad(x: Channels, rank: int) -> Channels:
    return replace(x, shape=x.shape + (1,) * (rank - len(x.shape)))


_EMPTY = 2**31 - 1  # a prime in the place of 0, which would take in all sizes beside it


def reshape_groups(old: tuple[int, ...], new: tuple[int, ...]) -> list[tuple[list[int], list[int]]]:
    """Runs of old and new dimensions with equal numbers of elements, as short as they can be."""
    groups: list[tuple[list[int], list[int]]] = []
    old, new = (tuple(n or _EMPTY for n in shape) for shape in (old, new))
    i = j = 0
    while i < len(old) or j < len(new):
        left, right = [i] if i < len(old) else [], [j] if j < len(new) else []
        a = old[i] if left else 1
        b = new[j] if right else 1
        i, j = i + len(left), j + len(right)
        while a != b or (a == b == 1 and not (left and right)):
            if a < b or (a == b and not left):
                if i >= len(old):
                    break
                a, left, i = a * old[i], [*left, i], i + 1
            else:
                if j >= len(new):
                    break
                b, right, j = b * new[j], [*right, j], j + 1
        groups.append((left, right))
    return groups


def view_dims(shape: Sequence[int], view: Sequence[int]) -> list[list[int]]:
    """For each dimension of a tensor, the dimensions of its view that it is cut into."""
    if tuple(shape) == tuple(view):
        return [[d] for d in range(len(shape))]
    result: list[list[int]] = []
    d = 0
    for size in shape:
        dims: list[int] = []
        product = 1
        while d < len(view) and (product < size or (view[d] == 1 and not dims)):
            dims.append(d)
            product *= view[d]
            d += 1
        result.append(dims)
    if result:
        result[-1] += range(d, len(view))  # of size 1, as the tensor's last is
    return result
