"""What optimizers hold of the parameters of a model that is pruned: cut by the same indices."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import combinations
from typing import Any

import torch
from torch import Tensor, nn

from ..errors import SettingError, warn
from ..modules import tree
from ..modules.inspecting import read_attribute
from ..parametrized.mask import parametrizations
from ..parametrized.weight_norm import parametrized
from ..replaying.kept_indices import same_indices, shrink
from ..rules.channels import SourceAxis
from .rewrite import Journal, memory_format

# States of one byte an entry are compressed by blocks, which no cut of a parameter respects.
_COMPRESSED = (torch.uint8, torch.int8)


@dataclass
class Cuts:
    """Gradients and optimizer states of a pruned model, built before anything is changed."""

    gradients: list[tuple[nn.Parameter, Tensor]] = field(default_factory=list)
    values: list[tuple[dict[Any, Any], Any, Any]] = field(default_factory=list)  # state, key, new
    anew: list[tuple[Any, nn.Parameter]] = field(default_factory=list)  # with their optimizers
    unknown: list[str] = field(default_factory=list)
    computed: list[str] = field(default_factory=list)


def check_optimizers(optimizers: Any, model: nn.Module) -> list[Any]:
    """One optimizer or several as a list, each with parameters of the model."""
    if optimizers is None:
        return []
    several = list(optimizers) if isinstance(optimizers, (list, tuple)) else [optimizers]
    own = {id(p) for p in model.parameters()}
    for optimizer in several:
        if not hasattr(optimizer, "param_groups") or not hasattr(optimizer, "state"):
            raise SettingError(
                f"optimizer={optimizer!r} is no torch.optim.Optimizer, nor a list of them"
            )
        if not any(id(p) in own for p in _parameters(optimizer)):
            raise SettingError(
                f"optimizer: {type(optimizer).__name__} has no parameter of this "
                f"{type(model).__name__}; was it made for a copy of it?"
            )
    return several


def cuts(plan: Any, model: nn.Module, optimizers: Sequence[Any]) -> Cuts:
    """What of gradients and of states in the shape of their parameter stays under a plan."""
    found = Cuts()
    axes: dict[str, list[SourceAxis]] = {}
    for axis in plan._relations.sources:
        axes.setdefault(axis.name, []).append(axis)
    changed: set[int] = set()
    with torch.no_grad(), parametrized(model):
        for name in plan.kept:
            path, _, attribute = name.rpartition(".")
            chains = parametrizations(model.get_submodule(path))
            if attribute in chains:  # what is beneath is computed from the pruned weight
                beneath = list(chains[attribute].parameters())
                changed |= {id(p) for p in beneath}
                pairs = [(o, p) for o in optimizers for p in beneath if o.state.get(p)]
                found.anew += pairs
                found.computed += [name] if pairs else []
                continue
            parameter = read_attribute(model, name)
            if not isinstance(parameter, nn.Parameter):
                continue
            changed.add(id(parameter))
            cut = _Cut(plan, name, axes[name])
            if parameter.grad is not None:
                found.gradients.append((parameter, cut.shrunk(parameter.grad)))
            for optimizer in optimizers:
                state = optimizer.state.get(parameter, {})
                for key, value in state.items():
                    cut.unknown = []
                    new = tree.map_tensors(value, cut)
                    found.values.append((state, key, new))
                    found.unknown += [
                        f"{key!r} of {name} {shape}, a {kind} of {type(optimizer).__name__}"
                        for shape, kind in cut.unknown
                    ]
        for parameter in model.parameters():  # a constant may be folded into one that stays whole
            if parameter.grad is not None and id(parameter) not in changed:
                found.gradients.append((parameter, parameter.grad))
        for optimizer in optimizers:
            found.unknown += _of_all(optimizer, changed)
    return found


def _of_all(optimizer: Any, changed: set[int]) -> list[str]:
    """States that speak of several parameters, where any of these changes."""
    if not any(id(p) in changed for p in _parameters(optimizer)):
        return []
    return [
        f"{key!r}, a {tuple(t.shape)} of {type(optimizer).__name__}"
        for p in _parameters(optimizer) if id(p) not in changed
        for key, value in optimizer.state.get(p, {}).items()
        for t in tree.tensors(value) if t.numel() > max(1, p.numel())
    ]  # fmt: skip


@dataclass
class _Cut:
    """From a tensor of the shape of a parameter to that of what stays of it."""

    plan: Any
    name: str
    axes: list[SourceAxis]
    unknown: list[tuple[str, str]] = field(default_factory=list)

    def __call__(self, value: Tensor) -> Tensor:
        if value.numel() <= 1:
            return value
        plain = (
            type(value) in (Tensor, nn.Parameter)
            and value.dtype not in _COMPRESSED
            and value.layout in (torch.strided, torch.sparse_coo)
        )
        if plain and tuple(value.shape) == self.axes[0].tensor_shape:
            return self.shrunk(value)
        new = self._factor(value) if plain else None
        if new is None:
            kind = f"{tuple(value.shape)} {str(value.dtype).removeprefix('torch.')}"
            self.unknown.append((str(self.axes[0].tensor_shape), kind))
        return value if new is None else new

    def shrunk(self, value: Tensor) -> Tensor:
        if value.layout == torch.sparse_coo:
            dense = shrink(value.detach().to_dense(), self.axes, self.plan._replay)
            return dense.to_sparse(value.sparse_dim())
        new = shrink(value.detach(), self.axes, self.plan._replay)
        return new.contiguous(memory_format=memory_format(value))

    def _factor(self, value: Tensor) -> Tensor | None:
        """A tensor over some dimensions of the parameter; None where it is not sure which."""
        shape, kept = self.axes[0].tensor_shape, self.plan.kept[self.name]
        places = [
            dims for dims in combinations(range(len(shape)), value.dim())
            if all(n == shape[d] or (n == 1 and value.dim() == len(shape))
                   for n, d in zip(value.shape, dims, strict=True))
        ]  # fmt: skip
        ways = [
            {i: kept[d] for i, d in enumerate(dims) if d in kept and value.shape[i] == shape[d]}
            for dims in places
        ]
        if not ways or not all(same_indices(way, ways[0]) for way in ways[1:]):
            return None
        if any(index.dim() > 1 for index in ways[0].values()):
            return self._of_groups(value, places[0])
        for dim, index in ways[0].items():
            value = value.index_select(dim, index.to(value.device))
        return value

    def _of_groups(self, value: Tensor, dims: tuple[int, ...]) -> Tensor | None:
        """A tensor over these dimensions, of which each group of rows keeps others: spread over the
        whole parameter, cut as that is, and taken where it stood."""
        shape = self.axes[0].tensor_shape
        sizes = dict(zip(dims, value.shape, strict=True))
        if sizes.get(0) != shape[0]:  # it is the same for all groups
            return None
        laid = value.reshape([sizes.get(d, 1) for d in range(len(shape))]).expand(shape)
        new = self.shrunk(laid)
        for d in range(len(shape)):
            new = new.narrow(d, 0, new.size(d) if sizes.get(d) == shape[d] else 1)
        return new.reshape([new.size(d) for d in dims])


def install(found: Cuts, journal: Journal) -> None:
    """Gradients and states as they were built; what is computed anew has the state of a beginner.
    To be called when the parameters have their new shapes."""
    for parameter, gradient in found.gradients:
        parameter.grad = gradient  # the journal of the parameter has the old one
    for state, key, new in found.values:
        journal.item(state, key, new)
    for optimizer, parameter in found.anew:
        journal.drop(optimizer.state, parameter)
        _begin(optimizer, parameter, journal)
    if found.unknown:
        warn(
            "an optimizer's state is not of the shape of its parameter, and was left as it is: "
            f"{'; '.join(found.unknown[:5])}. Make a new optimizer, or delete that state"
        )
    if found.computed:
        warn(
            "weights that a parametrization computes begin with a new optimizer state: "
            f"{', '.join(found.computed[:5])}"
        )


def regroup(
    optimizers: Iterable[Any], model: nn.Module, before: dict[str, nn.Parameter], journal: Journal
) -> None:
    """Parameters that the model has now and had not before come behind the weight of their layer,
    in its group. None leaves: what shrinks is the same parameter."""
    known = {id(p) for p in before.values()}
    made = {name: p for name, p in model.named_parameters() if id(p) not in known}
    for optimizer in optimizers:
        for name, parameter in made.items():
            _join(optimizer, model, name, parameter, journal)


def _join(
    optimizer: Any, model: nn.Module, name: str, parameter: nn.Parameter, journal: Journal
) -> None:
    path, _, attribute = name.rpartition(".")
    module = model.get_submodule(path)
    weight = module._parameters.get(attribute.replace("bias", "weight"))
    for neighbour in [weight, *module.parameters()]:
        for group in optimizer.param_groups:
            at = [i for i, p in enumerate(group["params"]) if p is neighbour]
            if neighbour is parameter or not at:
                continue
            place = at[0] + 1
            journal.entries(group["params"], _with(group["params"], place, parameter))
            if "param_names" in group:
                names = group["param_names"]
                lead = names[at[0]].rpartition(".parametrizations.")[0] or names[at[0]]
                own = f"{lead.rpartition('.')[0]}.{attribute}".lstrip(".")
                journal.entries(names, _with(names, place, own))
            _begin(optimizer, parameter, journal)
            return


def _with(items: list[Any], place: int, item: Any) -> list[Any]:
    return [*items[:place], item, *items[place:]]


def _begin(optimizer: Any, parameter: nn.Parameter, journal: Journal) -> None:
    """The state that a new optimizer of this class gives a parameter before any step; most give
    none, Adagrad does."""
    groups = optimizer.param_groups
    group: dict[str, Any] = next(
        (g for g in groups if any(p is parameter for p in g["params"])), {}
    )
    options = {key: group.get(key, value) for key, value in optimizer.defaults.items()}
    kind = type(optimizer)
    try:
        twin = kind([parameter], **options)
    except TypeError:  # it is made from something else; then states are made by its steps
        return
    except ValueError as error:  # Muon takes matrices alone
        raise SettingError(
            f"{kind.__name__} does not take the bias that is made for a layer ({error}): "
            "pass bias='drop', which makes none, or give the layer a bias of zeros"
        ) from error
    state = dict(twin.state).get(parameter)
    begun = any("momentum_buffer" in optimizer.state.get(p, ()) for p in group.get("params", ()))
    if not state and begun and group.get("fused"):  # SGD, whose kernel takes all buffers or none
        state = {"momentum_buffer": torch.zeros_like(parameter)}
    if state:
        journal.item(optimizer.state, parameter, state)


def _parameters(optimizer: Any) -> list[nn.Parameter]:
    return [p for group in optimizer.param_groups for p in group["params"]]
