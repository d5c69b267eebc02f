"""How sparsity grows while a model trains, and masks that follow it step by step."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

from torch import nn

from . import mask_methods as methods
from .errors import SettingError
from .mask import mask_of
from .masks import apply, global_unstructured

Schedule = Callable[[int], float]


def one_shot(sparsity: float, *, at: int = 0) -> Schedule:
    """All at once, at step ``at``."""
    _fraction(sparsity)
    return lambda step: sparsity if step >= at else 0.0


def linear(sparsity: float, steps: int, *, start: float = 0.0, after: int = 0) -> Schedule:
    """From ``start`` to ``sparsity`` in ``steps`` equal steps, after the first ``after``."""
    return _growing(sparsity, steps, start, after, lambda share: share)


def cubic(sparsity: float, steps: int, *, start: float = 0.0, after: int = 0) -> Schedule:
    """Fast at first, then ever slower (Zhu & Gupta, arXiv 1710.01878)."""
    return _growing(sparsity, steps, start, after, lambda share: 1 - (1 - share) ** 3)


def _growing(
    sparsity: float, steps: int, start: float, after: int, shape: Callable[[float], float]
) -> Schedule:
    _fraction(sparsity)
    _fraction(start)
    if steps < 1:
        raise SettingError(f"steps={steps!r} is not 1 at least")

    def schedule(step: int) -> float:
        share = min(max((step - after) / steps, 0.0), 1.0)
        return start + (sparsity - start) * shape(share)

    return schedule


def _fraction(value: float) -> None:
    if not 0 <= value <= 1:
        raise SettingError(f"sparsity={value!r} is not in [0, 1]")


class MaskScheduler:
    """Masks that grow with a schedule::

        scheduler = MaskScheduler([(model.fc, "weight")], cubic(0.9, steps=20))
        for epoch in range(20):
            train(model)
            scheduler.step()

    Args:
        parameters: ``(module, name)`` of each tensor to mask.
        schedule: step -> sparsity: :func:`one_shot`, :func:`linear`, :func:`cubic` or any function.
        method: ``f(scores, keep, amount) -> keep`` of :mod:`fxprune.mask_methods`; by default the
            entries of smallest absolute value go.
        together: rank the entries of all tensors together, not each tensor by itself.
    """

    def __init__(
        self,
        parameters: Iterable[tuple[nn.Module, str]],
        schedule: Schedule,
        method: Callable[..., Any] = methods.smallest,
        *,
        together: bool = False,
    ) -> None:
        self.parameters = list(parameters)
        if not self.parameters:
            raise SettingError("MaskScheduler: no parameters were given")
        self.schedule, self.method, self.together = schedule, method, together
        self.steps = 0

    @property
    def sparsity(self) -> float:
        """The share of entries that are masked now."""
        keeps = [mask_of(module, name) for module, name in self.parameters]
        return 1 - sum(int(k.sum()) for k in keeps) / sum(k.numel() for k in keeps)

    def step(self) -> float:
        """Mask what is missing to the next sparsity of the schedule; returns the one reached."""
        self.steps += 1
        wanted = self.schedule(self.steps)
        _fraction(wanted)
        if self.together:
            amount = _more(self.sparsity, wanted)
            global_unstructured(self.parameters, amount, self.method)
            return self.sparsity
        for module, name in self.parameters:
            amount = _more(1 - float(mask_of(module, name).double().mean()), wanted)
            apply(module, name, partial(self.method, amount=amount))
        return self.sparsity

    def state_dict(self) -> dict[str, Any]:
        """How far it is; the masks are in the model's own state dict."""
        return {"steps": self.steps}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.steps = int(state["steps"])

    def __repr__(self) -> str:
        return (
            f"MaskScheduler({len(self.parameters)} tensors, step {self.steps}, {self.sparsity:.1%})"
        )


def _more(now: float, wanted: float) -> float:
    """The share of what is left that has to go."""
    return min(max((wanted - now) / (1 - now), 0.0), 1.0) if now < 1 else 0.0
