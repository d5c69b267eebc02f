"""Perturbing slices of what goes into one node, to see whether what its pattern says is so."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, fx

from ..modules import tree
from ..modules.inspecting import read_attribute, tensors_of
from ..modules.running import run_node
from ..replaying.new_sizes import OldSizes
from ..rules.call import node_name
from ..rules.channels import Axis, Channels, SourceAxis, distinct
from ..rules.ops import argument_names
from ..tracing.trace import Trace
from .alone import Free

_ROLES = {"out": "what it makes", "in": "what it reads"}
_CONSTANT = 1.7
_SLICES = 8  # of one dimension that are perturbed, one at a time
_ROUNDING = {torch.float64: 1e-8, torch.float32: 1e-3}


@dataclass(frozen=True)
class Claim:
    """One thing that a pattern says, whether it holds, and by how much it is false if not."""

    text: str
    error: float = 0.0
    holds: bool = True

    def __str__(self) -> str:
        return f"{'holds' if self.holds else 'false'}: {self.text}"


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
            own = {k.removeprefix(f"{self.path}."): t for k, t in replaced.items()
                   if isinstance(k, str)}  # fmt: skip
            value = run_node(self.node, self.module, args, kwargs, own)
        return tree.tensors(value)

    def claims(self) -> Iterator[Claim]:
        nothing = self._nothing()
        if nothing is not None:
            yield nothing
            return
        yield from self._attributes()
        for source, x in self.free.inputs.items():
            for axis in x.axes:
                where = f"dimension {axis.dims[0]} of {self._argument_name(source)}"
                yield self._alone(source, self.values[source], axis.dims, axis.units, where)
        for s in self.free.sources:
            along = _ROLES.get(s.role, "its channels")
            where = f"{self._short(s.name)} along {along} (dimension {s.dims[-1]})"
            seen = self.trace.tensor(s.name).detach().reshape(s.view)
            yield self._alone(s.name, seen, s.dims, s.labels(), where, s.tensor_shape)
        yield from self._reads()
        yield from self._folds()
        yield from self._left_out()

    def _nothing(self) -> Claim | None:
        """A pattern by which nothing can go says nothing that could be tried."""
        axes = [a for x in (*self.free.inputs.values(), *self.free.results) for a in x.axes]
        if any(self.free.of(axis.units).any() for axis in axes):
            return None
        why = "; ".join(dict.fromkeys(note.reason for note in self.free.frozen))
        text = f"nothing can be cut in {self.name}: {why or 'it says nothing'}"
        return Claim(text, float("inf"), holds=False)

    def _attributes(self) -> Iterator[Claim]:
        """Attributes come out as they are where nothing is cut."""
        pattern = self.trace.pattern(self.node)
        if self.module is None or pattern is None or pattern.attributes is None:
            return
        views = {k: tuple(t.shape) for k, t in tensors_of(self.module).items()}
        for s in self.free.sources:
            views[self._short(s.name)] = s.view
        x = next(iter(self.free.inputs.values()), None)
        sizes = OldSizes(views, () if x is None else x.shape, self.node.meta["spec"])
        for key, said in pattern.attributes(self.module, sizes).items():
            found = None if key == "forward" else read_attribute(self.module, key)
            if key != "forward" and found != said:
                yield Claim(f"{key} is {found}, by the pattern it is {said}", float("inf"),
                            holds=False)  # fmt: skip

    def _folds(self) -> Iterator[Claim]:
        """What a constant channel adds through a weight is what the bias can add instead."""
        pattern = self.trace.pattern(self.node)
        rule = getattr(pattern, "rule", None)
        if self.module is None or not isinstance(pattern.bias, Mapping):  # type: ignore[union-attr]
            return
        border = rule.border(self.module) if callable(rule.border) else rule.border  # type: ignore[union-attr]
        for weight, bias in pattern.bias.items():  # type: ignore[union-attr]
            for source, x in self.free.inputs.items():
                for axis in x.axes:
                    claim = self._fold(weight, bias, source, axis, border, rule)
                    if claim is not None:
                        yield claim

    def _fold(
        self, weight: str, bias: str, source: fx.Node, axis: Axis, border: str, rule: Any
    ) -> Claim | None:
        mine = self.free.of(axis.units)
        readers = [s for s in self._readers() if self._short(s.name) == weight]
        units = self._read_by(readers)
        at = next((i for i in self._some(len(mine)) if int(mine[i]) in units), None)
        b = tensors_of(self.module).get(bias)  # type: ignore[arg-type]
        if at is None or border == "pattern" or b is None:  # a bias that may be None is, here
            return None
        unit = int(mine[at])
        s = readers[0]
        names, theirs = ([n for d in rule.layouts[key] for n in d] for key in (weight, bias))
        w = self.trace.tensor(s.name).detach().reshape(s.view)
        gone = s.laid(torch.from_numpy(self.free.of(s.labels()) == unit).to(w.device))
        rest = [d for d, n in enumerate(names) if n not in theirs]
        added = (w * gone * _CONSTANT).sum(rest) if rest else w * gone * _CONSTANT
        value = self._inner(source, rule) if border else self.values[source].clone()
        value.movedim(axis.dims[0], 0)[torch.from_numpy(mine == unit)] = _CONSTANT
        folded = {source: value, **self._unread(readers, unit),
                  f"{self.path}.{bias}": b.detach() + added.reshape(b.shape)}  # fmt: skip
        pairs = zip(self.run({source: value}), self.run(folded), self.free.results, strict=True)
        error = max(self._difference(y0, y, result, border) for y0, y, result in pairs)
        where = f"dimension {axis.dims[0]} of {self._argument_name(source)}"
        if error:
            return Claim(
                f"folds: what a constant in channel {at} of {where} adds through {weight} is not "
                f"what {bias} can add instead: the result differs by {error:.2g}",
                error, holds=False,
            )  # fmt: skip
        return Claim(f"{where}: what a constant adds through {weight} can go into {bias}")

    def _inner(self, source: fx.Node, rule: Any) -> Tensor:
        """An argument repeated where the layout mixes slices: so that not all of it is border."""
        value = self.values[source]
        layout = rule.layouts.get(self._argument_name(source), ())
        others = {n for key in (*rule.layouts.values(), *rule.results) if key is not layout
                  for d in key for n in d}  # fmt: skip
        if len(layout) != value.dim():
            return value.clone()
        wide = value.repeat([1 if set(names) & others else 3 for names in layout])
        try:
            self.run({source: wide})
        except Exception:  # whatever the layer raises: it takes this size only
            return value.clone()
        return wide

    def _difference(self, y0: Tensor, y: Tensor, result: Channels, border: str) -> float:
        """Between two results, 0 for rounding: with a border, where it is the least."""
        by = _apart(y, y0)
        if border:
            outs = {int(c) for o in self.free.sources if o.role == "out"
                    for c in self.free.of(o.labels()).flat}  # fmt: skip
            made = [d for a in result.axes
                    if outs & set(self.free.of(a.units).flat) for d in a.dims]  # fmt: skip
            by = by.amax(made).min() if made else by.min()
        error = float(by.max()) if by.numel() else 0.0
        return error if error > rounding(y0) else 0.0

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
                            holds=False,
                        )
        return Claim(f"{where}: slices move their own of the result only")

    def _reads(self) -> Iterator[Claim]:
        """Where the slices of weights that read a channel are zero, the channel says nothing."""
        readers = self._readers()
        read = self._read_by(readers)
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
                            f"slices of {names} that are to read it are zero", by, holds=False,
                        )  # fmt: skip
                        break
                else:
                    if found:
                        yield Claim(f"{where}: channels are read by those slices of weights only")

    def _readers(self) -> list[SourceAxis]:
        return [s for s in self.free.sources if s.role == "in"]

    def _read_by(self, readers: list[SourceAxis]) -> set[int]:
        """The units that weights read."""
        return {int(c) for s in readers for c in distinct(self.free.of(s.labels())) if c}

    def _unread(self, readers: list[SourceAxis], unit: int) -> dict[Any, Tensor]:
        """Weights whose slices that read a unit are zero."""
        zero: dict[Any, Tensor] = {}
        for s in readers:
            gone = s.laid(torch.from_numpy(self.free.of(s.labels()) == unit))
            tensor = zero.get(s.name, self.trace.tensor(s.name).detach()).reshape(s.view)
            zero[s.name] = tensor.masked_fill(gone.to(tensor.device), 0).reshape(s.tensor_shape)
        return zero

    def _left_out(self) -> Iterator[Claim]:
        """A parameter with slices for the channels of the result has to be named."""
        if self.module is None:
            return
        named = {s.name for s in self.free.sources}
        for local, p in tensors_of(self.module).items():
            full = f"{self.path}.{local}"
            if full in named or not p.is_floating_point() or ".parametrizations." in f".{local}":
                continue
            for d, size in enumerate(p.shape):
                hit = self._one_to_one(full, p.detach(), d) if size > 1 else None
                if hit:
                    e, by = hit
                    yield Claim(
                        f"{local} is not in the pattern, but perturbing slice 1 of its dimension "
                        f"{d} moves slice 1 of dimension {e} of the result only, by {by:.2g}",
                        by, holds=False,
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


def _movement(y: Tensor, y0: Tensor, axis: Axis) -> np.ndarray:
    """By how much each slice of an axis moved, 0 where it is rounding."""
    by = _apart(y, y0)
    by = torch.where(by > rounding(y0), by, 0.0)
    rest = [d for d in range(by.dim()) if d not in axis.dims]
    return (by.amax(rest) if rest else by).cpu().numpy()


def _distance(y: Tensor, y0: Tensor) -> float:
    by = float(_apart(y, y0).max()) if y.numel() else 0.0
    return by if by > rounding(y0) else 0.0


def _apart(y: Tensor, y0: Tensor) -> Tensor:
    return torch.nan_to_num((y.double() - y0.double()).abs())


def rounding(y: Tensor) -> float:
    scale = float(y.double().abs().nan_to_num(posinf=0).max()) if y.numel() else 1.0
    return _ROUNDING.get(y.dtype, 1e-1) * max(scale, 1e-30)
