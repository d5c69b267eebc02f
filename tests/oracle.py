"""The oracles that every test of pruning uses. They share no code with the library's own proof.

1. masked == pruned;
2. with ``bias="drop"``: zeroing, in the original, every slice that ``plan.kept`` leaves out;
3. permuting every group's units through the plan's own index maps moves no output.
"""

from __future__ import annotations

import copy
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.utils.weight_norm import WeightNorm

import fxprune
from fxprune.parametrized.mask import own_class
from fxprune.proving.proof import prove
from fxprune.relating import groups

TOLERANCE = 1e-9


def awake(model: nn.Module, seed: int = 0) -> nn.Module:
    """``model`` in float64 and eval mode, with biases, norms and statistics away from their
    initial values: a channel whose constant is 0 by chance would prove nothing."""
    generator = torch.Generator().manual_seed(seed)

    def noise(t: Tensor) -> Tensor:
        return torch.randn(t.shape, generator=generator, dtype=torch.float64)

    model = model.double().eval()
    with torch.no_grad():
        for p in model.parameters():
            if p.dim() <= 1:
                p.add_(0.5 * noise(p))
        for name, b in model.named_buffers():
            if name.endswith("running_mean"):
                b.add_(0.5 * noise(b))
            elif name.endswith("running_var"):
                b.mul_(1 + 0.5 * noise(b).abs())
    return model


def tensors(value: Any) -> list[Tensor]:
    if isinstance(value, Tensor):
        return [value]
    if isinstance(value, dict):
        value = value.values()
    elif hasattr(value, "__dict__") and not isinstance(value, (list, tuple)):
        value = vars(value).values()
    elif not isinstance(value, (list, tuple)):
        return []
    return [t for item in value for t in tensors(item)]


def run(model: nn.Module, x: Any) -> list[Tensor]:
    with torch.no_grad():
        if isinstance(x, dict):
            return tensors(model(**x))
        return tensors(model(*x) if isinstance(x, tuple) else model(x))


def difference(a: list[Tensor], b: list[Tensor]) -> float:
    assert len(a) == len(b)
    worst = 0.0
    for left, right in zip(a, b, strict=True):
        assert left.shape == right.shape, (left.shape, right.shape)
        scale = max(1.0, float(left.abs().max())) if left.numel() else 1.0
        worst = max(worst, float((left - right).abs().max()) / scale if left.numel() else 0.0)
    return worst


def state(model: nn.Module) -> dict[str, Tensor]:
    return {k: v.clone() for k, v in model.state_dict().items()}


def check(model: nn.Module, x: Any, *, shrinks: bool = True, seed: int = 0, **settings: Any):
    """Plan, mask and apply ``model`` under all oracles. Returns ``(plan, pruned model)``."""
    model = awake(model, seed)
    before, outputs = state(model), run(model, x)
    settings = {"sparsity": 0.5, **settings}
    settings.pop("exact", None)  # both are checked
    exact = fxprune.plan(model, x, exact=True, **settings)
    small = exact.apply(model)
    masked_equals_pruned(exact, model, small, x)
    dropped = fxprune.plan(model, x, bias="drop", **settings)
    zeroed_slices_equal_pruned(dropped, model, x)
    plain = fxprune.plan(model, x, **settings)
    masked_equals_pruned(plain, model, plain.apply(model), x)
    permutation_moves_nothing(plain, model, x)
    assert isinstance(small, type(model)) and type(small).__name__ == type(model).__name__
    assert type(small) is type(model) or "" in exact.code
    assert [t.shape for t in run(small, x)] == [t.shape for t in outputs]
    assert all(torch.equal(before[k], v) for k, v in model.state_dict().items())
    assert difference(outputs, run(model, x)) == 0
    if shrinks:
        size = [sum(p.numel() for p in m.parameters()) for m in (plain.apply(model), model)]
        assert size[0] < size[1], plain
    return plain, plain.apply(model)


def copied(model: nn.Module) -> nn.Module:
    """A deep copy; of a model that deepcopy cannot copy, what its ``made_again`` makes."""
    return model.made_again() if hasattr(model, "made_again") else copy.deepcopy(model)


def unhooked(model: nn.Module) -> nn.Module:
    """``model`` with weights in the place of ``nn.utils.weight_norm``'s hooks."""
    for module in model.modules():
        for hook in list(module._forward_pre_hooks.values()):
            if isinstance(hook, WeightNorm):
                torch.nn.utils.remove_weight_norm(module, hook.name)
    return model


def masked_equals_pruned(plan, model, small, x) -> None:
    if plan.approximate:
        assert prove(plan, model, small, x) <= TOLERANCE, plan
    else:
        error = difference(run(plan.mask(model), x), run(small, x))
        assert error <= TOLERANCE, (error, str(plan))


def zeroed_slices_equal_pruned(plan, model, x) -> None:
    """Oracle 2. Says nothing where a norm counts channels: then only the proof can."""
    small = plan.apply(model)
    if plan.approximate:
        assert prove(plan, model, small, x) <= TOLERANCE
        return
    zeroed = unhooked(copied(model))
    with torch.no_grad():
        for name, dims in plan.kept.items():
            owner, _, key = name.rpartition(".")
            module = zeroed.get_submodule(owner)
            tensor = getattr(module, key).clone()
            if tensor.dtype == torch.int64 or "running" in name:
                continue
            for dim, kept in dims.items():
                gone = torch.ones(tensor.shape, dtype=torch.bool)
                if kept.dim() == 2:  # a row for each group of a grouped convolution
                    rows = tensor.shape[0] // len(kept)
                    for i, row in enumerate(kept):
                        part = gone[i * rows : (i + 1) * rows]
                        part.index_fill_(dim, row, False)
                else:
                    gone.index_fill_(dim, kept, False)
                tensor[gone] = 0
            if hasattr(module, "parametrizations") and key in module.parametrizations:
                own_class(module)
                torch.nn.utils.parametrize.remove_parametrizations(module, key)
            getattr(module, key).copy_(tensor)
    error = difference(run(zeroed, x), run(small, x))
    assert error <= TOLERANCE, (error, str(plan))


def permutation_moves_nothing(plan, model, x) -> None:
    """Oracle 3: units of a group change places, everywhere at once."""
    relations = plan._relations
    place = unit_permutation(relations)
    moved = unhooked(copied(model))
    done = set()
    with torch.no_grad():
        for source in relations.sources:
            classes = relations.of(source).reshape(-1)
            order = positions(classes, place[classes])
            if len(source.dims) > 1:  # two axes of a grouped weight lie on its groups
                width = source.size // source.shape[0]
                if (source.name, source.dims[0]) in done:
                    order = np.arange(source.size) // width * width + order % width
                done.add((source.name, source.dims[0]))
            owner, _, key = source.name.rpartition(".")
            module = moved.get_submodule(owner)
            seen = getattr(module, key).detach().reshape(source.view)
            front = seen.movedim(source.dims, tuple(range(len(source.dims))))
            flat = front.reshape(source.size, -1)[torch.from_numpy(order)]
            back = flat.reshape(front.shape).movedim(tuple(range(len(source.dims))), source.dims)
            chain = dict(getattr(module, "parametrizations", {}).items()).get(key)
            if chain is not None and not hasattr(chain[0], "right_inverse"):
                chain.original.copy_(back.reshape(source.tensor_shape))
            elif chain is not None:
                setattr(module, key, back.reshape(source.tensor_shape))
            else:
                getattr(module, key).copy_(back.reshape(source.tensor_shape))
    error = difference(run(model, x), run(moved, x))
    assert error <= TOLERANCE, (error, str(plan))


def unit_permutation(relations) -> np.ndarray:
    """A random permutation of unit classes among those whose slices lie alike in every tensor."""
    rng = np.random.default_rng(0)
    place = np.arange(int(relations.classes.max()) + 1)
    nth = {}  # label -> (parameter axis, how many slices of the unit stand before it there)
    for i, source in enumerate(relations.sources):
        met: dict[int, int] = {}
        for label, unit in enumerate(relations.of(source).reshape(-1).tolist(), source.first):
            nth[label] = (i, met.get(unit, 0))
            met[unit] = met.get(unit, 0) + 1
    signs: dict[int, list] = {}
    arrays = [*(source.labels() for source in relations.sources), *relations.parts]
    for value in relations.values.values():
        for x in value if isinstance(value, (tuple, list)) else [value]:
            arrays += [axis.units for axis in getattr(x, "axes", ())]
    for number, array in enumerate({id(a): a for a in arrays}.values()):
        for label in array.reshape(-1).tolist():
            unit = int(relations.classes[label])
            if label in nth:  # not of a tensor that the code fills with one value
                signs.setdefault(unit, []).append((number, nth[label]))
    for group in groups.groups(relations):
        alike: dict[tuple, list[int]] = {}
        for unit in group.units.tolist():
            rows = [
                (b, r, int((row == unit).sum()))
                for b, bin_ in enumerate(group.bins)
                for r, row in enumerate(bin_)
            ]
            alike.setdefault((tuple(signs[unit]), tuple(rows)), []).append(unit)
        for units in alike.values():
            place[units] = rng.permutation(units)
    return place


def positions(classes: np.ndarray, wanted: np.ndarray) -> np.ndarray:
    """Where the k-th slice of each wanted class stands."""
    result = np.empty(len(classes), dtype=np.int64)
    result[np.argsort(wanted, kind="stable")] = np.argsort(classes, kind="stable")
    return result
