"""What the model's own code would do wrongly in training mode alone, at the widths of eval mode."""

from __future__ import annotations

import numpy as np
import torch

from ..relating.relations import Relations
from ..relating.training_only import ALONE, InTraining, both
from ..replaying.orders import Mismatch
from ..replaying.replay import Replay
from .mend import Mended, Unfit


def check_in_training(
    training: InTraining, relations: Relations, kept: np.ndarray, mended: Mended
) -> None:
    """That code which is to stay as it is runs in training mode, too.

    New code needs no look: it is written only where training mode makes the same calls, or others
    that take no sizes.

    Args:
        kept: for each unit class of ``relations``, whether it stays.

    Raises:
        Unfit: it does not.
    """
    there = training.relations
    trace = None if there is None else training.others.training
    if there is None or trace is None:
        return
    stays = np.ones(int(there.classes.max(initial=0)) + 1, dtype=bool)
    labels = np.full(len(there.classes), -1)  # of eval mode, by those of training mode
    orders = {}
    for mine, theirs in both(relations, there):
        slices = np.arange(theirs.size)
        labels[theirs.first + slices] = mine.first + slices
        stays[there.of(theirs).reshape(-1)[~kept[relations.of(mine).reshape(-1)]]] = False
        if mine.first in mended.orders:
            orders[theirs.first] = mended.orders[mine.first]

    lines = {node.meta.get("where") for node in mended.straighten} - {None, ""}
    straighten = [node for node in trace.graph.nodes if node.meta.get("where") in lines]

    def unfit(units: np.ndarray, reason: str, where: str, line: str) -> Unfit:
        found = labels[np.isin(there.classes, there.classes[units])]
        return Unfit(found[found >= 0], f"{reason}, {ALONE}", where, line)

    replay = Replay(trace, there, stays, mended.attributes, orders, straighten)
    try:
        replay.run()
    except Mismatch as error:
        raise unfit(error.units, error.reason, error.where, error.line) from error
    now, then = mended.replay.indices, replay.indices  # index buffers, in either mode
    in_eval, read = (
        {str(node.target) for node in t.graph.nodes if node.op == "get_attr"}
        for t in (mended.replay.trace, trace)
    )
    for name in sorted(read & (now.keys() | then.keys())):
        if name not in in_eval:
            now[name] = then[name]
            continue
        old = trace.tensor(name).cpu()
        if not torch.equal(now.get(name, old), then.get(name, old)):
            reason = f"{name} is used for something else, too"
            if name in then:
                raise unfit(replay.indexed[name].numpy(), reason, "", "")
            raise Unfit(mended.replay.indexed[name].numpy(), f"{reason}, {ALONE}", "", "")
    for fault in replay.faults():
        if trace.calls[fault.call].path not in mended.code:
            raise unfit(fault.units, fault.words, fault.line.rpartition("/")[2], fault.line)
