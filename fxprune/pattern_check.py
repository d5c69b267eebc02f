"""Trying what a pattern claims on numbers: perturbing slices, and comparing masked with shrunk."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import product
from typing import Any

import torch
from torch import Tensor, fx, nn

from . import fusions, tree
from .call import leaves
from .constants import Constants
from .errors import PatternError, ProofError, PruningWarning
from .ops import argument_names
from .pattern_types import Pattern
from .perturbing import Claim, Perturbing, rounding
from .planner import plan
from .proof import prove
from .pruning_plan import PruningPlan
from .recorder import record
from .recording import Trace
from .registry import scope
from .running import bind_inputs, evaluating

_MANY_ROWS = 2048  # of an identity matrix


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
        return [claim for claim in self.claims if claim.error]

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
    holder = _Holder(copy.deepcopy(module)).eval()
    with scope(pattern, override=True):
        trace = record(holder, example_input)
        fusions.find(trace)
    own = {id(pattern), *(id(step) for step in (pattern.steps or {}).values())}
    nodes = [n for n in trace.graph.nodes if id(n.meta.get("pattern") or trace.pattern(n)) in own]
    if not nodes:
        raise PatternError(
            f"{type(module).__name__} does not call what {pattern.name} is for on this input"
        )
    values = _values(trace, holder, example_input)
    claims: list[Claim] = []
    for node in nodes:
        claims += Perturbing(trace, node, values).claims()
    claims += _shrunk(pattern, copy.deepcopy(module).eval(), example_input)
    result = PatternCheck(pattern.name, claims)
    if result.wrong and raise_exception:
        raise PatternError(f"{pattern.name} ({pattern.source}) is wrong:\n{result}")
    return result


class _Holder(nn.Module):
    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.layer(*args, **kwargs)


def _values(trace: Trace, holder: nn.Module, example_input: Any) -> dict[fx.Node, Any]:
    """What each node of the run came to."""
    kept: dict[fx.Node, Any] = {}

    class Keeping(fx.Interpreter):
        def run_node(self, n: fx.Node) -> Any:
            kept[n] = super().run_node(n)
            return kept[n]

    args, kwargs = bind_inputs(example_input)
    with evaluating(holder), torch.no_grad():
        Keeping(trace.graph_module()).run(*args, *kwargs.values())
    return kept


class _Between(nn.Module):
    """The module between a layer that makes one dimension of an argument and one that reads one
    dimension of the result."""

    def __init__(self, module: nn.Module, example_input: Any, argument: int, dim: int, out: int):
        super().__init__()
        self.module = module
        self.args, self.kwargs = bind_inputs(example_input)
        self.argument, self.dim, self.out = argument, dim, out
        x = list(tree.tensors((self.args, self.kwargs)))[argument]
        self.made = nn.Linear(_rows(x, dim), x.shape[dim]).to(x)
        generator = torch.Generator().manual_seed(0)
        bias = torch.randn(x.shape[dim], generator=generator).to(x) * x.std()
        with torch.no_grad():  # on an identity matrix, this gives the argument as it was
            self.made.bias.copy_(bias)
            self.made.weight.copy_(x.movedim(dim, -1).reshape(-1, x.shape[dim]).T - bias[:, None])
            y = next(tree.tensors(self._call(x)))
        self.lead = [n for d, n in enumerate(x.shape) if d != dim % x.dim()]
        self.read = nn.Linear(y.shape[out], 3).to(x)

    def _call(self, x: Tensor) -> Any:
        tensors = iter(range(10**6))

        def swap(t: Tensor) -> Tensor:
            return x if next(tensors) == self.argument else t

        args, kwargs = tree.map_tensors((self.args, self.kwargs), swap)
        return self.module(*args, **kwargs)

    def forward(self, identity: Tensor) -> Tensor:
        x = self.made(identity).reshape(*self.lead, -1).movedim(-1, self.dim)
        y = self._call(x)
        y = y if isinstance(y, Tensor) else next(tree.tensors(y))
        return self.read(y.movedim(self.out, -1))


def _rows(x: Tensor, dim: int) -> int:
    return x.numel() // x.shape[dim]


def _shrunk(pattern: Pattern, module: nn.Module, example_input: Any) -> Iterator[Claim]:
    """Half of the units gone, along one dimension after the other: shrunk equals masked."""
    if pattern.steps is not None:  # the module holds what makes and reads the channels
        chosen = _plan(pattern, module, example_input)
        if chosen.kept:
            yield from _compare(pattern, chosen, module, example_input, "channels inside")
        return
    tried: set[str] = set()
    args, kwargs = bind_inputs(example_input)
    names = [*argument_names(type(module))[: len(args)], *kwargs]  # type: ignore[index]
    tensors = list(tree.tensors((args, kwargs)))
    names = names if len(names) == len(tensors) else [f"input {k}" for k in range(len(tensors))]
    with torch.no_grad(), evaluating(module):
        y = next(tree.tensors(module(*args, **kwargs)))
    for k, x in enumerate(tensors):
        if not x.is_floating_point():
            continue
        for d, e in product(range(x.dim()), range(y.dim())):
            if x.shape[d] < 2 or y.shape[e] < 2 or _rows(x, d) > _MANY_ROWS:
                continue
            net = _Between(copy.deepcopy(module), example_input, k, d, e).eval()
            identity = torch.eye(_rows(x, d)).to(x)
            chosen = _plan(pattern, net, identity)
            ends = {f"dimension {d} of {names[k]}": "made", f"dimension {e} of the result": "read"}
            cut = [what for what, layer in ends.items() if f"{layer}.weight" in chosen.kept]
            if set(cut) - tried:
                tried.update(cut)
                yield from _compare(pattern, chosen, net, identity, " and ".join(cut))


def _plan(pattern: Pattern, net: nn.Module, x: Any) -> PruningPlan:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", PruningWarning)
        return plan(net, x, patterns=[pattern])


def _compare(
    pattern: Pattern, chosen: PruningPlan, net: nn.Module, x: Any, where: str
) -> Iterator[Claim]:
    wrong = _wrong_constant(chosen, net, x, pattern)
    if wrong is not None:
        yield wrong
    small = chosen.apply(net)
    try:
        prove(chosen, net, small, x)
    except ProofError as error:
        why = str(error).partition(". Nothing was")[0]
        why = why.replace(f"the pruned {type(net).__name__}", "the shrunk layer")
        yield Claim(f"{where} cut by half: {why}", float("inf"))
        return
    yield Claim(f"{where} cut by half: shrunk equals masked")


def _wrong_constant(chosen: Any, net: nn.Module, x: Any, pattern: Pattern) -> Claim | None:
    """What the pattern says of removed units, beside what the masked model has there."""
    trace, masked = chosen._trace, chosen.mask(net)
    constants = Constants(
        trace, chosen._relations, chosen._removed, chosen._silent, net,
        attention=chosen.settings.attention,
    )  # fmt: skip
    constants.run()
    there = _values(trace.on(masked), masked, x)
    own = {id(pattern), *(id(step) for step in (pattern.steps or {}).values())}
    for node in trace.graph.nodes:
        if id(node.meta.get("pattern")) not in own:
            continue
        said = leaves(constants.values[node])
        for channels, y in zip(said, tree.tensors(there[node]), strict=True):
            for axis in channels.axes:
                if axis.constant is None or len(axis.dims) > 1 or axis.border:
                    continue
                dead = constants.removed(axis.units) & ~axis.constant.isnan()
                rows = y.double().cpu().movedim(axis.dims[0], 0).reshape(len(dead), -1)
                by = torch.where(dead, (rows - axis.constant[:, None]).abs().amax(1), 0.0)
                at = int(by.argmax())
                if float(by[at]) > rounding(y):
                    return Claim(
                        f"a removed channel {at} says {float(rows[at, 0]):.4g} along dimension "
                        f"{axis.dims[0]} of the result; by the pattern it is "
                        f"{float(axis.constant[at]):.4g}, which is wrong by {float(by[at]):.2g}",
                        float(by[at]),
                    )
    return None
