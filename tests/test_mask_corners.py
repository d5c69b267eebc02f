"""What was wrong once about masks: each under the name of what it must not do."""

from __future__ import annotations

import copy
import io

import pytest
import torch
from torch import nn
from torch.nn.utils import parametrizations as P
from torch.nn.utils import prune

import fxprune
from fxprune import masks
from fxprune.errors import SettingError
from fxprune.proving.proof import prove
from fxprune.schedules import MaskScheduler, PlanScheduler, linear, one_shot

from .test_trace import Net


def rows(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


@pytest.mark.parametrize("put", [P.weight_norm, P.spectral_norm, P.orthogonal])
def test_a_mask_on_a_computed_weight_is_removed_with_its_zeros_and_no_output_changed(put):
    layer = put(nn.Linear(8, 8).double()).eval()
    masks.ln_structured(layer, "weight", 0.5, 2, 0)
    wanted = layer(rows(3, 8))
    model = nn.Sequential(layer, nn.Tanh(), nn.Linear(8, 3).double())
    small = fxprune.compact(model, rows(3, 8))
    assert torch.allclose(small(rows(3, 8)), model(rows(3, 8)), rtol=0, atol=1e-9)
    masks.remove(layer, "weight")
    assert torch.allclose(layer(rows(3, 8)), wanted, rtol=0, atol=1e-9)
    assert int((layer.weight == 0).all(1).sum()) == 4


def test_units_of_a_weight_norm_layer_go_step_by_step():
    model = nn.Sequential(P.weight_norm(nn.Linear(6, 16)), nn.ReLU(), nn.Linear(16, 3)).double()
    scheduler = PlanScheduler(model, rows(2, 6), linear(0.6, 4))
    assert [round(16 * scheduler.step()) for _ in range(4)] == [2, 5, 7, 10]
    small = scheduler.plan.apply(model)
    assert torch.allclose(small(rows(3, 6)), model(rows(3, 6)), rtol=0, atol=1e-9)


@pytest.mark.parametrize("seed", range(20))
def test_slices_across_earlier_masks_are_ranked_as_pytorch_ranks_them(seed):
    torch.manual_seed(seed)
    mine = nn.Conv2d(5, 6, 3, bias=False)
    other = copy.deepcopy(mine)
    for amount, n, dim in ((0.3, 2, 1), (2, 1, 0), (0.4, float("inf"), 1)):
        masks.l1_unstructured(mine, "weight", 0.2)
        prune.l1_unstructured(other, "weight", 0.2)
        masks.ln_structured(mine, "weight", amount, n, dim)
        prune.ln_structured(other, "weight", amount, n, dim)
    assert torch.equal(masks.mask_of(mine, "weight"), other.weight_mask != 0)


def test_a_proximal_step_on_a_computed_weight_is_refused():
    model = nn.Sequential(P.weight_norm(nn.Linear(6, 16)), nn.ReLU(), nn.Linear(16, 3))
    plan = fxprune.plan(model, torch.randn(2, 6))
    with pytest.raises(SettingError, match="is computed"):
        plan.proximal_step(model, 100.0)


def test_with_bias_drop_units_of_a_schedule_emit_nothing():
    model = nn.Sequential(nn.Linear(6, 8), nn.Sigmoid(), nn.Linear(8, 3)).double()
    scheduler = PlanScheduler(model, rows(2, 6), one_shot(0.5), bias="drop")
    scheduler.step()
    small = scheduler.plan.apply(model)
    assert torch.allclose(small(rows(3, 6)), model(rows(3, 6)), rtol=0, atol=1e-9)


def test_a_refused_step_counts_for_none():
    model = nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 3))
    for scheduler in (
        PlanScheduler(model, torch.randn(2, 6), lambda step: 2.0),
        MaskScheduler([(model[0], "weight")], lambda step: 2.0),
    ):
        with pytest.raises(SettingError):
            scheduler.step()
        assert scheduler.steps == 0


@pytest.mark.parametrize("settings, words", [
    ({"exact": True}, "exact: compact keeps"),
    ({"verify": True}, "verify: is no setting"),
    ({"calibration": [1]}, "calibration: it is for pruning without"),
])  # fmt: skip
def test_settings_that_a_plan_schedule_cannot_have_are_said_at_once(settings, words):
    with pytest.raises(SettingError, match=words):
        PlanScheduler(nn.Linear(3, 4), torch.randn(2, 3), one_shot(0.5), **settings)


def test_masks_of_pytorch_are_no_ground_for_a_plan_schedule():
    model = nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 3))
    prune.l1_unstructured(model[0], "weight", 0.5)
    with pytest.raises(SettingError, match="from_torch_prune"):
        PlanScheduler(model, torch.randn(2, 6), one_shot(0.5))


def test_attention_by_head_dim_is_resumed_with_the_same_masks():
    def build(seed):
        torch.manual_seed(seed)
        layer = nn.TransformerEncoderLayer(16, 4, 32, batch_first=True).double().eval()
        nn.init.normal_(layer.self_attn.in_proj_bias)
        return layer

    first, second = build(0), build(1)
    schedulers = [PlanScheduler(m, rows(2, 5, 16), one_shot(0.5), attention="head_dim")
                  for m in (first, second)]  # fmt: skip
    schedulers[0].step()
    schedulers[1].load_state_dict(schedulers[0].state_dict())
    second.load_state_dict(first.state_dict())
    assert torch.equal(first(rows(2, 5, 16)), second(rows(2, 5, 16)))
    a, b = (s.plan.kept for s in schedulers)
    assert a.keys() == b.keys() and all(torch.equal(a[k][d], b[k][d]) for k in a for d in a[k])


def test_a_mask_schedule_that_has_not_begun_leaves_the_model_as_it_is():
    layer = nn.Linear(4, 4)
    scheduler = MaskScheduler([(layer, "weight")], one_shot(0.5))
    scheduler.load_state_dict({"steps": 0})
    assert set(layer.state_dict()) == {"weight", "bias"}


def cat_with(f):
    def forward(s, x):
        a, b = torch.sigmoid(s.a(x)), torch.sigmoid(s.b(x))
        return s.o(torch.cat(f(a, b), 1))

    model = Net(forward, a=nn.Conv2d(3, 8, 3, padding=1), b=nn.Conv2d(3, 8, 3, padding=1),
                o=nn.Conv2d(16, 3, 3, padding=1)).double().eval()  # fmt: skip
    with torch.no_grad():
        for layer in (model.a, model.b):
            layer.weight[:4] = 0
    return model


@pytest.mark.parametrize("f", [
    lambda a, b: [a, nn.functional.avg_pool2d(a, 3, 1, 1)],
    lambda a, b: [nn.functional.pad(a[..., 1:-1, 1:-1], (1, 1, 1, 1)), b],
    lambda a, b: [a, nn.functional.avg_pool2d(b, 3, 1, 1)],
], ids=["itself pooled", "padded", "another pooled"])  # fmt: skip
def test_channels_with_zeros_around_them_share_no_carrier_with_others(f):
    model, x = cat_with(f), rows(2, 3, 8, 8)
    small = fxprune.compact(model, x)
    assert torch.allclose(small(rows(3, 3, 11, 9)), model(rows(3, 3, 11, 9)), rtol=0, atol=1e-9)
    plan = fxprune.plan(model, x, exact=True)
    assert prove(plan, model, plan.apply(model), x) <= 1e-9


def test_a_penalty_in_half_precision_is_summed_in_more():
    model = nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 3)).half()
    plan = fxprune.plan(model, torch.randn(2, 6).half())
    for size in (2e-5, 20.0):
        nn.init.constant_(model[0].weight, size)
        assert float(plan.penalty(model)) == pytest.approx(8 * size * 6**0.5, rel=0.02)
    with torch.no_grad():
        model[0].weight[:3] = 0
    plan.penalty(model).backward()
    assert bool(model[0].weight.grad.isfinite().all())
    with pytest.raises(SettingError):
        plan.proximal_step(model, float("nan"))


def test_grouped_convolutions_get_carriers_when_compacted():
    model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.Sigmoid(), nn.Conv2d(8, 8, 3, padding=1, groups=2))
    model = model.double().eval()
    with torch.no_grad():
        model[0].weight[[0, 1, 4, 5]] = 0
    small = fxprune.compact(model, rows(2, 3, 9, 9))
    assert small[0].out_channels == 6
    assert torch.allclose(small(rows(1, 3, 7, 8)), model(rows(1, 3, 7, 8)), rtol=0, atol=1e-9)


@pytest.mark.parametrize(
    "sparsity", [{"i": 0.5}, {"a.out_proj": 0.5}, {"a": 0.5, "a.out_proj": 0.5}]
)
def test_attention_shrinks_on_one_side_only(sparsity):
    def forward(s, x):
        y = s.i(x)
        return s.o(s.a(y, y, y, need_weights=False)[0])

    model = Net(forward, i=nn.Linear(6, 8), o=nn.Linear(8, 3),
                a=nn.MultiheadAttention(8, 2, batch_first=True)).double().eval()  # fmt: skip
    nn.init.normal_(model.a.in_proj_bias)
    plan = fxprune.plan(model, rows(2, 5, 6), sparsity=sparsity)
    small = plan.apply(model)
    assert prove(plan, model, small, rows(2, 5, 6)) <= 1e-9 and plan.kept


@pytest.mark.parametrize("kind", [nn.LSTM, nn.GRU, nn.RNN])
def test_a_masked_recurrent_layer_can_be_saved(kind):
    layer = kind(4, 6, 2)
    masks.l1_unstructured(layer, "weight_hh_l0", 0.5)
    file = io.BytesIO()
    torch.save(layer, file)
    file.seek(0)
    again = torch.load(file, weights_only=False)
    assert torch.equal(again(torch.ones(2, 4))[0], layer(torch.ones(2, 4))[0])
    assert masks.is_pruned(again)


class Locked(nn.Linear):
    def __getstate__(self):
        return {k: v for k, v in self.__dict__.items() if k != "lock"}

    def __setstate__(self, state):
        super().__setstate__(state)
        self.lock = (i for i in ())


def test_a_masked_module_with_a_state_of_its_own_can_be_saved():
    layer = Locked(3, 4)
    layer.lock = (i for i in ())  # which cannot be pickled
    masks.l1_unstructured(layer, "weight", 0.5)
    file = io.BytesIO()
    torch.save(layer, file)
    file.seek(0)
    again = torch.load(file, weights_only=False)
    assert torch.equal(again.weight, layer.weight) and hasattr(again, "lock")


def test_a_mask_on_another_parametrization_becomes_final_for_pytorch():
    model = nn.Sequential(P.weight_norm(nn.Linear(6, 4)), nn.Linear(4, 4))
    for layer in model:
        masks.l1_unstructured(layer, "weight", 0.5)
    x = torch.randn(3, 6)
    expected = model(x)
    masks.to_torch_prune(model)
    assert torch.allclose(model(x), expected) and not masks.is_pruned(model)
    assert int((model[0].weight == 0).sum()) == 12 and prune.is_pruned(model[1])


def test_what_cannot_be_turned_into_pytorchs_masks_leaves_all_as_it_was():
    model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4))
    masks.l1_unstructured(model[0], "weight", 0.5)
    masks.identity(model[1], "running_mean")
    with pytest.raises(SettingError, match="is a buffer"):
        masks.to_torch_prune(model)
    assert masks.is_pruned(model[0])
    layer = nn.Linear(3, 4)
    prune.l1_unstructured(layer, "weight", 0.5)
    masks.identity(layer, "weight_orig")
    with pytest.raises(SettingError, match="no parameter any"):
        masks.from_torch_prune(layer)
    assert layer(torch.ones(1, 3)).shape == (1, 4)


def test_tied_weights_that_are_masked_in_one_place_are_two_when_compacted():
    model = Net(lambda s, x: s.b(torch.tanh(s.a(x))), a=nn.Linear(6, 6), b=nn.Linear(6, 6))
    model = model.double()
    model.b.weight = model.a.weight
    masks.ln_structured(model.a, "weight", 0.5, 2, 0)
    small = fxprune.compact(model, rows(2, 6))
    assert small.a.out_features == 3
    assert torch.allclose(small(rows(4, 6)), model(rows(4, 6)), rtol=0, atol=1e-9)


@pytest.mark.parametrize("make", [
    lambda layer: masks.ln_structured(layer, "weight", 1, "bogus", 0),
    lambda layer: masks.ln_structured(layer, "weight", 1, 2, None),
    lambda layer: masks.apply(layer, "weight", lambda scores, keep: None),
    lambda layer: masks.apply(layer, "weight", lambda scores, keep: keep.float()),
])  # fmt: skip
def test_wrong_arguments_are_said_and_leave_the_layer_as_it_was(make):
    layer = nn.Linear(3, 4)
    with pytest.raises(SettingError):
        make(layer)
    assert not masks.is_pruned(layer)


def test_what_is_no_model_is_said():
    for call in (lambda: fxprune.compact("x", torch.ones(1)),
                 lambda: PlanScheduler("x", torch.ones(1), one_shot(0.5))):  # fmt: skip
        with pytest.raises(fxprune.ModelError, match=r"not a torch\.nn\.Module"):
            call()


class Turned(nn.Module):
    """Linear layers as GPT-2 has them: b + x W."""

    def __init__(self):
        super().__init__()
        self.w1, self.b1 = nn.Parameter(torch.randn(6, 12)), nn.Parameter(torch.randn(12))
        self.w2, self.b2 = nn.Parameter(torch.randn(12, 3)), nn.Parameter(torch.randn(3))

    def forward(self, x):
        return torch.addmm(self.b2, torch.sigmoid(torch.addmm(self.b1, x, self.w1)), self.w2)


def test_layers_whose_weights_are_turned_are_compacted_and_keep_what_was_said():
    model = Turned().double()
    with torch.no_grad():
        model.w1[:, :4] = 0
    small = fxprune.compact(model, rows(2, 6))
    assert small.w1.shape == (6, 8) and small.w2.shape == (8, 3)
    assert torch.allclose(small(rows(5, 6)), model(rows(5, 6)), rtol=0, atol=1e-9)
    plan = fxprune.plan(model, rows(2, 6), calibration=[rows(64, 6)])
    assert plan.predicted_error and not plan.notes
    assert prove(plan, model, plan.apply(model), rows(2, 6)) <= 1e-9


class Memory(nn.Module):
    """Its tensors have names of methods of ``nn.ModuleDict``."""

    def __init__(self):
        super().__init__()
        self.ask = nn.Linear(6, 16)
        self.keys = nn.Parameter(torch.randn(10, 16))
        self.values = nn.Parameter(torch.randn(10, 12))
        self.register_buffer("items", torch.randn(12))
        self.out = nn.Linear(12, 3)

    def forward(self, x):
        found = (self.ask(x) @ self.keys.t()).softmax(-1) @ self.values
        return self.out(torch.relu(found + self.items))


def test_tensors_with_names_of_methods_of_the_dict_that_holds_parametrizations_are_masked(tmp_path):
    model, x = Memory().double(), rows(4, 6)
    plan = fxprune.plan(model, x)
    assert plan.kept.keys() >= {"keys", "values", "items"}
    masked, small = plan.mask(model), plan.apply(model)
    assert prove(plan, model, small, x) < 1e-9
    twin = copy.deepcopy(masked)
    assert torch.equal(twin(x), masked(x))
    file = io.BytesIO()
    torch.save(masked, file)
    file.seek(0)
    assert torch.equal(torch.load(file, weights_only=False)(x), masked(x))
    assert torch.allclose(plan.apply(masked)(x), masked(x), rtol=0, atol=1e-9)
    masks.l1_unstructured(small, "keys", 0.25)
    masks.l1_unstructured(small, "values", 0.25)
    fxprune.save(small, tmp_path / "small")
    loaded = fxprune.load(Memory().double(), tmp_path / "small")
    assert torch.equal(loaded(x), small(x))
    masks.remove(small, "keys")
    masks.remove(small, "values")
    assert isinstance(small.keys, nn.Parameter) and torch.equal(loaded(x), small(x))
