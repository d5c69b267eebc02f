"""Where the constants of removed channels go: biases, batch-norm means, a carrier's column."""

from __future__ import annotations

from collections.abc import Container, Iterator, Mapping
from dataclasses import dataclass, field, replace

import numpy as np
import torch
from torch import Tensor, fx

from ..rules.call import Call
from ..rules.channels import SourceAxis
from ..rules.ops import argument_at
from ..tracing.trace import Trace
from .constants import Constants, Read
from .side_by_side import SideBySide
from .weighing import delta_of

TWICE = "its weight is used twice: constants dropped"
_ROUNDING = 1e-12


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
        path, attribute, name, factor = self.sink
        offset = self.offset
        if self.order is not None:
            offset = torch.zeros(self.axis.size, dtype=offset.dtype)
            offset[self.order] = self.offset[0][:, None]
        delta, _ = delta_of(constants, self.read, offset.reshape(self.axis.shape))
        assert delta is not None
        return Shift(path, attribute, factor * delta, True, name)


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
    chosen: list[tuple[Read, list[Read]]] = []  # with all calls of the layer, if they read the same
    for several in by_weight.values():
        alike = _alike(several)
        reads = several[:1] if alike else several
        chosen += [(read, several if alike else []) for read in reads]
    spread: list[tuple[str, Tensor]] = []
    for (read, calls), masks in zip(chosen, _masks(chosen, carriers, classes), strict=True):
        if bias == "drop":
            result.drop(read.axis, masks.gone)
            continue
        if not calls and bool((masks.gone & (read.constant != 0)).any()):
            result.drop(read.axis, masks.gone)
            result.notes.append((read.call.name, TWICE))
            continue
        if masks.some_unknown:
            result.drop(read.axis, masks.gone & read.constant.isnan())
            result.notes.append(
                (read.call.name, "a removed channel is not constant here: its part is dropped")
            )
        constant = sink = norm = variances = None
        if masks.some_nonzero:
            constant = masks.said.masked_fill(~masks.nonzero, 0.0)
            sink = _sink(result, constants, read, masks, constant, exact, classes)
        if masks.some_spread and len(calls) == 1:
            norm = _measuring(constants, read)
        if norm and read.variance is not None:
            going = read.variance.masked_fill(~masks.gone, 0.0)
            variances = torch.stack([read.variance, going])
        delta, varied = delta_of(constants, read, constant if sink else None, variances)
        if sink and delta is not None:
            path, attribute, name, factor = sink
            moved = bool(read.border) or masks.some_moved
            result.shifts.append(Shift(path, attribute, factor * delta, moved, name))
        if norm and varied is not None:
            spread.append((norm, varied))
    if spread:
        _amplify(result, constants, spread)
    result.notes = list(dict.fromkeys(result.notes))
    return result


@dataclass
class _Masks:
    """For each slice of an axis: whether it is gone (not kept as a carrier), whether it is alive or
    a carrier, what it said to the layer, and whether that is known and not zero."""

    gone: Tensor
    alive: Tensor
    said: Tensor
    nonzero: Tensor
    some_unknown: bool
    some_nonzero: bool
    some_moved: bool  # was said otherwise than the masked model says it
    some_spread: bool  # what is gone varied, and it is known how all vary


def _masks(
    chosen: list[tuple[Read, list[Read]]], carriers: np.ndarray, classes: np.ndarray
) -> Iterator[_Masks]:
    """For all layers at once."""
    if not chosen:
        return
    side = SideBySide([read.axis.shape for read, _ in chosen])
    dead, constant = (
        side.put([getattr(r, key) for r, _ in chosen]) for key in ("dead", "constant")
    )
    said = _said(constant, side.put([_mean(read, calls) for read, calls in chosen]))
    alive = torch.zeros_like(dead)
    if carriers.any():
        labels = side.put([read.axis.labels() for read, _ in chosen])
        alive = torch.from_numpy(carriers[classes[labels.numpy()]])
    gone = dead & ~alive
    unknown = gone & constant.isnan()
    nonzero = gone & ~unknown & ((constant != 0) | (said != 0))
    some_spread = [False] * len(chosen)
    if all(read.variance is not None for read, _ in chosen):
        variance = side.put([read.variance for read, _ in chosen])  # type: ignore[misc]
        varied, blind = side.any(gone & (variance != 0)), side.any(variance.isnan())
        some_spread = [v and not b for v, b in zip(varied, blind, strict=True)]
    parts = (side.parts(flat) for flat in (gone, alive, said, nonzero))
    moved = nonzero & (said != constant)
    flags = side.any(unknown), side.any(nonzero), side.any(moved), some_spread
    yield from map(_Masks, *parts, *flags)


def mixed(weight: Tensor, mix: Mix) -> Tensor:
    """The weight folded with a prediction: W · A, in each row of the axis; zeros where channels
    go. It lies in memory as the weight does: a convolution's output goes by that."""
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
    return torch.empty_like(weight).copy_(mix.axis.unflat(found))


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


def _mean(read: Read, calls: list[Read]) -> Tensor:
    """What a layer's channels said in the mean of all its calls; NaN where that is not known."""
    means = [call.mean for call in calls if call.mean is not None]
    if not means:
        return torch.full_like(read.constant, torch.nan)
    return means[0] if len(means) == 1 else torch.stack(means).mean(0)


def _said(constant: Tensor, mean: Tensor) -> Tensor:
    """What channels say to a layer: what they emit when masked, or where that is known, what they
    said in the mean."""
    near = (mean - constant).abs() <= _ROUNDING * (1 + constant.abs())
    return torch.where(near | mean.isnan(), constant, mean)


def _measuring(constants: Constants, read: Read) -> str | None:
    """The variance of a batch norm that is all that reads what a layer makes of what it reads."""
    users = list(read.call.node.users)
    name = constants.norms.get(users[0]) if len(users) == 1 else None
    return name if constants.measured[name] == 1 and read.call.factor == 1 else None


def _amplify(result: Folds, constants: Constants, spread: list[tuple[str, Tensor]]) -> None:
    """A batch norm that is all that reads a layer scales what is left so that it predicts the whole
    best, by what channels have in common.

    The output is k + g, of channels that stay and that go. If all were independent, its variance
    would be I = Σ W² · variance; C, by which what the norm has measured exceeds that, is common. If
    the kept ones have the share q of I, and q of the common amplitude, then the multiple of k that
    predicts k + g best is c = 1 + (1 - q) C / (q C + I): cov(k, k + g) over var(k).

    Args:
        spread: the norms' variances, by name, each with I, and with that of what goes.
    """
    names = [name for name, _ in spread]
    found = [both.cpu().double() for _, both in spread]
    side = SideBySide([both.shape[1:] for both in found])
    alone, goes = side.put_rows(found)
    measured = side.put([constants.read(name).cpu().double() for name in names])
    common = (measured - alone).clamp(min=0)
    goes = (goes / alone).masked_fill(alone <= 0, 0.0)
    more = (goes * common / ((1 - goes) * common + alone)).masked_fill(goes <= 0, 0.0)
    deltas = (1 / (1 + more).square() - 1) * measured
    for name, delta, some in zip(names, side.parts(deltas), side.any(deltas != 0), strict=True):
        if some:
            path, _, attribute = name.rpartition(".")
            delta = delta.to(constants.read(name))
            result.shifts.append(Shift(path, attribute, delta, True, name))


def _sink(
    result: Folds,
    constants: Constants,
    read: Read,
    masks: _Masks,
    constant: Tensor,
    exact: bool,
    classes: np.ndarray,
) -> tuple[str, str, str, float] | None:
    """What can take a constant, as :func:`sink_of` says it; None where a carrier does, or where it
    has to be dropped."""
    if read.border and exact and not uses_alone(constants.trace, read.call, read.axis.name):
        result.drop(read.axis, masks.nonzero)
        result.notes.append((read.call.name, TWICE))
        return None
    if read.border and exact:
        carry = _carry(read, constant, masks.alive, classes)
        if carry is not None:
            result.carries.append(carry)
            return None
    if read.border == "pattern" or (read.border and exact):
        result.drop(read.axis, masks.nonzero)
        result.notes.append((read.call.name, "a constant differs by position here: dropped"))
        return None
    sink = sink_of(constants, read)
    if sink is None or read.border or masks.some_moved:
        result.drop(read.axis, masks.nonzero)
    if sink is None:
        result.notes.append((read.call.name, "no bias can take the constant: dropped"))
    elif read.border:
        result.notes.append((read.call.name, "constant folded as if its padding continued it"))
    return sink


def _carry(read: Read, constant: Tensor, alive: Tensor, classes: np.ndarray) -> Carry | None:
    """Fold into the column of the carrier with the largest constant, in each row of the axis; None
    where each channel has several columns, at whose places the border lies differently."""
    units = np.where(read.dead.numpy(), classes[read.axis.labels().numpy()], 0)
    in_order = np.sort(units.reshape(-1, constant.shape[-1]), axis=1)
    if ((in_order[:, 1:] == in_order[:, :-1]) & (in_order[:, 1:] > 0)).any():
        return None
    values = torch.where(alive & read.dead, torch.nan_to_num(read.constant), 0.0)
    rows = values.reshape(-1, values.shape[-1])
    best = rows.abs().argmax(1)
    scale = rows.gather(1, best[:, None])
    wanted = constant.reshape(rows.shape)
    if bool(((scale == 0) & (wanted != 0).any(1, keepdim=True)).any()):
        return None
    factors = torch.where(wanted != 0, wanted / torch.where(scale == 0, 1.0, scale), 0.0)
    return Carry(read.axis, best, factors.reshape(constant.shape))


def uses_alone(trace: Trace, call: Call, name: str) -> bool:
    """Whether no call but this one, or others of its layer, uses a tensor: a constant in it would
    be said there, too."""
    users = trace.uses.get(name, ())
    return all(u is call.node or (call.module and u.target == call.path) for u in users)


def sink_of(constants: Constants, read: Read):
    """(module path, attribute, tensor name, factor) of what can take a constant, or None."""
    call = read.call
    pattern, trace = call.pattern, constants.trace
    if pattern is None or not pattern.bias:
        return None
    if call.module is None:
        argument = (
            pattern.bias(call.node, read.axis.name) if callable(pattern.bias)
            else argument_at(call.node, *pattern.bias)
        )  # fmt: skip
        if isinstance(argument, fx.Node) and argument.op == "get_attr":
            name = str(argument.target)
            if call.factor and uses_alone(trace, call, name):
                path, _, attribute = name.rpartition(".")
                return path, attribute, name, call.factor
        return None if argument is not None else _absorbing_norm(constants, call)
    weight = next(
        key for key in trace.tensor_names(call.path)
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
        alone = uses_alone(trace, call, bias.name)
        return (path, attribute, bias.name, 1.0) if alone else _absorbing_norm(constants, call)
    if attribute not in constants.modules[path]._parameters or not call.factor:
        return None
    return _absorbing_norm(constants, call) or (path, attribute, "", 1.0)


def _absorbing_norm(constants: Constants, call):
    """A batch norm that is all that reads the call: its running mean can take the constant."""
    users = list(call.node.users)
    if len(users) != 1 or users[0].op != "call_module":
        return None
    path = str(users[0].target)
    pattern = constants.trace.pattern(users[0])
    if pattern is None or pattern.absorb is None or constants.trace.calls_of[path] != 1:
        return None
    buffer = constants.member(replace(call, path=path), pattern.absorb)
    return None if buffer is None else (path, pattern.absorb, buffer.name, -1.0)
