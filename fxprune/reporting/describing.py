"""A plan in plain words and numbers, ready for JSON: what the page and the command line show."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np
from torch import Tensor, nn

from .. import benchmarking
from ..errors import PlanError
from ..modules.inspecting import count_parameters, tensors_of
from ..replaying.kept_indices import tensor_dim
from ..tracing.trace import uses_of

_BINS = 24


def describe(plan: Any, model: nn.Module | None = None, small: nn.Module | None = None) -> dict:
    """The plan as dictionaries, lists, strings and numbers.

    Args:
        model: what the plan was made for, where its own has changed since.
        small: ``model`` pruned by the plan, where it is there already.

    Raises:
        PlanError: the plan does not fit the model; it was pruned in place, perhaps.
    """
    model = plan._trace.model if model is None else model
    small = plan.apply(model) if small is None else small
    homes = group_of_axis(plan)
    (macs, by_layer), (fewer, fewer_by_layer) = (
        benchmarking.macs_by_module(m, plan._example_input) for m in (model, small)
    )
    layers = _layers(plan, model, small, homes)
    for layer in layers:
        layer["macs"] = [d.get(layer["path"], 0) for d in (by_layer, fewer_by_layer)]
    return {
        "model": type(model).__name__,
        "settings": {k: _words(v) for k, v in vars(plan.settings).items() if v is not None},
        "parameters": [count_parameters(m) for m in (model, small)],
        "macs": [macs, fewer],
        "groups": _groups(plan, homes, [layer["path"] for layer in layers]),
        "layers": layers,
        "skipped": [[what, reason] for what, reason in plan.skipped],
        "notes": [[what, reason] for what, reason in plan.notes],
        "attributes": {name: _words(value) for name, value in plan.attributes.items()},
        "code": {path: code.source for path, code in plan.code.items()},
    }


def group_of_axis(plan: Any) -> dict[int, list[int]]:
    """For each axis of the graph, by its number among the sources, the groups it is of."""
    from networkx import connected_components

    sources = plan._relations.sources
    found = []
    for component in connected_components(plan.graph):
        axes = sorted({i for i, _ in component})
        makers = [i for i in axes if sources[i].role == "out"]
        found.append((sources[(makers or axes)[0]].first, axes))
    homes: dict[int, list[int]] = {}
    for number, (_, axes) in enumerate(sorted(found, key=lambda pair: pair[0])):
        for i in axes:
            homes.setdefault(i, []).append(number)
    if len(found) != len(plan.groups):
        raise PlanError("the plan's graph is not that of its groups; make the plan again")
    return homes


def owner(name: str) -> str:
    """The module that a tensor is of, also where a parametrization computes it."""
    return f".{name}".partition(".parametrizations.")[0][1:] if ".parametrizations." in name else (
        name.rpartition(".")[0]
    )  # fmt: skip


def axes_kept(plan: Any) -> list[tuple[int, int]]:
    """For each source axis its slices before and after."""
    stays = ~plan._removed | plan._carriers
    return [(s.size, int(stays[plan._relations.of(s)].sum())) for s in plan._relations.sources]


def _groups(plan: Any, homes: dict[int, list[int]], order: list[str]) -> list[dict[str, Any]]:
    sources, place = plan._relations.sources, {path: i for i, path in enumerate(order)}
    members: list[list[list[Any]]] = [[] for _ in plan.groups]
    for i, numbers in sorted(homes.items()):
        for number in numbers:
            path = owner(sources[i].name)
            inside = sources[i].name.removeprefix(f"{path}.")
            members[number].append([place[path], inside, tensor_dim(sources[i]), sources[i].role])
    calls: list[dict[str, dict[int, None]]] = [{} for _ in plan.groups]
    component = {node: homes[node[0]] for node in plan.graph}
    for a, b, data in plan.graph.edges(data=True):
        for number in set(component[a]) & set(component[b]):
            met = calls[number].setdefault(data["via"], {})
            met |= dict.fromkeys(place[owner(sources[i].name)] for i, _ in sorted((a, b)))
    result = []
    for number, group in enumerate(plan.groups):
        # A layer's bias goes with its weight; what couples it with others is worth telling.
        couplings = [[via, sorted(met)] for via, met in calls[number].items() if len(met) > 1]
        result.append({
            "name": group.name, "width": group.width, "kept": group.kept,
            "carriers": len(group.carriers), "frozen": group.frozen, "line": group.line,
            "approximate": group.approximate, "members": members[number],
            "calls": sorted(couplings, key=_where),
            "importance": histogram(group.importance, group.removed),
        })  # fmt: skip
    return result


def _where(call: list[Any]) -> Any:
    return call[1]


def histogram(scores: Tensor | None, removed: Tensor) -> dict[str, Any] | None:
    """How many units of each range of scores stay and go; None where nothing is known."""
    if scores is None or not len(removed):
        return None
    values = scores.double().cpu().numpy()
    goes = np.zeros(len(values), dtype=bool)
    goes[removed.cpu().numpy()] = True
    finite = np.isfinite(values)
    if not finite.any():
        return None
    low, high = float(values[finite].min()), float(values[finite].max())
    edges = np.linspace(low, high if high > low else low + 1, _BINS + 1)
    kept, gone = (np.histogram(values[finite & which], edges)[0] for which in (~goes, goes))
    return {"low": low, "high": high, "kept": kept.tolist(), "removed": gone.tolist()}


def _layers(
    plan: Any, model: nn.Module, small: nn.Module, homes: dict[int, list[int]]
) -> list[dict[str, Any]]:
    """Every module with tensors of its own, in the order in which they run."""
    sources, counts = plan._relations.sources, axes_kept(plan)
    before, after = ({n: list(t.shape) for n, t in tensors_of(m).items()} for m in (model, small))
    first: dict[str, int] = {}  # by layer, the first call that it runs in
    for name, nodes in uses_of(plan._trace).items():
        if nodes:
            at = min(node.meta["index"] for node in nodes)
            first[owner(name)] = min(at, first.get(owner(name), at))
    names: dict[str, list[str]] = {}
    for name in [*before, *after, *(s.name for s in sources)]:
        names.setdefault(owner(name), []).append(name)
    axes: dict[str, list[int]] = {}
    for i, source in enumerate(sources):
        axes.setdefault(owner(source.name), []).append(i)
    modules = dict(model.named_modules())
    result = []
    for path in sorted(names, key=lambda p: first.get(p, len(plan._trace.graph.nodes))):
        makes, acts, reads = (
            [i for i in axes.get(path, ()) if sources[i].role in roles]
            for roles in (("out",), ("scale", "shift", "stat"), ("in",))
        )
        bare = [i for i in axes.get(path, ()) if sources[i].is_bare]
        own = makes or acts or bare
        shrinks = [i for i in own if counts[i][0] != counts[i][1]]
        result.append({
            "path": path, "kind": type(modules.get(path, model)).__name__,
            "runs": path in first,
            "makes": bool(makes),
            "out": list(counts[(shrinks or own)[-1]]) if own else None,
            "in": list(counts[reads[0]]) if reads else None,
            "groups": _unique(g for i in own for g in homes.get(i, ())),
            "reads": _unique(g for i in reads for g in homes.get(i, ())),
            "tensors": [[n.removeprefix(f"{path}."), before.get(n), after.get(n)]
                        for n in dict.fromkeys(names[path]) if n in before or n in after],
        })  # fmt: skip
    return result


def _unique(items: Iterable[int]) -> list[int]:
    return list(dict.fromkeys(items))


def _words(value: Any) -> Any:
    """A setting or attribute as JSON can hold it."""
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    if isinstance(value, (tuple, list)):
        return [_words(item) for item in value]
    if isinstance(value, dict):
        return {k if isinstance(k, str) else _words(k): _words(v) for k, v in value.items()}
    if isinstance(value, nn.Module):
        return type(value).__name__
    return getattr(value, "__name__", None) or repr(value)
