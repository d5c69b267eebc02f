"""A target is met: what the plan foresees is what is counted on the pruned model."""

from __future__ import annotations

import re
import warnings

import numpy as np
import pytest
import torch
import torchvision
from torch import nn
from torch.nn.utils import parametrizations
from torch.utils.flop_counter import FlopCounterMode

import fxprune
from fxprune import Target
from fxprune.benchmarking import macs

from .oracle import awake, difference, run
from .snapshot import Snapshot
from .test_trace import Net

X = torch.randn(2, 3, 32, 32, generator=torch.Generator().manual_seed(0))


class Recurrent(nn.Module):
    def __init__(self, cls=nn.GRU):
        super().__init__()
        self.cells = cls(8, 24, 2, batch_first=True, bidirectional=True)
        self.a, self.b = nn.Linear(48, 24), nn.Linear(24, 5)

    def forward(self, x):
        return self.b(torch.relu(self.a(self.cells(x)[0])))


class Computed(nn.Module):
    """Weights that a parametrization computes, groups, a transposed convolution."""

    def __init__(self):
        super().__init__()
        self.a = parametrizations.weight_norm(nn.Conv2d(3, 16, 3))
        self.b = parametrizations.weight_norm(nn.Conv2d(16, 16, 3, groups=4))
        self.c, self.d = nn.ConvTranspose2d(16, 24, 3, 2), nn.Conv2d(24, 4, 1)

    def forward(self, x):
        return self.d(torch.sigmoid(self.c(torch.relu(self.b(torch.relu(self.a(x)))))))


class PerHead(nn.Module):
    """Products without weights, a weight that all heads share, and an einsum."""

    def __init__(self):
        super().__init__()
        self.qkv, self.out = nn.Linear(16, 48), nn.Linear(16, 16)
        self.shared = nn.Linear(4, 4)
        self.mlp = nn.Sequential(nn.Linear(16, 64), nn.GELU(), nn.Linear(64, 3))

    def forward(self, x):
        b, n, _ = x.shape
        q, k, v = self.qkv(x).view(b, n, 3, -1, 4).permute(2, 0, 3, 1, 4)
        weights = torch.einsum("bhnd,bhmd->bhnm", q, self.shared(k)).softmax(-1)
        y = (weights @ v).transpose(1, 2).flatten(2)
        return self.mlp(torch.relu(self.out(y)))


def vision(kind):
    torch.manual_seed(0)
    models = torchvision.models
    if kind == "vit":
        return models.VisionTransformer(32, 8, 2, 4, 32, 64)
    if kind == "swin":
        return models.SwinTransformer([4, 4], 16, [2, 2], [2, 4], [4, 4])
    if kind == "convnext":
        block = models.convnext.CNBlockConfig
        return models.ConvNeXt([block(16, 32, 1), block(32, None, 1)])
    if kind == "densenet":
        return models.DenseNet(8, (2, 2), 16)
    return getattr(models, kind)(weights=None)


def language(kind):
    import transformers as tr

    torch.manual_seed(0)
    small = {"vocab_size": 50, "hidden_size": 32, "num_hidden_layers": 2, "intermediate_size": 48}
    ids = {"input_ids": torch.arange(9)[None]}
    if kind == "bert":
        return tr.BertForSequenceClassification(tr.BertConfig(**small, num_attention_heads=4)), ids
    config = tr.LlamaConfig(**small, num_attention_heads=4, num_key_value_heads=2)
    return tr.LlamaForCausalLM(config), ids


def make(kind):
    made = {
        "gru": lambda: (Recurrent(), torch.randn(2, 5, 8)),
        "lstm": lambda: (Recurrent(nn.LSTM), torch.randn(2, 5, 8)),
        "computed": lambda: (Computed(), X),
        "per head": lambda: (PerHead(), torch.randn(2, 6, 16)),
        "encoder": lambda: (
            nn.TransformerEncoder(nn.TransformerEncoderLayer(32, 4, 64, batch_first=True), 2),
            torch.randn(2, 7, 32),
        ),
    }
    if kind in ("bert", "llama"):
        model, x = language(kind)
    else:
        model, x = made[kind]() if kind in made else (vision(kind), X)
    return model.eval(), x


def parameters(model):
    return sum(p.numel() for p in model.parameters())


def count(measure, model, x):
    return parameters(model) if measure == "params" else macs(model, x)


KINDS = [
    "resnet18", "mobilenet_v2", "squeezenet1_1", "densenet", "vit", "swin", "convnext",
    "bert", "llama", "gru", "lstm", "computed", "per head", "encoder",
]  # fmt: skip
REAL = ["resnet18", "mobilenet_v2", "vgg11", "densenet121", "efficientnet_b0", "vit_b_16", "swin_t",
        "convnext_tiny", "regnet_y_400mf", "googlenet", "shufflenet_v2_x1_0"]  # fmt: skip


def counts_as_foreseen(model, x, measure, **settings):
    plan = fxprune.plan(model, x, target=Target(**{measure: 0.5}), **settings)
    found, full = (count(measure, m, x) for m in (plan.apply(model), model))
    assert plan.target.got == found and plan.target.original == full
    assert plan.target.asked == full / 2
    return plan.target


@pytest.mark.parametrize("measure", ["params", "macs"])
@pytest.mark.parametrize("kind", KINDS)
def test_what_is_foreseen_is_counted_on_the_pruned_model(kind, measure):
    model, x = make(kind)
    reached = counts_as_foreseen(model, x, measure)
    assert abs(reached.error) <= (0.02 if kind == "computed" else 0.01)  # its groups go in fours


@pytest.mark.parametrize("settings", [
    {"attention": "head_dim", "exact": True}, {"scope": "global", "round_to": 4},
    {"scope": "isomorphic", "bias": "drop"},
], ids=str)  # fmt: skip
@pytest.mark.parametrize("kind", ["resnet18", "vit", "computed"])
def test_other_settings_are_foreseen_too(kind, settings):
    reached = counts_as_foreseen(*make(kind), "macs", **settings)
    assert abs(reached.error) <= (0.05 if kind == "computed" else 0.02)  # the widths are small


@pytest.mark.slow
@pytest.mark.parametrize("measure", ["params", "macs"])
@pytest.mark.parametrize("kind", REAL)
def test_models_of_torchvision_come_within_one_per_cent(kind, measure):
    torch.manual_seed(0)
    more = {"init_weights": True} if kind == "googlenet" else {}
    model = getattr(torchvision.models, kind)(weights=None, **more).eval()
    reached = counts_as_foreseen(model, torch.randn(1, 3, 224, 224), measure)
    assert abs(reached.error) <= 0.01


def near(x, y):
    return x @ y.transpose(-1, -2)


def nearest(x, y):
    """One of its three products is the same however many channels there are."""
    return near(x, y) @ near(y, y)


class Gram(nn.Module):
    def __init__(self, function):
        super().__init__()
        self.function = function
        self.a, self.b = nn.Linear(8, 64), nn.Linear(8, 64)
        self.c, self.d = nn.Linear(8, 32), nn.Linear(32, 8)

    def forward(self, x):
        return self.function(self.a(x), self.b(x)) @ self.d(torch.relu(self.c(x)))


@pytest.mark.parametrize("function", [near, nearest])
def test_work_of_an_op_that_only_the_user_knows_is_counted_on_the_pruned_model(function):
    """Its declaration does not say what it multiplies, so what was foreseen is put right."""
    model, x = Gram(function).eval(), torch.randn(2, 24, 8)
    known = fxprune.pattern(function, layout={"x": "b n c", "y": "b m c", "return": "b n m"})
    plan = fxprune.plan(model, x, target=Target(macs=0.6), patterns=known)
    small = plan.apply(model)
    assert small.a.out_features < 64
    assert plan.target.got == macs(small, x) and abs(plan.target.error) <= 0.02


def test_macs_are_those_of_the_flop_counter_for_the_example_input():
    model, x = make("resnet18")
    target = Target(macs=10**7)
    plan = fxprune.plan(model, x, target=target)
    small = plan.apply(model)
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        small(x)
    assert plan.target.asked == 10**7 and plan.target.got == counter.get_total_flops() / 2
    alone = fxprune.plan(model, x[:1], target=target)  # half of the batch: twice as much may stay
    assert alone.target.original == plan.target.original / 2
    assert parameters(alone.apply(model)) > 1.5 * parameters(plan.apply(model))


def test_a_layer_that_reads_a_view_of_a_parameter_is_counted():
    class Queries(nn.Module):
        def __init__(self):
            super().__init__()
            self.queries, self.norm = nn.Parameter(torch.randn(1, 3, 8)), nn.LayerNorm(8)
            self.a, self.b = nn.Linear(5, 8), nn.Linear(8, 3)

        def forward(self, x):
            queries = self.norm(self.queries.expand(len(x), -1, -1))
            return self.b(queries + self.a(x[:, None]))

    model, x = Queries().eval(), torch.randn(2, 5, requires_grad=True)
    model.a.weight.requires_grad_(False)
    plan = fxprune.plan(model, x, target=Target(macs=0.5))
    work = fxprune.benchmark(model, plan.apply(model), x, seconds=0.01, threads=1)
    assert plan.target.got == work.after.macs == 2 * (5 * 4 + 3 * 4 * 3)
    assert [p.requires_grad for p in model.parameters()].count(False) == 1


@pytest.mark.parametrize("asked", [0.1, 0.37, 0.9, 2_000_000])
def test_any_number_of_parameters_is_reached(asked):
    model, x = make("resnet18")
    small = fxprune.prune(model, x, target=Target(params=asked))
    wanted = asked if asked > 1 else asked * parameters(model)
    assert abs(parameters(small) / wanted - 1) <= 0.001


def test_a_pruned_model_with_a_target_is_the_masked_one():
    model, other, x = awake(vision("vit")), awake(Computed()), X.double()
    before = Snapshot(model)
    plan = fxprune.plan(model, x, target=Target(params=0.4), attention="head_dim")
    assert fxprune.proving.proof.prove(plan, model, plan.apply(model), x) < 1e-9
    plan = fxprune.plan(other, x, target=Target(macs=0.4))
    assert difference(run(plan.mask(other), x), run(plan.apply(other), x)) < 1e-9
    assert before.differences() == []


def test_biases_that_folding_makes_are_counted():
    torch.manual_seed(0)
    layers = [nn.Linear(16, 16, bias=i == 0) for i in range(6)]
    model = nn.Sequential(*(m for layer in layers for m in (layer, nn.Sigmoid())), nn.Linear(16, 2))
    plan = fxprune.plan(model, torch.randn(3, 16), target=Target(params=0.5))
    small = plan.apply(model)
    assert any(small[i].bias is not None and model[i].bias is None for i in range(0, 12, 2))
    assert plan.target.got == parameters(small)
    assert abs(plan.target.error) <= 0.01


def test_carriers_are_counted():
    torch.manual_seed(0)
    layers = [nn.Conv2d(3, 16, 3, padding=1), nn.Sigmoid()]
    layers += [m for _ in range(4) for m in (nn.Conv2d(16, 16, 3, padding=1), nn.Sigmoid())]
    model = nn.Sequential(*layers, nn.Conv2d(16, 2, 1))
    plan = fxprune.plan(model, X, target=Target(macs=0.5), exact=True)
    assert any(len(g.carriers) for g in plan.groups)
    assert plan.target.got == macs(plan.apply(model), X)
    assert abs(plan.target.error) <= 0.03


def test_groups_that_turn_out_not_to_fit_leave_the_budget_to_others():
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b = nn.Linear(8, 32), nn.Linear(32, 32)
            self.c, self.d = nn.Linear(32, 32), nn.Linear(32, 4)

        def forward(self, x):
            y = torch.relu(self.b(torch.relu(self.a(x))))
            for _ in range(2):
                y = torch.relu(self.c(y)).view(-1, 4, 8).flatten(1)
            return self.d(y)

    model, x = Net().eval(), torch.randn(2, 8)
    plan = fxprune.plan(model, x, target=Target(params=0.7))
    assert plan.target.got == parameters(plan.apply(model))
    assert abs(plan.target.error) <= 0.01


def test_a_target_out_of_reach_is_told_once_with_what_is_within_reach():
    model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 64))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        plan = fxprune.plan(model, torch.randn(2, 8), target=Target(params=0.01))
    (warning,) = caught
    least = parameters(plan.apply(model))
    assert issubclass(warning.category, fxprune.PruningWarning) and warning.filename == __file__
    assert re.search(rf"no more channels can go.*leaves {least}; within reach is {least} to 1,232",
                     str(warning.message))  # fmt: skip
    assert plan.target.got == plan.target.least == least == 8 + 1 + 64 * 2


def test_what_was_searched_is_not_said_to_be_all_that_there_is():
    model = nn.Sequential(nn.Linear(8, 3), nn.ReLU(), nn.Linear(3, 64))
    with pytest.warns(fxprune.PruningWarning, match="does not try all widths, found none that"):
        plan = fxprune.plan(model, torch.randn(2, 8), target=Target(params=0.55))
    assert plan.target.least < plan.target.asked < plan.target.original


def test_a_model_below_its_target_keeps_everything_and_says_so():
    model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 64))
    with pytest.warns(fxprune.PruningWarning, match="below it as it is"):
        plan = fxprune.plan(model, torch.randn(2, 8), target=Target(params=10**6))
    assert not plan.kept and plan.target.got == 1232
    assert "the target is met with all of its units" in dict(plan.skipped)["0"]


def test_a_target_of_which_nothing_is_counted_is_refused():
    lstm = nn.LSTM(5, 6, batch_first=True)
    model = Net(lambda s, x: s.l(x)[0].mean(2), l=lstm)  # one kernel, which the counter overlooks
    x = torch.randn(2, 4, 5)
    with pytest.raises(fxprune.SettingError, match=r"Target\(macs=0.5\): nothing is counted.*Net"):
        fxprune.plan(model, x, target=Target(macs=0.5))
    table = fxprune.LatencyTable(timer=lambda *_: 0.0)
    with pytest.raises(fxprune.SettingError, match=r"nothing is counted.*takes no time"):
        fxprune.plan(model, x, target=Target(latency=0.5, table=table))
    linear = nn.Sequential(nn.Linear(5, 6), nn.Linear(6, 2))
    with pytest.raises(fxprune.SettingError, match=r"nothing is counted.*empty"):
        fxprune.plan(linear, x[:0, 0], target=Target(macs=100))
    with pytest.raises(fxprune.SettingError, match=r"nothing is counted.*no parameters"):
        fxprune.plan(nn.Sequential(nn.ReLU()), x, target=Target(params=0.5))


def test_least_widths_and_most_sparsities_bound_what_is_within_reach():
    model, x = make("resnet18")
    with pytest.warns(fxprune.PruningWarning, match="is not reached"):
        plan = fxprune.plan(model, x, target=Target(params=0.01), max_sparsity=0.5)
    same = fxprune.plan(model, x, sparsity=0.5)
    assert plan.target.got == plan.target.least == parameters(same.apply(model))


def test_ignored_layers_stay_whole():
    model, x = make("resnet18")
    plan = fxprune.plan(model, x, target=Target(params=0.8), ignore="layer4.*")
    assert plan.apply(model).layer4[1].conv1.out_channels == 512
    assert abs(plan.target.error) <= 0.01


def test_the_plan_says_what_was_asked_and_got():
    model, x = make("resnet18")
    plan = fxprune.plan(model, x, target=Target(params=0.5))
    line = next(line for line in str(plan).splitlines() if line.startswith("target"))
    assert "params asked 5,844,756 (50.0%), got 5,8" in line and "of 11,689,512" in line
    assert fxprune.plan(model, x).target is None


def test_the_lowest_scores_go_within_each_group():
    model, x = make("resnet18")
    plan = fxprune.plan(model, x, target=Target(macs=0.5))
    for g in plan.groups:
        if len(g.removed):
            assert sorted(g.importance.argsort()[: len(g.removed)].tolist()) == g.removed.tolist()


def test_scores_without_end_keep_a_unit_and_the_target(recwarn):
    model, x = make("resnet18")
    scores = {"layer3.0.conv1": torch.full((256,), torch.inf), "*": "l1"}
    plan = fxprune.plan(model, x, importance=scores, scope="global", target=Target(params=0.5))
    assert abs(plan.target.error) < 0.01 and not recwarn
    assert 0 not in plan.kept.get("layer3.0.conv1.weight", {})


def test_numbers_of_numpy_are_numbers():
    assert Target(params=np.int64(2000)).goal(4000) == Target(params=np.float32(0.5)).goal(4000)


def test_reconstruction_shares_a_target_out_by_predicted_errors():
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Conv2d(3, 24, 3), nn.BatchNorm2d(24), nn.ReLU(), nn.Conv2d(24, 32, 3),
        nn.BatchNorm2d(32), nn.ReLU(), nn.Conv2d(32, 40, 3), nn.ReLU(), nn.Flatten(),
        nn.Linear(40 * 26 * 26, 4),
    ).eval()  # fmt: skip
    images = torch.randn(8, 3, 32, 32)
    settings = {"calibration": [images], "importance": "reconstruction"}
    found = {}
    for scope in ("local", "global"):
        plan = fxprune.plan(model, X, target=Target(macs=0.5), scope=scope, **settings)
        assert plan.target.got == macs(plan.apply(model), X)
        assert abs(plan.target.error) <= 0.02
        found[scope] = [g.kept for g in plan.groups]
    assert found["local"] != found["global"]


def test_a_target_works_with_inplace_and_as_graph():
    model, x = make("vit")
    graph = fxprune.prune(model, x, target=Target(params=0.5), as_graph=True)
    small = fxprune.prune(model, x, target=Target(params=0.5), inplace=True)
    assert small is model and isinstance(graph, torch.fx.GraphModule)
    assert torch.allclose(graph(x), small(x), atol=1e-5)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_a_model_of_any_dtype_in_training_mode_is_counted(dtype):
    model, x = make("resnet18")
    model = model.to(dtype).train()
    plan = fxprune.plan(model, x.to(dtype), target=Target(macs=0.5))
    assert plan.target.got == macs(plan.apply(model), x.to(dtype)) and model.training


@pytest.mark.parametrize("given, said", [
    ({}, "one of params=, macs= and latency=, not None"),
    ({"params": 0.5, "macs": 0.5}, "not params and macs"),
    ({"params": 0}, "params=0"), ({"params": 1.0}, "params=1.0"), ({"params": 2.5}, "integer"),
    ({"params": True}, "True"), ({"params": "2M"}, "2M"), ({"macs": -1}, "macs=-1"),
    ({"macs": float("nan")}, "nan"), ({"macs": float("inf")}, "inf"),
    ({"latency": 2}, "with its unit"), ({"latency": "2"}, "'2ms'"), ({"latency": "0ms"}, "0ms"),
    ({"latency": "1.2.3ms"}, "1.2.3ms"), ({"macs": 0.5, "table": 3}, "table="),
])  # fmt: skip
def test_targets_that_mean_nothing_are_refused(given, said):
    with pytest.raises(fxprune.SettingError, match=said):
        Target(**given)


def test_a_target_and_a_sparsity_are_refused_together():
    model, x = nn.Sequential(nn.Linear(8, 16), nn.Linear(16, 4)), torch.randn(1, 8)
    before = Snapshot(model)
    with pytest.raises(fxprune.SettingError, match=r"sparsity=0.5 and target=Target\(params=0.5\)"):
        fxprune.prune(model, x, sparsity=0.5, target=Target(params=0.5))
    with pytest.raises(fxprune.SettingError, match=r"Target\(params=0.5\)"):
        fxprune.plan(model, x, target=0.5)
    assert before.differences() == []
