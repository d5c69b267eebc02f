"""Criteria that ask how much a loss would change: weights times gradients."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize

from ..errors import InputError, ModelError, SettingError
from ..modules import tree
from ..modules.batches import Batches, as_input, check_limit, labels_of
from ..modules.given import check_flag
from ..modules.inspecting import read_attribute, tensors_of
from ..modules.running import bind_inputs, describe, evaluating
from ..progress import tracking
from ..rules.channels import SourceAxis
from .criterion import Context, Criterion, Importance, Measured
from .reduction import Member
from .slices import Slices

_NAMES = ("batches", "limit")


@dataclass(frozen=True, kw_only=True, eq=False, repr=False)
class _OfGradients(Criterion):
    factor: ClassVar[float] = 1.0
    batches: Iterable[Any] = field(repr=False, kw_only=False)
    loss: Callable[..., Tensor] | None = None
    forward: Callable[[nn.Module, Any], Tensor] | None = None
    limit: int | None = None
    joint: bool = True

    def __post_init__(self) -> None:
        super().__post_init__()
        if (self.loss is None) == (self.forward is None):
            raise SettingError(
                f"{type(self).__name__} needs one of loss=, f(output, label), and forward=, "
                "f(model, batch); each returns a scalar tensor"
            )
        for name in ("loss", "forward"):
            given = getattr(self, name)
            if isinstance(given, type):
                raise SettingError(f"{name}={given.__name__} is a class; pass {given.__name__}()")
            if given is not None and not callable(given):
                raise SettingError(f"{name}={given!r} is no function")
        check_flag("joint", self.joint)
        check_limit(self.limit, "limit")

    def prepare(self, context: Context) -> Importance:
        data = _measure(self, context)
        return lambda group: self(group, data)

    def members(self, group: list[Slices], data: Measured | None) -> list[Member]:
        return [self.measured(data).of(s) for s in group]

    def samples(self, batch: Any) -> Iterator[Any]:
        """The parts of a batch of which gradients are taken apart."""
        yield batch


@dataclass(frozen=True, kw_only=True, eq=False, repr=False)
class Taylor(_OfGradients):
    """How much the loss would change, to first order, without a unit: mean over batches of
    (Σ g·w)² over its slices in a layer; with ``joint=False``, Σ (g·w)².

    Molchanov et al., "Importance Estimation for Neural Network Pruning" (arXiv 1906.10771),
    equations 8 and 9. g is the gradient of the batch's loss. Each layer gives a value of its own:
    that which makes a unit, a norm that scales it and those that read it; ``reduce`` makes them
    one.

    Args:
        batches: an iterable of batches; ``(input, label)`` for a ``loss``.
        loss: ``f(output, label)``, a scalar tensor: ``torch.nn.functional.cross_entropy``. It gets
            all that a batch holds beyond the model's inputs.
        forward: ``f(model, batch)``, a scalar tensor, in the place of ``loss``; ``batch`` is what
            ``batches`` yields, with its tensors on the model's device.
        limit: how many batches to take; by default all.
        joint: whether the slices of a unit in one layer count as one, so that what they do to the
            loss may cancel out, or each weight for itself.
        reduce, normalize: see :class:`Criterion`.
    """


@dataclass(frozen=True, kw_only=True, eq=False, repr=False)
class Fisher(_OfGradients):
    """How much the loss would rise, to second order, without a unit: ½ · mean over samples of
    (Σ g·w)² over its slices in a layer, g the gradient of one sample's loss.

    Theis et al., "Faster gaze prediction with dense networks and Fisher pruning" (arXiv
    1801.05787). With ``joint=False`` it is ½ Σ h·w², with the diagonal of the Hessian h taken from
    the Fisher information, mean of g²: optimal brain damage (LeCun et al. 1989).

    Args:
        batches, loss, forward, limit, joint: see :class:`Taylor`.
        per_sample: run the samples of a batch one by one, by splitting all its tensors along their
            first dimension. False takes a batch for a sample, which is faster and says less.
        reduce, normalize: see :class:`Criterion`.
    """

    factor: ClassVar[float] = 0.5

    per_sample: bool = True

    def __post_init__(self) -> None:
        super().__post_init__()
        check_flag("per_sample", self.per_sample)

    def samples(self, batch: Any) -> Iterator[Any]:
        if not self.per_sample:
            yield batch
            return
        sizes = {len(t) if t.dim() else 0 for t in tree.tensors(batch)}
        if len(sizes) != 1 or 0 in sizes:
            raise SettingError(
                f"Fisher: a batch, {describe(batch)}, cannot be split into samples, for its "
                "tensors differ in their first dimension; pass batches of one sample and "
                "per_sample=False"
            )
        for i in range(sizes.pop()):
            yield tree.map_tensors(batch, lambda t: t[i : i + 1])


# -- running the model ----------------------------------------------------------------------------


def _measure(criterion: _OfGradients, context: Context) -> Measured:
    """For each axis the mean over samples of what the criterion says of each unit; it stands at the
    unit's first slice."""
    model, words = context.trace.model, type(criterion).__name__
    totals = [
        _Total(axis, context.classes(axis), criterion.joint)
        for axis in context.axes if axis.role not in ("shift", "stat")
    ]  # fmt: skip
    names = list(dict.fromkeys(total.axis.name for total in totals))
    batches = Batches(criterion.batches, model, context.example_input, criterion.limit, _NAMES)
    count = 0
    with differentiating(model, names), tracking(words, criterion.limit) as track:
        for batch in track(batches.whole()):
            for sample in criterion.samples(batch):
                loss = _loss(criterion, model, sample, context.example_input)
                products = _products(model, names, loss)
                count += 1
                for total in totals:
                    if total.axis.name in products:
                        total.add(products[total.axis.name])
    values, sizes = {}, {}
    for total in totals:
        if not np.isfinite(total.values).all():
            raise SettingError(f"{words}: the gradients of {total.axis.name} hold inf or NaN")
        value, size = np.zeros((2, total.axis.size))
        value[total.at], size[total.at] = criterion.factor * total.values / count, 1
        values[total.axis.first], sizes[total.axis.first] = value, size
    return Measured(values, sizes)


class _Total:
    """Over samples, what the slices along an axis say of each unit: ``values``. ``at``: where the
    first slice of each lies."""

    def __init__(self, axis: SourceAxis, classes: np.ndarray, joint: bool) -> None:
        self.axis, self._joint = axis, joint
        _, self.at, self._inverse = np.unique(classes, return_index=True, return_inverse=True)
        self.values = np.zeros(len(self.at))

    def add(self, product: Tensor) -> None:
        """Weight times gradient, of one sample."""
        rows = self.axis.rows(product)
        rows = rows.sum(1) if self._joint else rows.square().sum(1)
        found = np.bincount(self._inverse, rows.double().cpu().numpy(), len(self.at))
        self.values += found**2 if self._joint else found


def _loss(criterion: _OfGradients, model: nn.Module, batch: Any, example_input: Any) -> Tensor:
    if criterion.forward is not None:
        made = _call("forward", criterion.forward, model, batch)
    else:
        assert criterion.loss is not None
        args, kwargs = bind_inputs(as_input(batch, example_input, "batches"))
        try:
            output = model(*args, **kwargs)
        except Exception as error:  # whatever the model's own calls raise
            raise InputError(
                f"batches: a batch, {describe(batch)}, does not run: {type(error).__name__}: "
                f"{error}"
            ) from error
        made = _call("loss", criterion.loss, output, *labels_of(batch, example_input))
    which = "loss" if criterion.forward is None else "forward"
    if not isinstance(made, Tensor) or made.numel() != 1 or not made.is_floating_point():
        raise SettingError(
            f"{which}= returned {describe(made)}; it has to return a scalar tensor, such as the "
            "mean over the batch"
        )
    if not made.requires_grad:
        raise SettingError(
            f"{which}= returned a tensor without a gradient: does the model run under "
            "torch.no_grad(), or detach what it returns?"
        )
    return made


def _call(name: str, function: Callable[..., Any], *args: Any) -> Any:
    try:
        return function(*args)
    except Exception as error:  # whatever the user's own function raises
        given = ", ".join(map(describe, args))
        raise SettingError(f"{name}= raised {type(error).__name__} for {given}: {error}") from error


def _products(model: nn.Module, names: list[str], loss: Tensor) -> dict[str, Tensor]:
    """Weight times gradient, of each tensor that the loss depends on."""
    # Read after the run: a weight that a hook or a parametrization computes is that of the run.
    found = {name: read_attribute(model, name) for name in names}
    found = {name: tensor for name, tensor in found.items() if tensor.requires_grad}
    try:
        gradients = torch.autograd.grad(loss, list(found.values()), allow_unused=True)
    except RuntimeError as error:
        raise SettingError(f"the gradient of the loss cannot be taken: {error}") from error
    return {
        name: (_long(tensor.detach()) * _long(gradient).conj()).real
        for (name, tensor), gradient in zip(found.items(), gradients, strict=True)
        if gradient is not None
    }


def _long(tensor: Tensor) -> Tensor:
    return tensor.float() if tensor.dtype.itemsize < 4 else tensor


@contextlib.contextmanager
def differentiating(model: nn.Module, names: Iterable[str]) -> Iterator[None]:
    """The model in eval mode with gradients of all parameters, frozen ones too, and of the buffers
    among ``names``. Afterwards everything is as it was."""
    wanted = set(names)
    leaves = [
        tensor for name, tensor in tensors_of(model).items()
        if tensor.is_leaf and (tensor.is_floating_point() or tensor.is_complex())
        and (isinstance(tensor, nn.Parameter) or name in wanted)
    ]  # fmt: skip
    if any(tensor.is_inference() for tensor in leaves):
        raise ModelError(
            "the model was made under torch.inference_mode(), where nothing has a gradient; make "
            "it outside, or choose a criterion without gradients"
        )
    flags = [tensor.requires_grad for tensor in leaves]
    # PyTorch's recurrent layers have no cuDNN gradient in eval mode.
    recurrent = any(isinstance(m, nn.RNNBase) and _on_cuda(m) for m in model.modules())
    cudnn = torch.backends.cudnn.flags(enabled=False) if recurrent else contextlib.nullcontext()
    with torch.inference_mode(False), torch.enable_grad(), evaluating(model), cudnn:
        try:
            for tensor in leaves:
                tensor.requires_grad_(True)
            torch.clear_autocast_cache()  # its copies of weights were made without gradients
            with parametrize.cached():
                yield
        finally:
            torch.clear_autocast_cache()
            for tensor, flag in zip(leaves, flags, strict=True):
                tensor.requires_grad_(flag)


def _on_cuda(module: nn.Module) -> bool:
    return any(p.is_cuda for p in module.parameters())
