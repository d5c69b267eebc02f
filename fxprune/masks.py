"""Masks on any parameter or buffer of any module, as parametrizations.

The methods of ``torch.nn.utils.prune`` and of ``torch.ao.pruning``'s sparsifiers, in one place::

    masks.l1_unstructured(model.fc, "weight", amount=0.5)
    masks.ln_structured(model.conv, "weight", amount=0.25, n=2, dim=0)
    masks.block_norm(model.fc, "weight", sparse_block_shape=(1, 4), zeros_per_block=2)  # 2:4

A masked entry is zero, gets no gradient, and is kept in the state dict beside the tensor. Another
mask on the same tensor ranks only what the first has left. The parameter object stays the same, so
optimizers stay valid. :func:`remove` makes a mask final; :func:`fxprune.compact` takes out of the
model what masks have made dead. A method that raises leaves the module as it was.

``amount`` is a fraction in [0, 1] or a count of what earlier masks have left.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from .errors import SettingError
from .masking import methods
from .masking.leftovers import from_torch_prune, to_torch_prune
from .modules.given import check_function, check_generator, check_module
from .modules.inspecting import dotted
from .modules.running import describe
from .parametrized.mask import is_masked, mask_of, masked_names, parametrizations, put_on, take_off

__all__ = [
    "apply",
    "block_norm",
    "custom_from_mask",
    "fpgm",
    "from_torch_prune",
    "global_unstructured",
    "identity",
    "is_pruned",
    "l1_unstructured",
    "ln_structured",
    "mask_of",
    "nearly_diagonal",
    "random_structured",
    "random_unstructured",
    "remove",
    "sparsity",
    "to_semi_structured",
    "to_torch_prune",
]


def identity(module: nn.Module, name: str) -> nn.Module:
    """A mask that keeps everything."""
    return apply(module, name, lambda scores, keep: keep)


def random_unstructured(
    module: nn.Module, name: str, amount: float, *, generator: torch.Generator | None = None
) -> nn.Module:
    """Zero entries drawn at random."""
    check_generator(generator)
    return apply(module, name, lambda s, keep: methods.random_entries(s, keep, amount, generator))


def l1_unstructured(
    module: nn.Module, name: str, amount: float, importance_scores: Tensor | None = None
) -> nn.Module:
    """Zero the entries of smallest absolute value, or of smallest ``importance_scores``."""
    return apply(module, name, lambda s, k: methods.smallest(s, k, amount), importance_scores)


def random_structured(
    module: nn.Module, name: str, amount: float, dim: int, *,
    generator: torch.Generator | None = None,
) -> nn.Module:  # fmt: skip
    """Zero whole slices along ``dim``, drawn at random."""
    check_generator(generator)
    return apply(
        module, name, lambda s, keep: methods.random_slices(s, keep, amount, dim, generator)
    )


def ln_structured(
    module: nn.Module, name: str, amount: float, n: Any, dim: int,
    importance_scores: Tensor | None = None,
) -> nn.Module:  # fmt: skip
    """Zero the slices along ``dim`` of smallest Lₙ norm, of the tensor or of the scores."""
    return apply(
        module, name, lambda s, keep: methods.slices_of_norm(s, keep, amount, n, dim),
        importance_scores,
    )  # fmt: skip


def fpgm(
    module: nn.Module, name: str, amount: float, dim: int = 0, distance: Any = 2,
    importance_scores: Tensor | None = None,
) -> nn.Module:  # fmt: skip
    """Zero the slices nearest to the geometric median of all (He et al., arXiv 1811.00250).

    ``distance``: 1, 2 or a function of the slices as rows (n, m) that gives distances (n, n).
    """
    return apply(
        module, name, lambda s, keep: methods.slices_near_median(s, keep, amount, dim, distance),
        importance_scores,
    )  # fmt: skip


def block_norm(
    module: nn.Module,
    name: str,
    sparsity_level: float = 1.0,
    sparse_block_shape: tuple[int, int] = (1, 4),
    zeros_per_block: int | None = None,
    norm: Any = 2,
    importance_scores: Tensor | None = None,
) -> nn.Module:
    """Zero entries by blocks of the last two dimensions.

    Args:
        sparsity_level: the share of blocks, those of smallest norm, that lose entries.
        sparse_block_shape: rows and columns of a block.
        zeros_per_block: how many entries such a block loses, the smallest; by default all.
            With ``sparse_block_shape=(1, 4)``, 2 makes 2:4 sparsity.
        norm: 1, 2 or a function of the tensor that gives one value an entry.
    """
    size = methods.block_size(sparse_block_shape)
    zeros = size if zeros_per_block is None else zeros_per_block
    return apply(
        module, name,
        lambda s, keep: methods.blocks(s, keep, sparsity_level, sparse_block_shape, zeros, norm),
        importance_scores,
    )  # fmt: skip


def nearly_diagonal(module: nn.Module, name: str, nearliness: int = 1) -> nn.Module:
    """Keep the ``nearliness`` diagonals (an odd number) around the main one of a matrix; with 0,
    as PyTorch's sparsifier has it, none."""
    return apply(module, name, lambda s, keep: methods.diagonal(s, keep, nearliness))


def custom_from_mask(module: nn.Module, name: str, mask: Tensor) -> nn.Module:
    """Zero the entries where ``mask``, a tensor of the same shape, is 0 or False."""

    def method(scores: Tensor, keep: Tensor) -> Tensor:
        if not isinstance(mask, Tensor) or mask.shape != keep.shape:
            found = tuple(mask.shape) if isinstance(mask, Tensor) else mask
            raise SettingError(f"mask: {found} is not a tensor of shape {tuple(keep.shape)}")
        if bool(mask.isnan().any()):
            raise SettingError("mask: it holds NaN, which is neither 0 nor anything else")
        return keep & (mask.to(keep.device) != 0)

    return apply(module, name, method)


def global_unstructured(
    parameters: Iterable[tuple[nn.Module, str]],
    amount: float,
    method: str | Callable[[Tensor, Tensor, float], Tensor] = "l1",
    *,
    importance_scores: Mapping[tuple[nn.Module, str], Tensor] | None = None,
    generator: torch.Generator | None = None,
) -> None:
    """Zero entries of several tensors, ranked all together.

    Args:
        parameters: ``(module, name)`` of each tensor.
        method: ``"l1"``, ``"random"`` or ``f(scores, keep, amount) -> keep`` on flat tensors.
        importance_scores: for some of the tensors, what is ranked in their place.
    """
    found = places(parameters)
    if not callable(method) and method not in ("l1", "random"):
        raise SettingError(f"method={method!r} is neither 'l1', 'random' nor a function")
    given = _scores_of(importance_scores, found, method)
    check_generator(generator)
    if generator is not None and method != "random":
        raise SettingError("generator= draws for method='random' only")
    scores = [_scores(m, n, given.get((m, n))) for m, n in found]
    keeps = [mask_of(m, n) for m, n in found]
    flat, left = (torch.cat([t.reshape(-1) for t in ts]) for ts in (scores, keeps))
    if callable(method):
        kept = method(flat, left, amount)
    elif method == "l1":
        kept = methods.smallest(flat, left, amount)
    else:
        kept = methods.random_entries(flat, left, amount, generator)
    check_made(kept, left, "all tensors")
    parts = kept.split([t.numel() for t in keeps])
    for (module, name), keep, part in zip(found, keeps, parts, strict=True):
        put_on(module, name, part.reshape(keep.shape))


def remove(module: nn.Module, name: str) -> nn.Module:
    """Take the masks off a tensor, which keeps its zeros.

    Where something else computes the tensor too (``weight_norm``) and cannot compute these zeros,
    that is taken off with the masks.

    Raises:
        SettingError: it has none.
    """
    if name not in masked_names(check_module(module)):
        raise SettingError(f"{name!r} of {type(module).__name__} has no mask that could be removed")
    take_off(module, name)
    return module


def is_pruned(module: nn.Module) -> bool:
    """Whether a tensor of the module, or of one inside it, has a mask of fxprune's."""
    return is_masked(check_module(module))


def sparsity(module: nn.Module) -> dict[str, float]:
    """The share of masked entries of each masked tensor, by name."""
    return {
        dotted(path, name): float((~mask_of(m, name)).double().mean())
        for path, m in check_module(module).named_modules() for name in masked_names(m)
    }  # fmt: skip


def to_semi_structured(model: nn.Module) -> list[str]:
    """Hand masked 2:4 weights of linear layers to PyTorch's sparse kernels, in place.

    Only those whose mask leaves two of every four entries of a row at most; their masks become
    final. For inference on a GPU of compute capability 8.0 or more, in half precision.

    Returns:
        Paths of the layers that were converted.

    Raises:
        SettingError: no masked weight of a linear layer is 2:4 and on such a GPU.
    """
    found = []
    for path, module in check_module(model, "model").named_modules():
        if isinstance(module, nn.Linear) and "weight" in masked_names(module):
            kept = mask_of(module, "weight")
            fours = kept.shape[1] % 4 == 0 and int(kept.unflatten(1, (-1, 4)).sum(-1).max()) <= 2
            if fours and kept.is_cuda and torch.cuda.get_device_capability(kept.device) >= (8, 0):
                found.append((path, module))
    if not found:
        raise SettingError(
            "no linear layer has a 2:4 mask (block_norm with sparse_block_shape=(1, 4) and "
            "zeros_per_block=2) and lies on a GPU of compute capability 8.0 or more"
        )
    sparse = [torch.sparse.to_sparse_semi_structured(m.weight.detach()) for _, m in found]
    for (_, module), weight in zip(found, sparse, strict=True):
        take_off(module, "weight")
        module.weight = nn.Parameter(weight, requires_grad=False)
    return [path for path, _ in found]


def apply(
    module: nn.Module, name: str, method: methods.Method, importance_scores: Tensor | None = None
) -> nn.Module:
    """Mask what ``method(scores, keep) -> keep`` says (:mod:`.masking.methods`, or your own).

    Everything is worked out before the module is touched.
    """
    module, name = _place(module, name)
    check_function("method", method, "f(scores, keep)")
    keep = mask_of(module, name)
    scores = _scores(module, name, importance_scores)
    made = method(scores, keep)
    check_made(made, keep, name)
    put_on(module, name, made)
    return module


def check_made(made: Any, keep: Tensor, name: str) -> None:
    """Raise where what a method returns is no mask."""
    if not isinstance(made, Tensor) or made.dtype != torch.bool or made.shape != keep.shape:
        raise SettingError(
            f"the method returned {describe(made)} for {name}; it has to return a bool tensor of "
            f"shape {tuple(keep.shape)}, True for what stays"
        )


def places(parameters: Any) -> list[tuple[nn.Module, str]]:
    """Pairs of a module and the name of a tensor that it has, each checked."""
    if isinstance(parameters, (str, Mapping)) or not isinstance(parameters, Iterable):
        raise SettingError(f"parameters={parameters!r} are no pairs (module, name)")
    found = []
    for pair in parameters:
        if not isinstance(pair, (tuple, list)) or len(pair) != 2:
            given = type(pair).__name__ if isinstance(pair, nn.Module) else repr(pair)
            raise SettingError(f"parameters: {given} is no pair (module, name)")
        found.append(_place(*pair))
    if not found:
        raise SettingError("no parameters were given")
    return found


def _scores_of(
    given: Any, found: list[tuple[nn.Module, str]], method: Any
) -> Mapping[tuple[nn.Module, str], Tensor]:
    if given is None:
        return {}
    if not isinstance(given, Mapping):
        kind = type(given).__name__
        raise SettingError(f"importance_scores is a {kind}; it maps (module, name) to scores")
    if method == "random":
        raise SettingError("importance_scores= ranks nothing with method='random'")
    for key in given:
        if not any(key == place for place in found):
            module, name = key if isinstance(key, tuple) and len(key) == 2 else (key, "?")
            raise SettingError(
                f"importance_scores: ({type(module).__name__}, {name!r}) is none of parameters"
            )
    return given


def _place(module: Any, name: str) -> tuple[nn.Module, str]:
    registered = {**check_module(module)._parameters, **module._buffers}
    own = [key for key, tensor in registered.items() if tensor is not None]
    own += parametrizations(module)
    if name not in own:
        raise SettingError(
            f"{type(module).__name__} has no parameter or buffer {name!r}; it has "
            f"{', '.join(own) or 'none of its own'}"
        )
    return module, name


def _scores(module: nn.Module, name: str, given: Tensor | None) -> Tensor:
    value = getattr(module, name).detach()  # as earlier masks left it
    if given is None:
        return value
    if not isinstance(given, Tensor) or given.shape != value.shape:
        found = tuple(given.shape) if isinstance(given, Tensor) else type(given).__name__
        raise SettingError(
            f"importance_scores: {found} is not a tensor of the shape of {name}, "
            f"{tuple(value.shape)}"
        )
    if bool(given.isnan().any()):
        raise SettingError("importance_scores: they hold NaN, which ranks nowhere")
    return given.detach().to(value.device)
