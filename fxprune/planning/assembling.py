"""A plan from what its planner has come to: groups, reasons, notes, attributes."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import nn

from ..code import Borrowed
from ..errors import warn
from ..mending.mend import Mended
from ..records.places import places
from ..relating import groups
from ..replaying import kept_indices as kept
from ..replaying.replay import Replay
from ..rules.call import node_name
from ..rules.probe import probed
from ..rules.sizes import Attribute, origins
from . import configs
from .pruning_plan import ChannelGroup, PruningPlan
from .skipped import skipped
from .width_attributes import announced

if TYPE_CHECKING:
    from .planner import Planner


def assemble(planner: Planner, mended: Mended) -> PruningPlan:
    """The plan that a planner has come to."""
    replay = mended.replay
    result = PruningPlan(
        groups=[_channel_group(planner, g) for g in planner.groups],
        kept=kept.by_dimension(replay, planner.relations),
        fusions=planner.fusions,
        skipped=[],
        settings=planner.settings,
        notes=planner.notes + planner.folds.notes + _probed(planner),
        attributes={
            name: value
            for name, value in mended.attributes.items()
            if not planner.trace.is_layer(name.rpartition(".")[0])  # which its tensors change
        },
        code=mended.code | {path: Borrowed(f) for path, f in replay.forwards.items()},
        _trace=planner.trace,
        _relations=planner.relations,
        _removed=planner.removed,
        _carriers=planner.carriers,
        _silent=planner.silent,
        _folds=planner.folds,
        _replay=replay,
        _telling=planner.telling,
        _budget=planner.budget,
        _example_input=planner.example_input,
        _units=[g.units for g in planner.groups if not g.frozen and g.producers],
    )
    shown = list(zip(planner.groups, result.groups, strict=True))
    result.skipped = skipped(planner.trace, planner.relations, shown, set(result.kept))
    read = {str(n.target) for n in planner.trace.graph.nodes if n.op == "get_attr"}
    asked = (o for call in planner.trace.calls for q in call.questions for o in q.operands)
    read.update(o.name for number in asked for o in origins(number) if isinstance(o, Attribute))
    result.attributes |= announced(planner.trace, replay, read | result.attributes.keys())
    _configure(planner, result, replay)
    # Where there is a target, its budget says so.
    some = result.groups or result.skipped
    if planner.budget is None and some and all(g.frozen for g in result.groups):
        reasons = "; ".join(f"{what}: {why}" for what, why in result.skipped[:5])
        reasons = reasons or "no call in it uses parameters in a way that says what channels are"
        warn(f"nothing of {type(planner.trace.model).__name__} can be pruned. {reasons}")
    return result


def _probed(planner: Planner) -> list[tuple[str, str]]:
    """What probing has found, where that lets anything be cut."""
    found = {}
    for node, dims in probed(planner.trace.graph):
        result = planner.relations.values[node]
        free = [
            d
            for a in result.axes
            for d in a.dims
            if planner.relations.classes[a.units.numpy()].any()
        ]
        through = [d for d in dims if d in free]
        if through:
            where = "dimension" if len(through) == 1 else "dimensions"
            found[node_name(node)] = (
                "no pattern is known for it, but probed as it ran: channels pass through along "
                f"{where} {', '.join(map(str, through))}"
            )
    return list(found.items())


def _configure(planner: Planner, result: PruningPlan, replay: Replay) -> None:
    """Have the model's configuration, if it has one, say what the pruned model is."""
    model = planner.trace.model
    if not hasattr(model, "config") or not result.kept:
        return
    shapes = {}
    for name, tensor in model.state_dict(keep_vars=True).items():
        first = planner.trace.names.get(id(tensor), name)  # of the names of a tied tensor
        shape = list(tensor.shape)
        for dim, rows in result.kept.get(first, {}).items():
            shape[dim] = rows.shape[-1]
        shapes[name] = tuple(shape)
    asked = {str(n.target) for n in planner.trace.graph.nodes if n.op == "get_attr"}
    fixed = asked - result.attributes.keys()
    numbers = configs.attributes(model) | result.attributes
    for path, values in replay.module_sizes.items():
        numbers |= {f"{path}.{key}": value for key, value in values.items()}
    found = configs.truthful(model, shapes, numbers, replay.widths(), asked, fixed)
    if found and not isinstance(found, str):
        found = _unsaid(model, result) or found
    if isinstance(found, str):
        result.notes.append(("config", f"it cannot describe the pruned model: {found}"))
        warn(
            f"the configuration of {type(model).__name__} cannot describe the pruned model "
            f"({found}): from_pretrained will not give it back; use fxprune.save"
        )
    else:
        result.attributes |= found


def _unsaid(model: nn.Module, result: PruningPlan) -> str:
    """What of the pruned model no configuration says, though all its widths were right."""
    for path in result.code:
        return f"{path or 'the model'} gets a forward of its own"
    for shift in result._folds.shifts:
        if not shift.name:
            return f"{shift.path} gets a bias, which bias='drop' would not make"
    for name, place in places(model).items():
        if name in result.kept and not place.persistent:
            return f"of {name} a part is kept, and it would be computed anew"
    return ""


def _channel_group(planner: Planner, group: groups.Group) -> ChannelGroup:
    lead = planner.relations.of(group.leader).reshape(-1)
    scores = None
    if id(group) in planner.scores:
        scores = torch.from_numpy(planner.scores[id(group)])
    gone = planner.removed & ~planner.carriers
    units = group.units
    return ChannelGroup(
        name=planner.name(group),
        members=kept.members(group.axes),
        width=len(units) if len(units) else len(np.unique(lead)) if lead.any() else len(lead),
        removed=torch.from_numpy(np.flatnonzero(gone[units])),
        importance=scores,
        frozen=group.frozen,
        approximate=group.approximate,
        line=group.line,
        carriers=torch.from_numpy(np.flatnonzero(planner.carriers[units])),
    )
