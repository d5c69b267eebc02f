"""compact: units that are dead already go, and no output changes."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn.utils import prune as torch_prune

import fxprune

from .oracle import awake, difference, run, state
from .test_trace import Net

pytestmark = pytest.mark.filterwarnings("ignore::fxprune.PruningWarning")


def image(size=9):
    g = torch.Generator().manual_seed(1)
    return torch.randn(2, 3, size, size, dtype=torch.float64, generator=g)


def compacted(model, x=None, **settings):
    """The compact model, after all checks."""
    x = image() if x is None else x
    before, outputs = state(model), run(model, x)
    small = fxprune.compact(model, x, **settings)
    assert difference(outputs, run(small, x)) < 1e-9
    other = torch.randn_like(x) * 3  # and on whatever else it is given
    assert difference(run(model, other), run(small, other)) < 1e-9
    assert all(torch.equal(before[k], v) for k, v in model.state_dict().items())
    assert type(small) is type(model)
    return small


def kill(layer, *rows, bias=False):
    with torch.no_grad():
        layer.weight[list(rows)] = 0
        if bias:
            layer.bias[list(rows)] = 0


def plain(padding=0, act=nn.Sigmoid):
    return awake(nn.Sequential(nn.Conv2d(3, 8, 3), act(), nn.Conv2d(8, 6, 3, padding=padding),
                               act(), nn.Conv2d(6, 4, 1)))  # fmt: skip


def test_dead_filters_go_and_what_they_say_stays():
    net = plain()
    kill(net[0], 1, 4, 5)
    small = compacted(net)
    assert (small[0].out_channels, small[2].in_channels, small[2].out_channels) == (5, 5, 6)


def test_before_a_padded_layer_one_dead_filter_carries_their_constants():
    net = plain(padding=1)
    kill(net[0], 1, 4, 5)
    assert compacted(net)[0].out_channels == 6
    kill(net[0], 1, 4, 5, bias=True)
    silent = plain(padding=1, act=nn.Tanh)
    kill(silent[0], 1, 4, 5, bias=True)
    assert compacted(silent)[0].out_channels == 5, "none where they say nothing"


def test_a_negative_constant_dies_in_a_relu():
    net = plain(padding=1, act=nn.ReLU)
    kill(net[0], 1, 4)
    with torch.no_grad():
        net[0].bias[[1, 4]] = -torch.rand(2, dtype=torch.float64)
    assert compacted(net)[0].out_channels == 6


def test_a_model_without_dead_units_stays_as_it_is():
    net = plain()
    assert compacted(net)[0].out_channels == 8


@pytest.mark.parametrize("beta", [True, False], ids=["beta", "no beta"])
def test_channels_that_a_norm_scales_by_zero_are_dead(beta):
    net = awake(nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.Sigmoid(),
                              nn.Conv2d(8, 4, 3)))  # fmt: skip
    with torch.no_grad():
        net[1].weight[[0, 3, 7]] = 0
        net[1].bias[[0, 3, 7]] *= beta
    small = compacted(net)
    assert small[0].out_channels == small[1].num_features == 5


def test_a_norm_beside_another_reader_does_not_kill():
    def forward(s, x):
        y = s.a(x)
        return s.b(s.norm(y)) + s.c(y)

    net = awake(Net(forward, a=nn.Conv2d(3, 8, 3), norm=nn.BatchNorm2d(8), b=nn.Conv2d(8, 4, 1),
                    c=nn.Conv2d(8, 4, 1)))  # fmt: skip
    with torch.no_grad():
        net.norm.weight[[0, 3]] = 0
    assert compacted(net).a.out_channels == 8


def residual():
    def forward(s, x):
        y = torch.sigmoid(s.a(x))
        return s.c(y + torch.sigmoid(s.b(y)))

    return awake(Net(forward, a=nn.Conv2d(3, 8, 3), b=nn.Conv2d(8, 8, 1), c=nn.Conv2d(8, 4, 1)))


def test_of_a_coupled_group_only_what_is_dead_in_every_branch_goes():
    net = residual()
    kill(net.a, 0, 1, 2)
    assert compacted(net).a.out_channels == 8
    kill(net.b, 1, 2, 3)
    small = compacted(net)
    assert small.a.out_channels == small.b.out_channels == small.c.in_channels == 6


def test_groups_of_a_convolution_lose_equally_many():
    net = awake(nn.Sequential(nn.Conv2d(3, 8, 3), nn.Sigmoid(), nn.Conv2d(8, 8, 3, groups=2),
                              nn.Sigmoid(), nn.Conv2d(8, 4, 1)))  # fmt: skip
    kill(net[2], 0, 1, 6)  # two of the first group, one of the second
    assert compacted(net)[2].out_channels == 6


def test_a_layer_whose_units_are_all_dead_keeps_one():
    net = plain()
    kill(net[0], *range(8))
    assert compacted(net)[0].out_channels == 1


def test_a_constant_that_is_multiplied_by_what_varies_is_not_dead():
    def forward(s, x):
        return s.c(torch.sigmoid(s.a(x)) * s.b(x))

    net = awake(Net(forward, a=nn.Conv2d(3, 8, 3), b=nn.Conv2d(3, 8, 3), c=nn.Conv2d(8, 4, 1)))
    kill(net.a, 0, 1)
    assert compacted(net).a.out_channels == 8
    kill(net.b, 0, 1, bias=True)  # 0 whatever it is multiplied by
    assert compacted(net).a.out_channels == 6


def test_a_layer_norm_over_them_keeps_them():
    net = awake(nn.Sequential(nn.Linear(6, 8), nn.LayerNorm(8), nn.Linear(8, 3)))
    kill(net[0], 0, 1)
    x = torch.randn(4, 6, dtype=torch.float64)
    assert compacted(net, x)[0].out_features == 8


def test_dead_hidden_units_of_a_recurrent_layer_go():
    net = awake(Net(lambda s, x: s.fc(s.lstm(x)[0]), lstm=nn.LSTM(6, 8, batch_first=True),
                    fc=nn.Linear(8, 3)))  # fmt: skip
    gone = [1, 5]
    with torch.no_grad():
        for name, p in net.lstm.named_parameters():
            if "hh" in name or "ih" in name:
                p.view(4, 8, *p.shape[1:])[:, gone] = 0
    assert compacted(net, torch.randn(2, 5, 6, dtype=torch.float64)).lstm.hidden_size == 6


def test_what_torch_prune_has_zeroed_goes_and_its_masks_too():
    net = plain(padding=1)
    torch_prune.ln_structured(net[0], "weight", amount=0.5, n=2, dim=0)
    torch_prune.l1_unstructured(net[2], "weight", amount=0.3)
    small = compacted(net)
    assert small[0].out_channels == 5  # one carries the biases
    assert not torch_prune.is_pruned(small) and torch_prune.is_pruned(net)
    assert float((small[2].weight == 0).double().mean()) > 0.2


def test_what_a_sparsifier_has_zeroed_goes():
    sparsity = pytest.importorskip("torch.ao.pruning")
    net = plain()
    pruner = sparsity.WeightNormSparsifier(sparsity_level=0.5, sparse_block_shape=(3, 9),
                                           zeros_per_block=27)  # fmt: skip
    pruner.prepare(net, [{"tensor_fqn": "0.weight"}])
    with torch.no_grad():
        net[0].parametrizations.weight[0].mask[[1, 2]] = 0
    small = compacted(net)
    assert small[0].out_channels <= 6 and not hasattr(small[0], "parametrizations")


def test_a_masked_model_of_a_plan_becomes_what_the_plan_would_make_of_it():
    net = plain(padding=1)
    plan = fxprune.plan(net, image(), exact=True)
    small = compacted(plan.mask(net))
    direct = plan.apply(net)
    shapes = [{k: p.shape for k, p in m.named_parameters()} for m in (small, direct)]
    assert shapes[0] == shapes[1]


def test_layers_that_are_ignored_stay():
    net = plain()
    kill(net[0], 1, 4)
    for ignored in ("0", net[0], [net[0]]):
        assert compacted(net, ignore=ignored)[0].out_channels == 8


def test_layers_inside_of_what_is_ignored_stay():
    net = plain()
    net[0] = nn.Sequential(net[0])
    kill(net[0][0], 1, 4)
    assert compacted(net)[0][0].out_channels < 8
    assert compacted(net, ignore="0")[0][0].out_channels == 8


@pytest.mark.parametrize("padding", [0, 1])
def test_a_norm_goes_on_scaling_what_dead_filters_say(padding):
    net = awake(nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.Sigmoid(),
                              nn.Conv2d(8, 4, 3, padding=padding)))  # fmt: skip
    kill(net[0], 1, 4, 5)
    assert compacted(net)[0].out_channels == 5 + padding
