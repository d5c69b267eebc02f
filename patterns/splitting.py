"""Ops that take a tensor apart: chunk, split, unbind."""

from __future__ import annotations

from itertools import accumulate

from fxprune.rules.call import Named
from fxprune.rules.channels import Channels
from fxprune.rules.registry import register


def new_chunk(call, new):
    """Parts of sizes that it would not compute are parts to split in."""
    sizes = [shape[call.arg(2, "dim", 0)] for shape in new.result]
    whole, parts = sum(sizes), call.arg(1, "chunks")
    parts = parts if isinstance(parts, int) else len(sizes)  # a tensor tells it
    each = -(-whole // parts)
    if sizes == [min(each, whole - start) for start in range(0, whole, each)]:
        return {}
    return {(1, "chunks"): tuple(sizes), None: "split"}


@register("chunk", kind="split", resize=new_chunk)
def chunk(a, call):
    """Parts of one size, which the code computes from the width: they keep equally many."""
    x, dim = call.channels(), call.arg(2, "dim", 0)
    parts = len(call.spec)
    equal = len({s.shape[dim] for s in call.spec}) == 1
    return apart(a, call, x, dim, parts, equal)


def new_split(call, new):
    dim = call.arg(2, "dim", 0)
    sizes = [shape[dim] for shape in new.result]
    given = call.arg(1, "split_size_or_sections", call.kwargs.get("split_size"))
    if isinstance(given, int) and len(set(sizes[:-1])) <= 1 and sizes[-1] <= sizes[0]:
        return {(1, "split_size_or_sections"): sizes[0]}
    return {(1, "split_size_or_sections"): tuple(sizes)}


@register("split", "split_with_sizes", kind="split", resize=new_split)
def split(a, call):
    """Parts of stated sizes; where these are equal and computed, they stay equal."""
    x, dim = call.channels(), call.arg(2, "dim", 0)
    given = call.arg(1, "split_size_or_sections", call.kwargs.get("split_size"))
    equal = isinstance(given, int) and len({s.shape[dim] for s in call.spec}) == 1
    return apart(a, call, x, dim, len(call.spec), equal)


def places(call):
    """Where the parts end, or how many there are, and what the argument is called."""
    names = ("indices_or_sections", "indices", "sections", "tensor_indices_or_sections")
    name = next((n for n in names if n in call.kwargs), names[0])
    return call.arg(1, name), name


ALONG = {"vsplit": 0, "hsplit": 1, "dsplit": 2}  # the dimension that the name says


def dim_of(call):
    flat = call.word == "hsplit" and len(call.channels().shape) == 1
    return 0 if flat else ALONG.get(call.word, call.arg(2, "dim", 0))


def new_tensor_split(call, new):
    dim = dim_of(call)
    sizes = [shape[dim] for shape in new.result]
    given, name = places(call)
    if isinstance(given, (Channels, Named)):
        return {}
    if (
        isinstance(given, int)
        and sizes == sorted(sizes, reverse=True)
        and sizes[0] <= sizes[-1] + 1
    ):
        return {}  # what the code computes
    return {(1, name): tuple(accumulate(sizes[:-1]))}


@register("tensor_split", *ALONG, kind="split", resize=new_tensor_split)
def tensor_split(a, call):
    """Parts of nearly one size, or that end at stated places."""
    x, dim = call.channels(), dim_of(call)
    given, _ = places(call)
    if isinstance(given, (Channels, Named)):
        return a.unknown(call)
    equal = isinstance(given, int) and len({s.shape[dim] for s in call.spec}) == 1
    return apart(a, call, x, dim, len(call.spec), equal)


def apart(a, call, x, dim, parts, equal):
    dim %= len(x.shape)
    axis = x.axis(dim)
    if axis is not None and equal and len(axis.dims) == 1:
        a.balance(axis, parts, call)
    if axis is None:  # a part may even be empty: of tokens that no router sends to an expert
        return tuple(Channels(shape, x.axes) for shape in call.shapes)
    ends, start = [], 0
    for shape in call.shapes:
        ends.append((start, start + shape[dim]))
        start += shape[dim]
    return tuple(
        a.move(call, x, lambda t, s=s, e=e: t.narrow(dim, s, e - s), shape, touched=[dim])
        for (s, e), shape in zip(ends, call.shapes, strict=True)
    )


@register("unbind", kind="split")
def unbind(a, call):
    """yₖ = x[k]: every slice by itself."""
    x, dim = call.channels(), call.arg(1, "dim", 0) % len(call.channels().shape)
    shape = tuple(n for d, n in enumerate(x.shape) if d != dim)
    for axis in x.touching([dim]):
        a.hold(axis, [dim])
    return tuple(
        a.move(call, x, lambda t, i=i: t.select(dim, i), shape, touched=[dim])
        for i in range(x.shape[dim])
    )
