"""Making the channels go: every new tensor first, then one commit that can be taken back."""

from __future__ import annotations

from collections.abc import Callable, Iterator, MutableMapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from ..code import Patched, rewritten_class
from ..errors import ModelError, PlanError
from ..masking.plan_masks import FOLDED, check_fits, has_predictions, keep_masks
from ..mending.patching import fits
from ..modules.copying import copy_model
from ..modules.filled import Empty
from ..modules.inspecting import dotted, modules_of, parts_of, read_attribute
from ..modules.running import on_cpu, uncollected
from ..parametrized.assigning import assign
from ..parametrized.mask import bake, is_masked, parametrizations
from ..parametrized.weight_norm import parametrized, with_hooks
from ..records.history import STEPS, note
from ..relating.fold import Carry, Folds, mixed
from ..replaying.kept_indices import shrink
from ..rules.channels import SourceAxis


@dataclass
class Change:
    """Everything that will be different, built before anything is."""

    tensors: dict[str, Tensor] = field(default_factory=dict)  # by name in the model
    computed: dict[str, Tensor] = field(default_factory=dict)  # results of parametrizations
    made: dict[tuple[str, str], Tensor] = field(default_factory=dict)  # (module path, attribute)
    biases: dict[tuple[str, str], int] = field(default_factory=dict)  # sizes of all new ones
    attributes: dict[tuple[str, str], Any] = field(default_factory=dict)
    refresh: dict[str, Callable[[nn.Module], None]] = field(default_factory=dict)
    classes: dict[str, type] = field(default_factory=dict)  # modules with new code, by path
    filled: Empty = field(default_factory=dict)  # what runs have kept there is of the old widths


class Journal:
    """Assignments that can be undone."""

    def __init__(self) -> None:
        self._undo: list[Callable[[], None]] = []

    def data(self, tensor: Tensor, new: Tensor) -> None:
        old, grad = tensor.data, tensor.grad
        self._undo.append(lambda: _assign(tensor, old, grad))
        _assign(tensor, new, None)  # the gradient is of the old shape

    def attribute(self, owner: Any, name: str, value: Any) -> None:
        self.item(vars(owner), name, value)

    def item(self, space: MutableMapping[Any, Any], key: Any, value: Any) -> None:
        old, had = space.get(key), key in space

        def undo() -> None:
            if had:
                space[key] = old
            else:
                space.pop(key, None)

        self._undo.append(undo)
        space[key] = value

    def drop(self, space: MutableMapping[Any, Any], key: Any) -> None:
        old = dict(space)  # with its order

        def undo() -> None:
            space.clear()
            space.update(old)

        self._undo.append(undo)
        space.pop(key, None)

    def entries(self, items: list[Any], new: list[Any]) -> None:
        old = list(items)
        self._undo.append(lambda: items.__setitem__(slice(None), old))
        items[:] = new

    def cls(self, module: nn.Module, cls: type) -> None:
        old = type(module)
        self._undo.append(lambda: setattr(module, "__class__", old))
        module.__class__ = cls

    def rollback(self) -> None:
        for undo in reversed(self._undo):
            undo()
        self._undo.clear()


@contextmanager
def undoing() -> Iterator[Journal]:
    """A journal whose assignments are taken back where anything inside raises."""
    journal = Journal()
    try:
        yield journal
    except BaseException:
        journal.rollback()
        raise


def _assign(tensor: Tensor, data: Tensor, grad: Tensor | None) -> None:
    tensor.grad = None
    if tensor.requires_grad:
        # A loss that is still alive keeps what adds up the tensor's gradient, for the old shape.
        # Autograd makes a new one where the dtype changes, so it does on the way.
        other = torch.float16 if tensor.dtype == torch.float32 else torch.float32
        tensor.data = tensor.data.new_empty(0, dtype=other)
    tensor.data = data
    tensor.grad = grad


def apply(plan: Any, model: nn.Module, *, inplace: bool = False) -> nn.Module:
    """See :meth:`fxprune.planning.pruning_plan.PruningPlan.apply`."""
    small, _ = apply_with_journal(plan, model, inplace=inplace)
    return small


@on_cpu()
def apply_with_journal(
    plan: Any,
    model: nn.Module,
    *,
    inplace: bool,
    folds: Folds | None = None,
    journal: Journal | None = None,
) -> tuple[nn.Module, Journal]:
    """The pruned model, and for ``inplace`` the way back. ``folds`` are those of ``model``; where a
    ``journal`` is given, an exception takes back all that stands in it."""
    folded = isinstance(model, nn.Module) and has_predictions(plan, model)
    if isinstance(model, nn.Module) and is_masked(model):
        if inplace:
            raise ModelError("a masked model cannot be pruned in place; use inplace=False")
        model = copy_model(model)
        bake(model)
    journal = journal or Journal()
    # What is made can be trained.
    with torch.inference_mode(False), torch.no_grad(), uncollected(), parametrized(model):
        check_fits(plan, model)
        change = build(plan, model, folds or plan.folds(model, mixes=not folded))
        if not inplace:
            tensor = plan._trace.on(model).tensor
            olds = {name: tensor(name) for name in change.tensors}
            news = {id(old): _like(old, change.tensors[name]) for name, old in olds.items()}
            model = copy_model(model, news)
        vars(model).pop(FOLDED, None)
        try:
            _install(change, model, journal, in_place=inplace)
            _remember(plan, change, model, journal)
        except BaseException:
            journal.rollback()
            raise
    return model if inplace else with_hooks(model), journal


def _like(old: Tensor, new: Tensor) -> Tensor:
    """``new`` as the kind of tensor that ``old`` is."""
    if isinstance(old, nn.Parameter):
        return nn.Parameter(new, requires_grad=old.requires_grad)
    return new


def build(plan: Any, model: nn.Module, folds: Folds) -> Change:
    """Every new tensor and attribute."""
    change = Change()
    axes: dict[str, list[SourceAxis]] = {}
    for axis in plan._relations.sources:
        axes.setdefault(axis.name, []).append(axis)
    deltas: dict[str, Tensor] = {}
    for shift in folds.shifts:
        if shift.name:
            deltas[shift.name] = deltas.get(shift.name, 0) + shift.delta
    _biases(plan, model, folds, change)
    carries = {carry.axis.name: carry for carry in folds.carries}
    mixes = folds.mixes
    masked = plan._carriers.any() and plan._telling.masked
    masks = keep_masks(plan, folds) if masked else {}
    on_model = plan._trace.on(model)
    for name in sorted(
        plan.kept.keys() | deltas.keys() | carries.keys() | mixes.keys() | masks.keys()
    ):
        old = on_model.tensor(name).detach()
        new = old
        if name in carries:
            new = _carried(new, carries[name])
        if name in mixes:
            new = mixed(new, mixes[name])
        if name in masks:  # carriers stay as masked channels
            new = new.masked_fill(~masks[name].to(new.device), 0)
        if name in deltas:
            new = new + deltas[name].to(new).reshape(new.shape)
        if name in plan.kept:
            new = shrink(new, axes[name], plan._replay)
        new = new.contiguous(memory_format=memory_format(old))
        if new.data_ptr() == old.data_ptr():
            new = new.clone()
        path, _, attribute = name.rpartition(".")
        computed = attribute in parametrizations(on_model.modules[path])
        (change.computed if computed else change.tensors)[name] = new
    _settings(plan, model, change)
    return change


def _biases(plan: Any, model: nn.Module, folds: Folds, change: Change) -> None:
    """Those that layers get that have none."""
    made = {key: torch.zeros(()) for key in _made_by_masks(plan, model)}
    made |= {(s.path, s.attribute): s.delta for s in folds.shifts if not s.name}
    for (path, attribute), delta in made.items():
        owner = model.get_submodule(path)
        # A masked model has the bias already: its masks needed it.
        old = getattr(owner, attribute, None)
        new = delta.to(next(owner.parameters())) + (0 if old is None else old.detach())
        rows = _rows_of(plan, path, new)
        change.biases[path, attribute] = rows.numel()
        if old is None:
            change.made[path, attribute] = rows
        else:
            change.tensors[dotted(path, attribute)] = rows


def _settings(plan: Any, model: nn.Module, change: Change) -> None:
    """Index buffers, attributes and code, and what layers are to work out anew."""
    for name, index in plan._replay.indices.items():
        old = read_attribute(model, name)
        change.tensors[name] = index.to(old)
    for path, values in plan._replay.module_sizes.items():
        for attribute, value in values.items():
            change.attributes[path, attribute] = value
    for name, value in plan.attributes.items():
        path, _, attribute = name.rpartition(".")
        change.attributes[path, attribute] = value
    change.filled = plan._trace.filled
    for path, code in plan.code.items():
        cls = type(model.get_submodule(path))
        if isinstance(code, Patched) and not fits(cls, code):
            raise PlanError(
                f"the plan was made for a model in which {path or 'the model'} has other code: "
                f"{', '.join(name for name, _ in code.originals)} of {cls.__name__} differ; make a "
                "new plan for it"
            )
        change.classes[path] = rewritten_class(cls, code)
    for node in plan._trace.graph.nodes:
        pattern = plan._trace.pattern(node) if node.op == "call_module" else None
        if pattern is not None and pattern.refresh is not None:
            change.refresh[str(node.target)] = pattern.refresh


def _made_by_masks(plan: Any, model: nn.Module) -> list[tuple[str, str]]:
    """Biases that ``model`` has and the model of the plan has not."""
    found: list[tuple[str, str]] = []
    if model is plan._trace.model:
        return found
    modules = modules_of(model)
    for path, module in plan._trace.model.named_modules():
        for name, parameter in module._parameters.items():
            if parameter is None and getattr(modules[path], name, None) is not None:
                found.append((path, name))
    return found


def _rows_of(plan: Any, path: str, bias: Tensor) -> Tensor:
    """A bias's entries for the outputs that are left of its layer's weight."""
    axis = plan._relations.maker(path)
    return bias if axis is None else bias.reshape(-1)[plan._replay.order[axis.first].reshape(-1)]


def _carried(weight: Tensor, carry: Carry) -> Tensor:
    """Fold columns, scaled, into their row's carrier column."""
    axis = carry.axis
    seen = weight.reshape(axis.view)
    added = seen * axis.laid(carry.factors.to(seen))
    last = axis.dims[-1]
    total = added.sum(last, keepdim=True)
    onto = torch.zeros(carry.factors.shape, dtype=torch.bool)
    onto.reshape(-1, onto.shape[-1]).scatter_(1, carry.carriers[:, None], True)
    return (seen + total * axis.laid(onto.to(seen))).reshape(weight.shape)


def memory_format(tensor: Tensor) -> torch.memory_format:
    for rank, form in ((4, torch.channels_last), (5, torch.channels_last_3d)):
        dense = tensor.dim() != rank or tensor.is_contiguous()
        if not dense and tensor.is_contiguous(memory_format=form):
            return form
    return torch.contiguous_format


def _install(change: Change, model: nn.Module, journal: Journal, *, in_place: bool) -> None:
    """The commit. What is assigned is in the journal, which can undo it; what the ``refresh`` of a
    pattern derives from the tensors is not, and comes last."""
    if in_place:
        for name, new in change.tensors.items():
            journal.data(read_attribute(model, name), new)
    for name, new in change.computed.items():
        path, _, attribute = name.rpartition(".")
        module = model.get_submodule(path)
        for original in parametrizations(module)[attribute].parameters():
            journal.data(original, original.data)  # right_inverse writes into them
        assign(parametrizations(module)[attribute], new)
    for (path, attribute), new in change.made.items():
        _make(model.get_submodule(path), attribute, new, journal)
    for (path, attribute), value in change.attributes.items():
        owner = read_attribute(model, path) if path else model
        journal.attribute(owner, attribute, value)
    for (path, attribute), kind in change.filled.items():
        journal.attribute(model.get_submodule(path), attribute, kind())
    for path, cls in change.classes.items():
        journal.cls(model.get_submodule(path), cls)
    for path, refresh in change.refresh.items():
        refresh(model.get_submodule(path))


def _make(module: nn.Module, attribute: str, new: Tensor, journal: Journal) -> None:
    requires_grad = next(module.parameters()).requires_grad
    made = nn.Parameter(new, requires_grad=requires_grad)
    journal.item(module._parameters, attribute, made)


def make_parameter(model: nn.Module, name: str, shape: Sequence[int], journal: Journal) -> None:
    """A parameter of zeros where the model has none, as those beside it are."""
    path, _, attribute = name.rpartition(".")
    module = model.get_submodule(path)
    _make(module, attribute, next(module.parameters()).new_zeros(shape), journal)


def _remember(plan: Any, change: Change, model: nn.Module, journal: Journal) -> None:
    """Leave on the model what was done to it and, before, to modules in it."""
    history = note(plan, model, change.attributes, change.biases)
    for module in parts_of(model):
        if STEPS in vars(module):
            journal.drop(vars(module), STEPS)
    journal.attribute(model, STEPS, history)
