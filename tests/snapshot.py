"""Everything of a model that a call must leave alone, taken before and compared after."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

_TABLES = (
    "_parameters", "_buffers", "_modules", "_forward_hooks", "_forward_pre_hooks",
    "_backward_hooks", "_backward_pre_hooks", "_state_dict_hooks", "_load_state_dict_pre_hooks",
    "_non_persistent_buffers_set",
)  # fmt: skip


class Snapshot:
    """The state of ``model`` bit for bit: tensors, gradients, attributes, hooks, flags, classes,
    the RNG state of PyTorch, the way modules are called and whether gradients are recorded."""

    def __init__(self, model: nn.Module) -> None:
        self.model = model
        self.before = _state(model)

    def differences(self) -> list[str]:
        after = _state(self.model)
        keys = list(dict.fromkeys([*self.before, *after]))
        return [key for key in keys if not _same(self.before.get(key), after.get(key))]


def _state(model: nn.Module) -> dict[str, Any]:
    state: dict[str, Any] = {
        "rng": torch.get_rng_state(),
        "grad mode": torch.is_grad_enabled(),
        "nn.Module.__call__": nn.Module.__call__,
        "fast path": torch.backends.mha.get_fastpath_enabled(),
    }
    for path, module in model.named_modules(remove_duplicate=False):
        state[f"{path}: class"] = type(module)
        names = set(vars(type(module))) - {"__slotnames__"}  # copyreg's cache
        state[f"{path}: class attributes"] = sorted(names)
        for key, value in vars(module).items():
            if key == "_flat_weight_refs":  # nn.RNNBase renews it when it runs
                continue
            if key in _TABLES:
                state[f"{path}: {key}"] = list(value.items() if isinstance(value, dict) else value)
            else:
                state[f"{path}: {key}"] = _copied(value)
    for name, t in [*model.named_parameters(), *model.named_buffers()]:
        state[f"{name}: value"] = t.detach().clone()
        state[f"{name}: layout"] = (t.dtype, t.shape, t.stride(), t.requires_grad, t.device)
        state[f"{name}: grad"] = (t.grad, None if t.grad is None else t.grad.clone())
    return state


def _copied(value: Any) -> Any:
    """``value`` with its type, so that a change inside a container or a config object shows."""
    if isinstance(value, (tuple, list)):
        return type(value), [_copied(item) for item in value]
    if isinstance(value, dict):
        return dict, [(key, _copied(item)) for key, item in value.items()]
    plain = getattr(value, "__dict__", None)
    if isinstance(plain, dict) and not isinstance(value, (nn.Module, type)) and not callable(value):
        return type(value), value, [(key, _copied(item)) for key, item in plain.items()]
    return type(value), value


def _same(a: Any, b: Any) -> bool:
    if a is b:
        return True
    if isinstance(a, torch.Tensor) and isinstance(b, torch.Tensor):
        return a.dtype == b.dtype and torch.equal(a, b)
    if isinstance(a, (tuple, list)) and isinstance(b, (tuple, list)):
        return len(a) == len(b) and all(_same(x, y) for x, y in zip(a, b, strict=True))
    return bool(type(a) is type(b) and a == b)
