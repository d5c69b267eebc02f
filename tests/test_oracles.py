"""The three oracles on random networks and random plans, in float64 within 1e-9."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given

import fxprune

from .networks import networks, settings_of_a_plan
from .oracle import (
    awake,
    masked_equals_pruned,
    permutation_moves_nothing,
    zeroed_slices_equal_pruned,
)

X = torch.randn(2, 3, 6, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(3))


@given(networks(), settings_of_a_plan())
def test_masked_equals_pruned_with_carriers_at_border_pixels_too(model, settings):
    model = awake(model)
    plan = fxprune.plan(model, X, exact=True, **settings)
    assert not plan.approximate
    masked_equals_pruned(plan, model, plan.apply(model), X)


@pytest.mark.parametrize("bias", ["propagate", "expected"])
@given(networks(), settings_of_a_plan())
def test_masked_equals_pruned_without_carriers(bias, model, settings):
    model = awake(model)
    plan = fxprune.plan(model, X, bias=bias, **settings)
    masked_equals_pruned(plan, model, plan.apply(model), X)


@given(networks(), settings_of_a_plan())
def test_zeroed_slices_equal_pruned(model, settings):
    model = awake(model)
    zeroed_slices_equal_pruned(fxprune.plan(model, X, bias="drop", **settings), model, X)


@given(networks(norms_over_channels=True), settings_of_a_plan())
def test_permuting_units_moves_no_output(model, settings):
    model = awake(model)
    plan = fxprune.plan(model, X, **settings)
    permutation_moves_nothing(plan, model, X)
    masked_equals_pruned(plan, model, plan.apply(model), X)
