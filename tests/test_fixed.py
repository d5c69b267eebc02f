"""Tensors that are neither parameters nor buffers, and buffers that the model writes to."""

from __future__ import annotations

import functools

import pytest
import torch
from torch import nn

import fxprune

from .oracle import awake, check, difference, masked_equals_pruned, run

X = torch.linspace(-2, 2, 96, dtype=torch.float64).sin().reshape(2, 6, 8)


def table(rows: int = 6, width: int = 12) -> torch.Tensor:
    return torch.linspace(-3, 3, rows * width, dtype=torch.float64).cos().reshape(rows, width)


class Positions(nn.Module):
    """A table of positions, added to what a layer makes."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed = nn.Linear(8, 12)
        self.positions = table()
        self.up = nn.Linear(12, 16)
        self.down = nn.Linear(16, 12)
        self.head = nn.Linear(12, 3)

    def forward(self, x):
        x = self.embed(x) + self.positions[: x.shape[1]].to(x.dtype)
        return self.head(x + self.down(torch.sigmoid(self.up(x))))


class Moved(Positions):
    def _apply(self, fn, recurse=True):
        self.positions = fn(self.positions)
        return super()._apply(fn, recurse)


class Sets(Positions):
    """Its forward sets the table anew for longer inputs."""

    def forward(self, x):
        if x.shape[1] > len(self.positions):
            self.positions = table(x.shape[1])
        return super().forward(x)


class SetsByName(Positions):
    def forward(self, x):
        if x.shape[1] > len(self.positions):
            setattr(self, "positions", table(x.shape[1]))  # noqa: B010
        return super().forward(x)


class SetsInside(Positions):
    def forward(self, x):
        def longer():
            self.positions = table(x.shape[1])

        if x.shape[1] > len(self.positions):
            longer()
        return super().forward(x)


class SetsWrapped(Positions):
    @functools.lru_cache  # noqa: B019
    def longer(self, n):
        self.positions = table(n)

    @torch.no_grad()
    def forward(self, x):
        if x.shape[1] > len(self.positions):
            self.longer(x.shape[1])
        return super().forward(x)


@pytest.mark.parametrize("kind", [Positions, Moved])
def test_a_tensor_that_only_init_sets_shrinks_with_what_it_meets(kind):
    _, small = check(kind(), X)
    assert small.positions.shape == (6, 6) and small.embed.out_features == 6
    assert "positions" in vars(small) and "positions" not in small.state_dict()


@pytest.mark.parametrize("kind", [Sets, SetsByName, SetsInside, SetsWrapped])
def test_a_tensor_that_the_models_code_sets_anew_stays_whole(kind):
    plan, small = check(kind(), X)
    assert small.positions.shape == (6, 12) and small.up.out_features == 8
    assert "fixed width" in dict(plan.skipped)["embed"]
    longer = torch.cat([X, X], 1)
    assert difference(run(plan.mask(awake(kind())), longer), run(small, longer)) < 1e-9


def test_so_does_one_that_a_forward_of_the_instance_sets():
    model = awake(Positions())

    def forward(x):
        model.positions = model.positions + 0
        return Positions.forward(model, x)

    model.forward = forward
    assert "embed" in dict(fxprune.plan(model, X).skipped)


def test_two_modules_can_hold_the_same_one():
    model = awake(Positions())
    model.again = nn.Sequential(nn.Tanh())
    model.again.positions = model.positions
    model.forward = lambda x: model.head(
        torch.sigmoid(model.embed(x) + model.positions) * model.again.positions
    )
    plan = fxprune.plan(model, X)
    masked = plan.mask(model)
    assert "positions" in plan.kept
    assert bool((masked.positions == masked.again.positions).all())


def test_pruned_in_place_again_and_loaded_it_is_as_wide_as_it_has_to_be(tmp_path):
    model = awake(Positions())
    once = fxprune.prune(model, X, sparsity=0.5)
    twice = fxprune.prune(once, X, sparsity=0.5)
    assert twice.positions.shape == (6, 3) and model.positions.shape == (6, 12)
    fxprune.save(twice, tmp_path / "twice.safetensors")
    loaded = fxprune.load(awake(Positions(), seed=1), tmp_path / "twice.safetensors")
    assert difference(run(twice, X), run(loaded, X)) == 0
    fxprune.prune(model, X, sparsity=0.5, inplace=True, verify=False)
    assert difference(run(model, X), run(once, X)) < 1e-12
    assert model.positions.shape == (6, 6)


def test_a_mask_that_is_taken_off_leaves_attributes_and_buffers_the_kind_that_they_were():
    class Mixed(Positions):
        def __init__(self):
            super().__init__()
            self.register_buffer("scale", table(1)[0], persistent=False)

        def forward(self, x):
            return self.head(torch.sigmoid(self.embed(x) + self.positions) * self.scale)

    model = awake(Mixed())
    plan = fxprune.plan(model, X)
    masked = plan.mask(model)
    masked_equals_pruned(plan, model, plan.apply(masked), X)
    small = plan.apply(masked)
    assert small.state_dict().keys() == model.state_dict().keys()
    assert "positions" in vars(small) and small.scale.shape == (6,)


def test_a_buffer_that_the_model_writes_to_stays_whole_and_the_plan_says_why():
    class Cache(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b = nn.Linear(8, 12), nn.Linear(12, 3)
            self.register_buffer("cache", torch.zeros(2, 9, 12, dtype=torch.float64))

        def forward(self, x):
            self.cache[:, : x.shape[1]] = self.a(x)
            return self.b(torch.sigmoid(self.cache[:, : x.shape[1]]))

    model = awake(Cache())
    with pytest.warns(fxprune.PruningWarning, match="nothing of Cache can be pruned"):
        plan = fxprune.plan(model, X)
    assert not model.cache.any()
    assert dict(plan.skipped)["a"] == "the model writes to it as it runs"


def test_an_attribute_that_is_written_to_while_the_model_is_recorded_is_as_it_was():
    class Counts(Positions):
        def forward(self, x):
            self.positions.add_(1)
            return super().forward(x)

    model = awake(Counts())
    plan = fxprune.plan(model, X)
    assert torch.equal(model.positions, table())
    assert dict(plan.skipped)["embed"] == "the model writes to it as it runs"
