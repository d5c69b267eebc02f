"""Does a pruned model compute what it should? The same oracle for fxprune and its peers.

A pruner that deletes slices of tensors should leave a model that computes what the original does
with these slices zero. So both run in float64, and

* what went is read off the result: every number of the original has a value of its own (the weights
  get noise in their last digits), so each tensor of the pruned model says which of its numbers are
  left, whatever the pruner meant to do;
* the others are set to zero in the original: weights that make a channel, its bias, its scale and
  shift in a norm, the columns that read it. So this forgives a pruner that forgets what removed
  channels still say (``peers.py`` does not);
* layer, group and RMS norms of the original, PyTorch's or modules named so, count the numbers that
  are left only, since no zero can make the wide norm equal the narrow one. Where some other call
  counts channels (a mean over them), or a tensor holds numbers that the original does not, the
  result is "not checked".
"""

from __future__ import annotations

import copy
import inspect
from dataclasses import dataclass
from typing import Any

import torch
from harness import TimeUp, limit, seconds
from pruners import NotInstalled, on_purpose, output_layers, pruner
from torch import Tensor, nn
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

import fxprune
from fxprune.modules import tree
from fxprune.modules.running import outputs
from fxprune.proving.proof import TOLERANCE, largest_error

NORMS = (F.layer_norm, F.group_norm, F.rms_norm)
NORM_MODULES = (nn.LayerNorm, nn.GroupNorm, nn.RMSNorm)
STATUSES = ("prunes", "not checked", "removes nothing", "not installed", "refuses", "hangs",
            "crashes", "wrong")  # fmt: skip


@dataclass
class Verdict:
    """What a pruner made of a model. Fields stay None from the step that failed on."""

    status: str = ""
    kept: float | None = None  # of the parameters
    seconds: float | None = None
    error: float | None = None  # relative to the largest value of the output
    details: str = ""


def judge(
    name: str, model: nn.Module, x: Any, other: Any, sparsity: float, longest: float, only: Any
) -> Verdict:
    """Prune a copy of ``model`` by the pruner called ``name``; compare on the input ``other``."""
    verdict = Verdict()
    model, x, other = distinct(model), doubled(x), doubled(other)
    given = copy.deepcopy(model)
    more = {"bias": "drop"} if name == "fxprune" else {}
    try:
        prune = pruner(name)
        last = output_layers(given, x, only)
        with limit(longest):
            verdict.seconds, small = seconds(
                lambda: prune(given, x, sparsity=sparsity, only=only, last=last, **more)
            )
    except TimeUp:
        verdict.status, verdict.details = "hangs", f"stopped after {longest:.0f} s"
    except NotInstalled as error:
        verdict.status, verdict.details = "not installed", str(error)
    except Exception as error:
        verdict.status = "refuses" if on_purpose(error, name) else "crashes"
        verdict.details = short(error)
    else:
        verdict.kept = count(small) / count(model)
        _compare(verdict, model, small.eval(), other, only)
    return verdict


def _compare(verdict: Verdict, model: nn.Module, small: nn.Module, x: Any, only: Any) -> None:
    if verdict.kept == 1:
        verdict.status = "removes nothing"
        return
    try:
        found = outputs(small, x, only)
    except Exception as error:
        verdict.status, verdict.details = "crashes", f"the pruned model: {short(error)}"
        return
    unknown = cut(model, small)
    if unknown:
        verdict.status, verdict.details = "not checked", f"{unknown} holds other numbers"
        return
    with CountKept(model, small):
        expected = outputs(model, x, only)
    if len(expected) == len(found):
        verdict.error = largest_error(expected, found)
    if verdict.error is not None and verdict.error <= TOLERANCE[torch.float64]:
        verdict.status = "prunes"
    elif counts_otherwise(model, x, only):
        verdict.status, verdict.details = "not checked", "a call that is no norm counts channels"
    else:
        verdict.status = "wrong"


# -- the reference --------------------------------------------------------------------------------


def distinct(model: nn.Module) -> nn.Module:
    """A copy in float64 in which no two numbers of a tensor are equal."""
    model = copy.deepcopy(model).double().eval()
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for tensor in numbers(model).values():
            noise = torch.randn(tensor.shape, generator=generator, dtype=tensor.dtype)
            tensor.addcmul_(torch.where(tensor == 0, 1.0, tensor), noise, value=1e-6)
    return model


def numbers(model: nn.Module) -> dict[str, Tensor]:
    return {k: v for k, v in model.state_dict().items() if v.is_floating_point() and v.dim()}


def cut(model: nn.Module, small: nn.Module) -> str:
    """Set to zero in ``model`` what ``small`` has not; the name of a tensor that makes no sense."""
    left = numbers(small)
    with torch.no_grad():
        for name, tensor in numbers(model).items():
            if name not in left:
                return name
            if left[name].shape != tensor.shape:
                kept = places(tensor, left[name])
                if kept is None:
                    return name
                mask = torch.zeros(tensor.numel(), dtype=torch.bool)
                mask[kept] = True
                tensor.mul_(mask.reshape(tensor.shape))
    return ""


def places(wide: Tensor, narrow: Tensor) -> Tensor | None:
    """Where the numbers of ``narrow`` stand in ``wide``, flat; None if one stands nowhere."""
    ordered, order = wide.flatten().sort()
    found = torch.searchsorted(ordered, narrow.flatten()).clamp(max=len(ordered) - 1)
    if not torch.equal(ordered[found], narrow.flatten()) or len(found.unique()) != len(found):
        return None
    return order[found]


class CountKept(TorchFunctionMode):
    """Norms see the channels that ``small`` has."""

    def __init__(self, model: nn.Module, small: nn.Module) -> None:
        super().__init__()
        mine, theirs = dict(model.named_parameters()), dict(small.named_parameters())
        self.kept = {
            id(p): p.detach().nonzero().flatten() for name, p in mine.items()
            if p.dim() == 1 and name in theirs and theirs[name].shape != p.shape
        }  # fmt: skip
        for module in model.modules():
            kept = self.kept.get(id(getattr(module, "weight", None)))
            if kept is not None and is_written_norm(module):
                vars(module)["forward"] = narrowed(module, kept)

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func not in NORMS:
            return func(*args, **(kwargs or {}))
        given = inspect.signature(func).bind(*args, **(kwargs or {})).arguments
        kept = self.kept.get(id(given.get("weight")))
        if kept is None:
            return func(**given)
        dim = 1 if func is F.group_norm else -1
        groups = given.pop("num_groups", 1)
        x = given.pop("input")
        result, size = torch.zeros_like(x), x.shape[dim] // groups
        for part in (kept[kept // size == g] for g in range(groups)):
            if len(part):
                narrow = {k: v[part] if isinstance(v, Tensor) else v for k, v in given.items()}
                narrow |= {"num_groups": 1} if dim == 1 else {"normalized_shape": (len(part),)}
                found = func(x.index_select(dim, part), **narrow)
                result = result.index_copy(dim, part, found)
        return result


def is_written_norm(module: nn.Module) -> bool:
    """Whether a norm over the last dimension is written in Python, as many RMS norms are."""
    name = type(module).__name__
    return name.endswith(("RMSNorm", "LayerNorm")) and not isinstance(module, NORM_MODULES)


def narrowed(module: nn.Module, kept: Tensor) -> Any:
    """The forward of a norm that counts the kept channels; the others become 0."""
    narrow = copy.deepcopy(module)
    for name, p in module.named_parameters(recurse=False):
        setattr(narrow, name, nn.Parameter(p[kept]))

    def forward(x: Tensor) -> Tensor:
        return torch.zeros_like(x).index_copy(-1, kept, narrow(x.index_select(-1, kept)))

    return forward


def counts_otherwise(model: nn.Module, x: Any, only: Any) -> bool:
    """Whether fxprune knows a call in the model that counts channels and is none of the norms."""
    try:
        plan = fxprune.plan(model, x, outputs=only)
    except fxprune.PruningError:
        return False
    return any(
        not isinstance(model.get_submodule(str(node.target)), NORM_MODULES)
        if node.op == "call_module" else node.target not in NORMS
        for node in {note.node for note in plan._relations.approximate}
    )  # fmt: skip


# -- small things ---------------------------------------------------------------------------------


def doubled(x: Any) -> Any:
    return tree.map_tensors(x, lambda t: t.double() if t.is_floating_point() else t)


def count(model: nn.Module) -> int:
    return sum(p.numel() for p in model.parameters())


def short(error: BaseException) -> str:
    text = " ".join(str(error).split())
    return f"{type(error).__name__}: {text if len(text) <= 160 else text[:157] + '...'}"
