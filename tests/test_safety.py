"""No call changes the caller's model or input, on success or on failure at any moment."""

from __future__ import annotations

import copy
import dataclasses

import pytest
import torch
from torch import nn
from torch.nn.utils import parametrizations
from torch.nn.utils import prune as torch_prune

import fxprune
from fxprune import api
from fxprune.masking import plan_masks as masking
from fxprune.rewriting import rewrite
from fxprune.rules import registry

from .oracle import awake, difference, run
from .snapshot import Snapshot
from .test_constructs import Net


class Everything(nn.Module):
    """Its pruning takes every kind of change: tensors, layer sizes, a parametrized weight, a bias
    made where there was none, an attribute of the model's own, and an LSTM's list of weights."""

    def __init__(self):
        super().__init__()
        self.a = parametrizations.weight_norm(nn.Conv1d(3, 8, 3))
        self.b = nn.Conv1d(8, 8, 1, bias=False)
        self.norm, self.width = nn.BatchNorm1d(8), 8
        self.lstm, self.head = nn.LSTM(8, 6, batch_first=True), nn.Linear(6, 2)
        self.drop = nn.Dropout()

    def forward(self, x):
        y = torch.sigmoid(self.b(torch.sigmoid(self.a(x))))
        y = self.norm(y).transpose(1, 2).reshape(-1, y.shape[2], self.width)
        return self.head(self.drop(self.lstm(y)[0]))


X = torch.randn(2, 3, 7, dtype=torch.float64, generator=torch.Generator().manual_seed(1))


def everything():
    """In mixed training modes, with gradients, hooks and a frozen parameter."""
    model = awake(Everything())
    model.drop.train()
    model.norm.weight.requires_grad_(False)
    model.b.register_forward_hook(lambda m, i, o: None)
    model.lstm.register_forward_pre_hook(lambda m, i: None)
    model(X).sum().backward()
    return model


def small_net(*layers):
    return nn.Sequential(*(layers or (nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 4))))


STEPS = {
    "prune": lambda m, x: fxprune.prune(m, x),
    "exact": lambda m, x: fxprune.prune(m, x, exact=True),
    "plan": lambda m, x: fxprune.plan(m, x),
    "mask": lambda m, x: fxprune.plan(m, x).mask(m),
    "apply": lambda m, x: fxprune.plan(m, x).apply(m),
}


@pytest.mark.parametrize("step", STEPS)
def test_success_leaves_the_model_and_the_input_bit_for_bit_as_they_were(step):
    model, x = everything(), X.clone()
    before = Snapshot(model)
    result = STEPS[step](model, x)
    assert before.differences() == [] and torch.equal(x, X)
    if isinstance(result, nn.Module):  # nothing is shared with the result either
        with torch.no_grad():
            for t in [*result.parameters(), *result.buffers()]:
                t.zero_()
        assert before.differences() == []


def test_a_model_that_writes_into_its_input_writes_into_no_input_of_the_caller():
    class InPlace(nn.Module):
        def __init__(self):
            super().__init__()
            self.layers = small_net()

        def forward(self, x):
            return self.layers(x.mul_(2))

    x = torch.randn(2, 6)
    before = x.clone()
    fxprune.prune(InPlace(), x)
    assert torch.equal(x, before)


def test_the_result_keeps_flags_hooks_and_frozen_parameters():
    model = everything()
    small = fxprune.prune(model, X)
    assert [m.training for m in small.modules()] == [m.training for m in model.modules()]
    assert len(small.b._forward_hooks) == len(small.lstm._forward_pre_hooks) == 1
    frozen = [name for name, p in small.named_parameters() if not p.requires_grad]
    assert frozen == ["norm.weight"] and small.norm.weight.shape == (4,)


def test_in_place_gives_what_a_copy_gives_and_keeps_every_parameter_object():
    model = everything()
    expected = fxprune.prune(model, X)
    before = {name: id(p) for name, p in model.named_parameters()}
    assert fxprune.prune(model, X, inplace=True) is model
    after = {name: id(p) for name, p in model.named_parameters()}
    assert {name: after[name] for name in before} == before
    assert set(after) - set(before) == {"b.bias"}  # made, as it had none
    assert difference(run(model.eval(), X), run(expected.eval(), X)) == 0
    assert model.width == 4 and model.lstm.hidden_size == 3


class Fault(Exception):
    """Injected."""


FAULTS = {
    "build": (rewrite, "build"), "shrink": (rewrite, "shrink"),
    "data": (rewrite.Journal, "data"), "attribute": (rewrite.Journal, "attribute"),
    "item": (rewrite.Journal, "item"), "install": (rewrite, "_install"), "prove": (api, "prove"),
    "deepcopy": (copy, "deepcopy"), "mask": (masking, "keep_masks"),
    "record": (nn.Linear, "forward"), "refresh": (None, "refresh"),
}  # fmt: skip


def inject(monkeypatch, stage, number, calls):
    """Let the call with this number of ``stage`` raise; each call is noted in ``calls``."""
    owner, name = FAULTS[stage]
    registry.load()
    pattern = registry._global.modules[nn.LSTM]
    original = pattern.refresh if owner is None else getattr(owner, name)

    def faulty(*args, **kwargs):
        calls.append(stage)
        if len(calls) == number:
            raise Fault
        return original(*args, **kwargs)

    if owner is None:
        changed = dataclasses.replace(pattern, refresh=faulty)
        monkeypatch.setitem(registry._global.modules, nn.LSTM, changed)
    else:
        monkeypatch.setattr(owner, name, faulty)


@pytest.mark.parametrize("inplace", [False, True])
@pytest.mark.parametrize("stage", FAULTS)
def test_a_fault_at_any_moment_of_any_stage_changes_nothing(stage, inplace):
    number = 0
    while True:
        number += 1
        model, calls = everything(), []
        twin, before = copy.deepcopy(model).eval(), Snapshot(model)
        with pytest.MonkeyPatch.context() as monkeypatch:
            inject(monkeypatch, stage, number, calls)
            try:
                fxprune.prune(model, X, inplace=inplace)
            except (Fault, fxprune.PruningError) as error:
                assert isinstance(error, Fault) or isinstance(error.__cause__, Fault)
            else:
                break
        assert before.differences() == []
        assert difference(run(model.eval(), X), run(twin, X)) == 0
    assert number > 1, f"{stage} never ran"


COMPUTED = {
    "weight_norm": parametrizations.weight_norm, "spectral_norm": parametrizations.spectral_norm,
    "orthogonal": parametrizations.orthogonal, "old weight_norm": nn.utils.weight_norm,
    "old spectral_norm": nn.utils.spectral_norm,
    "prune": lambda m: torch_prune.l1_unstructured(m, "weight", 0.5),
}  # fmt: skip


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("how", COMPUTED)
def test_layers_whose_weight_is_computed_are_pruned_or_left_whole_with_a_reason(how):
    layers = COMPUTED[how](nn.Linear(6, 8)), nn.Sigmoid(), nn.Linear(8, 6), nn.Linear(6, 4)
    model = awake(small_net(*layers))
    before = Snapshot(model)
    small = fxprune.prune(model, X.new_ones(2, 6))
    assert before.differences() == [] and small[2].out_features == 3
    plan = fxprune.plan(model, X.new_ones(2, 6))
    assert small[0].out_features == 4 or "0" in dict(plan.skipped)


def test_channels_that_leave_pytorch_are_left_whole_with_a_reason():
    class Numpy(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b = nn.Linear(6, 8), nn.Linear(8, 4)

        def forward(self, x):
            return self.b(torch.from_numpy(self.a(x).detach().numpy() * 2))

    model = awake(Numpy())
    plan = fxprune.plan(model, X.new_ones(2, 6))
    assert "numpy" in dict(plan.skipped)["a"]
    assert fxprune.prune(model, X.new_ones(2, 6)).a.out_features == 8


def test_where_a_masked_model_would_go_another_way_by_its_values_what_is_counted_stays():
    """Behind a norm that counts channels, masked and recorded run would pick other rows."""

    class Picks(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b, self.head = nn.Linear(6, 16), nn.Linear(16, 16), nn.Linear(16, 3)
            self.scale, self.shift = nn.Parameter(torch.rand(16)), nn.Parameter(torch.rand(16))

        def forward(self, x):
            h = nn.functional.layer_norm(self.a(x), (16,), self.scale, self.shift)
            y = self.b(h).sigmoid()
            size = y.sum(-1)
            high = size > size.median() + 0.05
            return self.head(y[high].view(int(high.sum()), 16)).mean(0)

    model, x = awake(Picks()), torch.randn(64, 6, dtype=torch.float64)
    before = Snapshot(model)
    plan = fxprune.plan(model, x)
    assert "goes by values that come of it" in dict(plan.skipped)["a"]
    fxprune.prune(model, x)
    assert before.differences() == []


@pytest.mark.parametrize("layer", [nn.Embedding, nn.EmbeddingBag])
def test_an_embedding_that_scales_its_rows_as_it_reads_them_is_set_back(layer):
    model = nn.Sequential(layer(9, 8, max_norm=0.5), nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 3))
    before = Snapshot(model)
    fxprune.prune(model, torch.arange(8).view(2, 4))
    assert before.differences() == []


class Box:
    """What a model may get: an object with tensors in it, which the model writes to."""

    def __init__(self, seen):
        self.seen = seen


def test_objects_in_the_example_input_are_copied():
    def forward(s, x, box):
        box.seen = torch.cat([box.seen, x])
        return s.b(torch.sigmoid(s.a(box.seen)))

    model = Net(forward, a=nn.Linear(6, 8), b=nn.Linear(8, 3)).eval()
    box = Box(torch.randn(2, 6))
    small = fxprune.prune(model, (torch.randn(2, 6), box))
    assert small.a.out_features == 4 and box.seen.shape == (2, 6)


def test_a_model_that_calculates_in_half_precision_is_proved_with_its_rounding():
    def forward(s, x):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return s.c(torch.sigmoid(s.b(torch.sigmoid(s.a(x)))))

    for seed in range(4):
        torch.manual_seed(seed)
        net = Net(forward, a=nn.Linear(6, 32), b=nn.Linear(32, 32), c=nn.Linear(32, 3)).eval()
        assert fxprune.prune(net, torch.randn(4, 6)).a.out_features == 16


@pytest.mark.parametrize("how", ["pair", "mapping"])
def test_an_object_that_a_model_returns_is_made_again_by_the_graph(how):
    def forward(s, x):
        y = s.norm(s.a(x))
        box = Box(s.b(y))
        return (s.c(y), box) if how == "pair" else {"y": s.c(y), "box": box}

    torch.manual_seed(0)
    layers = {"a": nn.Linear(6, 8), "b": nn.Linear(8, 5), "c": nn.Linear(8, 3)}
    model = awake(Net(forward, norm=nn.LayerNorm(8), **layers))
    x, y = torch.randn(2, 4, 6, dtype=torch.float64)
    assert fxprune.prune(model, x).a.out_features == 4  # the reference is a graph's
    assert difference(run(fxprune.trace(model, x), y), run(model, y)) == 0


def test_an_input_that_holds_a_part_of_the_model_is_no_reason_to_copy_it():
    model = Net(lambda s, x, box: s.b(torch.relu(box.layer(x))), a=nn.Linear(6, 8),
                b=nn.Linear(8, 3)).eval()  # fmt: skip
    box = Box(None)
    box.layer = model.a
    assert fxprune.plan(model, (torch.randn(2, 6), box)).groups[0].kept == 4


def test_tensors_without_numbers_in_containers_are_left_alone():
    model = Net(lambda s, x: s.b(torch.relu(s.a(x))), a=nn.Linear(6, 8), b=nn.Linear(8, 3)).eval()
    model.held = [torch.empty(3, device="meta"), torch.nested.nested_tensor([torch.ones(2)])]
    assert fxprune.plan(model, torch.randn(2, 6)).groups[0].kept == 4
