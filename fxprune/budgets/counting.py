"""Parameters and multiply-accumulates that a choice of units would leave, before anything is cut.

Every size is the number of slices that stay along some axis. So what a model holds and does is a
sum of products of such numbers, and all of them are counted at once for any choice.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import torch
from torch import Tensor, fx
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.utils import parametrize
from torch.utils.flop_counter import FlopCounterMode, flop_registry

from ..errors import InputError
from ..modules import tree
from ..modules.inspecting import read_attribute
from ..modules.running import evaluating, without_gradients
from ..relating.readers import Run
from ..relating.relations import Product, Relations
from ..rules.channels import Channels, varying
from ..rules.shapes import view_dims
from ..tracing.trace import Trace


class Lengths:
    """How many slices of axes stay. An axis is asked for once, by its labels, and has a number for
    each of its dimensions; None where a dimension does not change."""

    def __init__(self, relations: Relations) -> None:
        self._classes = relations.classes
        self._known: dict[tuple[tuple[int, ...], bytes], list[int | None]] = {}
        self._lines: list[tuple[int, np.ndarray]] = []
        self._grids: list[tuple[list[int], np.ndarray]] = []
        self.count = 0

    def of(self, units: Tensor) -> list[int | None]:
        classes = torch.from_numpy(self._classes[units.numpy()])
        moving = varying(classes) or ((0,) if classes.numel() == 1 else ())
        if not moving or not bool(classes.any()):  # nothing goes, or all or nothing
            return [None] * units.dim()
        at = tuple(slice(None) if d in moving else 0 for d in range(units.dim()))
        array = np.ascontiguousarray(classes[at].numpy())
        key = array.shape, array.tobytes()
        if key not in self._known:
            numbers = list(range(self.count, self.count + array.ndim))
            self.count += array.ndim
            if array.ndim == 1:
                self._lines.append((numbers[0], array))
            else:
                self._grids.append((numbers, array))
            self._known[key] = [*numbers]
        given = iter(self._known[key])
        return [next(given) if d in moving else None for d in range(units.dim())]

    def dims(self, x: Channels) -> list[int | None]:
        """One for each dimension of a tensor."""
        found: list[int | None] = [None] * len(x.shape)
        for axis in x.axes:
            for d, number in zip(axis.dims, self.of(axis.units), strict=True):
                found[d] = number
        return found

    def measure(self, kept: np.ndarray) -> np.ndarray:
        """All of them, where ``kept`` says of each unit class whether it stays."""
        found = np.zeros(self.count)
        if self._lines:
            starts = np.cumsum([0, *(len(a) for _, a in self._lines)])[:-1]
            flat = kept[np.concatenate([a for _, a in self._lines])]
            found[[n for n, _ in self._lines]] = np.add.reduceat(flat, starts, dtype=np.int64)
        for numbers, array in self._grids:
            found[numbers] = _rectangle(kept[array])
        return found


def _rectangle(kept: np.ndarray) -> list[int]:
    """The shape of what stays of an array: without empty slices, and one dimension may be ragged
    (it keeps equally many along each slice of the others)."""
    others = [tuple(o for o in range(kept.ndim) if o != d) for d in range(kept.ndim)]
    shape = [int(kept.any(axis=o).sum()) for o in others]
    total = int(kept.sum())
    if np.prod(shape) == total:
        return shape
    for d in reversed(range(kept.ndim)):
        counts = kept.sum(axis=d)
        counts = counts[counts > 0]
        if len(counts) and (counts == counts[0]).all():
            shape[d] = int(counts[0])
            return shape
    return shape  # the plan will refuse it


@dataclass
class Term:
    """``factor`` times the product of some lengths."""

    factor: float
    lengths: tuple[int, ...]


@dataclass
class Count:
    """A sum of products of lengths, for any choice of units."""

    lengths: Lengths
    terms: list[Term]
    unsure: bool = False  # whether some of it was taken as fixed for want of better knowledge

    @cached_property
    def _moving(self) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Of the terms that change: all their lengths, where each term's start, and factors."""
        terms = [t for t in self.terms if t.lengths]
        flat = np.array([n for t in terms for n in t.lengths], dtype=np.int64)
        starts = np.cumsum([0, *(len(t.lengths) for t in terms)])[:-1]
        return flat, starts, np.array([t.factor for t in terms])

    def __call__(self, kept: np.ndarray) -> float:
        flat, starts, factors = self._moving
        total = sum(t.factor for t in self.terms if not t.lengths)
        if len(flat):
            total += np.multiply.reduceat(self.lengths.measure(kept)[flat], starts) @ factors
        return float(total)


def tensor_lengths(relations: Relations, lengths: Lengths) -> dict[str, list[tuple[int, Any]]]:
    """For each tensor with channels (size, length or None) of the dimensions its pattern sees."""
    found: dict[str, list[tuple[int, Any]]] = {}
    for axis in relations.sources:
        view = found.setdefault(axis.name, [(n, None) for n in axis.view])
        for d, number in zip(axis.dims, lengths.of(axis.labels()), strict=True):
            if number is not None and len(axis.view) == len(view):
                view[d] = (axis.view[d], number)
    return found


def product_of(dims: Iterable[tuple[int, int | None]], factor: float = 1.0) -> Term:
    moving = []
    for size, number in dims:
        if number is None:
            factor *= size
        else:
            moving.append(number)
    return Term(factor, tuple(moving))


def parameters(trace: Trace, relations: Relations, lengths: Lengths) -> Count:
    """Numbers that the model's parameters hold."""
    views = tensor_lengths(relations, lengths)
    terms = []
    for name, parameter in trace.model.named_parameters():
        path, inside, key = f".{name}".rpartition(".parametrizations.")
        if inside:  # of a computed tensor, whose dimensions its own have
            computed = f"{path}.{key.partition('.')[0]}".lstrip(".")
            terms.append(_like(parameter, computed, trace, views))
        else:
            first = trace.names.get(id(parameter), name)
            terms.append(product_of(views.get(first, [(parameter.numel(), None)])))
    return Count(lengths, terms)


def _like(parameter: Tensor, computed: str, trace: Trace, views: dict[str, Any]) -> Term:
    """A parametrization's own tensor: its dimensions are those of what is computed, or 1."""
    shape = tuple(read_attribute(trace.model, computed).shape)
    if computed not in views or len(shape) != parameter.dim():
        return product_of([(parameter.numel(), None)])
    view = views[computed]
    dims: list[tuple[int, int | None]] = []
    for n, old, parts in zip(
        parameter.shape, shape, view_dims(shape, tuple(s for s, _ in view)), strict=True
    ):
        dims += [view[d] for d in parts] if n == old else [(n, None)]
    return product_of(dims)


def multiply_accumulates(
    trace: Trace, relations: Relations, lengths: Lengths, example_input: Any
) -> Count:
    """Of one run on the example input, as :mod:`torch.utils.flop_counter` counts them.

    The run says which products there are and what each costs; the first walk, which of their
    dimensions hold channels.
    """
    views = tensor_lengths(relations, lengths)
    result = Count(lengths, [])
    for node, ops in _run(trace, views, example_input).items():
        products = [
            p for inner in [node, *getattr(node.meta.get("aten"), "nodes", ())]
            for p in relations.products.get(inner, ())
        ]  # fmt: skip
        for flops, names in ops:
            product = _take(products, names)
            if product is not None:
                dims = _dims(product, lengths)
            elif names:  # a weight meets as many positions as it did
                dims = views[names[0]]
            else:
                result.unsure, dims = True, _met(node, relations, lengths)
            size = math.prod(n for n, _ in dims)
            result.terms.append(product_of(dims, flops / 2 / max(size, 1)))
    return result


def _take(products: list[Product], names: Sequence[str]) -> Product | None:
    """The product that an op has computed: that with its weight, or the next one without."""
    for product in products:
        own = {a.source.name for x in (product.x, product.w) for a in x.axes if a.source}
        if (own & set(names)) if names else not own:
            products.remove(product)
            return product
    return None


def _dims(product: Product, lengths: Lengths) -> list[tuple[int, int | None]]:
    x, w = (list(zip(c.shape, lengths.dims(c), strict=True)) for c in (product.x, product.w))
    for a, b in product.pairs:  # under broadcasting, the one that is not 1
        x[a] = max(x[a], w[b], key=lambda dim: dim[0])
    paired = {b for _, b in product.pairs}
    return x + [dim for d, dim in enumerate(w) if d not in paired]


def _met(node: fx.Node, relations: Relations, lengths: Lengths) -> list[tuple[int, int | None]]:
    """What a product seems to run over whose rule does not say so: every dimension of one is one
    of two of its three tensors."""
    seen: dict[int, list[int]] = {}
    for value in (relations.values.get(n) for n in [*node.all_input_nodes, node]):
        if isinstance(value, Channels):
            for size, number in zip(value.shape, lengths.dims(value), strict=True):
                if number is not None:
                    seen.setdefault(number, []).append(size)
    return [(sizes[0], n) for n, sizes in seen.items() for _ in range(len(sizes) // 2)]


Ops = list[tuple[int, list[str]]]  # of each: operations, names of the model's tensors it reads


def _run(trace: Trace, views: Iterable[str], example_input: Any) -> dict[fx.Node, Ops]:
    """The ops beneath each node that the counter knows."""
    found: dict[fx.Node, Ops] = {}
    ops: Ops = []
    with (
        evaluating(trace.model),
        without_gradients(trace.model),
        sdpa_kernel(SDPBackend.MATH),
        parametrize.cached(),  # else a computed tensor is another at each read
    ):
        tensors = {name: read_attribute(trace.model, name) for name in views}
        names = {t.untyped_storage().data_ptr(): name for name, t in tensors.items() if t.dim() > 1}
        noting = {op: _noting(count, ops, names) for op, count in flop_registry.items()}
        run = Run(trace.graph_module(), example_input)
        with FlopCounterMode(display=False, custom_mapping=noting):
            for node in trace.graph.nodes:
                try:
                    run.step(node)
                except InputError as error:
                    raise InputError(
                        "Target(macs=…) counts a second run on example_input, which fails: "
                        f"{error.__cause__}"
                    ) from error
                if ops:
                    found[node] = [*ops]
                    ops.clear()
    return found


def _noting(count: Any, ops: Ops, names: dict[int, str]) -> Any:
    """A function of the counter's that also writes down what it counts."""

    def note(*args: Any, out_val: Any = None, **kwargs: Any) -> int:
        flops = count(*args, out_val=out_val, **kwargs)
        at = [t.untyped_storage().data_ptr() for t in tree.tensors((args, kwargs))]
        ops.append((flops, [names[p] for p in at if p in names]))
        return flops

    note._get_raw = True  # type: ignore[attr-defined]  # tensors, not shapes
    return note
