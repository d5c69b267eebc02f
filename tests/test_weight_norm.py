"""Weights that ``nn.utils.weight_norm`` computes in a hook, as in vocoders of their time; and those
that a forward standardises."""

from __future__ import annotations

import copy
import io

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.nn.utils import remove_weight_norm
from torch.nn.utils.weight_norm import WeightNorm

import fxprune

from .oracle import awake, check, difference, run
from .snapshot import Snapshot
from .test_constructs import Net

pytestmark = pytest.mark.filterwarnings("ignore:.*weight_norm.*deprecated:FutureWarning")


def old(layer, **settings):
    return nn.utils.weight_norm(layer, **settings)


def drawn(*shape):
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(1))


X = drawn(2, 6, 12)


class Causal(nn.Conv1d):
    def forward(self, x):
        return super().forward(nn.functional.pad(x, (2, 0), value=0.1))


def vocoder():
    return nn.Sequential(
        old(Causal(6, 16, 3)), nn.LeakyReLU(0.1), old(nn.ConvTranspose1d(16, 8, 4, 2, 1)),
        nn.Softplus(), old(nn.Conv1d(8, 8, 3, groups=2, bias=False)), nn.Sigmoid(),
        old(nn.Conv1d(8, 2, 1)),
    )  # fmt: skip


def hooks(model):
    return [
        (path, hook.name) for path, m in model.named_modules()
        for hook in m._forward_pre_hooks.values() if isinstance(hook, WeightNorm)
    ]  # fmt: skip


def test_rows_and_columns_go_and_the_hooks_stay():
    model = vocoder()
    plan, small = check(model, X)
    assert [m.weight.shape for m in small[::2]] == [(8, 6, 3), (8, 4, 4), (4, 2, 3), (2, 4, 1)]
    assert hooks(small) == hooks(model)
    new = small.state_dict().keys() - model.state_dict().keys()
    assert new == {"4.bias"}
    assert [n for n in small.state_dict() if n not in new] == list(model.state_dict())
    assert [type(m) for m in small] == [type(m) for m in model]


@pytest.mark.parametrize("dim", [1, None, -1, 2])
def test_norms_along_any_dimension(dim):
    check(nn.Sequential(old(nn.Conv1d(6, 8, 3), dim=dim), nn.Sigmoid(), nn.Conv1d(8, 2, 1)), X)


def test_a_weight_that_code_reads_itself():
    net = Net(lambda s, x: s.head(s.a(x).sigmoid() * s.a.weight.mean()),
                a=old(nn.Conv1d(6, 8, 1)), head=nn.Conv1d(8, 2, 1))  # fmt: skip
    check(net, X, shrinks=False)


def test_the_model_is_untouched_down_to_the_order_of_its_hooks():
    model = awake(vocoder())
    model[0].register_forward_pre_hook(lambda m, args: None)
    run(model, X)
    before = Snapshot(model)
    spaces = [(list(m._parameters), list(m._forward_pre_hooks), type(m)) for m in model]
    weights = [m.weight for m in model[::2]]
    plan = fxprune.plan(model, X)
    plan.mask(model)
    small = fxprune.prune(model, X)
    assert before.differences() == []
    assert spaces == [(list(m._parameters), list(m._forward_pre_hooks), type(m)) for m in model]
    assert all(m.weight is w for m, w in zip(model[::2], weights, strict=True))
    assert spaces[0] == (list(small[0]._parameters), list(small[0]._forward_pre_hooks), Causal)


def test_in_place_the_parameters_stay_the_same_objects():
    model, twin = awake(vocoder()), awake(vocoder())
    twin.load_state_dict(model.state_dict())
    parameters = dict(model.named_parameters())
    assert fxprune.prune(model, X, inplace=True) is model
    assert all(p is parameters[n] for n, p in model.named_parameters() if n in parameters)
    assert difference(run(model, X), run(fxprune.prune(twin, X), X)) < 1e-12
    assert hooks(model) == hooks(twin)


def test_an_error_in_place_leaves_all_as_it_was(monkeypatch):
    model = awake(vocoder())
    run(model, X)
    before = Snapshot(model)
    plan = fxprune.plan(model, X)

    def fault(*args):
        raise RuntimeError("no")

    monkeypatch.setattr("fxprune.rewriting.rewrite._remember", fault)
    with pytest.raises(RuntimeError, match="no"):
        plan.apply(model, inplace=True)
    assert before.differences() == []


def test_the_result_trains_and_its_hooks_can_be_taken_off():
    small = fxprune.prune(awake(vocoder()), X).train()
    before = run(small, X)
    optimizer = torch.optim.SGD(small.parameters(), lr=0.01)
    loss = small(X).square().mean()
    loss.backward()
    assert small[2].weight_v.grad.abs().max() > 0 and small[2].weight_g.grad.abs().max() > 0
    optimizer.step()
    after = run(small, X)
    assert difference(before, after) > 0
    for layer in small[::2]:
        remove_weight_norm(layer)
    assert difference(run(small, X), after) < 1e-12


def test_masked_models_train_and_become_hooks_again_when_they_are_pruned():
    model = awake(vocoder())
    plan = fxprune.plan(model, X)
    masked = plan.mask(model)
    masked(X).square().mean().backward()
    with torch.no_grad():
        for p in masked.parameters():
            if p.grad is not None:
                p -= 0.01 * p.grad
    small = plan.apply(masked)
    assert difference(run(masked, X), run(small, X)) < 1e-9
    assert hooks(small) == hooks(model)


def test_copies_files_and_second_prunings():
    model = awake(vocoder())
    small = fxprune.prune(model, X)
    run(small, X)
    again = fxprune.prune(copy.deepcopy(small), X)
    assert again[0].out_channels == 4
    whole = io.BytesIO()
    torch.save(again, whole)
    whole.seek(0)
    assert difference(run(torch.load(whole, weights_only=False), X), run(again, X)) == 0


@pytest.mark.parametrize("times", [1, 2])
def test_a_file_of_the_pruned_model_is_loaded_into_a_new_one(tmp_path, times):
    small = awake(vocoder())
    for _ in range(times):
        small = fxprune.prune(small, X)
    fxprune.save(small, tmp_path / "small.safetensors")
    new = fxprune.load(vocoder().double().eval(), tmp_path / "small.safetensors")
    assert difference(run(new, X), run(small, X)) == 0
    assert hooks(new) == hooks(small)


def test_a_pruner_goes_step_by_step_and_takes_the_optimizer_along():
    model = awake(vocoder())
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    model(X).square().mean().backward()
    optimizer.step()
    pruner = fxprune.Pruner(model, X, sparsity=0.5, steps=2, optimizer=optimizer)
    for _ in range(2):
        pruner.step()
        optimizer.zero_grad()
        model(X).square().mean().backward()
        optimizer.step()
    assert model[0].out_channels == 8 and len(hooks(model)) == 4
    held = {id(p) for group in optimizer.param_groups for p in group["params"]}
    assert held == {id(p) for p in model.parameters()}


def test_parameters_are_counted():
    model = awake(vocoder())
    plan = fxprune.plan(model, X, target=fxprune.Target(params=0.6))
    left = sum(p.numel() for p in plan.apply(model).parameters())
    assert left <= 0.6 * sum(p.numel() for p in model.parameters())
    assert left / sum(p.numel() for p in model.parameters()) > 0.45


def test_spectral_norms_and_recurrent_layers_stay_with_the_reason():
    net = nn.Sequential(nn.utils.spectral_norm(nn.Linear(6, 8)), nn.Sigmoid(), nn.Linear(8, 3))
    plan = fxprune.plan(awake(net), drawn(2, 6))
    assert "a hook computes its weight" in dict(plan.skipped)["0"]
    lstm = Net(lambda s, x: s.head(s.lstm(x)[0]), lstm=old(nn.LSTM(6, 8), name="weight_hh_l0"),
               head=nn.Linear(8, 3))  # fmt: skip
    plan = fxprune.plan(awake(lstm), drawn(4, 2, 6))
    assert "a hook computes its weight_hh_l0" in dict(plan.skipped)["lstm"]


class Own(nn.Linear):
    def forward(self, x):
        return super().forward(x).view(-1, 2, 4).flatten(1)


class ReadsLengths(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b = old(nn.Linear(6, 8)), nn.Linear(8, 3)

    def forward(self, x):
        return self.b(self.a(x).sigmoid()) + self.a.weight_g.sum()


def tied():
    net = nn.Sequential(old(nn.Linear(8, 8)), nn.Sigmoid(), old(nn.Linear(8, 8)))
    net[2].weight_v = net[0].weight_v
    return nn.Sequential(nn.Linear(6, 8), *net, nn.Sigmoid(), nn.Linear(8, 3))


@pytest.mark.parametrize("make", [
    lambda: nn.Sequential(old(Own(6, 8)), nn.Sigmoid(), nn.Linear(8, 3)), ReadsLengths, tied,
], ids=["own code", "read", "tied"])  # fmt: skip
def test_hooks_whose_tensors_others_hold_or_read_stay_hooks(make):
    model, x = awake(make()), drawn(4, 6)
    plan, small = fxprune.plan(model, x), fxprune.prune(model, x)
    assert difference(run(plan.mask(model), x), run(small, x)) < 1e-9
    assert "a hook computes" in " ".join(reason for _, reason in plan.skipped)
    assert hooks(small) == hooks(model)


@pytest.mark.parametrize("before", [False, True])
def test_hooks_that_act_on_a_module_whose_forward_would_be_written_anew_act_once(before):
    class Block(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b = nn.Linear(3, 16), nn.Linear(16, 4)
            self.same = lambda t: t.view(-1, 16)

        def forward(self, x):
            return self.b(self.same(torch.relu(self.a(x))))

    model = nn.Sequential(Block(), nn.Tanh()).double().eval()
    if before:
        model[0].register_forward_pre_hook(lambda m, args: (args[0] * 2,))
    else:
        model[0].register_forward_hook(lambda m, args, output: output * 2)
    x = torch.randn(4, 3, dtype=torch.float64)
    plan = fxprune.plan(model, x)
    assert "has hooks that change what it reads or returns" in dict(plan.skipped)["0.a"]
    assert torch.equal(plan.apply(model)(x), model(x))


class Standardised(nn.Conv2d):
    """Weight standardisation (arXiv 1903.10520) by way of a norm: the filters are its channels."""

    def __init__(self, *args, by, **settings):
        super().__init__(*args, **settings)
        self.by, self.gain = by, nn.Parameter(torch.ones(self.out_channels))

    def forward(self, x):
        w = self.weight.reshape(1, self.out_channels, -1)
        norm = F.instance_norm if self.by == "instance" else F.batch_norm
        told = {} if self.by == "instance" else {"training": True, "momentum": 0.0}
        w = norm(w, None, None, weight=self.gain * 0.5, **told).reshape_as(self.weight)
        return F.conv2d(x, w, self.bias, padding=self.padding, groups=self.groups)


@pytest.mark.parametrize("by", ["batch", "instance"])
def test_standardised_filters_lose_what_they_read_and_count_what_is_left(by):
    net = nn.Sequential(Standardised(3, 8, 3, by=by), nn.SiLU(),
                        Standardised(8, 16, 3, padding=1, by=by), nn.SiLU(),
                        Standardised(16, 16, 3, groups=2, by=by), nn.SiLU(),
                        Standardised(16, 4, 1, by=by))  # fmt: skip
    plan, small = check(net, torch.randn(2, 3, 8, 8, dtype=torch.float64))
    assert [layer.out_channels for layer in small[::2]] == [4, 8, 8, 4]
    assert "counts in" in str(plan)


def test_a_norm_of_running_statistics_averages_over_nothing_that_may_go():
    class Along(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b, self.norm = nn.Linear(5, 8), nn.Linear(8, 3), nn.BatchNorm1d(4)

        def forward(self, x):
            return self.b(self.norm(self.a(x)))

    with pytest.warns(fxprune.PruningWarning, match="batch norm averages over them"):
        fxprune.plan(Along(), torch.randn(2, 4, 5))
