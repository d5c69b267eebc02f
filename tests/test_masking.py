"""plan.mask: the removed channels are off, and everything else about the model is as it was."""

from __future__ import annotations

import copy
from typing import ClassVar

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.nn.utils import parametrizations, parametrize

import fxprune
from fxprune.masking.plan_masks import mask
from fxprune.parametrized.mask import Mask

from .oracle import awake, difference, run
from .snapshot import Snapshot

X = torch.randn(4, 3, 8, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
WORDS = torch.randint(0, 20, (4, 5), generator=torch.Generator().manual_seed(1))


def convolutions():
    """Padded, so that constants do not fold exactly without a carrier."""
    return nn.Sequential(
        nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8), nn.Sigmoid(),
        nn.Conv2d(8, 6, 3, padding=1, bias=False), nn.Softplus(), nn.Conv2d(6, 4, 1),
    )  # fmt: skip


class Tied(nn.Module):
    """The output layer reads with the embedding's own weight."""

    def __init__(self):
        super().__init__()
        self.table, self.mid, self.out = nn.Embedding(20, 8), nn.Linear(8, 8), nn.Linear(8, 20)
        self.out.weight = self.table.weight

    def forward(self, ids):
        return self.out(torch.tanh(self.mid(self.table(ids))))


class Recurrent(nn.Module):
    def __init__(self):
        super().__init__()
        self.table = nn.Embedding(20, 6)
        self.lstm, self.fc = nn.LSTM(6, 8, num_layers=2, batch_first=True), nn.Linear(8, 3)

    def forward(self, ids):
        return self.fc(self.lstm(self.table(ids))[0][:, -1])


def normed():
    layers = convolutions()
    for i in (0, 3):
        parametrizations.weight_norm(layers[i])
    return layers


MODELS = {
    "convolutions": (convolutions, X), "tied": (Tied, WORDS), "lstm": (Recurrent, WORDS),
    "weight_norm": (normed, X),
}  # fmt: skip


def make(kind, **settings):
    build, x = MODELS[kind]
    torch.manual_seed(0)
    model = awake(build())
    return model, fxprune.plan(model, x, **settings), x


def masks(model):
    """(module, tensor name, its mask) for each tensor that is masked."""
    return [
        (module, name, part.keep)
        for module in model.modules() if parametrize.is_parametrized(module)
        for name, chain in module.parametrizations.items() for part in chain
        if isinstance(part, Mask)
    ]  # fmt: skip


def activations(model, x):
    """What each module of torch.nn returns, by name."""
    seen, handles = {}, []
    for name, module in model.named_modules():
        if name and "parametrizations" not in name:
            hook = lambda m, i, o, name=name: seen.__setitem__(name, o)  # noqa: E731
            handles.append(module.register_forward_hook(hook))
    run(model, x)
    for handle in handles:
        handle.remove()
    return seen


@pytest.mark.parametrize("kind", MODELS)
def test_a_mask_changes_no_shape_no_class_no_flag_and_not_the_model(kind):
    model, plan, x = make(kind)
    before = Snapshot(model)
    masked = plan.mask(model)
    assert before.differences() == [] and masks(model) == [] and len(masks(masked)) > 0
    for path, module in model.named_modules():
        if "parametrizations" not in path:
            assert isinstance(masked.get_submodule(path), type(module).__mro__[
                1 if parametrize.is_parametrized(module) else 0])  # fmt: skip
    for name, p in model.named_parameters():
        if "parametrizations" not in name:
            path, _, key = name.rpartition(".")
            assert getattr(masked.get_submodule(path), key).shape == p.shape
    assert [t.shape for t in run(masked, x)] == [t.shape for t in run(model, x)]
    assert difference(run(masked, x), run(model, x)) > 1e-4


def test_removed_channels_emit_their_constant_and_the_others_what_they_did():
    model, plan, x = make("convolutions", sparsity={"0": 0.5})
    gone = next(g for g in plan.groups if g.name == "0").removed
    stays = plan.kept["0.weight"][0]
    full, seen = activations(model, x), activations(plan.mask(model), x)
    for name, constant in (("0", model[0].bias), ("1", model[1].bias),
                           ("2", model[1].bias.sigmoid())):  # fmt: skip
        wanted = constant.detach()[gone].view(1, -1, 1, 1).expand(4, -1, 8, 8)
        assert torch.allclose(seen[name][:, gone], wanted, rtol=0, atol=1e-12), name
        assert torch.equal(seen[name][:, stays], full[name][:, stays]), name


def test_masked_lstm_units_are_zero_at_every_step_in_every_layer():
    model, plan, x = make("lstm")
    masked = plan.mask(model)
    out, (h, c) = activations(masked, x)["lstm"]
    for layer in range(2):
        kept = plan.kept[f"lstm.weight_hh_l{layer}"][1]
        gone = [i for i in range(8) if i not in kept.tolist()]
        assert len(gone) == 4 and (h[layer][:, gone] == 0).all() and (c[layer][:, gone] == 0).all()
        assert (h[layer][:, kept] != 0).all()
    assert (out[:, :, gone] == 0).all()


def test_with_bias_drop_the_next_layer_reads_nothing_of_removed_channels():
    model, plan, x = make("convolutions", bias="drop")
    masked = plan.mask(model)
    seen = activations(masked, x)
    for name, read in (("3", "2"), ("5", "4")):
        gone = [i for i in range(model[int(name)].in_channels)
                if i not in plan.kept[f"{name}.weight"][1].tolist()]  # fmt: skip
        assert gone and (seen[read][:, gone] != 0).any()  # sigmoid(0) is still emitted
        assert (masked[int(name)].weight[:, gone] == 0).all()


def test_masking_and_baking_copies_leaves_the_class_of_a_parametrized_model_alone():
    model, plan, x = make("weight_norm")
    expected, cls, space = run(model, x), type(model[0]), set(vars(type(model[0])))
    masked, twin = plan.mask(model), copy.deepcopy(model)
    small = plan.apply(masked)
    parametrize.remove_parametrizations(masked[0], "weight")
    assert type(model[0]) is cls and set(vars(cls)) - {"__slotnames__"} == space - {"__slotnames__"}
    for other in (model, twin, small):
        assert [type(p).__name__ for p in other[0].parametrizations.weight] == ["_WeightNorm"]
    assert difference(run(model, x), expected) == difference(run(twin, x), expected) == 0


def test_a_masked_model_is_not_pruned_in_place():
    model, plan, x = make("convolutions")
    masked = plan.mask(model)
    before = Snapshot(masked)
    with pytest.raises(fxprune.PruningError, match="inplace=False"):
        plan.apply(masked, inplace=True)
    assert before.differences() == []
    assert F.mse_loss(*run(masked, x), *run(plan.mask(masked), x)) == 0  # masking twice is once


def memories(model):
    return {p.data_ptr() for p in model.parameters()}


@pytest.mark.parametrize("kind", MODELS)
def test_one_that_is_only_run_has_no_memory_of_its_own_for_parameters(kind):
    model, plan, x = make(kind)
    before, own = Snapshot(model), plan.mask(model)
    shared = mask(plan, model, shared=True)
    assert memories(own).isdisjoint(memories(model))
    # But for biases that constants are added to.
    assert len(memories(shared) & memories(model)) >= len(memories(model)) / 2
    assert difference(run(shared, x), run(own, x)) == 0
    assert before.differences() == []
    with torch.no_grad():  # what is set on it is set on it alone
        for p in shared.parameters():
            p.data = torch.zeros_like(p)
    assert before.differences() == []


class Writes(nn.Module):
    """Its code writes to a parameter, or would if the numbers were others."""

    def __init__(self, always):
        super().__init__()
        self.a, self.b, self.always = nn.Linear(6, 8), nn.Linear(8, 3), always

    def forward(self, x):
        h = self.a(x).sigmoid()
        if self.always or float(h.detach().sum()) > 1e6:
            self.b.bias.data.clamp_(-0.1, 0.1)
        return self.b(h)


@pytest.mark.parametrize("always", [True, False])
def test_it_has_where_code_may_write_to_them(always):
    model = awake(Writes(always))
    x = torch.ones(2, 6, dtype=torch.float64)
    plan = fxprune.plan(model, x)
    assert model.b.bias.data_ptr() not in memories(mask(plan, model, shared=True))


def test_a_class_that_asks_for_more_of_its_subclasses_is_masked_and_keeps_its_list_of_them():
    class Family(nn.Module):
        members: ClassVar[list[str]] = []

        def __init_subclass__(cls, called):
            cls.members.append(called)

    class Member(Family, called="one"):
        def __init__(self):
            super().__init__()
            self.weight = nn.Parameter(torch.randn(8, 3, dtype=torch.float64))

        def forward(self, x):
            return x @ self.weight.t()

    net = nn.Sequential(Member(), nn.ReLU(), nn.Linear(8, 2)).double().eval()
    x = torch.randn(4, 3, dtype=torch.float64)
    plan = fxprune.plan(net, x, sparsity=0.5)
    small = fxprune.prune(net, x, sparsity=0.5)
    assert small[0].weight.shape == (4, 3) and isinstance(plan.mask(net)[0], Member)
    assert Family.members == ["one"] and type(net[0]) is Member
