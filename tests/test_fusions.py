"""Fusions: runs of nodes that the plan names, along which constants are folded, and near misses."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import fxprune

from .oracle import check
from .test_trace import Net

pytestmark = pytest.mark.filterwarnings("ignore::fxprune.PruningWarning")

C1, C2 = (3, 8, 3), (8, 4, 3)


def image():
    return torch.randn(2, 3, 8, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(1))


def sequence():
    return torch.randn(2, 5, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(1))


def found(plan):
    return [(f.name, f.nodes) for f in plan.fusions if not f.name.endswith("output")]


def conv_to_linear(*middle, size):
    return nn.Sequential(nn.Conv2d(*C1), *middle, nn.Linear(8 * size, 5))


@pytest.mark.parametrize("name, net", [
    ("conv-conv", nn.Sequential(nn.Conv2d(*C1), nn.Conv2d(*C2))),
    ("conv-act-conv", nn.Sequential(nn.Conv2d(*C1), nn.GELU(), nn.Conv2d(*C2))),
    ("conv-pool-act-conv",
     nn.Sequential(nn.Conv2d(*C1), nn.MaxPool2d(2), nn.Sigmoid(), nn.Conv2d(*C2))),
    ("conv-act-pool-conv",
     nn.Sequential(nn.Conv2d(*C1), nn.Sigmoid(), nn.AvgPool2d(2), nn.Conv2d(*C2))),
    ("conv-norm-act-conv",
     nn.Sequential(nn.Conv2d(*C1), nn.BatchNorm2d(8), nn.Sigmoid(), nn.Conv2d(*C2))),
    ("conv-flatten-linear", conv_to_linear(nn.Flatten(), size=36)),
    ("conv-act-flatten-linear", conv_to_linear(nn.Sigmoid(), nn.Flatten(), size=36)),
    ("conv-pool-flatten-linear", conv_to_linear(nn.MaxPool2d(2), nn.Flatten(), size=9)),
    ("conv-act-pool-flatten-linear",
     conv_to_linear(nn.Sigmoid(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), size=1)),
    ("conv-pool-act-flatten-linear",
     conv_to_linear(nn.MaxPool2d(2), nn.Sigmoid(), nn.Flatten(), size=9)),
    ("linear-linear", nn.Sequential(nn.Flatten(), nn.Linear(192, 8), nn.Linear(8, 4))),
    ("linear-act-linear",
     nn.Sequential(nn.Flatten(), nn.Linear(192, 8), nn.Sigmoid(), nn.Linear(8, 4))),
], ids=lambda value: value if isinstance(value, str) else "")  # fmt: skip
def test_a_run_of_layers_is_found_once_in_order_and_pruned_exactly(name, net):
    plan, _ = check(net, image())
    start = 1 if isinstance(net[0], nn.Flatten) else 0
    assert found(plan) == [(name, tuple(str(i) for i in range(start, len(net))))]
    assert next(g for g in plan.groups if g.name == str(start)).kept == 4


class Last(nn.Sequential):
    def forward(self, x):
        return self[0](x[0])[0]


def made_of(run):
    """A chain of layers of these kinds."""
    layers, width = [], 3
    for at, kind in enumerate(run):
        first = at == 0
        layers += {
            "conv": [nn.Conv2d(width, 8 if first else 4, 3, padding=1)],
            "linear": [nn.LazyLinear(8 if first else 4)],
            "act": [nn.Sigmoid()],
            "pool": [nn.MaxPool2d(2)],
            "norm": [nn.BatchNorm2d(8) if run[0] == "conv" else nn.BatchNorm1d(8)],
            "flatten": [nn.Flatten()],
            "output": [],
        }[kind]
        width = 8
    return nn.Sequential(*layers)


RUNS = [r for r in fxprune.rules.registry.runs() if r[0] in ("conv", "linear")]


@pytest.mark.parametrize("run", RUNS, ids=lambda run: "-".join(run))
def test_every_registered_run_is_found_where_it_stands(run):
    net, x = made_of(run), image() if run[0] == "conv" else sequence()[:, 0]
    net.double()(x)
    plan, _ = check(net, x, shrinks=run[-1] != "output")
    assert plan.fusions[0].name == "-".join(run)


@pytest.mark.parametrize("norm", [False, True])
def test_lstm_getitem_linear_with_and_without_layer_norm(norm):
    def forward(s, x):
        y = s.lstm(x)[0]
        return s.fc(s.norm(y) if norm else y)

    net = Net(forward, lstm=nn.LSTM(6, 8, batch_first=True), norm=nn.LayerNorm(8),
              fc=nn.Linear(8, 3))  # fmt: skip
    plan, small = check(net, sequence())
    middle = ("norm",) if norm else ()
    name = "lstm-getitem-layernorm-linear" if norm else "lstm-getitem-linear"
    assert found(plan) == [(name, ("lstm", "getitem", *middle, "fc"))]
    assert small.lstm.hidden_size == 4 and small.fc.in_features == 4
    assert plan.approximate == (["lstm"] if norm else [])


@pytest.mark.parametrize("flatten", [
    lambda y: y.flatten(1), lambda y: torch.flatten(y, 1), lambda y: y.view(y.size(0), -1),
    lambda y: y.reshape(y.shape[0], -1),
], ids=["method", "function", "view", "reshape"])  # fmt: skip
def test_functions_count_as_the_modules_they_stand_for(flatten):
    def forward(s, x):
        return s.fc(flatten(F.avg_pool2d(F.silu(s.conv(x)), 2)))

    plan, small = check(Net(forward, conv=nn.Conv2d(*C1), fc=nn.Linear(72, 5)), image())
    assert [name for name, _ in found(plan)] == ["conv-act-pool-flatten-linear"]
    assert small.fc.in_features == 36


def test_dropout_and_identity_do_not_hide_a_fusion():
    net = nn.Sequential(nn.Conv2d(*C1), nn.Dropout(), nn.ReLU(), nn.Identity(), nn.Conv2d(*C2))
    assert found(fxprune.plan(net, image().float())) == [("conv-act-conv", ("0", "2", "4"))]


def test_a_run_is_found_once_whatever_stands_before_it():
    net = nn.Sequential(nn.Flatten(), nn.Linear(3, 4), nn.Dropout(), nn.Linear(4, 4), nn.ReLU(),
                        nn.Dropout(), nn.Linear(4, 2))  # fmt: skip
    names = [name for name, _ in found(fxprune.plan(net, torch.randn(2, 3)))]
    assert sorted(names) == sorted(set(names))


def test_an_intermediate_with_two_readers_ends_the_run():
    def forward(s, x):
        y = torch.sigmoid(s.a(x))
        return s.b(y) + s.c(y)

    net = Net(forward, a=nn.Conv2d(*C1), b=nn.Conv2d(*C2), c=nn.Conv2d(*C2))
    plan, small = check(net, image())
    assert found(plan) == []
    assert small.a.out_channels == small.b.in_channels == small.c.in_channels == 4


def test_an_intermediate_that_is_also_an_output_ends_the_run():
    def forward(s, x):
        y = torch.sigmoid(s.a(x))
        return s.b(y), y

    plan = fxprune.plan(Net(forward, a=nn.Conv2d(*C1), b=nn.Conv2d(*C2)), image().float())
    assert found(plan) == [] and "a" in dict(plan.skipped)


@pytest.mark.parametrize("name, net", [
    ("conv-output", nn.Sequential(nn.Conv2d(*C1))),
    ("conv-act-output", nn.Sequential(nn.Conv2d(*C1), nn.ReLU())),
    ("linear-act-output", nn.Sequential(nn.Linear(8, 4), nn.Tanh())),
    ("linear-output", nn.Sequential(nn.Linear(8, 4))),
    ("lstm-getitem-output", Last(nn.LSTM(8, 4))),
], ids=lambda value: value if isinstance(value, str) else "")  # fmt: skip
def test_a_run_that_ends_in_the_output_is_named_so_and_stays_whole(name, net):
    plan = fxprune.plan(net, image().float())
    names = [str(i) for i in range(len(net))] + ["getitem"] * isinstance(net, Last)
    assert [(f.name, f.nodes) for f in plan.fusions] == [(name, (*names, "output"))]
    assert plan.kept == {}
