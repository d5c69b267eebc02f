"""Where the constants of removed channels go: biases, batch-norm means, a carrier's column."""

from __future__ import annotations

import math
from collections.abc import Container, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor, fx, nn

from .channels import SourceAxis
from .constants import Constants, Read
from .layout import view_dims

_ROUNDING = 1e-12
_PIECE = 2**17  # elements


@dataclass
class Shift:
    """A constant to add to one tensor of a module (old widths)."""

    path: str  # of the module that owns the tensor
    attribute: str
    delta: Tensor
    masked_too: bool  # the masked model has it as well: its columns are zeroed instead
    name: str = ""  # the tensor's name in the model, "" where it has to be made


@dataclass
class Carry:
    """Columns of a weight that are folded, scaled, into the column of a carrier channel."""

    axis: SourceAxis
    carriers: Tensor  # flat positions in the axis, one a row of it
    factors: Tensor  # over the axis: what of each column goes to its row's carrier


@dataclass
class Mix:
    """A weight that reads, in the place of each of its channels, what the kept ones say of it.

    ``matrix`` is (rows, n, k) over the axis, from the kept channels at ``index`` (rows, k) to all;
    ``offset`` (rows, n) is what they cannot say, for the bias in ``sink``. ``error`` is the squared
    error of the layer's output, on inputs left out, over the output's variance.
    """

    read: Read
    order: Tensor | None  # (n, positions) of the axis' slices, where the same is said of several
    index: Tensor
    matrix: Tensor
    offset: Tensor
    sink: tuple[str, str, str, float] | None  # as sink_of says it
    error: float
    samples: int
    ridge: float

    @property
    def axis(self) -> SourceAxis:
        return self.read.axis

    def shift(self, constants: Constants) -> Shift | None:
        """What goes into the bias, with the weights of the model of ``constants``."""
        if self.sink is None:
            return None
        path, attribute, name, sign = self.sink
        offset = self.offset
        if self.order is not None:
            offset = torch.zeros(self.axis.size, dtype=offset.dtype)
            offset[self.order] = self.offset[0][:, None]
        delta = delta_of(constants, self.read, offset.reshape(self.axis.shape))
        return Shift(path, attribute, sign * delta, True, name)


@dataclass
class Folds:
    shifts: list[Shift] = field(default_factory=list)
    carries: list[Carry] = field(default_factory=list)
    mixes: dict[str, Mix] = field(default_factory=dict)  # by name of the weight
    # Columns whose constant cannot be kept: the masked model reads 0 there. By label of the axis.
    dropped: dict[int, tuple[SourceAxis, Tensor]] = field(default_factory=dict)
    notes: list[tuple[str, str]] = field(default_factory=list)

    def drop(self, axis: SourceAxis, columns: Tensor) -> None:
        if bool(columns.any()):
            _, known = self.dropped.get(axis.first, (axis, torch.zeros_like(columns)))
            self.dropped[axis.first] = (axis, known | columns)


def folds(
    constants: Constants,
    carriers: np.ndarray,
    classes: np.ndarray,
    model: nn.Module,
    *,
    bias: str | None,
    exact: bool,
    skip: Container[str] = (),
) -> Folds:
    """What each reading layer does with the constants it reads.

    Args:
        constants: what is said, and to whom.
        carriers: for each unit class, whether it stays as a masked channel.
        skip: weights to leave alone.
    """
    result = Folds()
    by_weight: dict[str, list[Read]] = {}
    for read in constants.reads:
        if read.axis.name not in skip:
            by_weight.setdefault(read.axis.name, []).append(read)
    for several in by_weight.values():
        reads = several[:1] if _alike(several) else several
        for read in reads:
            said = read.constant if len(reads) > 1 else _said(several)
            alive = torch.from_numpy(carriers[classes[read.axis.labels().numpy()]])
            gone = read.dead & ~alive
            known = gone & ~torch.isnan(read.constant)
            nonzero = known & ((read.constant != 0) | (said != 0))
            if bias == "drop":
                result.drop(read.axis, gone)
                continue
            if len(reads) > 1 and not bool((gone & (read.constant == 0)).eq(gone).all()):
                result.drop(read.axis, gone)
                result.notes.append((read.call.name, "its weight is used twice: constants dropped"))
                continue
            if bool((gone & ~known).any()):
                result.drop(read.axis, gone & ~known)
                result.notes.append(
                    (read.call.name, "a removed channel is not constant here: its part is dropped")
                )
            if bool(nonzero.any()):
                _fold(result, constants, read, said, nonzero, alive, model, exact)
            if len(several) == 1 and read.variance is not None and bool(gone.any()):
                _amplify(result, constants, read, gone)
    result.notes = list(dict.fromkeys(result.notes))
    return result


def mixed(weight: Tensor, mix: Mix) -> Tensor:
    """The weight folded with a prediction: W · A, in each row of the axis; zeros where channels
    go."""
    flat = mix.axis.flat(weight)
    seen = placed(flat, mix.order)
    matrix = mix.matrix.to(flat.device)
    with torch.autocast(weight.device.type, enabled=False):  # it becomes weights
        folded = (matrix.transpose(1, 2) @ seen.to(matrix.dtype)).to(weight.dtype)
    index = mix.index.to(flat.device)[:, :, None].expand(-1, -1, seen.shape[2])
    found = torch.zeros_like(seen).scatter_(1, index, folded)
    if mix.order is not None:
        back = found.reshape(*mix.order.shape, -1)
        found = torch.empty_like(flat)
        found[0, mix.order.to(flat.device)] = back
    return mix.axis.unflat(found)


def placed(flat: Tensor, order: Tensor | None) -> Tensor:
    """(rows, n, m), with the slices of a channel's positions side by side."""
    if order is None:
        return flat
    return flat[0, order.to(flat.device)].reshape(1, len(order), -1)


def _alike(reads: list[Read]) -> bool:
    """Whether a layer reads the same constants each time it is called."""
    first, *others = reads
    return all(
        read.call.path and read.call.path == first.call.path and read.border == first.border
        and torch.equal(read.dead, first.dead)
        and torch.equal(read.constant.nan_to_num(1e30), first.constant.nan_to_num(1e30))
        for read in others
    )  # fmt: skip


def _said(reads: list[Read]) -> Tensor:
    """What a layer's channels say to it: what they emit when masked, or where that is known, what
    they said in the mean of all its calls."""
    constant = reads[0].constant
    if any(read.mean is None for read in reads):
        return constant
    mean = torch.stack([read.mean for read in reads]).mean(0)  # type: ignore[misc]
    near = (mean - constant).abs() <= _ROUNDING * (1 + constant.abs())
    return torch.where(near | torch.isnan(mean), constant, mean)


def _amplify(result, constants, read, gone) -> None:
    """A batch norm that is all that reads the layer scales what is left so that it predicts the
    whole best, by what channels have in common.

    The output is k + g, of channels that stay and that go. If all were independent, its variance
    would be I = Σ W² · variance; C, by which what the norm has measured exceeds that, is common. If
    the kept ones have the share q of I, and q of the common amplitude, then the multiple of k that
    predicts k + g best is c = 1 + (1 - q) C / (q C + I): cov(k, k + g) over var(k).
    """
    users = list(read.call.node.users)
    name = constants.norms.get(users[0]) if len(users) == 1 else None
    if (
        name is None
        or list(constants.norms.values()).count(name) > 1
        or bool(torch.isnan(read.variance).any())
    ):
        return
    going = torch.where(gone, read.variance, 0.0)
    if not bool(going.any()):
        return
    both = torch.stack([read.variance, going])
    alone, goes = delta_of(constants, read, both, squared=True)
    measured = constants.read(name)
    common = (measured.to(alone) - alone).clamp(min=0)
    goes = torch.where(alone > 0, goes / alone, 0.0)
    factor = 1 + torch.where(goes > 0, goes * common / ((1 - goes) * common + alone), 0.0)
    path, _, attribute = name.rpartition(".")
    delta = (1 / factor.square() - 1).to(measured) * measured
    if bool(delta.any()):
        result.shifts.append(Shift(path, attribute, delta, True, name))


def _fold(result, constants, read, said, nonzero, alive, model, exact) -> None:
    constant = torch.where(nonzero, said, 0.0)
    differs = bool((nonzero & (said != read.constant)).any())  # from what the masked model emits
    if read.border and exact:
        carry = _carry(read, constant, alive)
        if carry is not None:
            result.carries.append(carry)
            return
    if read.border == "pattern" or (read.border and exact):
        result.drop(read.axis, nonzero)
        result.notes.append((read.call.name, "a constant differs by position here: dropped"))
        return
    sink = sink_of(constants, read, model)
    if sink is None:
        result.drop(read.axis, nonzero)
        result.notes.append((read.call.name, "no bias can take the constant: dropped"))
        return
    path, attribute, name, sign = sink
    delta = sign * delta_of(constants, read, constant)
    masked_too = bool(read.border) or differs
    if masked_too:
        result.drop(read.axis, nonzero)
    if read.border:
        result.notes.append((read.call.name, "constant folded as if its padding continued it"))
    result.shifts.append(Shift(path, attribute, delta, masked_too, name))


def _carry(read: Read, constant: Tensor, alive: Tensor) -> Carry | None:
    """Fold into the column of the carrier with the largest constant, in each row of the axis."""
    values = torch.where(alive & read.dead, torch.nan_to_num(read.constant), 0.0)
    rows = values.reshape(-1, values.shape[-1])
    best = rows.abs().argmax(1)
    scale = rows.gather(1, best[:, None])
    wanted = constant.reshape(rows.shape)
    if bool(((scale == 0) & (wanted != 0).any(1, keepdim=True)).any()):
        return None
    factors = torch.where(wanted != 0, wanted / torch.where(scale == 0, 1.0, scale), 0.0)
    return Carry(read.axis, best, factors.reshape(constant.shape))


def delta_of(
    constants: Constants, read: Read, constant: Tensor, *, squared: bool = False
) -> Tensor:
    """What constants (..., n) add to each live output: Σ W · constant over columns and kernel; or
    what variances add to that of the output: Σ W² · variance."""
    axis, out = read.axis, read.out
    makes = sorted(_making_dims(read))
    shared = [d for d in makes if d in axis.dims]  # the groups of a grouped convolution
    own = [d for d in makes if d not in axis.dims]
    summed = [d for d in axis.dims if d not in shared]
    kernel = [d for d in range(len(axis.view)) if d not in makes and d not in axis.dims]
    w = constants.read(axis.name).reshape(axis.view).permute(*shared, *own, *summed, *kernel)
    groups, rows, columns = (math.prod(axis.view[d] for d in ds) for ds in (shared, own, summed))
    w = w.reshape(groups, rows, -1)
    lead = constant.shape[: constant.dim() - len(axis.dims)]
    places = [1 + axis.dims.index(d) for d in (*shared, *summed)]
    laid = constant.reshape(-1, *axis.shape).permute(
        *places[: len(shared)], 0, *places[len(shared) :]
    )
    laid = laid.reshape(groups, -1, columns, 1).expand(-1, -1, -1, w.shape[2] // columns)
    laid = laid.reshape(groups, -1, w.shape[2]).to(
        w.device, torch.promote_types(w.dtype, torch.float32)
    )
    dead = None if out is None else constants.is_removed(out).to(w.device)
    with torch.autocast(w.device.type, enabled=False):  # it becomes a bias
        if squared:
            delta = _squares_times(
                w, laid, dead if out is not None and out.dims == (*own,) else None
            )
        else:
            delta = laid @ w.to(laid.dtype).transpose(1, 2)
    # (groups, n, rows) as (n, what it makes)
    delta = delta.reshape(*[axis.view[d] for d in shared], -1, *[axis.view[d] for d in own])
    delta = delta.movedim(len(shared), 0)
    delta = delta.permute(0, *[1 + [*shared, *own].index(d) for d in makes])
    if out is not None and dead is not None:  # the rows of dead outputs are masked
        shape = [axis.view[d] if d in out.dims else 1 for d in makes]
        delta = delta.masked_fill(dead.reshape(shape), 0.0)
    return delta.reshape(*lead, -1)


def _squares_times(w: Tensor, laid: Tensor, dead: Tensor | None) -> Tensor:
    """``laid`` @ (W²)ᵀ, a few rows at a time: the squares of all would not stay in the cache. Of
    ``dead`` rows there is no need."""
    rows = torch.arange(w.shape[1], device=w.device)
    rows = rows if dead is None or len(w) > 1 else rows[~dead.reshape(-1)]
    result = laid.new_zeros(*laid.shape[:2], w.shape[1])
    for some in rows.split(max(1, _PIECE // max(1, w.shape[2] * len(w)))):
        squares = w.index_select(1, some).to(laid.dtype).square_()
        result[:, :, some] = laid @ squares.transpose(1, 2)
    return result


def _making_dims(read: Read) -> set[int]:
    """The dimensions of the weight's view along which its outputs lie."""
    out = () if read.out is None else read.out.dims
    merged = view_dims(read.axis.tensor_shape, read.axis.view)
    same = {d for dims in merged if set(dims) & set(out) for d in dims}
    return set(out) | (same - set(read.axis.dims))


def sink_of(constants: Constants, read: Read, model: nn.Module):
    """(module path, attribute, tensor name, sign) of what can take a constant, or None."""
    call = read.call
    pattern = call.pattern
    if pattern is None or not pattern.bias:
        return None
    if call.module is None:
        argument = _raw_argument(call.node, *pattern.bias)
        if isinstance(argument, fx.Node) and argument.op == "get_attr" and len(argument.users) == 1:
            path, _, attribute = str(argument.target).rpartition(".")
            return path, attribute, str(argument.target), 1.0
        return None if argument is not None else _absorbing_norm(constants, call)
    weight = next(
        key for key in constants.trace.tensor_names(call.path)
        if (m := constants.member(call, key)) is not None and m.name == read.axis.name
    )  # fmt: skip
    name = weight.replace("weight", "bias")
    if isinstance(pattern.bias, Mapping):
        if weight not in pattern.bias:
            return None
        name = pattern.bias[weight]
    path, _, attribute = f"{call.path}.{name}".rpartition(".")  # of the layer or a part of it
    bias = constants.member(call, name)
    if bias is not None:
        return path, attribute, bias.name, 1.0
    if attribute not in constants.modules[path]._parameters:
        return None
    return _absorbing_norm(constants, call) or (path, attribute, "", 1.0)


def _raw_argument(node: fx.Node, position: int, name: str) -> Any:
    return node.args[position] if position < len(node.args) else node.kwargs.get(name)


def _absorbing_norm(constants: Constants, call):
    """A batch norm that is all that reads the call: its running mean can take the constant."""
    users = list(call.node.users)
    if len(users) != 1 or users[0].op != "call_module":
        return None
    path = str(users[0].target)
    pattern = constants.trace.pattern(users[0])
    calls = [n for n in users[0].graph.nodes if n.op == "call_module" and n.target == path]
    if pattern is None or pattern.absorb is None or len(calls) != 1:
        return None
    buffer = getattr(constants.trace.modules[path], pattern.absorb, None)
    if buffer is None:
        return None
    return path, pattern.absorb, constants.trace.names[id(buffer)], -1.0
