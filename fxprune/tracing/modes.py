"""What the code of a module does otherwise in training mode, in which nothing is pruned.

A call may be told the mode (``F.dropout(x, training=self.training)``), or get another number by it
(``p if self.training else 0.0``): then new code reads the mode when it runs.
"""

from __future__ import annotations

from .comparing import Differences, compared, own_nodes
from .flags import hands_mode_on, may_read_mode, training_argument
from .runs import OtherRuns
from .trace import CannotRewrite, Trace


def differences(trace: Trace, index: int, others: OtherRuns, name: str) -> Differences:
    """What the code of call ``index`` passes on in training mode in the place of other numbers:
    ``others`` is asked where the code alone does not tell.

    Raises:
        CannotRewrite: it makes other calls there, or none that can be told.
    """
    if not may_read_mode(trace.modules[trace.calls[index].path]):
        return {}
    found = _handed_on(trace, index)
    if found is not None:
        return found
    if others.training is None:
        raise CannotRewrite(f"{name} does not run in training mode")
    return compared(trace, index, others.training, name, "in training mode")


def flags_of(trace: Trace, others: OtherRuns) -> Differences:
    """What code of the whole model passes on; of modules that do more by the mode than a graph can
    say, the flags that they may have passed on."""
    found: Differences = {}
    for i, call in enumerate(trace.calls):
        try:
            found |= differences(trace, i, others, call.path)
        except CannotRewrite:
            flags = {n: training_argument(n) for n in own_nodes(trace, i)}
            found |= {node: [(at, True)] for node, at in flags.items() if at is not None}
    return found


def _handed_on(trace: Trace, index: int) -> Differences | None:
    """The flags that code passes on; None where it does something else by the mode, some calls are
    told by others that nothing trains (``F.batch_norm``, by default), or some that are told do
    nothing then (``drop_path(x, p, training=self.training)``)."""
    places = hands_mode_on(trace.modules[trace.calls[index].path])
    flags = {n: at for n in own_nodes(trace, index) if (at := training_argument(n)) is not None}
    if places is None or len({(n.meta["where"], n.target) for n in flags}) != places:
        return None
    return {node: [(at, True)] for node, at in flags.items()}
