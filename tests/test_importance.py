"""Scores equal a direct computation, over all slices that go with a unit and no others."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import nn

import fxprune

from .test_plan import X, coupled, group


def slices(net):
    """All weights that go with each of the 8 units; biases and statistics do not count."""
    made, scale, read = net[0].weight, net[1].weight[:, None], net[3].weight.transpose(0, 1)
    return torch.cat([made.flatten(1), scale, read.flatten(1)], 1).detach().double()


def spread(net):
    flat = net[0].weight.detach().double().flatten(1)
    return (flat[:, None] - flat).square().sum(-1).sqrt().sum(1)


@pytest.mark.parametrize("importance, direct", [
    ("l2", lambda net: slices(net).square().mean(1).sqrt()),
    ("l1", lambda net: slices(net).abs().mean(1)),
    ("fpgm", spread),
    (lambda parts: sum(s.total(s.weights.sum(1)) for s in parts if s.role == "out"),
     lambda net: net[0].weight.detach().double().flatten(1).sum(1)),
    (lambda parts: torch.arange(8.0), lambda net: torch.arange(8.0)),
], ids=["l2", "l1", "fpgm", "callable", "tensor"])  # fmt: skip
def test_importance_equals_a_direct_computation(importance, direct):
    net = coupled()
    found = group(fxprune.plan(net, X, importance=importance), "0")
    assert torch.allclose(found.importance, direct(net).double(), rtol=1e-6)
    assert found.removed.tolist() == sorted(direct(net).argsort()[:4].tolist())


def test_random_importance_repeats_itself_and_does_not_look_at_weights():
    scores = [group(fxprune.plan(coupled(seed), X, importance="random"), "0").importance
              for seed in (0, 1)]  # fmt: skip
    assert torch.equal(*scores) and len(scores[0].unique()) == 8
    weights = group(fxprune.plan(coupled(), X, importance="l2"), "0").importance
    assert not np.array_equal(scores[0].argsort(), weights.argsort())


def test_an_importance_that_raises_is_named():
    net = nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 2))
    with pytest.raises(fxprune.SettingError, match="ZeroDivisionError for group '0'"):
        fxprune.plan(net, torch.randn(1, 4), importance=lambda group: 1 / 0)
