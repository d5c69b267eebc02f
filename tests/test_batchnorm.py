"""Statistics of batch norms, estimated anew."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import fxprune

from .test_calibration import IMAGES, conv_net


def test_statistics_are_those_of_the_batches_and_nothing_else_changes():
    model = conv_net().train()
    before = {k: v.clone() for k, v in model.state_dict().items()}
    batches = [(IMAGES[:20], torch.zeros(20)), (IMAGES[20:], torch.zeros(20))]
    assert fxprune.recalibrate_batchnorm(model, batches, IMAGES[:2]) is model
    with torch.no_grad():
        seen = [model[0](part) for part in (IMAGES[:20], IMAGES[20:])]
    mean = torch.stack([y.mean((0, 2, 3)) for y in seen]).mean(0)
    spread = torch.stack([y.transpose(0, 1).flatten(1).var(1) for y in seen]).mean(0)
    assert torch.allclose(model[1].running_mean, mean) and torch.allclose(
        model[1].running_var, spread
    )
    assert model.training and model[1].momentum == 0.1
    changed = {k for k, v in model.state_dict().items() if not torch.equal(v, before[k])}
    assert changed == {"1.running_mean", "1.running_var"}


def test_an_exception_leaves_the_statistics_as_they_were():
    model = conv_net()
    before = {k: v.clone() for k, v in model.state_dict().items()}
    with pytest.raises(fxprune.SettingError, match="batches has no batches"):
        fxprune.recalibrate_batchnorm(model, [], IMAGES[:2])
    with pytest.raises(fxprune.SettingError, match=r"^limit=0"):
        fxprune.recalibrate_batchnorm(model, [IMAGES], IMAGES[:2], limit=0)
    with pytest.raises(RuntimeError):
        fxprune.recalibrate_batchnorm(model, [IMAGES, nn.Identity()(IMAGES[:, :2])], IMAGES[:2])
    assert all(torch.equal(v, before[k]) for k, v in model.state_dict().items())
    assert not model.training and not model[1].training


@pytest.mark.parametrize("norm", [nn.Identity(), nn.BatchNorm2d(3, track_running_stats=False)])
def test_a_model_without_statistics_is_told(norm):
    with pytest.warns(fxprune.PruningWarning, match="no batch norm that keeps statistics"):
        fxprune.recalibrate_batchnorm(nn.Sequential(norm), [IMAGES], IMAGES[:2])
