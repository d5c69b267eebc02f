"""Perturbing slices of what goes into one node, to see whether what its pattern says is so."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, fx

from . import tree
from .call import leaves, map_specs, node_name, rigid
from .channels import FROZEN, Axis, Channels, SourceAxis, distinct
from .discover import Discover, components_of
from .ops import argument_names
from .recording import Trace
from .spec import Spec

_SLICES = 8  # of one dimension that are perturbed, one at a time
_ROUNDING = {torch.float64: 1e-8, torch.float32: 1e-3}


@dataclass(frozen=True)
class Claim:
    """One thing that a pattern says, and by how much it is false: 0 where it holds."""

    text: str
    error: float = 0.0

    def __str__(self) -> str:
        return f"false: {self.text}" if self.error else f"holds: {self.text}"


class Free(Discover):
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


class Perturbing:
    """Perturbing the arguments and parameters of one node."""

    def __init__(self, trace: Trace, node: fx.Node, values: dict[fx.Node, Any]) -> None:
        self.trace, self.node, self.values = trace, node, values
        self.path = str(node.target) if node.op == "call_module" else ""
        self.module = trace.model.get_submodule(self.path) if self.path else None
        self.free = Free(trace, node)
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
    by = torch.where(by > rounding(y0), by, 0.0)
    rest = [d for d in range(by.dim()) if d not in axis.dims]
    return (by.amax(rest) if rest else by).cpu().numpy()


def _distance(y: Tensor, y0: Tensor) -> float:
    by = float(torch.nan_to_num((y.double() - y0.double()).abs()).max()) if y.numel() else 0.0
    return by if by > rounding(y0) else 0.0


def rounding(y: Tensor) -> float:
    scale = float(y.double().abs().nan_to_num(posinf=0).max()) if y.numel() else 1.0
    return _ROUNDING.get(y.dtype, 1e-1) * max(scale, 1e-30)
