"""Cutting dimensions by half, one after the other: does the shrunk layer compute what the masked
one does?"""

from __future__ import annotations

import copy
import warnings
from collections.abc import Iterator
from itertools import combinations, product
from typing import Any

import torch
from torch import Tensor, fx, nn

from ..errors import ProofError, PruningWarning
from ..modules import tree
from ..modules.running import bind_inputs, evaluating
from ..planning.make import plan
from ..planning.pruning_plan import PruningPlan
from ..proving.proof import prove
from ..rules.ops import argument_names
from ..rules.pattern_types import Pattern
from ..tracing.trace import Trace
from .perturbing import Claim, rounding

_MANY_ROWS = 2048  # of an identity matrix
_MANY_PAIRS = 12

Cut = tuple[int, int]  # (which tensor among the arguments, dimension)


class Between(nn.Module):
    """The module between layers that make dimensions of its arguments, and one that reads a
    dimension of a result (``out``). On identity matrices these give the arguments as they were."""

    def __init__(self, module: nn.Module, example_input: Any, cuts: list[Cut], out: Cut) -> None:
        super().__init__()
        self.module, self.cuts, self.out = module, cuts, out
        self.args, self.kwargs = bind_inputs(example_input)
        tensors = list(tree.tensors((self.args, self.kwargs)))
        generator = torch.Generator().manual_seed(0)
        self.made = nn.ModuleList()
        self.leads = []
        for k, d in cuts:
            x = tensors[k]
            layer = nn.Linear(rows(x, d), x.shape[d]).to(x)
            with torch.no_grad():
                scale = float(x.double().std()) if x.numel() > 1 else 1.0
                layer.bias.copy_(torch.randn(x.shape[d], generator=generator) * scale)
                flat = x.movedim(d, -1).reshape(-1, x.shape[d]).T
                layer.weight.copy_(flat - layer.bias[:, None])
            self.made.append(layer)
            self.leads.append([n for i, n in enumerate(x.shape) if i != d])
        with torch.no_grad():
            y = self._call({})
        self.read = nn.Linear(y.shape[out[1]], 3).to(tensors[cuts[0][0]])

    def identities(self) -> tuple[Tensor, ...]:
        return tuple(torch.eye(m.in_features).to(m.weight) for m in self.made)  # type: ignore

    def _call(self, given: dict[int, Tensor]) -> Tensor:
        numbers = iter(range(10**6))

        def swap(t: Tensor) -> Tensor:
            return given.get(next(numbers), t)

        args, kwargs = tree.map_tensors((self.args, self.kwargs), swap)
        return floats(self.module(*args, **kwargs))[self.out[0]]

    def forward(self, *identities: Tensor) -> Tensor:
        given = {}
        for (k, d), layer, lead, eye in zip(
            self.cuts, self.made, self.leads, identities, strict=True
        ):
            given[k] = layer(eye).reshape(*lead, -1).movedim(-1, d).contiguous()
        return self.read(self._call(given).movedim(self.out[1], -1))


def floats(result: Any) -> list[Tensor]:
    return [t for t in tree.tensors(result) if t.is_floating_point()]


def rows(x: Tensor, dim: int) -> int:
    return x.numel() // x.shape[dim]


def cut(pattern: Pattern, module: nn.Module, example_input: Any) -> Iterator[Claim]:
    """Half of the channels gone along one dimension after the other, and along two of different
    arguments together."""
    if pattern.steps is not None:  # the module holds what makes and reads the channels
        chosen = _plan(pattern, module, example_input)
        if chosen.kept:
            yield from _compare(pattern, chosen, module, example_input, "channels inside")
        return
    args, kwargs = bind_inputs(example_input)
    tensors = tree.tensors((args, kwargs))
    with torch.no_grad(), evaluating(module):
        results = floats(module(*args, **kwargs))
    names = [*(argument_names(type(module)) or [])[: len(args)], *kwargs]
    names = names if len(names) == len(tensors) else [f"input {k}" for k in range(len(tensors))]
    ends = [
        (k, d) for k, x in enumerate(tensors) if x.is_floating_point()
        for d in range(x.dim()) if x.shape[d] > 1 and rows(x, d) <= _MANY_ROWS
    ]  # fmt: skip
    pairs = [
        [a, b] for a, b in combinations(ends, 2)
        if a[0] != b[0] and tensors[a[0]].shape[a[1]] == tensors[b[0]].shape[b[1]]
    ]  # fmt: skip
    outs = [(i, e) for i, y in enumerate(results) for e in range(y.dim()) if y.shape[e] > 1]
    tried: set[str] = set()
    for cuts, out in product([[end] for end in ends] + pairs[:_MANY_PAIRS], outs):
        words = [f"dimension {d} of {names[k]}" for k, d in cuts]
        net = Between(copy.deepcopy(module), example_input, cuts, out).eval()
        x = net.identities()
        chosen = _plan(pattern, net, x)
        made = [w for i, w in enumerate(words) if f"made.{i}.weight" in chosen.kept]
        if len(cuts) > 1 and len(made) < len(cuts):
            continue
        gone = made + [f"dimension {out[1]} of {_called(out[0], results)}"] * (
            "read.weight" in chosen.kept
        )
        if set(gone) - tried or (len(cuts) > 1 and " and ".join(made) not in tried):
            tried |= {*gone, " and ".join(made)}
            yield from _compare(pattern, chosen, net, x, " and ".join(gone))


def _called(i: int, results: list[Tensor]) -> str:
    return "the result" if len(results) == 1 else f"result {i}"


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
        yield Claim(f"{where} cut by half: {why}", float("inf"), holds=False)
        return
    yield Claim(f"{where} cut by half: shrunk equals masked")


def values_of(trace: Trace, model: nn.Module, example_input: Any) -> dict[fx.Node, Any]:
    """What each node of the run comes to with the tensors of ``model``."""
    kept: dict[fx.Node, Any] = {}

    class Keeping(fx.Interpreter):
        def run_node(self, n: fx.Node) -> Any:
            kept[n] = super().run_node(n)
            return kept[n]

    args, kwargs = bind_inputs(example_input)
    with evaluating(model), torch.no_grad():
        Keeping(trace.on(model).graph_module()).run(*args, *kwargs.values())
    return kept


def own_nodes(trace: Trace, pattern: Pattern) -> list[fx.Node]:
    """The nodes that a pattern, or a step of it, gives a meaning."""
    own = {id(pattern), *(id(step) for step in (pattern.steps or {}).values())}
    return [n for n in trace.graph.nodes if id(trace.pattern(n)) in own]


def _wrong_constant(chosen: Any, net: nn.Module, x: Any, pattern: Pattern) -> Claim | None:
    """What the pattern says of removed units, beside what the masked model has there."""
    trace, constants = chosen._trace, chosen.constants(net)
    there = values_of(trace, chosen.mask(net), x)
    for node in own_nodes(trace, pattern):
        tensors = tree.tensors(there[node])
        for (channels, said), y in zip(constants.at(node), tensors, strict=True):
            for axis, constant in zip(channels.axes, said, strict=True):
                if len(axis.dims) > 1 or axis.border:
                    continue
                dead = constants.removed(axis.units) & ~constant.isnan()
                found = y.double().cpu().movedim(axis.dims[0], 0).reshape(len(dead), -1)
                by = torch.where(dead, (found - constant[:, None]).abs().amax(1), 0.0)
                at = int(by.argmax())
                if float(by[at]) > rounding(y):
                    return Claim(
                        f"a removed channel {at} says {float(found[at, 0]):.4g} along dimension "
                        f"{axis.dims[0]} of the result; by the pattern it is "
                        f"{float(constant[at]):.4g}, which is wrong by {float(by[at]):.2g}",
                        float(by[at]), holds=False,
                    )  # fmt: skip
    return None
