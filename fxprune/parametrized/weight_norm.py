"""Weights that hooks compute before each run (``nn.utils.weight_norm``): parametrizations while
fxprune is at work, which can be masked and set."""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils.weight_norm import WeightNorm

from ..modules.inspecting import parts_of, tensors_of
from ..modules.near import codes_near, names_in
from .mask import own_class, parametrizations, parametrized_by


class HookedNorm(nn.Module):
    """Weight norm as a parametrization, and the hook that it stands for.

    Args:
        hook: of PyTorch, which knows the weight's name and the dimension that is kept.
        hooks: the module's hooks before its forward, in their order.
        parameters: the names of its own parameters, in their order.
    """

    def __init__(self, hook: Any, hooks: dict[int, Any], parameters: list[str]) -> None:
        super().__init__()
        self.hook, self.hooks, self.parameters_then = hook, hooks, parameters

    def forward(self, g: Tensor, v: Tensor) -> Tensor:
        return torch._weight_norm(v, g, self.hook.dim)

    def right_inverse(self, weight: Tensor) -> tuple[Tensor, Tensor]:
        return torch.norm_except_dim(weight, 2, self.hook.dim), weight


def stored_names(chain: Any, key: str) -> list[str]:
    """What a module's state calls the tensors beneath a computed one, ``key``."""
    if is_hooked(chain):
        return [f"{key}_g", f"{key}_v"]
    return [f"parametrizations.{key}.{name}" for name in tensors_of(chain)]


def is_hooked(chain: Any) -> bool:
    return isinstance(chain[0], HookedNorm)


@contextlib.contextmanager
def parametrized(model: Any) -> Iterator[None]:
    """While inside, hooks of ``nn.utils.weight_norm`` are parametrizations of the same tensors."""
    before = []
    found = list(_alone(model)) if isinstance(model, nn.Module) else []
    for module, hooks in found:
        for hook in hooks:
            before.append((module, hook.name, vars(module)[hook.name], _memory(module, hook)))
            _to_parametrization(module, hook)
    try:
        yield
    finally:
        for module, name, value, memory in before:
            hook = _to_hook(module, name)
            if hook is not None and _memory(module, hook) == memory:
                vars(module)[name] = value


def with_hooks(model: nn.Module) -> nn.Module:
    """``model``, a copy that was made inside of :func:`parametrized`, with its hooks again; where
    masks lie on a weight it stays a parametrization."""
    for module in parts_of(model):
        for name in list(parametrizations(module)) if module._modules else ():
            _to_hook(module, name)
    return model


def hooked_weights(module: nn.Module) -> dict[str, Tensor]:
    """What such hooks compute, by the weights' names."""
    with torch.no_grad():
        return {hook.name: hook.compute_weight(module) for hook in _hooks(module)}


def _alone(model: nn.Module) -> Iterator[tuple[nn.Module, list[Any]]]:
    """The hooks of each module whose tensors nobody else holds or reads."""
    hooked = [(m, hooks) for m in parts_of(model) if (hooks := _hooks(m))]
    if not hooked:
        return
    held = Counter(id(p) for m in model.modules() for p in m._parameters.values() if p is not None)
    named = {n for m in model.modules() for code in codes_near(m) for n in names_in(code)}
    for module, hooks in hooked:
        yield module, [
            hook for hook in hooks
            if all(held[id(module._parameters[f"{hook.name}_{part}"])] == 1 for part in "gv")
            and named.isdisjoint((f"{hook.name}_g", f"{hook.name}_v"))
        ]  # fmt: skip


def _hooks(module: nn.Module) -> list[Any]:
    if not module._forward_pre_hooks or isinstance(module, nn.RNNBase):  # whose weights are a list
        return []
    return [
        hook for hook in module._forward_pre_hooks.values()
        if isinstance(hook, WeightNorm) and f"{hook.name}_v" in module._parameters
        and hook.name in vars(module)
    ]  # fmt: skip


def _to_parametrization(module: nn.Module, hook: Any) -> None:
    name, own = hook.name, module._parameters
    made = HookedNorm(hook, dict(module._forward_pre_hooks), list(own))
    for key in [key for key, other in module._forward_pre_hooks.items() if other is hook]:
        del module._forward_pre_hooks[key]
    g, v = own.pop(f"{name}_g"), own.pop(f"{name}_v")
    del vars(module)[name]
    with torch.no_grad():
        own[name] = nn.Parameter(made(g, v))
    parametrized_by(module, name, made)
    parametrizations(module)[name]._parameters.update(original0=g, original1=v)


def _to_hook(module: nn.Module, name: str) -> Any:
    """None where the weight has to stay a parametrization: it has masks, or its module new code."""
    chain = parametrizations(module)[name]
    if not is_hooked(chain) or len(chain) > 1 or name not in vars(type(module)):
        return None
    made, g, v = chain[0], chain.original0, chain.original1
    with torch.no_grad():
        weight = made(g, v)
    own_class(module)
    delattr(type(module), name)
    del parametrizations(module)[name]
    if not parametrizations(module):
        del module._modules["parametrizations"]
        module.__class__ = type(module).__bases__[0]
    own = module._parameters
    own.update({f"{name}_g": g, f"{name}_v": v})
    for key in made.parameters_then:
        if key in own:
            own[key] = own.pop(key)
    vars(module)[name] = weight
    hooks = module._forward_pre_hooks
    now = dict(hooks)
    hooks.clear()
    hooks.update({k: h for k, h in made.hooks.items() if k in now or h is made.hook} | now)
    return made.hook


def _memory(module: nn.Module, hook: Any) -> list[tuple[int, torch.Size]]:
    found = (module._parameters[f"{hook.name}_{part}"] for part in "gv")
    return [(t.data_ptr(), t.shape) for t in found if t is not None]
