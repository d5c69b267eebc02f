"""One run of a model as a graph that runs."""

from __future__ import annotations

from typing import Any

from torch import fx, nn

from ..errors import ModelError
from ..modules.running import uncollected
from ..modules.usable import check_is_model
from .asking_again import checked
from .flags import depend_on_mode
from .lengths import lengths_that_count
from .modes import flags_of
from .record import record
from .runs import OtherRuns
from .transforms import check_runs


def trace(model: nn.Module, example_input: Any) -> fx.GraphModule:
    """Record one run of ``model`` as a runnable, printable :class:`torch.fx.GraphModule`.

    The model runs in eval mode without gradients, and is left as it was. Whatever Python the model
    runs (conditions, loops, helpers) is followed as it happens; the graph holds what this input
    made it do. Sizes that the model reads from its inputs stay expressions, so the graph is right
    for other batch sizes, too; where sizes decided which way the code went (a loop over a sequence,
    a condition), the graph raises if they would decide otherwise. So it does at lengths of which
    the code makes a number unseen (``table[len(x)]``), which runs on parts of the input, or on the
    same twice, tell. Like the model it shares tensors with, it can be told to train or to evaluate.

    Args:
        model: any module that runs.
        example_input: a tensor, a tuple of positional or a mapping of keyword arguments.

    Raises:
        InputError: the model does not run on ``example_input``; its own error is chained.
    """
    check_is_model(model)
    with uncollected():
        recorded = record(model, example_input)
        for node in recorded.graph.nodes:
            if "object" in node.meta:
                raise ModelError(
                    f"{type(model).__name__} takes a {node.meta['object']} with tensors in it, "
                    "which a graph cannot read. Pass tensors, or do without a graph"
                )
        check_runs(recorded.graph)
        others = OtherRuns(model, example_input)
        lengths = set(lengths_that_count(recorded, others))
        for node, flags in flags_of(recorded, others).items():
            for place, train in flags:
                depend_on_mode(node, place, train)
        return recorded.graph_module(checked(recorded, lengths))
