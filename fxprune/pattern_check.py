"""Trying what a pattern claims on numbers: perturbing slices, and comparing masked with shrunk."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import product
from typing import Any

import numpy as np
import torch
from torch import Tensor, fx, nn

from . import fusions, tree
from .call import leaves, map_specs, node_name, rigid
from .channels import FROZEN, Axis, Channels, SourceAxis, distinct
from .constants import Constants
from .discover import Discover, components_of
from .errors import PatternError, ProofError, PruningWarning
from .ops import argument_names
from .pattern_types import Pattern
from .planner import plan
from .proof import prove
from .pruning_plan import PruningPlan
from .recorder import record
from .recording import Trace
from .registry import scope
from .running import bind_inputs, evaluating
from .spec import Spec

_MANY_ROWS = 2048  # of an identity matrix
_SLICES = 8  # of one dimension that are perturbed, one at a time
_ROUNDING = {torch.float64: 1e-8, torch.float32: 1e-3}


@dataclass(frozen=True)
class Claim:
    """One thing that a pattern says, and by how much it is false: 0 where it holds."""

    text: str
    error: float = 0.0

    def __str__(self) -> str:
        return f"false: {self.text}" if self.error else f"holds: {self.text}"


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
        claims += _Node(trace, node, values).claims()
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


class _Free(Discover):
    """One node whose arguments have channels along every dimension: what its pattern says."""

    def __init__(self, trace: Trace, node: fx.Node) -> None:
        super().__init__(trace)
        self.inputs: dict[fx.Node, Channels] = {}
        with torch.no_grad():
            for source in node.all_input_nodes:
                self.values[source] = self._argument(source)
            self.results: list[Channels] = list(leaves(self._visit(node)))
        none = np.zeros(0, dtype=np.int64)
        left = np.concatenate([none, *(a for a, _ in self._joins)])
        right = np.concatenate([none, *(b for _, b in self._joins)])
        found = components_of(left, right, self._next)
        self.classes = np.where(found == found[FROZEN], 0, found + 1)  # by label; 0 stays

    def _argument(self, source: fx.Node) -> Any:
        spec = source.meta["spec"]
        if source.op == "get_attr":
            return self._attribute(source)
        if isinstance(spec, Spec) and spec.dtype.is_floating_point:
            axes = []
            for d, n in enumerate(spec.shape):
                if n > 1:
                    axes.append(Axis((d,), torch.arange(self._next, self._next + n)))
                    self._next += n
            self.inputs[source] = Channels(spec.shape, tuple(axes))
            return self.inputs[source]
        return map_specs(spec, rigid)

    def of(self, units: Tensor) -> np.ndarray:
        return self.classes[units.numpy()]


class _Node:
    """Perturbing the arguments and parameters of one node."""

    def __init__(self, trace: Trace, node: fx.Node, values: dict[fx.Node, Any]) -> None:
        self.trace, self.node, self.values = trace, node, values
        self.path = str(node.target) if node.op == "call_module" else ""
        self.module = trace.model.get_submodule(self.path) if self.path else None
        self.free = _Free(trace, node)
        self.name = node_name(node).removeprefix("layer.")
        self.before = self.run({})
        self.generator = torch.Generator().manual_seed(0)

    def run(self, replaced: dict[Any, Tensor]) -> list[Tensor]:
        """The node with some tensors replaced: arguments by node, parameters by name."""

        def argument(n: fx.Node) -> Any:
            return replaced.get(n, replaced.get(str(n.target), self.values[n]))

        args, kwargs = fx.node.map_arg((self.node.args, self.node.kwargs), argument)
        with torch.no_grad(), torch.random.fork_rng():
            torch.manual_seed(0)
            if self.module is not None:
                own = {k.removeprefix(f"{self.path}."): t for k, t in replaced.items()
                       if isinstance(k, str)}  # fmt: skip
                value = torch.func.functional_call(self.module, own, args, kwargs)
            elif self.node.op == "call_method":
                value = getattr(args[0], str(self.node.target))(*args[1:], **kwargs)
            else:
                value = self.node.target(*args, **kwargs)  # type: ignore[operator]
        return list(tree.tensors(value))

    def claims(self) -> Iterator[Claim]:
        for source, x in self.free.inputs.items():
            for axis in x.axes:
                where = f"dimension {axis.dims[0]} of {self._argument_name(source)}"
                yield self._alone(source, self.values[source], axis.dims, axis.units, where)
        for s in self.free.sources:
            where = f"{self._short(s.name)} along {self._role(s.role)} (dimension {s.dims[-1]})"
            seen = self.trace.tensor(s.name).detach().reshape(s.view)
            yield self._alone(s.name, seen, s.dims, s.labels(), where, s.tensor_shape)
        yield from self._reads()
        yield from self._left_out()

    def _alone(
        self, key: Any, tensor: Tensor, dims: tuple[int, ...], units: Tensor, where: str,
        shape: tuple[int, ...] | None = None,
    ) -> Claim:  # fmt: skip
        """Perturbing one slice moves no slice of the result but those of its own unit."""
        for at in self._some(units.numel()):
            unit = int(self.free.of(units).reshape(-1)[at])
            moved = self.run({key: self._perturbed(tensor, dims, at).reshape(
                tensor.shape if shape is None else shape)}) if unit else []  # fmt: skip
            for y, y0, result in zip(moved, self.before, self.free.results, strict=False):
                for axis in result.axes:
                    theirs = self.free.of(axis.units)
                    if not (theirs == unit).any():
                        continue  # it is summed over: all may move
                    by = _movement(y, y0, axis)
                    by[theirs == unit] = 0
                    if by.max() > 0:
                        other = int(by.argmax())
                        return Claim(
                            f"{where}: perturbing slice {at} moved slice {other} of dimension "
                            f"{axis.dims[0]} of the result, by {by.max():.2g}; by the pattern only "
                            f"slice {int((theirs.reshape(-1) == unit).argmax())} may move",
                            float(by.max()),
                        )
        return Claim(f"{where}: slices move their own of the result only")

    def _reads(self) -> Iterator[Claim]:
        """Where the slices of weights that read a channel are zero, the channel says nothing."""
        readers = [s for s in self.free.sources if s.role == "in"]
        read = {int(c) for s in readers for c in distinct(self.free.of(s.labels())) if c}
        for source, x in self.free.inputs.items():
            for axis in x.axes:
                mine = self.free.of(axis.units)
                found = [i for i in self._some(len(mine)) if int(mine[i]) in read]
                for at in found:
                    zero = self._unread(readers, int(mine[at]))
                    given = self._perturbed(self.values[source], axis.dims, at)
                    pairs = zip(self.run({**zero, source: given}), self.run(zero), strict=True)
                    by = max(_distance(y, y0) for y, y0 in pairs)
                    where = f"dimension {axis.dims[0]} of {self._argument_name(source)}"
                    if by > 0:
                        names = ", ".join(sorted({self._short(s.name) for s in readers}))
                        yield Claim(
                            f"{where}: channel {at} still moves the result by {by:.2g} where the "
                            f"slices of {names} that are to read it are zero", by,
                        )  # fmt: skip
                        break
                else:
                    if found:
                        yield Claim(f"{where}: channels are read by those slices of weights only")

    def _unread(self, readers: list[SourceAxis], unit: int) -> dict[Any, Tensor]:
        """Weights whose slices that read a unit are zero."""
        zero: dict[Any, Tensor] = {}
        for s in readers:
            gone = torch.from_numpy(self.free.of(s.labels()) == unit)
            tensor = zero.get(s.name, self.trace.tensor(s.name).detach()).reshape(s.view)
            gone = gone.reshape([n if d in s.dims else 1 for d, n in enumerate(s.view)])
            zero[s.name] = tensor.masked_fill(gone.to(tensor.device), 0).reshape(s.tensor_shape)
        return zero

    def _left_out(self) -> Iterator[Claim]:
        """A parameter with slices for the channels of the result has to be named."""
        if self.module is None:
            return
        named = {s.name for s in self.free.sources}
        for local, p in [*self.module.named_parameters(), *self.module.named_buffers()]:
            full = f"{self.path}.{local}"
            if full in named or not p.is_floating_point():
                continue
            for d, size in enumerate(p.shape):
                hit = self._one_to_one(full, p.detach(), d) if size > 1 else None
                if hit:
                    e, by = hit
                    yield Claim(
                        f"{local} is not in the pattern, but perturbing slice 1 of its dimension "
                        f"{d} moves slice 1 of dimension {e} of the result only, by {by:.2g}", by,
                    )  # fmt: skip

    def _one_to_one(self, name: str, p: Tensor, d: int) -> tuple[int, float] | None:
        for y0, result in zip(self.before, self.free.results, strict=True):
            for axis in result.axes:
                if len(axis.dims) > 1 or axis.units.numel() != p.shape[d]:
                    continue
                if not self.free.of(axis.units).any():
                    continue
                moves = [
                    _movement(self.run({name: self._perturbed(p, (d,), at)})[0], y0, axis)
                    for at in (0, 1)
                ]
                if all((by > 0).sum() == 1 and by[at] > 0 for at, by in enumerate(moves)):
                    return axis.dims[0], float(moves[1].max())
        return None

    def _perturbed(self, tensor: Tensor, dims: tuple[int, ...], at: int) -> Tensor:
        """Another slice ``at`` (row-major over ``dims``): values of about the same size."""
        front = tensor.movedim(dims, tuple(range(len(dims)))).clone()
        flat = front.reshape(-1, *front.shape[len(dims) :])
        size = float(tensor.double().std()) if tensor.numel() > 1 else 0.0
        noise = torch.randn(flat[at].shape, generator=self.generator, dtype=torch.float64)
        flat[at] += ((size or 1.0) * (0.5 + noise.abs())).to(flat)
        return flat.reshape(front.shape).movedim(tuple(range(len(dims))), dims)

    def _some(self, count: int) -> list[int]:
        return sorted({round(i) for i in np.linspace(0, count - 1, min(count, _SLICES))})

    def _argument_name(self, source: fx.Node) -> str:
        target = self.node.target if self.module is None else type(self.module)
        names = argument_names(target) or []
        for i, value in enumerate(self.node.args):
            if value is source:
                return names[i] if i < len(names) else f"argument {i}"
        return next((k for k, v in self.node.kwargs.items() if v is source), "an argument")

    def _short(self, name: str) -> str:
        return name.removeprefix("layer.").removeprefix(f"{self.path}.".removeprefix("layer."))

    def _role(self, role: str) -> str:
        return {"out": "what it makes", "in": "what it reads"}.get(role, "its channels")


def _movement(y: Tensor, y0: Tensor, axis: Axis) -> np.ndarray:
    """By how much each slice of an axis moved, 0 where it is rounding."""
    by = torch.nan_to_num((y.double() - y0.double()).abs())
    by = torch.where(by > _rounding(y0), by, 0.0)
    rest = [d for d in range(by.dim()) if d not in axis.dims]
    return (by.amax(rest) if rest else by).cpu().numpy()


def _distance(y: Tensor, y0: Tensor) -> float:
    by = float(torch.nan_to_num((y.double() - y0.double()).abs()).max()) if y.numel() else 0.0
    return by if by > _rounding(y0) else 0.0


def _rounding(y: Tensor) -> float:
    scale = float(y.double().abs().nan_to_num(posinf=0).max()) if y.numel() else 1.0
    return _ROUNDING.get(y.dtype, 1e-1) * max(scale, 1e-30)


# -- masked and shrunk ----------------------------------------------------------------------------


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
                if float(by[at]) > _rounding(y):
                    return Claim(
                        f"a removed channel {at} says {float(rows[at, 0]):.4g} along dimension "
                        f"{axis.dims[0]} of the result; by the pattern it is "
                        f"{float(axis.constant[at]):.4g}, which is wrong by {float(by[at]):.2g}",
                        float(by[at]),
                    )
    return None
