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


def longer_table(module, rows):
    if rows > len(module.positions):
        module.positions = table(rows)
    return module.positions[:rows]


class SetsByHelper(Positions):
    def forward(self, x):
        longer_table(self, x.shape[1])
        return super().forward(x)


class SetsInItsDictionary(Positions):
    def forward(self, x):
        if x.shape[1] > len(self.positions):
            self.__dict__["positions"] = table(x.shape[1])
        return super().forward(x)


class Filler:
    def __init__(self, module):
        self.module = module

    def __call__(self, rows):
        if rows > len(self.module.positions):
            self.module.positions = table(rows)


class SetsByObject(Positions):
    def __init__(self):
        super().__init__()
        self.fill = Filler(self)

    def forward(self, x):
        self.fill(x.shape[1])
        return super().forward(x)


class SetUpInParts(Positions):
    def __init__(self):
        super().__init__()
        self._build()

    def _build(self):
        self._fill(6)

    def _fill(self, rows):
        self.positions = table(rows)


class FilledAsItRuns(SetUpInParts):
    def forward(self, x):
        if x.shape[1] > len(self.positions):
            self._fill(x.shape[1])
        return super().forward(x)


class DefaultOfTheClass(Positions):
    positions = None


class RebuiltWhenCopied(Positions):
    def __setstate__(self, state):
        super().__setstate__(state)
        self.positions = table()


@pytest.mark.parametrize("kind", [Positions, Moved, SetUpInParts])
def test_a_tensor_that_only_init_sets_shrinks_with_what_it_meets(kind):
    _, small = check(kind(), X)
    assert small.positions.shape == (6, 6) and small.embed.out_features == 6
    assert "positions" in vars(small) and "positions" not in small.state_dict()


@pytest.mark.parametrize(
    "kind",
    [
        Sets,
        SetsByName,
        SetsInside,
        SetsWrapped,
        SetsByHelper,
        SetsInItsDictionary,
        SetsByObject,
        FilledAsItRuns,
    ],
)
def test_a_tensor_that_the_models_code_sets_anew_stays_whole(kind):
    plan, small = check(kind(), X)
    assert small.positions.shape == (6, 12) and small.up.out_features == 8
    assert "fixed width" in dict(plan.skipped)["embed"]
    longer = torch.cat([X, X], 1)
    assert difference(run(plan.mask(awake(kind())), longer), run(small, longer)) < 1e-9


@pytest.mark.parametrize("kind", [DefaultOfTheClass, RebuiltWhenCopied])
def test_so_does_one_that_would_not_be_found_again_in_a_copy(kind):
    _, small = check(kind(), X)
    assert small.positions.shape == (6, 12) and small.up.out_features == 8


def test_so_does_one_that_a_forward_of_the_instance_sets():
    model = awake(Positions())

    def forward(x):
        model.positions = model.positions + 0
        return Positions.forward(model, x)

    model.forward = forward
    assert "fixed width" in dict(fxprune.plan(model, X).skipped)["embed"]


class Around(nn.Module):
    """Another module's code has the table to set, or something else."""

    def __init__(self):
        super().__init__()
        self.inner = Positions()

    def forward(self, x):
        return self.inner(x)


class NameHandedOn(Around):
    def forward(self, x):
        if x.shape[1] > len(self.inner.positions):
            self.set(self.inner, "positions", table(x.shape[1]))
        return self.inner(x)

    def set(self, module, name, value):
        setattr(module, name, value)


class Numbered(Positions):
    def __init__(self):
        super().__init__()
        self.table_0, self.positions = self.positions, None

    def forward(self, x):
        return self.head(self.embed(x) + self.table_0[: x.shape[1]])


class NameOfParts(Around):
    def __init__(self):
        super().__init__()
        self.inner = Numbered()

    def forward(self, x):
        for i in range(x.shape[1] // 12):
            setattr(self.inner, f"table_{i}", table(x.shape[1]))
        return self.inner(x)


class OtherNames(Around):
    def switch(self, value):
        for module in self.modules():
            setattr(module, "checkpointing", value)  # noqa: B010


@pytest.mark.parametrize(
    ("kind", "width"),
    [(NameHandedOn, 12), (NameOfParts, 12), (OtherNames, 6)],
)
def test_code_of_other_modules_sets_by_name_what_it_has_the_name_of(kind, width):
    _, small = check(kind(), X, shrinks=kind is not NameOfParts)
    assert small.inner.embed.out_features == width


def test_two_modules_can_hold_the_same_one():
    class Twice(Positions):
        def __init__(self):
            super().__init__()
            self.again = nn.Sequential(nn.Tanh())
            self.again.positions = self.positions

        def forward(self, x):
            return self.head(torch.sigmoid(self.embed(x) + self.positions) * self.again.positions)

    plan, small = check(Twice(), X)
    masked = plan.mask(awake(Twice()))
    assert small.positions is small.again.positions and small.positions.shape == (6, 6)
    assert int((masked.positions == 0).sum()) == int((masked.again.positions == 0).sum()) == 36


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


def test_one_beside_code_that_is_new_can_be_saved_and_pruned_again(tmp_path):
    class Around(nn.Module):
        def __init__(self):
            super().__init__()
            self.positions = torch.linspace(-1, 1, 8).cos()
            self.embed, self.block, self.head = nn.Linear(8, 8), Split(), nn.Linear(8, 3)

        def forward(self, x):
            return self.head(self.block(self.embed(x) + self.positions))

    class Split(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b = nn.Linear(8, 12), nn.Linear(6, 8)

        def forward(self, x):
            gate, y = self.a(x).split([6, 6], -1)
            return self.b(gate.sigmoid() * y)

    small = fxprune.prune(awake(Around()), X)
    fxprune.save(small, tmp_path / "small.safetensors")
    loaded = fxprune.load(awake(Around(), seed=1), tmp_path / "small.safetensors")
    assert difference(run(small, X), run(loaded, X)) == 0 and loaded.positions.shape == (4,)
    assert fxprune.prune(small, X).positions.shape == (2,)


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


def test_so_do_both_of_two_buffers_that_share_memory():
    class Caches(nn.Module):
        def __init__(self):
            super().__init__()
            self.k, self.v = nn.Linear(8, 12), nn.Linear(8, 12)
            self.head = nn.Linear(12, 3)

        def forward(self, x):
            n = x.shape[0]
            self.keys[:n], self.values[:n] = self.k(x), self.v(x)
            return self.head(torch.sigmoid(self.keys[:n] * self.values[:n]))

    model = awake(Caches())
    both = torch.zeros(2, 9, 12, dtype=torch.float64)
    model.register_buffer("keys", both[0])
    model.register_buffer("values", both[1])
    with pytest.warns(fxprune.PruningWarning, match="nothing of Caches"):
        skipped = dict(fxprune.plan(model, X[0]).skipped)
    assert skipped["k"] == skipped["v"] == "the model writes to it as it runs"


def mean_anew(s, y):
    s.mean = 0.9 * s.mean + 0.1 * y.detach().mean(0)


def mean_in_its_memory(s, y):
    s.mean.data = 0.9 * s.mean + 0.1 * y.detach().mean(0)


@pytest.mark.parametrize("update", [mean_anew, mean_in_its_memory])
def test_a_buffer_that_the_model_sets_anew_stays_whole_and_is_as_it_was(update):
    class Mean(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b = nn.Linear(8, 12), nn.Linear(12, 3)
            self.register_buffer("mean", table(1)[0])

        def forward(self, x):
            y = self.a(x)
            update(self, y)
            return self.b(y * self.mean)

    model = awake(Mean())
    with pytest.warns(fxprune.PruningWarning, match="nothing of Mean"):
        plan = fxprune.plan(model, X[0])
    assert dict(plan.skipped)["a"] == "the model writes to it as it runs"
    assert torch.equal(model.mean, table(1)[0])


def test_what_a_run_in_inference_mode_has_left_on_the_model_is_no_obstacle():
    class Remembers(Positions):
        last = None

        def forward(self, x):
            self.last = torch.sigmoid(self.up(self.embed(x)))
            return self.head(self.down(self.last))

    model = awake(Remembers())
    with torch.inference_mode():
        model(X)
    assert fxprune.prune(model, X).up.out_features == 8


def test_a_table_of_complex_numbers_is_no_obstacle_to_saving(tmp_path):
    class Turned(Positions):
        def __init__(self):
            super().__init__()
            self.turns = torch.polar(torch.ones(6), torch.arange(6.0))[:, None].to(torch.complex128)

        def forward(self, x):
            return (super().forward(x) * self.turns).real

    small = fxprune.prune(awake(Turned()), X)
    fxprune.save(small, tmp_path / "small.safetensors")
    loaded = fxprune.load(awake(Turned(), seed=1), tmp_path / "small.safetensors")
    assert difference(run(small, X), run(loaded, X)) == 0


@pytest.mark.parametrize("kind", ["parameter", "buffer", "attribute"])
def test_a_masked_model_that_uses_a_tensor_by_itself_can_be_planned(kind):
    model = awake(Positions())
    if kind != "attribute":
        del model.positions
    if kind == "parameter":
        model.positions = nn.Parameter(table())
    if kind == "buffer":
        model.register_buffer("positions", table())
    masked = fxprune.plan(model, X).mask(model)
    small = fxprune.prune(masked, X)
    assert difference(run(masked, X), run(small, X)) < 1e-9


def test_an_attribute_that_is_written_to_while_the_model_is_recorded_is_as_it_was():
    class Counts(Positions):
        def forward(self, x):
            self.positions.add_(1)
            return super().forward(x)

    model = awake(Counts())
    plan = fxprune.plan(model, X)
    assert torch.equal(model.positions, table())
    assert dict(plan.skipped)["embed"] == "the model writes to it as it runs"


class Tables(nn.Module):
    """LeViT keeps in eval mode what it makes of a table of biases, a row for each head."""

    def __init__(self, empty):
        super().__init__()
        self.qkv, self.out = nn.Linear(6, 24), nn.Linear(8, 3)
        self.biases = nn.Parameter(torch.randn(4, 9))
        self.heads, self.kept = 4, empty

    def table(self, n):
        at = torch.arange(n)[:, None] - torch.arange(n)[None] + 4
        return self.biases[:, at]

    def forward(self, x):
        if not self.kept and isinstance(self.kept, dict):
            self.kept["table"] = self.table(x.shape[1])
        elif self.kept is None:
            self.kept = self.table(x.shape[1])
        table = self.kept["table"] if isinstance(self.kept, dict) else self.kept
        q, k, v = self.qkv(x).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        y = (q @ k.transpose(-2, -1) + table).softmax(-1) @ v
        return self.out(y.transpose(1, 2).flatten(2))


@pytest.mark.parametrize("empty", [dict, type(None)])
def test_what_a_run_has_kept_since_the_plan_is_not_kept_in_the_pruned_model(empty):
    net, x = awake(Tables(empty())), torch.randn(2, 5, 6, dtype=torch.float64)
    plan = fxprune.plan(net, x)
    run(net, x)
    table = net.kept
    small, masked = plan.apply(net), plan.mask(net)
    assert small.heads == 2 and small.kept == masked.kept == empty() and net.kept is table
    assert difference(run(masked, x), run(small, x)) < 1e-9
    plan.apply(net, inplace=True)
    assert net.kept == empty()
