"""Finding out what a call does to slices by running it, where nobody has a pattern for it.

A dimension passes through a call if dropping slices of its inputs there drops the same slices of
its result and changes nothing else. That is the very claim that pruning needs, tried on the values
of the recorded run.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, fx

from .declared import RETURN, Declared
from .pattern_types import Pattern

SOURCE = "probed as it ran"
_ROUNDING = {torch.float64: 1e-9, torch.float32: 1e-5}


def probe(
    name: str, run: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], value: Any
) -> Pattern | None:
    """A pattern for a call that returned ``value``, or None where no dimension passes through."""
    inputs = {key: t for key, t in _inputs(args, kwargs) if t.is_floating_point() and t.dim()}
    everything = list(_inputs(args, kwargs))
    if not isinstance(value, Tensor) or not value.is_floating_point() or not inputs:
        return None
    if len(everything) != len(inputs) or any(t.dim() > value.dim() for t in inputs.values()):
        return None
    if any(t.layout != torch.strided or not t.numel() for t in (value, *inputs.values())):
        return None  # sparse ones are compared by few ops, and empty ones tell nothing
    if not _same(_again(run, args, kwargs, {}), value):
        return None  # random, or it remembers
    passing = [d for d in range(value.dim()) if _passes(run, args, kwargs, inputs, value, d)]
    if not any(value.shape[d] > 1 for d in passing):
        return None
    names = [_passing(d) if d in passing else f"mixed{d}" for d in range(value.dim())]
    layout = {
        key: " ".join(
            names[d] if n == value.shape[d] and d in passing else f"{key}_{d}"
            for d, n in enumerate(t.shape, value.dim() - t.dim())
        )
        for key, t in inputs.items()
    }  # fmt: skip
    positions = [f"argument{i}" for i in range(len(args))]
    rule = Declared({**layout, RETURN: " ".join(names)}, (), arguments=positions)
    rule.name = name
    rule.mixes = "probed, other slices come out there where fewer go into"
    return Pattern(name, (), rule, source=SOURCE)


def probed(graph: fx.Graph) -> Iterator[tuple[fx.Node, list[int]]]:
    """The calls of a trace whose pattern is what probing found, and the dimensions that pass."""
    for node in graph.nodes:
        pattern = node.meta.get("pattern")
        if pattern is not None and pattern.source == SOURCE:
            (result,) = pattern.rule.results
            yield node, [d for d, (name,) in enumerate(result) if name == _passing(d)]


def _passing(d: int) -> str:
    """The name in the layout of a dimension that passes."""
    return f"d{d}"


def _inputs(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Iterator[tuple[str, Tensor]]:
    for i, value in enumerate(args):
        if isinstance(value, Tensor):
            yield f"argument{i}", value
    for key, value in kwargs.items():
        if isinstance(value, Tensor):
            yield key, value


def _passes(
    run: Callable[..., Any],
    args: Any,
    kwargs: Any,
    inputs: dict[str, Tensor],
    value: Tensor,
    d: int,
) -> bool:
    size = value.shape[d]
    if size == 1:
        return True
    touched = {
        key: d - value.dim() for key, t in inputs.items()
        if t.dim() >= value.dim() - d and t.shape[d - value.dim()] == size
    }  # fmt: skip
    if not touched:
        return False
    rows = [inputs[key].movedim(at, 0) for key, at in touched.items()]
    for scaled in _variants(inputs, touched):
        whole = _again(run, args, kwargs, scaled)
        if not isinstance(whole, Tensor) or whole.shape != value.shape:
            return False
        for keep in _subsets(size, rows):
            keep = keep.to(value.device)
            given = {key: scaled[key].index_select(at, keep) for key, at in touched.items()}
            found = _again(run, args, kwargs, {**scaled, **given})
            if not _same(found, whole.index_select(d, keep)):
                return False
    return True


def _variants(inputs: dict[str, Tensor], touched: dict[str, int]) -> Iterator[dict[str, Tensor]]:
    """The inputs in other sizes: what is little beside 1 may be much beside 100; and with a first
    slice beside which the others are nothing."""
    for scale in (1.0, 100.0, 0.01):
        yield {key: t * scale for key, t in inputs.items()}
    loud = dict(inputs)
    for key, at in touched.items():
        loud[key] = inputs[key].clone()
        loud[key].select(at, 0).mul_(1000)
    yield loud


def _subsets(size: int, rows: list[Tensor]) -> Iterator[Tensor]:
    """Slices to keep: the others move up, and what would be the largest of all goes."""
    generator = torch.Generator().manual_seed(0)
    yield torch.arange(1, size)
    yield 1 + torch.randperm(size - 1, generator=generator)[: max(1, size // 2)].sort()[0]
    for t in rows:
        reach = t.detach().double().abs().reshape(size, -1).nan_to_num().amax(1).cpu()
        yield reach.argsort()[: max(1, size // 2)].sort()[0]


def _again(
    run: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], given: dict[str, Tensor]
) -> Any:
    """The call with some of its tensors replaced, or None where it does not run so."""
    swapped = [given.get(f"argument{i}", value) for i, value in enumerate(args)]
    named = {key: given.get(key, value) for key, value in kwargs.items()}
    try:
        return run(*swapped, **named)
    except Exception:  # whatever a function raises says that slices cannot be dropped so
        return None


def _same(found: Any, expected: Tensor) -> bool:
    if not isinstance(found, Tensor) or found.shape != expected.shape:
        return False
    allowed = _ROUNDING.get(expected.dtype, 1e-2)
    finite = expected[expected.isfinite()]
    scale = float(finite.abs().max()) if finite.numel() else 1.0
    return torch.allclose(found, expected, rtol=0.0, atol=allowed * max(scale, 1e-30),
                          equal_nan=True)  # fmt: skip
