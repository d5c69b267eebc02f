"""What only training mode uses: an auxiliary head, the noise of a noisy layer.

Pruning follows a run in eval mode. What such tensors meet in training mode keeps its width, or the
pruned model could not be trained any more.
"""

from __future__ import annotations

from functools import cached_property
from typing import Any

import numpy as np
from torch import fx, nn

from ..modules.inspecting import named_tensors
from ..modules.near import codes_of_forward, names_in
from ..tracing.flags import hands_mode_on, may_read_mode
from ..tracing.runs import OtherRuns
from ..tracing.trace import Trace, uses_of
from .discover import Stays, discover
from .relations import Relations
from .walk import IS_OUTPUT


class InTrainingAlone:
    """Tells which slices have to stay for what only training mode uses or returns, of those that
    may go otherwise.

    Args:
        others: asked for the run in training mode where tensors are left over that the run in eval
            mode did without, and code that may read the mode; or where what the model returns may
            go by it.
    """

    def __init__(self, trace: Trace, others: OtherRuns) -> None:
        self.trace, self.others = trace, others

    def __call__(self, relations: Relations) -> list[Stays]:
        own, there = self._found
        if there is None:
            return []
        return [*_met(there, relations, own), *_returned(there, relations)]

    @cached_property
    def _found(self) -> tuple[set[str], Relations | None]:
        """Tensors that training mode alone uses, and what hangs together there, once for all walks;
        None where nobody is to be asked."""
        trace, modules = self.trace, dict.fromkeys(self.trace.modules.values())
        left = _unused(trace) if any(map(may_read_mode, modules)) else set()
        returns = any(map(_goes_by_mode, _returning(trace)))
        training = self.others.training if left or returns else None
        # Some are used in neither mode: what they meet goes nowhere.
        own = set() if training is None else left & set(uses_of(training)) - _unused(training)
        if training is None or not (own or (returns and not _same_calls(trace, training))):
            return set(), None
        training.attention = trace.attention
        return own, discover(training)


def _met(there: Relations, relations: Relations, own: set[str]) -> list[Stays]:
    """What tensors meet that training mode alone uses."""
    if not own:
        return []
    owners: dict[int, str] = {}
    for source in there.sources:
        if source.name in own:
            owners |= dict.fromkeys(there.of(source).reshape(-1).tolist(), source.name)
    owners[0] = "something"  # else that stays there
    here = {s.key: relations.of(s).reshape(-1) for s in relations.sources}
    found = []
    for source in there.sources:
        classes = there.of(source).reshape(-1)
        if source.key in here:
            met = np.flatnonzero(np.isin(classes, list(owners)) & (here[source.key] > 0))
            if len(met):
                reason = f"{owners[int(classes[met[0]])]} meets them, in training mode alone"
                found.append(Stays(source.key, met, reason))
    return found


def _returned(there: Relations, relations: Relations) -> list[Stays]:
    """What the model returns in training mode, be it more than in eval mode."""
    outputs = [note.units.numpy() for note in there.frozen if note.reason == IS_OUTPUT]
    is_output = np.zeros(len(there.classes), dtype=bool)
    is_output[np.concatenate([np.zeros(0, dtype=int), *outputs])] = True
    here = {s.key: relations.of(s).reshape(-1) for s in relations.sources}
    found = []
    for source in there.sources:
        own = is_output[source.first : source.first + source.size]
        slices = np.flatnonzero(own & (here[source.key] > 0 if source.key in here else False))
        if len(slices):
            found.append(Stays(source.key, slices, f"{IS_OUTPUT}, in training mode alone"))
    return found


def _goes_by_mode(module: nn.Module) -> bool:
    """Whether what a module's own forward returns may go by its mode."""
    named = any("training" in names_in(code) for code in codes_of_forward(type(module)))
    return named and hands_mode_on(module) is None


def _returning(trace: Trace) -> list[nn.Module]:
    """The model, and those of its modules whose results are among what it returns."""
    output = next(node for node in trace.graph.nodes if node.op == "output")
    returned = set(output.all_input_nodes)
    found = [trace.model]
    for call in trace.calls:
        results: list[fx.Node] = []
        fx.node.map_arg(call.output, results.append)
        if not returned.isdisjoint(results):
            found.append(trace.modules[call.path])
    return found


def _same_calls(a: Trace, b: Trace) -> bool:
    """Whether two runs made the same calls of the same values."""

    def told(node: fx.Node) -> tuple[str, ...]:
        return node.op, node.name, str(node.target), str(node.args), str(node.kwargs)

    return list(map(told, a.graph.nodes)) == list(map(told, b.graph.nodes))


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
