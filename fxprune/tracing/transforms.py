"""Transforms of functions (``torch.vmap``, ``torch.func.grad``): one call each, which is followed
through the ops beneath it. Its function belongs to the model and may read more than it is given."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import torch
from torch import fx
from torch._functorch import eager_transforms, vmap
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves

from ..errors import ModelError
from ..rules import sizes
from .unrecorded import READ_PAST_SIZES

# Returns a function, too, that runs later.
VJP = eager_transforms._vjp_with_argnums
# What runs the function.
TRANSFORMS = (
    vmap.vmap_impl,
    eager_transforms.grad_impl,
    eager_transforms.grad_and_value_impl,
    eager_transforms._jvp_with_argnums,
    VJP,
)
_NAMES = dict(zip(TRANSFORMS, ("vmap", "grad", "grad_and_value", "jvp", "vjp"), strict=True))
RUNS_A_FUNCTION = "runs a function of its own under torch.vmap, torch.func.grad or the like"


class Transform:
    """A transform as the target of a node: takes the tensors, too, that the function reads without
    being given them (``besides``), so that the graph says what the call goes by.

    Args:
        run: what is called: the transform, or a function that it has returned.
    """

    def __init__(self, transform: Callable[..., Any], run: Callable[..., Any]) -> None:
        self.run = run
        self.__name__ = self.__qualname__ = _NAMES[transform]
        self.__module__ = __name__

    def __call__(self, *args: Any, besides: tuple[Any, ...] = (), **kwargs: Any) -> Any:
        return self.run(*args, **kwargs)


class Inside(TorchFunctionMode):
    """What the function does of which the ops beneath it know no more: whether it asks tensors for
    sizes, and the traced numbers that it hands to PyTorch."""

    _asks = frozenset((*READ_PAST_SIZES, "size", "__len__", "numel", "nelement"))

    def __init__(self) -> None:
        super().__init__()
        self.reads_sizes = False
        self.numbers: list[Any] = []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        asks = func == torch.Tensor.shape.__get__ or func.__name__ in self._asks  # type: ignore[attr-defined]
        caller = sys._getframe(1).f_globals.get("__name__", "")
        self.reads_sizes |= asks and not caller.startswith("torch._functorch")
        kwargs = kwargs or {}
        self.numbers += [n for n in tree_leaves((args, kwargs)) if isinstance(n, sizes.OWN)]
        return func(*args, **kwargs)


def check_runs(graph: fx.Graph) -> None:
    """Refuse a graph to be run where a function would read what it has read in the recorded run."""
    for node in graph.nodes:
        if isinstance(node.target, Transform) and "besides" in node.kwargs:
            raise ModelError(
                f"a function under torch.{node.target.__name__} reads tensors that it is not given "
                f"({node.meta['where']}), which a graph cannot hand to it. Give them as arguments, "
                "or do without a graph"
            )
