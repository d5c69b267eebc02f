"""The proof: the pruned model computes what the masked model computes."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, fx, nn

from ..errors import ProofError, PruningError
from ..modules import tree
from ..modules.other_lengths import resized, with_another_batch
from ..modules.running import on_cpu, outputs
from ..rules.probe import SOURCE
from ..rules.spec import Spec
from .random_draws import settled_error
from .reference import reference

# Relative to the largest value of an output; rounding differs with the order of sums.
TOLERANCE = {
    torch.float64: 1e-9,
    torch.float32: 1e-3,
    torch.float16: 5e-2,
    torch.bfloat16: 2e-1,
}


def largest_error(expected: list[Tensor], found: list[Tensor]) -> float:
    """The largest difference, relative to the largest value of the same output."""
    worst = 0.0
    for a, b in zip(expected, found, strict=True):
        if a.shape != b.shape:
            return float("inf")
        a, b = (torch.view_as_real(t) if t.is_complex() else t for t in (a, b))
        if not a.is_floating_point():
            worst = max(worst, 0.0 if torch.equal(a, b) else float("inf"))
        elif a.numel():
            a, b = a.double(), b.double()
            same = (a == b) | (a.isnan() & b.isnan())
            difference = torch.where(same, 0.0, (a - b).abs()).max()
            scale = a[a.isfinite()].abs().max() if a.isfinite().any() else a.new_ones(())
            error = float(difference / max(float(scale), 1e-30))
            worst = max(worst, float("inf") if error != error else error)  # NaN on one side only
    return worst


def tolerance(model: nn.Module, run: Iterable[fx.Node] = ()) -> float:
    """Of the coarsest type of numbers in the model and in a ``run`` of it, which may go by way of a
    coarser one (``torch.autocast`` in its own code)."""
    parameters = [p for p in model.parameters() if p.is_floating_point() or p.is_complex()]
    kinds = [p.dtype.to_real() for p in parameters]
    specs = [node.meta.get("spec") for node in run]
    seen = {s.dtype for s in specs if isinstance(s, Spec) and s.is_inexact}
    kinds += [kind.to_real() for kind in seen]
    devices = {p.device.type for p in parameters}
    kinds += [torch.get_autocast_dtype(d) for d in devices if torch.is_autocast_enabled(d)]
    return max((TOLERANCE.get(kind, 1e-9) for kind in kinds), default=1e-9)


@on_cpu()
def prove(plan: Any, model: nn.Module, small: nn.Module, example_input: Any) -> float:
    """Compare the masked model with the pruned one on the example input; where code is new, in
    another batch of it, too.

    Returns:
        The largest relative error.

    Raises:
        ProofError: they differ by more than rounding, or the pruned model does not run. Models that
            draw random numbers for each channel are compared with these settled.
    """
    allowed = tolerance(model, plan._trace.graph.nodes)
    error = _compared(plan, model, small, example_input)
    if error <= allowed:
        if not plan.code:
            return error
        return max(error, _at_another_batch(plan, model, small, example_input, allowed))
    settled = settled_error(model, lambda: _compared(plan, model, small, example_input), allowed)
    if settled is not None:
        return settled
    layer = first_difference(plan, plan.mask(model), small, example_input, allowed)
    where = f" The first layer that differs is {layer}." if layer else ""
    raise ProofError(
        f"the pruned {type(model).__name__} differs from the masked one by {error:.2g} "
        f"(relative; {allowed:.0e} is allowed).{where} Nothing was changed.{_doubtful(plan)}"
    )


def _at_another_batch(
    plan: Any, model: nn.Module, small: nn.Module, example_input: Any, allowed: float
) -> float:
    """The largest relative error there; 0 where nothing says what has to come out: the model does
    not run there, or does not give each sample what it gives it in the batch of the example."""
    kind, given = type(model).__name__, with_another_batch(example_input)
    graph_alone = any(note.node.op != "call_module" for note in plan._relations.approximate)
    if graph_alone or given is None:
        return 0.0
    first = reference(plan, model, small, example_input)
    try:
        expected = reference(plan, model, small, given)
    except Exception:  # whatever the model's own code raises
        return 0.0
    alike = len(first) == len(expected) and all(t.dim() for t in first)
    if not alike or not largest_error([*map(resized, first)], expected) <= allowed:
        return 0.0
    shapes = ", ".join(str(tuple(t.shape)) for t in tree.tensors(given))
    try:
        error = largest_error(expected, outputs(small, given, plan.settings.outputs))
    except PruningError:
        return 0.0  # new code asks, and says that it is for another batch
    except Exception as failed:
        raise ProofError(
            f"the pruned {kind} does not run on another batch than that of the example ({shapes}): "
            f"{type(failed).__name__}: {failed}. Nothing was changed.{_REPORT}"
        ) from failed
    if error > allowed:
        raise ProofError(
            f"the pruned {kind} differs from the masked one by {error:.2g} on another batch than "
            f"that of the example ({shapes}). Nothing was changed.{_REPORT}"
        )
    return error


def _compared(plan: Any, model: nn.Module, small: nn.Module, example_input: Any) -> float:
    """The largest relative error."""
    try:
        expected = reference(plan, model, small, example_input)
    except PruningError:
        raise
    except Exception as error:  # whatever the model's own code raises
        raise ProofError(
            f"the masked {type(model).__name__} does not run: {type(error).__name__}: "
            f"{str(error).partition(chr(10))[0]}. Its code may go by values, and another way with "
            "masked channels than it went as it was recorded. Nothing was changed; ignore= the "
            "layers that make these values, or pass verify=False to go without a proof."
        ) from error
    if not expected:
        raise ProofError(
            f"{type(model).__name__} returns no tensor that could be compared. Return one, or pass "
            "verify=False to go without a proof."
        )
    if not any(bool(t.isfinite().any()) for t in expected):
        raise ProofError(
            f"{type(model).__name__} returns no finite number on the example input: nothing can be "
            "compared. Pass an input on which it does, or verify=False to go without a proof."
        )
    try:
        found = outputs(small, example_input, plan.settings.outputs)
    except Exception as error:
        raise ProofError(
            f"the pruned {type(model).__name__} does not run: {type(error).__name__}: {error}. "
            f"Nothing was changed.{_doubtful(plan) or _REPORT}"
        ) from error
    if len(expected) != len(found):
        raise ProofError(
            f"the pruned model returns {len(found)} tensors, the masked one {len(expected)}. "
            "Nothing was changed."
        )
    return largest_error(expected, found)


_REPORT = " Please report the model; ignore= its layers to go on."


def _doubtful(plan: Any) -> str:
    """The patterns in use that fxprune has not brought itself."""
    used = [n.meta.get("pattern") for n in plan._trace.graph.nodes]
    own = [p for p in used if p is not None and not p.is_builtin]
    names = ", ".join(dict.fromkeys(f"{p.name} ({p.source})" for p in own))
    if not own:
        return ""
    if all(p.source == SOURCE for p in own):
        return (
            f" It rests on what was found of {names}, which nobody has a pattern for: register one "
            "(docs/patterns.md), or ignore= the layers before it."
        )
    return (
        f" It rests on patterns that are not fxprune's own: {names}; fxprune.check_pattern tells "
        "what is wrong with one."
    )


def first_difference(
    plan: Any, masked: nn.Module, small: nn.Module, example_input: Any, allowed: float
) -> str:
    """Path of the first leaf module whose kept outputs are not those of the masked model."""
    if plan.approximate:
        return ""  # behind a norm that counts channels every layer does
    calls = [n for n in plan._trace.graph.nodes if n.op == "call_module"]
    expected, found = (_leaf_outputs(m, {str(n.target) for n in calls}, example_input)
                       for m in (masked, small))  # fmt: skip
    for node in calls:
        path = str(node.target)
        if path not in expected or path not in found:
            continue
        old, new = plan._relations.values[node], plan._replay.values[node]
        wide = expected.pop(path)
        for dim, order in plan._replay.positions_kept(old, new):
            wide = wide.index_select(dim, order.to(wide.device))
        if largest_error([wide], [found[path]]) > allowed:
            return path
    return ""


def _leaf_outputs(model: nn.Module, paths: set[str], example_input: Any) -> dict[str, Tensor]:
    """The first output of each module, where it is one tensor."""
    seen: dict[str, Tensor] = {}

    def keep(path: str) -> Any:
        def hook(module: nn.Module, args: Any, output: Any) -> None:
            if isinstance(output, Tensor):
                seen.setdefault(path, output.detach().clone())

        return hook

    handles = [model.get_submodule(p).register_forward_hook(keep(p)) for p in paths]
    try:
        outputs(model, example_input)
    finally:
        for handle in handles:
            handle.remove()
    return seen
