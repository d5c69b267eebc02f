"""The dependency graph of a model's channels, for those who look at it: the engine itself works on
the arrays that it is made from."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise
from typing import TYPE_CHECKING

import numpy as np

from ..rules.call import node_name
from ..rules.channels import distinct
from .relations import Relations

if TYPE_CHECKING:
    import networkx as nx


def dependency_graph(relations: Relations) -> nx.Graph:
    """Nodes are parameter axes, one for each group that has slices in the axis; an edge is a call
    that couples slices of two of them. Its connected components are the groups."""
    import networkx as nx  # here: it takes a third of the time that importing fxprune would

    graph: nx.Graph = nx.Graph()
    for group, i in relations.members.tolist():
        source = relations.sources[i]
        graph.add_node((i, group), name=source.name, dims=source.dims, role=source.role)
    for a, b, group, call in _coupled_axes(relations):
        graph.add_edge((a, group), (b, group), via=call)
    owned = np.flatnonzero(relations.owners >= 0)[::-1]
    home = np.zeros(len(relations.component), dtype=np.int64)  # an axis for each class: its first
    home[relations.classes[owned]] = relations.owners[owned]
    for bin_ in relations.bins:
        units = distinct(bin_.rows[bin_.rows > 0])
        # Units in a row of the same axis and group are one node.
        nodes = np.unique(np.stack([home[units], relations.component[units]]), axis=1).T.tolist()
        for one, other in pairwise(map(tuple, nodes)):
            if not graph.has_edge(one, other):
                graph.add_edge(one, other, via=f"equal numbers: {bin_.where}")
    # A component is a group even where its axes meet nowhere but in one producer.
    whole: dict[int, list[tuple[int, int]]] = {}
    for node in graph.nodes:
        whole.setdefault(node[1], []).append(node)
    for nodes in whole.values():
        parts = [min(part) for part in nx.connected_components(graph.subgraph(nodes))]
        for a, b in pairwise(parts):
            graph.add_edge(a, b, via="one producer")
    return graph


def _coupled_axes(relations: Relations) -> Iterator[tuple[int, int, int, str]]:
    """(parameter axis, another that a call couples with it, group, the call), once each."""
    pairs = [(node, *pair) for node, pairs in relations.meetings.items() for pair in pairs]
    if not pairs:
        return
    left = np.concatenate([a for _, a, _ in pairs])
    right = np.concatenate([b for _, _, b in pairs])
    call = np.repeat(np.arange(len(pairs)), [len(a) for _, a, _ in pairs])
    here, there = relations.owners[left], relations.owners[right]
    real = (here >= 0) & (there >= 0) & (here != there)
    here, there, call = here[real], there[real], call[real]
    # One number for (group, axis, axis): sorting numbers is much faster than rows.
    count = len(relations.sources)
    keys = (relations.group_of[left[real]] * count + here) * count + there
    keys, first = np.unique(keys, return_index=True)
    found = (keys // count % count, keys % count, keys // count**2, call[first])
    for a, b, group, at in zip(*(array.tolist() for array in found), strict=True):
        yield a, b, group, node_name(pairs[at][0])
