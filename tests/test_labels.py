"""Which labels are joined, however it is kept."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from fxprune.relating.labels import Labels
from fxprune.rules.channels import SourceAxis, components_of


def labelled(*shapes: tuple[int, ...]) -> tuple[Labels, list[torch.Tensor]]:
    labels = Labels()
    for i, shape in enumerate(shapes):
        dims = tuple(range(len(shape)))
        labels.add(SourceAxis(f"t{i}", shape, shape, dims, "out", labels.count))
    return labels, [axis.labels() for axis in labels.sources]


def one_by_one(count: int, pairs: list[tuple[torch.Tensor, torch.Tensor]]) -> np.ndarray:
    left, right = (torch.cat([pair[i].reshape(-1) for pair in pairs]).numpy() for i in (0, 1))
    found = components_of(left, right, count)
    return np.unique(found, return_inverse=True)[1]


def halves(a, b, c, d, e):
    both = torch.cat([a, b])
    return [(both, c), (d, both), (both, e.reshape(-1))]


def mirrored(a, b, c, d, e):
    both = torch.cat([b, a])
    return [(both.flip(0), c), (both, d), (both.flip(0), e.reshape(-1)), (e, d.reshape(2, 4))]


def repeated(a, b, c, d, e):
    row = a.expand(2, 4)
    return [(row, c.reshape(2, 4)), (row, e), (b.expand(2, 4), e)]


def parts(a, b, c, d, e):
    return [(c[:4], a), (c[:4], b), (d[4:], a), (c.reshape(4, 2).t().reshape(-1), d)]


@pytest.mark.parametrize("met", [halves, mirrored, repeated, parts])
def test_what_is_joined_by_way_of_whole_axes_is_joined_slice_by_slice(met):
    labels, axes = labelled((4,), (4,), (8,), (8,), (2, 4))
    pairs = met(*axes)
    for a, b in pairs:
        left, right = labels.join(a, b)
        assert np.array_equal(left, a.reshape(-1)) and np.array_equal(right, b.reshape(-1))
    assert np.array_equal(labels.joined()[0], one_by_one(labels.count, pairs))


def test_slices_that_stay_keep_all_that_an_array_has_met():
    labels, (a, b, c, d) = labelled((2,), (2,), (4,), (4,))
    both = torch.cat([a, b])
    labels.join(both, c)
    labels.join(both, d)
    labels.freeze(a[:1])
    classes, frozen = labels.joined()
    assert frozen[classes[c]].tolist() == frozen[classes[d]].tolist() == [True, False, False, False]
