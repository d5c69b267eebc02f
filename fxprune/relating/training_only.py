"""What training mode does otherwise: an auxiliary head, the noise of a noisy layer, statistics that
are gathered there, and whatever else code does then.

Pruning follows a run in eval mode. What such code does with channels in training mode has to hold,
too, or the pruned model could not be trained any more.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import cached_property
from types import CodeType
from typing import Any

import numpy as np
from torch import fx, nn
from torch.utils._pytree import tree_leaves

from ..modules.inspecting import named_tensors
from ..modules.near import codes_near, codes_of_forward, constants_near, names_in, package_of
from ..rules.channels import SourceAxis
from ..tracing import fusions
from ..tracing.comparing import differing
from ..tracing.cuts import Cuts
from ..tracing.flags import chooses_numbers, hands_mode_on, is_off, may_read_mode
from ..tracing.runs import OtherRuns
from ..tracing.trace import ModuleCall, Trace, uses_of
from .discover import discover
from .groups import note_for
from .relations import Relations, Stays

ALONE = "in training mode alone"


class InTraining:
    """What hangs together in training mode; tells which slices have to stay for it.

    Args:
        others: asked for the run in training mode where code does more by the mode than to hand it
            on; or where tensors are left over that the run in eval mode did without, and code may
            read the mode.
    """

    def __init__(self, trace: Trace, others: OtherRuns) -> None:
        self._trace, self.others = trace, others

    def __call__(self, relations: Relations) -> list[Stays]:
        own, there = self._found
        if there is None:
            return []
        return [*_met(there, relations, own), *_fixed(there, relations), *_joined(there, relations)]

    @property
    def relations(self) -> Relations | None:
        """Of the run in training mode; None where it does nothing else, or does not run."""
        return self._found[1]

    @cached_property
    def _found(self) -> tuple[set[str], Relations | None]:
        """Tensors that training mode alone uses, and what hangs together there, once for all walks;
        None where nobody is to be asked."""
        trace, modules = self._trace, dict.fromkeys(self._trace.modules.values())
        left = _unused(trace) if any(map(may_read_mode, modules)) else set()
        does = {trace.modules[call.path] for call in trace.calls if not _only_drops(trace, call)}
        asked = any(map(_goes_by_mode, does)) or _may_be_used(trace, left)
        training = self.others.training if asked else None
        if training is None:
            return set(), None
        # Some are used in neither mode: what they meet goes nowhere.
        own = left & set(uses_of(training)) - (_unused(training) & set(uses_of(trace)))
        if not own and _same_calls(trace, training):
            return set(), None
        training.cuts = Cuts(trace.cuts.attention)
        fusions.find(training)
        return own, discover(training)


def _may_be_used(trace: Trace, left: set[str]) -> bool:
    """Whether some of the tensors that are ``left`` may be used by the mode. One that its module's
    code did not touch, and does not by the mode, is none of them: unless the module is told the
    mode, or others that read it know the tensor by name."""
    if not left:
        return False
    reading = [m for m in dict.fromkeys(trace.modules.values()) if may_read_mode(m)]
    touched = uses_of(trace).keys()
    calls = {call.path: call for call in trace.calls}
    named = set[str]().union(
        *(names_in(code) for m in reading for code in codes_of_forward(type(m))),
        *(n for m in reading for n in map(names_in, codes_near(m)) if "training" in n),
    )
    for name in left:
        path, _, key = name.rpartition(".")
        call = calls.get(path)
        if call is None or name in touched or key in named or trace.modules[path] in reading:
            return True
        if any(type(value) is bool for value in tree_leaves((call.args, call.kwargs))):
            return True
    return False


def _met(there: Relations, relations: Relations, own: set[str]) -> list[Stays]:
    """What tensors meet that training mode alone uses."""
    if not own:
        return []
    owners: dict[int, str] = {}
    for source in there.sources:
        if source.name in own:
            owners |= dict.fromkeys(there.of(source).reshape(-1).tolist(), source.name)
    owners.pop(0, None)
    owned = _among(list(owners), there)
    found = []
    for source, here, classes in _shared(there, relations):
        met = np.flatnonzero(owned[classes] & (here > 0))
        if len(met):
            reason = f"{owners[int(classes[met[0]])]} meets them, {ALONE}"
            found.append(Stays(source.key, met, reason))
    return found


def _fixed(there: Relations, relations: Relations) -> list[Stays]:
    """What stays in training mode, and might go otherwise: the model returns it then."""
    found = []
    for source, here, classes in _shared(there, relations):
        slices = np.flatnonzero((classes == 0) & (here > 0))
        if len(slices):
            note = note_for(source.first + slices, there)
            reason = note.reason if note else "its channels cannot change"
            found.append(Stays(source.key, slices, f"{reason}, {ALONE}"))
    return found


def _joined(there: Relations, relations: Relations) -> list[Stays]:
    """What hangs together in training mode, and nowhere else."""
    shared = list(_shared(there, relations))
    if not shared:
        return []
    here, classes = (np.concatenate([each[i] for each in shared]) for i in (1, 2))
    may_go = (classes > 0) & (here > 0)
    here, classes = here[may_go], classes[may_go]
    one = np.zeros(there.classes.max(initial=0) + 1, dtype=np.int64)
    one[classes] = here  # of several here, the last
    apart = _among(classes[one[classes] != here], there)
    found = []
    for source, mine, theirs in shared:
        slices = np.flatnonzero(apart[theirs] & (mine > 0))
        if len(slices):
            found.append(Stays(source.key, slices, f"they meet other channels, {ALONE}"))
    return found


def _among(classes: np.ndarray | list[int], there: Relations) -> np.ndarray:
    """For each class whether it is one of these: what ``np.isin`` would sort for at every axis."""
    found = np.zeros(there.classes.max(initial=0) + 1, dtype=bool)
    found[classes] = True
    return found


def both(here: Relations, there: Relations) -> Iterator[tuple[SourceAxis, SourceAxis]]:
    """Axes that both modes read: each as one has it, and as the other does."""
    mine = {source.key: source for source in here.sources}
    return ((mine[axis.key], axis) for axis in there.sources if axis.key in mine)


def _shared(
    there: Relations, relations: Relations
) -> Iterator[tuple[SourceAxis, np.ndarray, np.ndarray]]:
    """Axes of training mode, with the classes of their slices in eval mode and there."""
    for mine, axis in both(relations, there):
        yield axis, relations.of(mine).reshape(-1), there.of(axis).reshape(-1)


def _only_drops(trace: Trace, call: ModuleCall) -> bool:
    """Whether a module gives back in eval mode what it gets, and holds no number that could be a
    width: what it does in training mode (drop a path, most of all) it does to any."""
    module = trace.modules[call.path]
    if not isinstance(call.output, fx.Node) or call.output not in call.inputs():
        return False
    own = (value for key, value in vars(module).items() if key[:1] != "_")
    return not any(map(_may_be_width, (*own, *constants_near(module))))


def _may_be_width(value: Any) -> bool:
    if isinstance(value, (tuple, list)):
        return any(map(_may_be_width, value))
    return type(value) not in _NO_WIDTHS and not (isinstance(value, int) and abs(value) <= 1)


_NO_WIDTHS = (bool, float, str, type(None), CodeType)


def _goes_by_mode(module: nn.Module) -> bool:
    """Whether a module's own forward may make other calls by its mode."""
    if package_of(type(module)) == "torch":
        return False
    named = any(
        "training" in names_in(code) and not is_off(module, code)
        for code in codes_of_forward(type(module))
    )
    return named and hands_mode_on(module) is None and not chooses_numbers(module)


def _same_calls(a: Trace, b: Trace) -> bool:
    """Whether two runs made the same calls of the same results, be it with other flags and shares
    (of what is dropped)."""
    mine, theirs = list(a.graph.nodes), list(b.graph.nodes)
    if [(n.op, n.target) for n in mine] != [(n.op, n.target) for n in theirs]:
        return False
    found = differing(dict(zip(mine, theirs, strict=True)))
    values = [value for each in (found or {}).values() for _, value in each]
    return found is not None and all(isinstance(value, (bool, float)) for value in values)


def _live(trace: Trace) -> set[fx.Node]:
    """The calls that the model's outputs depend on, those that write to a parameter too
    (``weight.data.clamp_(-1, 1)``)."""
    waiting = [node for node in trace.graph.nodes if node.op == "output"]
    writing: dict[Any, list[fx.Node]] = {}
    for node in trace.graph.nodes:
        if node.op == "call_method" and str(node.target).endswith("_"):
            written = node.args[0]
            while isinstance(written, fx.Node) and written.target is getattr:
                written = written.args[0]
            writing.setdefault(written, []).append(node)
    live: set[fx.Node] = set()
    while waiting:
        node = waiting.pop()
        if node not in live:
            live.add(node)
            waiting += [*node.all_input_nodes, *writing.get(node, ())]
    return live


def _unused(trace: Trace) -> set[str]:
    """Tensors that the run has done without, or made nothing of that the model returns."""
    nodes = _live(trace)
    read = {node.target for node in nodes if node.op == "get_attr"}
    leaves = [trace.modules[str(node.target)] for node in nodes if node.op == "call_module"]
    parts = [part for leaf in leaves for part in (leaf.modules() if leaf._modules else (leaf,))]
    used = {id(t) for m in parts for t in (*m._parameters.values(), *m._buffers.values())}
    return {
        name for name, t in named_tensors(trace.modules)
        if t.dim() and id(t) not in used and name not in read
    }  # fmt: skip
