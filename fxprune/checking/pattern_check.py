"""Trying what a pattern claims on numbers: perturbing slices, and comparing masked with shrunk."""

from __future__ import annotations

import copy
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from ..errors import PatternError
from ..modules import tree
from ..modules.running import bind_inputs
from ..rules.pattern_types import Pattern
from ..rules.registry import scope
from ..tracing import fusions
from ..tracing.record import record
from .cutting import cut, own_nodes, values_of
from .perturbing import Claim, Perturbing


@dataclass(frozen=True)
class PatternCheck:
    """What :func:`check_pattern` tried.

    Attributes:
        pattern: its name.
        claims: each :class:`Claim`, those that are false with the channel and the error.
    """

    pattern: str
    claims: list[Claim]

    @property
    def wrong(self) -> list[Claim]:
        return [claim for claim in self.claims if not claim.holds]

    def __bool__(self) -> bool:
        return not self.wrong

    def __str__(self) -> str:
        return "\n".join([f"pattern {self.pattern}", *(f"  {claim}" for claim in self.claims)])


def check_pattern(
    pattern: Pattern, module: nn.Module, example_input: Any, *, raise_exception: bool = True
) -> PatternCheck:
    """Try on numbers whether what ``pattern`` says of ``module`` is so.

    Slices of each argument and parameter are perturbed one at a time, to see whether only those
    slices of the result move that the pattern says; then half of the units go, one dimension after
    the other, and the shrunk layer is compared with the masked one.

    Args:
        pattern: made by :func:`fxprune.pattern` or :func:`fxprune.register`; it need not be
            registered.
        module: a layer of the class that the pattern is for, or a module that calls the function or
            has the run of nodes. In float64 the comparison is the sharpest.
        example_input: a tensor, a tuple of positional or a mapping of keyword arguments.
        raise_exception: raise where a claim is false; else return it among the others.

    Returns:
        The claims that were tried.

    Raises:
        PatternError: a claim is false, with the channel and the size of the error; or ``module``
            does not call what the pattern is for.
    """
    if not isinstance(pattern, Pattern):
        raise PatternError(f"{pattern!r} is no Pattern; fxprune.pattern(...) makes one")
    if not all(t.numel() for t in tree.tensors(bind_inputs(example_input))):
        raise PatternError("example_input has an empty tensor, on which nothing can be tried")
    holder = _holding(module)
    with scope(pattern, override=True):
        trace = record(holder, example_input)
        fusions.find(trace)
        nodes = own_nodes(trace, pattern)
    if not nodes:
        raise PatternError(
            f"{type(module).__name__} does not call what {pattern.name} is for on this input"
        )
    values = values_of(trace, holder, example_input)
    claims: list[Claim] = []
    for node in nodes:
        claims += Perturbing(trace, node, values).claims()
    claims += cut(pattern, holder.get_submodule("layer"), example_input)
    result = PatternCheck(pattern.name, claims)
    if result.wrong and raise_exception:
        raise PatternError(f"{pattern.name} ({pattern.source}) is wrong:\n{result}")
    return result


def _holding(module: nn.Module) -> nn.Module:
    """A model that calls a copy of ``module``, which is no leaf of a trace by itself. Where its
    parameters are nothing (a scale of 0), what they do could not be seen: they are moved."""
    layer = copy.deepcopy(module)
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for p in layer.parameters():
            if p.is_floating_point() and p.numel():
                size = float(p.double().std()) if p.numel() > 1 else 0.0
                noise = torch.randn(p.shape, generator=generator, dtype=torch.float64)
                p.add_((noise * 0.3 * (size or 1.0)).to(p))

    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        return self.layer(*args, **kwargs)

    holder = type(type(module).__name__, (nn.Module,), {"forward": forward})()
    holder.layer = layer
    return holder.eval()
