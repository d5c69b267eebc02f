"""What the example did not reach, beside what it did: an expert that no token was sent to.

Which of several layers of a kind code runs may be a matter of the values of tensors. One that the
example left out stays whole, and so has to stay what it would read and make: the channels that
those beside it share with the rest of the model.
"""

from __future__ import annotations

import numpy as np
from torch import nn

from ..modules.inspecting import dotted
from ..rules import sizes
from ..tracing.trace import Trace
from .relations import Relations, Stays


def beside_unreached(trace: Trace, relations: Relations) -> list[Stays]:
    """Which slices of layers that run have to stay for others of their kind that do not."""
    found = []
    for folder, unreached, reached in _of_a_kind(trace):
        elsewhere = [
            relations.of(s).reshape(-1) for s in relations.sources
            if not s.name.startswith(f"{folder}.")
        ]  # fmt: skip
        shared = np.unique(np.concatenate([np.zeros(0, dtype=int), *elsewhere]))
        for source in relations.sources:
            if source.name.startswith(tuple(f"{path}." for path in reached)):
                classes = relations.of(source).reshape(-1)
                slices = np.flatnonzero(np.isin(classes, shared) & (classes > 0))
                if len(slices):
                    key = source.key
                    reason = f"the example does not reach {unreached}, which goes with them"
                    found.append(Stays(key, slices, reason))
    return found


def _of_a_kind(trace: Trace) -> list[tuple[str, str, list[str]]]:
    """(Folder, one of its modules that did not run, those of the same kind that did)."""
    found = []
    ran = {id(trace.modules[path]): path for path in trace.called}  # one may have several names
    for folder, module in trace.modules.items():
        runs = [id(child) in ran for child in module._modules.values()]
        if all(runs) or not any(runs):
            continue
        kinds: dict[tuple[object, ...], list[str]] = {}
        for name, child in module._modules.items():
            if child is not None and any(True for _ in child.parameters()):
                path = ran.get(id(child), dotted(folder, name))
                kinds.setdefault(_kind(child), []).append(path)
        for paths in kinds.values():
            reached = [path for path in paths if path in trace.called]
            if reached and len(reached) < len(paths) and _by_data(trace, reached):
                found.append((folder, next(p for p in paths if p not in reached), reached))
    return found


def _kind(module: nn.Module) -> tuple[object, ...]:
    return (type(module), *((name, p.shape) for name, p in module.named_parameters()))


def _by_data(trace: Trace, paths: list[str]) -> bool:
    """Whether code that runs these asks for values of tensors, or how many there are of some."""
    runs = {c.parent for c in trace.calls if c.path in paths}
    runs |= {
        n.meta.get("call") for n in trace.graph.nodes
        if n.op == "call_module" and str(n.target) in paths
    }  # fmt: skip
    calls = [trace.calls[i] for i in runs if i is not None]
    asked = (
        number for call in calls for q in call.questions for number in q.operands
        if not q.only_checks and q.function not in sizes.LOSING
    )  # fmt: skip
    return bool(sizes.dimensions(asked)) or any(call.reads_data for call in calls)
