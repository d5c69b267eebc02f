"""A masked model trains, is saved and copied like any other, and the mask stays in force."""

from __future__ import annotations

import copy
import io

import pytest
import torch

from .oracle import difference, run
from .snapshot import Snapshot
from .test_masking import MODELS, make, masks


def train(model, x, steps=3):
    model.train()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, weight_decay=0.01)
    for _ in range(steps):
        optimizer.zero_grad()
        model(x).square().mean().backward()
        optimizer.step()
    return model.eval()


@pytest.mark.parametrize("kind", MODELS)
def test_masked_slices_get_no_gradient_and_stay_masked_in_training(kind):
    model, plan, x = make(kind)
    masked = plan.mask(model)
    before = [t.clone() for t in run(masked, x)]
    masked.train()(x).square().mean().backward()
    for module, name, keep in masks(masked):
        if len(module.parametrizations[name]) == 1:
            gradient = module.parametrizations[name].original.grad
            assert gradient is not None and (gradient[~keep] == 0).all(), name
            assert (gradient[keep] != 0).any(), name
    train(masked, x)
    assert difference(before, run(masked, x)) > 1e-4
    for module, name, keep in masks(masked):
        assert (getattr(module, name)[~keep] == 0).all()


@pytest.mark.parametrize("exact", [False, True])
@pytest.mark.parametrize("kind", MODELS)
def test_a_masked_model_that_was_trained_equals_what_apply_makes_of_it(kind, exact):
    model, plan, x = make(kind, exact=exact)
    masked = train(plan.mask(model), x)
    before = Snapshot(masked)
    small = plan.apply(masked)
    assert before.differences() == []
    assert difference(run(masked, x), run(small, x)) < 1e-9
    assert masks(small) == [] and type(small) is type(model)
    assert sum(p.numel() for p in small.parameters()) < sum(p.numel() for p in model.parameters())


@pytest.mark.parametrize("kind", MODELS)
def test_state_dicts_copies_and_files_of_a_masked_model_compute_the_same(kind):
    model, plan, x = make(kind)
    masked = train(plan.mask(model), x)
    other = plan.mask(model)
    assert difference(run(other, x), run(masked, x)) > 1e-4
    buffer = io.BytesIO()
    torch.save(masked.state_dict(), buffer)
    buffer.seek(0)
    other.load_state_dict(torch.load(buffer, weights_only=True))
    assert difference(run(other, x), run(masked, x)) == 0
    before = Snapshot(masked)
    twin = copy.deepcopy(masked)
    assert difference(run(twin, x), run(masked, x)) == 0
    train(twin, x)
    plan.apply(twin)
    assert before.differences() == [] and len(masks(twin)) == len(masks(masked))


def test_tied_weights_stay_tied_behind_one_mask_and_after_training():
    model, plan, x = make("tied")
    masked = train(plan.mask(model), x)
    assert torch.equal(masked.table.weight, masked.out.weight)
    small = plan.apply(masked)
    assert small.table.weight is small.out.weight and small.table.weight.shape == (20, 4)
