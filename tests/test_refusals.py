"""What cannot be done is refused by an error of one family: what, where and what to do instead."""

from __future__ import annotations

import inspect
import warnings
from pathlib import Path

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn import functional as F

import fxprune
from fxprune import errors
from fxprune.schedules import MaskScheduler

from .oracle import check
from .snapshot import Snapshot
from .test_trace import Net

X = torch.ones(2, 6)


def small_net(*layers):
    return nn.Sequential(*(layers or (nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 4))))


@pytest.mark.parametrize("step", ["mask", "apply"])
def test_a_plan_refuses_a_model_it_does_not_fit_and_leaves_it_alone(step):
    plan = fxprune.plan(small_net(), X)
    for other, said in [
        (small_net(nn.Linear(6, 10), nn.ReLU(), nn.Linear(10, 4)), r"0.weight has shape \(10, 6\)"),
        (small_net(nn.Linear(6, 8)), "2.weight"),
        (plan.apply(small_net()), "make a new plan|Make a new plan"),
    ]:
        before = Snapshot(other)
        with pytest.raises(fxprune.PlanError, match=said):
            getattr(plan, step)(other)
        assert before.differences() == []


def fake(make):
    with FakeTensorMode():
        return make()


def wrong(problem):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return {
            "no module": lambda: "resnet18",
            "class": lambda: nn.ReLU,
            "parallel": lambda: nn.DataParallel(small_net()),
            "scripted": lambda: torch.jit.script(small_net()),
            "scripted part": lambda: small_net(torch.jit.script(nn.Linear(6, 4))),
            "quantized": lambda: torch.ao.quantization.quantize_dynamic(small_net(), {nn.Linear}),
            "compiled": lambda: torch.compile(small_net()),
            "lazy": lambda: small_net(nn.LazyLinear(4)),
            "compiled part": lambda: small_net(torch.compile(nn.Linear(6, 4))),
            "meta": lambda: nn.Linear(6, 4, device="meta"),
            "fake": lambda: fake(small_net),
        }[problem]()


@pytest.mark.parametrize("problem, said", [
    ("no module", "not a torch.nn.Module"), ("class", "pass an instance"),
    ("parallel", "model.module"), ("scripted", "scripted from"), ("scripted part", "'0'.*scripted"),
    ("quantized", "'0'.*prune first, then quantize"), ("compiled", "_orig_mod"),
    ("compiled part", "'0'.*model.0._orig_mod in its place"), ("fake", "outside of the Fake"),
    ("lazy", "run the model once"), ("meta", r"meta device.*hooks"),
])  # fmt: skip
def test_models_that_cannot_be_pruned_are_refused_with_what_to_do(problem, said):
    with pytest.raises(fxprune.ModelError, match=said):
        fxprune.prune(wrong(problem), X)


def test_a_model_in_flat_tensors_is_refused_before_anything_is_copied(tmp_path):
    fsdp = pytest.importorskip("torch.distributed.fsdp")
    store = torch.distributed.FileStore(str(tmp_path / "store"), 1)
    torch.distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
    try:
        net = fsdp.FullyShardedDataParallel(small_net(), device_id=torch.device("cpu"))
        with pytest.raises(fxprune.ModelError, match="prune first, then wrap"):
            fxprune.prune(net, X)
    finally:
        torch.distributed.destroy_process_group()


SETTINGS = [
    ({"sparsity": 1.0}, r"1.0.*\[0, 1\)"), ({"sparsity": -0.1}, "-0.1"),
    ({"sparsity": True}, "True"), ({"sparsity": "a"}, "'a'"),
    ({"sparsity": float("nan")}, "nan"), ({"sparsity": "half"}, "half"),
    ({"sparsity": {"0": 1.0}}, "1.0"), ({"sparsity": {"0": "a"}}, "'a'"),
    ({"sparsity": {3: 0.5}}, "sparsity: 3"), ({"sparsity": {"00": 0.5}}, "did you mean '0'"),
    ({"ignore": ["00"]}, "did you mean '0'"), ({"ignore": "layer*"}, "named_modules"),
    ({"ignore": nn.Conv2d}, "Conv2d"), ({"ignore": [nn.Linear(1, 1)]}, "Linear"),
    ({"ignore": 3}, "ignore"), ({"ignore": [3]}, "ignore: 3"),
    ({"importance": "l3"}, "l3.*l2"), ({"importance": 3}, "importance=3"),
    ({"importance": lambda group: [1.0]}, "group '0.*8 units"),
    ({"importance": lambda group: [float("nan")] * 8}, "NaN for group '0"),
    ({"importance": lambda group: "a"}, "importance"),
    ({"round_to": 0}, "round_to=0"), ({"round_to": 2.5}, "2.5"), ({"round_to": True}, "True"),
    ({"bias": "keep"}, "'drop' or 'expected'"), ({"attention": "rows"}, "'heads'"),
    ({"exact": 1}, "exact=1 is neither"), ({"outputs": ()}, "neither names nor places"),
]  # fmt: skip


@pytest.mark.parametrize("settings, said", SETTINGS, ids=[str(i) for i in range(len(SETTINGS))])
def test_settings_that_mean_nothing_are_refused_by_name_and_value(settings, said):
    model = small_net()
    before = Snapshot(model)
    with pytest.raises(fxprune.SettingError, match=said):
        fxprune.prune(model, X, **settings)
    assert before.differences() == []


@pytest.mark.parametrize("x", [torch.ones(2, 5), "a", (), {"y": 1}, None], ids=range(5))
def test_an_input_that_does_not_run_is_told_with_the_models_own_error(x):
    with pytest.raises(fxprune.InputError, match="Sequential does not run") as caught:
        fxprune.prune(small_net(), x)
    assert caught.value.__cause__ is not None


@pytest.mark.parametrize("inplace", [False, True])
def test_a_model_with_nothing_to_prune_comes_back_equal_with_a_warning_that_says_why(inplace):
    model, x = nn.Linear(6, 4), X
    before = Snapshot(model)
    with pytest.warns(fxprune.PruningWarning, match="output of the model"):
        result = fxprune.prune(model, x, inplace=inplace)
    assert (result is model) == inplace
    assert torch.equal(result(x), model(x))
    # That it was pruned, though of nothing, is noted: it can be saved.
    assert before.differences() == ([": _fxprune_steps"] if inplace else [])


def test_every_error_is_of_one_family_and_exported():
    found = [c for _, c in inspect.getmembers(errors, inspect.isclass)]
    assert len(found) >= 7
    for error in found:
        assert issubclass(error, (fxprune.PruningError, fxprune.PruningWarning))
        assert getattr(fxprune, error.__name__) is error and error.__doc__
    assert issubclass(fxprune.SettingError, ValueError)


def net_and_plan():
    net, x = small_net(nn.Linear(6, 32), nn.ReLU(), nn.Linear(32, 4)).eval(), torch.randn(2, 6)
    return net, x, fxprune.plan(net, x)


@pytest.mark.parametrize("use", [
    lambda plan, model, path: plan.apply(model), lambda plan, model, path: plan.mask(model),
    lambda plan, model, path: plan.to_html(path, model=model),
])  # fmt: skip
@pytest.mark.parametrize("wrap, said", [
    (lambda m: torch.compile(m, backend="eager"), "is compiled"),
    (nn.DataParallel, "is wrapped in DataParallel"),
])  # fmt: skip
def test_a_plan_asks_for_the_model_inside(use, wrap, said, tmp_path):
    net, _, plan = net_and_plan()
    with pytest.raises(fxprune.ModelError, match=said):
        use(plan, wrap(net), tmp_path / "plan.html")


@pytest.mark.parametrize("call, said", [
    (lambda m, x: fxprune.plan(m, x, patterns=3), "patterns=3"),
    (lambda m, x: fxprune.compact(m, x, patterns=nn.Linear), "patterns="),
    (lambda m, x: fxprune.compact(m, x, verify=3), "verify=3"),
    (lambda m, x: fxprune.plan(m, x).apply(m, inplace="no"), "inplace='no'"),
    (lambda m, x: fxprune.plan(m, x, calibration_mode="bogus"), "calibration_mode='bogus'"),
    (lambda m, x: fxprune.plan(m, x, calibration_batches=-3), "calibration_batches=-3"),
    (lambda m, x: fxprune.plan(m, x, calibration_batches=3), "pass both"),
    (lambda m, x: MaskScheduler([(m[0], "weight")], 0.5), "no function of the step"),
    (lambda m, x: fxprune.plan(m, x, calibration_mode="parallel"), "pass both"),
    (lambda m, x: fxprune.trace(None, x), "model is a NoneType"),
    (lambda m, x: fxprune.trace(nn.Linear, x), "pass an instance"),
    (lambda m, x: fxprune.plan(m, x).save(None), "path is a NoneType"),
    (lambda m, x: fxprune.plan(m, x).to_html(None), "path is a NoneType"),
    (lambda m, x: fxprune.PruningPlan.load(None, m), "path is a NoneType"),
    (lambda m, x: fxprune.plan(m, x).draw(3), "path is a int"),
    (lambda m, x: fxprune.plan(m, x).draw(Path("a.xyz")), "path='a.xyz' does not end as pictures"),
    (lambda m, x: fxprune.plan(m, x).proximal_step(m, "x"), "amount='x'"),
    (lambda m, x: fxprune.plan(m, x, ignore=[m[0].weight]), "ignore: a tensor"),
    (lambda m, x: fxprune.plan(m, x, ignore={"0": True}), "ignore=.*is not a name, a glob"),
    (lambda m, x: fxprune.plan(m, x).penalty(m, grow=float("nan")), "grow=nan"),
    (lambda m, x: fxprune.Pruner(m, x, target=0.5), "target=0.5"),
    (lambda m, x: fxprune.Pruner(m, x, also=3), "also=3"),
    (lambda m, x: fxprune.Pruner(m, x, calibration=iter([x])), "an iterator"),
    (lambda m, x: fxprune.prune(m, x * torch.nan), "no finite number"),
])  # fmt: skip
def test_what_means_nothing_is_refused_before_it_is_used(call, said):
    net, x, _ = net_and_plan()
    with pytest.raises(fxprune.PruningError, match=said):
        call(net, x)


def test_a_default_device_is_that_of_the_users_code_alone():
    net, x, plan = net_and_plan()
    with torch.device("meta"):
        small = [fxprune.prune(net, x), plan.apply(net), plan.mask(net), fxprune.compact(net, x)]
        assert torch.empty(0).is_meta
    assert not any(p.is_meta for m in small for p in m.parameters())
    assert torch.equal(small[0](x), small[1](x))


@pytest.mark.parametrize("change", [
    {"history": [{"a": 1}]}, {"history": None}, {"choices": None}, {"kept": None}, {"history": []},
    {"asked": ["a"]}, {"asked": None}, {"asked": []}, {"kept": {"0.weight": 3}},
])  # fmt: skip
def test_a_state_in_another_form_changes_nothing(change):
    net, x, _ = net_and_plan()
    done = fxprune.Pruner(net, x, sparsity=0.5, schedule="once")
    done.step()
    fresh, _, _ = net_and_plan()
    pruner = fxprune.Pruner(fresh, x, sparsity=0.5, schedule="once")
    before = Snapshot(fresh)
    with pytest.raises(fxprune.PlanError, match="no state of Pruner"):
        pruner.load_state_dict(done.state_dict() | change)
    assert before.differences() == [] and pruner.history == []


class Shared(nn.Module):
    """Weights of layers, which other code uses in another layout: before the layers are called, or
    after it."""

    def __init__(self, kind, before):
        super().__init__()
        self.kind, self.before = kind, before
        self.a, self.grouped = nn.Conv2d(3, 4, 1), nn.Conv2d(4, 8, 3, groups=2)
        self.lstm = nn.LSTM(4, 6, batch_first=True)
        self.b, self.c = nn.Linear(8 if kind == "grouped" else 24, 4), nn.Linear(8, 4)
        self.d = nn.Linear(6, 8)

    def other(self, y):
        if self.kind == "grouped":
            return self.b(
                F.conv2d(y.repeat(1, 2, 1, 1), self.grouped.weight, groups=4).mean((2, 3))
            )
        return self.b(F.linear(y.mean((2, 3)), self.lstm.weight_ih_l0))

    def layer(self, y):
        if self.kind == "grouped":
            return self.c(self.grouped(y).mean((2, 3)))
        return self.c(self.d(self.lstm(y.flatten(2).transpose(1, 2))[0][:, -1]).relu())

    def forward(self, x):
        y = self.a(x).relu()
        first, second = (self.other, self.layer) if self.before else (self.layer, self.other)
        return first(y) + second(y)


@pytest.mark.parametrize("before", [False, True])
@pytest.mark.parametrize("kind", ["grouped", "lstm"])
def test_a_weight_that_is_used_in_two_layouts_stays_as_it_is(kind, before):
    x = torch.randn(2, 3, 5, 5, dtype=torch.float64)
    plan, small = check(Shared(kind, before), x, shrinks=False)
    name = "grouped" if kind == "grouped" else "lstm"
    reasons = [why for what, why in plan.skipped if what == name]
    assert reasons and all("in two layouts" in why for why in reasons)
    assert (small.grouped.groups, small.lstm.hidden_size) == (2, 6)


class Headed(nn.Module):
    """A classifier whose code holds a size."""

    def __init__(self):
        super().__init__()
        self.body, self.head = nn.Linear(6, 8), nn.Linear(8, 10)

    def forward(self, x):
        return self.head(torch.relu(self.body(x)).view(-1, 8))


def test_a_new_head_behind_a_forward_that_was_written_is_refused_while_saving(tmp_path):
    small = fxprune.prune(Headed().eval(), torch.randn(2, 6))
    small.head = nn.Linear(small.head.in_features, 3)
    with pytest.raises(fxprune.ModelError, match="this model has changed since"):
        fxprune.save(small, tmp_path / "small.safetensors")


def test_layers_in_a_list_whose_parameters_are_registered_elsewhere_stay():
    class Blocks(nn.Module):
        def __init__(self):
            super().__init__()
            self.blocks = [nn.Sequential(nn.Linear(3, 8), nn.ReLU(), nn.Linear(8, 2))]
            self.own = nn.ParameterList(p for b in self.blocks for p in b.parameters())

        def forward(self, x):
            return self.blocks[0](x)

    plan, _ = check(Blocks().double(), torch.randn(4, 3, dtype=torch.float64), shrinks=False)
    assert any("also kept in blocks" in why for _, why in plan.skipped)


@pytest.mark.parametrize("seed", range(3))
def test_what_is_counted_stays_where_the_code_goes_by_what_comes_of_it(seed):
    def forward(s, x):
        x = s.a(x)
        way = x.mean((0, 2)).argmax().item()
        return s.b(s.norm(x) * (1 + way))

    torch.manual_seed(seed)
    net = Net(forward, a=nn.Linear(3, 8), norm=nn.LayerNorm(8), b=nn.Linear(8, 2))
    plan, _ = check(net, torch.randn(2, 9, 3, dtype=torch.float64), shrinks=False)
    assert "goes by values that come of it" in dict(plan.skipped)["a"]


def test_a_value_that_has_only_the_type_of_what_is_counted_does_not_go_by_it():
    def forward(s, x):
        h = s.a(x)
        h = h / h.norm(dim=-1, keepdim=True)
        mask = torch.full((9, 9), 1.0, dtype=h.dtype, device=h.device).tril()
        return s.b(mask @ h if mask.sum().item() > 0 else h)

    net = Net(forward, a=nn.Linear(3, 8), b=nn.Linear(8, 2))
    plan, small = check(net, torch.randn(2, 9, 3, dtype=torch.float64))
    assert small.a.out_features == 4 and plan.approximate


@pytest.mark.parametrize("of", [
    lambda m, v: torch.distributions.Normal(m, v.exp()).mean,
    lambda m, v: torch.distributions.Gumbel(m, v.exp()).mean,
    lambda m, v: torch.distributions.Beta(m.exp(), v.exp()).mean,
], ids=["normal", "gumbel", "beta"])  # fmt: skip
def test_a_distribution_that_checks_its_values_is_no_obstacle(of):
    def forward(s, x):
        h = s.a(x)
        return s.c(of(h / h.norm(dim=-1, keepdim=True), s.b(x)))

    net = Net(forward, a=nn.Linear(5, 8), b=nn.Linear(5, 8), c=nn.Linear(8, 3))
    plan, small = check(net, torch.randn(4, 5, dtype=torch.float64))
    assert small.a.out_features == small.b.out_features == 4


def test_an_input_of_another_kind_is_refused_in_the_words_of_the_model_alone():
    net = nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU(), nn.Conv2d(4, 2, 3))
    for given in ([torch.ones(1, 3, 8, 8)], torch.ones(1, 3, 8, 8).numpy()):
        with pytest.raises(fxprune.InputError, match=r"\. Pass what the model takes") as caught:
            fxprune.plan(net, given)
        said = str(caught.value)
        assert "Traced" not in said and "expected one of" not in said and ".." not in said
