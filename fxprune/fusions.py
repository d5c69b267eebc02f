"""Named runs of nodes in the trace, such as ``conv-act-conv``."""

from __future__ import annotations

from collections.abc import Iterator

from torch import fx, nn

from . import registry
from .recording import Trace


def find(trace: Trace, modules: dict[str, nn.Module]) -> Iterator[tuple[str, tuple[str, ...]]]:
    """The longest registered run from each node that starts one; nodes on it have one reader each.

    Nodes of kind ``same`` (dropout, casts) are passed over. A run that ends in ``output`` ends
    where the model returns.
    """
    names = {kinds: name for name, kinds in registry.fusions().items()}
    longest = max(map(len, names), default=0)
    for node in trace.graph.nodes:
        kinds: list[str] = []
        nodes: list[fx.Node] = []
        best = None
        current: fx.Node | None = node
        while current is not None and len(kinds) < longest:
            kind = _kind(current, modules)
            if kind != "same":
                kinds.append(kind)
                nodes.append(current)
            if tuple(kinds) in names:
                best = names[tuple(kinds)], tuple(_name(n) for n in nodes)
            if not kind:
                break
            users = [user for user in current.users if not _is_size(user)]
            current = users[0] if len(users) == 1 else None
        if best is not None:
            yield best


def _kind(node: fx.Node, modules: dict[str, nn.Module]) -> str:
    if node.op == "output":
        return "output"
    if node.op == "call_module":
        pattern = registry.for_module(modules[str(node.target)])
    elif node.op in ("call_function", "call_method"):
        pattern = registry.for_function(node.target)
    else:
        return ""
    return pattern.kind if pattern is not None else ""


def _is_size(node: fx.Node) -> bool:
    return node.op == "call_method" and node.target == "size"


def _name(node: fx.Node) -> str:
    if node.op == "call_module":
        return str(node.target)
    return registry.op_name(node.target) or node.name
