"""A plan's masks: removed units switched off without changing shapes."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize

from ..errors import PlanError
from ..modules.copying import copy_model
from ..modules.inspecting import modules_of, named_tensors, read_attribute
from ..modules.running import on_cpu
from ..modules.tensor_attributes import fixed_tensors
from ..modules.usable import check_bare
from ..parametrized.mask import bake, beneath, masked_names, own_class, parametrizations, put_on
from ..parametrized.weight_norm import parametrized, with_hooks
from ..relating.fold import Folds, Shift, mixed
from ..rules.channels import SourceAxis
from ..tracing.trace import Trace


@on_cpu()
def mask(plan: Any, model: nn.Module, *, shared: bool = False) -> nn.Module:
    """See :meth:`fxprune.planning.pruning_plan.PruningPlan.mask`.

    Args:
        shared: the masked model is only to be run as the model was recorded: it needs no memory of
            its own for parameters.
    """
    with parametrized(model):
        check_fits(plan, model)
        folds = plan.folds(model, mixes=not has_predictions(plan, model))
        return with_hooks(masked(plan, model, folds, shared=shared))


def stand_ins(trace: Trace, model: nn.Module) -> dict[int, Any]:
    """By the ids of parameters, others on the same memory: of those that a run only reads."""
    if any(call.reads_data for call in trace.calls):  # with masks, its code may go another way
        return {}
    return {
        id(p): nn.Parameter(p.detach(), requires_grad=p.requires_grad)
        for name, p in model.named_parameters(remove_duplicate=False)
        if type(p) is nn.Parameter and name not in trace.written
    }


FOLDED = "_fxprune_calibration"  # a masked model's: which predictions are in its weights


def has_predictions(plan: Any, model: nn.Module) -> bool:
    """Whether a plan's predictions are folded into the model: it is masked by the plan."""
    return plan._calibration != "" and vars(model).get(FOLDED) == plan._calibration


@on_cpu()
def masked(plan: Any, model: nn.Module, folds: Folds, *, shared: bool = False) -> nn.Module:
    """A copy of ``model`` with a plan's masks, and constants as ``folds`` say."""
    masked = copy_model(model, stand_ins(plan._trace, model) if shared else None)
    bake(masked)
    for (path, attribute), kind in plan._trace.filled.items():
        vars(masked.get_submodule(path))[attribute] = kind()
    for module in masked.modules():
        own_class(module)
    with torch.no_grad():
        for name, mix in folds.mixes.items():
            weight = read_attribute(masked, name)
            weight.data = mixed(weight.data, mix)
    put_masks(masked, keep_masks(plan, folds))
    if folds.mixes:
        vars(masked)[FOLDED] = plan._calibration
    with torch.no_grad():
        for shift in folds.shifts:
            if shift.masked_too:
                add_shift(masked, shift)
                if not shift.name:  # a bias that the masks made is none of dead channels
                    keep = live_rows(plan, shift.path).to(shift.delta.device)
                    put_on(masked.get_submodule(shift.path), shift.attribute, keep)
    return masked


def put_masks(model: nn.Module, keeps: dict[str, Tensor]) -> None:
    """Mask tensors by name; tied ones wherever they are, masked ones by both masks together."""
    owners = _owners(model)
    for name, keep in keeps.items():
        path, _, attribute = name.rpartition(".")
        module = model.get_submodule(path)
        tensor = beneath(module, attribute)
        for owner, key in owners.get(id(tensor), [(module, attribute)]):
            put_on(owner, key, keep.to(tensor.device))


def keep_masks(plan: Any, folds: Folds) -> dict[str, Tensor]:
    """For each tensor a mask touches, True where the masked model keeps its value."""
    keeps: dict[str, Tensor] = {}

    def block(axis: SourceAxis, off: Tensor) -> None:
        if not bool(off.any()):
            return
        if axis.name not in keeps:
            keeps[axis.name] = torch.ones(axis.tensor_shape, dtype=torch.bool)
        keeps[axis.name].view(axis.view).logical_and_(~axis.laid(off))

    for axis in plan._relations.sources:
        dead, silent = plan.flags("removed", axis), plan.flags("silent", axis)
        part = axis.is_bare and not axis.is_whole
        if axis.role in ("out", "scale") or part:
            block(axis, dead)
        elif axis.role == "shift" or axis.is_bare:
            block(axis, silent)
    for axis, columns in folds.dropped.values():
        block(axis, columns)
    for mix in folds.mixes.values():
        block(mix.axis, plan.flags("removed", mix.axis) & ~plan.flags("carrier", mix.axis))
    return keeps


def live_rows(plan: Any, path: str) -> Tensor:
    """For each output of the layer at ``path``, whether it is not masked."""
    axis = plan._relations.maker(path)
    return torch.tensor(True) if axis is None else ~plan.flags("removed", axis).reshape(-1)


def add_shift(model: nn.Module, shift: Shift) -> None:
    """Add a constant to a module's tensor, making the bias where there is none."""
    module = model.get_submodule(shift.path)
    current = getattr(module, shift.attribute, None)
    if current is None:
        like = next(module.parameters())
        made = nn.Parameter(shift.delta.to(like), requires_grad=like.requires_grad)
        module.register_parameter(shift.attribute, made)
    else:
        target = current
        if parametrize.is_parametrized(module, shift.attribute):
            target = parametrizations(module)[shift.attribute].original
        target.data = target.data + shift.delta.to(target).reshape(target.shape)


def _owners(model: nn.Module) -> dict[int, list[tuple[nn.Module, str]]]:
    """For each tensor of the model, all modules that hold it: a tied one is masked in each."""
    owners: dict[int, list[tuple[nn.Module, str]]] = {}
    for fixed in fixed_tensors(modules_of(model)):
        owners.setdefault(id(fixed.tensor), []).append((fixed.module, fixed.key))
    for module in model.modules():
        if isinstance(module, parametrize.ParametrizationList):
            continue  # what it holds is beneath a tensor of its module
        own = {**module._parameters, **module._buffers}
        own |= {name: beneath(module, name) for name in masked_names(module)}
        for key, tensor in own.items():
            if tensor is not None:
                owners.setdefault(id(tensor), []).append((module, key))
    return owners


def check_fits(plan: Any, model: nn.Module) -> None:
    """Raise unless ``model`` has the tensors the plan speaks of, in the same shapes."""
    if not isinstance(model, nn.Module):
        raise PlanError(f"model is a {type(model).__name__}, not a torch.nn.Module")
    on_model = plan._trace.on(model)
    if any(t.is_meta for _, t in named_tensors(on_model.modules)):
        raise PlanError("the model is on the meta device and has no values; load weights first")
    check_bare(model)
    for axis in {axis.name: axis for axis in plan._relations.sources}.values():
        try:
            tensor = on_model.tensor(axis.name)
        except AttributeError:
            tensor = None
        if not isinstance(tensor, Tensor):
            raise PlanError(
                f"the plan was made for a model with {axis.name}, which this "
                f"{type(model).__name__} lacks; make a new plan for it"
            )
        # Code may make tensors of its own (masks, tables) anew for each batch.
        ours = isinstance(tensor, nn.Parameter) or axis.name in plan.kept
        if ours and tuple(tensor.shape) != axis.tensor_shape:
            raise PlanError(
                f"{axis.name} has shape {tuple(tensor.shape)}, the plan was made for "
                f"{axis.tensor_shape}; was the model pruned already? Make a new plan for it"
            )
