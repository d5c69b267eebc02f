"""Kinds of code that broke earlier versions, each under the oracles."""

from __future__ import annotations

import functools
import types

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.nn.utils.parametrizations import weight_norm

import fxprune
from fxprune.proving.proof import largest_error

from .oracle import check
from .test_constructs import Net, image


def rows():
    return torch.randn(3, 4, dtype=torch.float64)


@pytest.mark.parametrize("name", ["where", "masked_fill", "and", "not", "int", "mask index"])
def test_booleans_and_integers_made_of_activations(name):
    def forward(s, x):
        h = s.a(x)
        if name == "where":
            h = torch.where(h > 0, h, h * 0.1)
        elif name == "masked_fill":
            h = h.masked_fill(h < 0, 0.1)
        elif name == "and":
            h = h * ((h > 0) & (h < 1))
        elif name == "not":
            h = h * (~(h < 0))
        elif name == "int":
            h = (h * 10).int().double()
        else:
            h = h.clone()
            h[h < 0] *= 0.1
        return s.b(h)

    check(Net(forward, a=nn.Linear(4, 8), b=nn.Linear(8, 2)), rows(), shrinks=name != "mask index")


class Standardized(nn.Conv2d):
    """A convolution whose weight has no mean: it is computed in the forward."""

    def forward(self, x):
        w = self.weight
        return F.conv2d(x, w - w.mean((1, 2, 3), keepdim=True), self.bias)


def test_weight_standardisation():
    net = nn.Sequential(nn.Conv2d(3, 8, 3), Standardized(8, 8, 3), nn.Sigmoid(), nn.Conv2d(8, 2, 1))
    plan, small = check(net, image())
    assert small[1].weight.shape[0] == 4


class StandardizedInside(nn.Conv2d):
    def _conv_forward(self, x, weight, bias):
        return super()._conv_forward(x, weight - weight.mean((1, 2, 3), keepdim=True), bias)


class Scaled(nn.Linear):
    """A linear layer whose weight is a property."""

    def __init__(self, reads, makes):
        super().__init__(reads, makes)
        self.raw = nn.Parameter(self._parameters.pop("weight").detach())
        self.scale = nn.Parameter(torch.rand(makes, 1) + 0.5)

    @property
    def weight(self):
        return self.raw * self.scale


class OfAnyRank(nn.BatchNorm2d):
    def _check_input_dim(self, x):
        pass


def test_a_subclass_that_computes_what_the_forward_of_its_base_reads_is_followed_inside():
    net = nn.Sequential(
        nn.Conv2d(3, 8, 3), StandardizedInside(8, 8, 3), nn.Sigmoid(), nn.Conv2d(8, 2, 1)
    )
    assert check(net, image())[1][1].weight.shape[0] == 4
    net = nn.Sequential(nn.Linear(4, 8), nn.Sigmoid(), Scaled(8, 8), nn.Sigmoid(), nn.Linear(8, 2))
    plan, small = check(net, rows())
    assert small[2].weight.shape == (4, 4)


def test_a_subclass_with_checks_of_its_own_is_the_layer():
    net = nn.Sequential(nn.Conv2d(3, 8, 3), OfAnyRank(8), nn.Sigmoid(), nn.Conv2d(8, 2, 1))
    assert check(net, image())[1][1].num_features == 4


def test_layer_norm_over_a_stack_is_left_whole():
    def forward(s, x):
        return s.o(s.ln(torch.stack([s.a(x), s.g(x)], 1)).flatten(1))

    layers = {"a": nn.Linear(4, 8), "g": nn.Linear(4, 8), "ln": nn.LayerNorm(8)}
    check(Net(forward, **layers, o=nn.Linear(16, 2)), rows(), shrinks=False)


def test_an_empty_sequential_is_an_identity():
    net = nn.Sequential(nn.Linear(4, 8), nn.Sequential(), nn.Sigmoid(), nn.Linear(8, 2))
    plan, small = check(net, rows())
    assert small[0].out_features == 4


def test_a_number_computed_from_a_width_stays_what_it_was():
    class Scaled(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b = nn.Linear(4, 8), nn.Linear(8, 2)

        def forward(self, x):
            y = self.a(x)
            return self.b(torch.sigmoid(y / y.shape[1]))

    plan, small = check(Scaled(), rows())
    assert small.a.out_features == 4 and "y / 8)" in plan.code[""].source


def test_a_constant_passes_through_a_mean_over_positions():
    def forward(s, x):
        return s.b(torch.sigmoid(s.a(x)).mean([2, 3]))

    plan, small = check(Net(forward, a=nn.Conv2d(3, 8, 1), b=nn.Linear(8, 2)), image())
    assert not plan.notes


def test_carriers_are_not_asked_of_weights_that_cannot_be_zero():
    net = nn.Sequential(
        nn.Conv1d(1, 8, 3, padding=1), nn.Sigmoid(), weight_norm(nn.Conv1d(8, 8, 3, padding=1)),
        nn.Sigmoid(), nn.Conv1d(8, 4, 3, padding=1),
    )  # fmt: skip
    plan, small = check(net, torch.randn(2, 1, 20, dtype=torch.float64), exact=True)
    assert all(p.isfinite().all() for p in small.parameters())


def test_nan_on_one_side_is_not_equal():
    assert largest_error([torch.ones(3)], [torch.full((3,), torch.nan)]) == float("inf")


def test_a_model_that_returns_no_tensor_has_no_proof():
    net = Net(lambda s, x: None, a=nn.Linear(4, 8))
    with pytest.raises(fxprune.ProofError, match="returns no tensor"):
        fxprune.prune(net.double(), rows())


def test_outputs_inside_an_object_keep_their_width():
    class Result:
        def __init__(self, y):
            self.y = y

    net = Net(lambda s, x: Result(s.b(s.a(x))), a=nn.Linear(4, 8), b=nn.Linear(8, 2))
    plan, small = check(net, rows())
    assert small.b.out_features == 2 and small.a.out_features == 4


def test_inference_mode_around_the_call():
    net = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Linear(8, 2)).double().eval()
    with torch.inference_mode():
        assert fxprune.prune(net, rows())[0].out_features == 4


@pytest.mark.parametrize("call", [F.embedding, F.embedding_bag], ids=["rows", "bags"])
@pytest.mark.parametrize("scaled", [False, True])
def test_tables_that_code_looks_up_by_itself(call, scaled):
    def forward(s, x):
        return s.b(call(x, s.table * 0.5 if scaled else s.table).sigmoid())

    net = Net(forward, table=nn.Parameter(torch.randn(10, 8)), b=nn.Linear(8, 2))
    plan, small = check(net, torch.randint(0, 10, (3, 4)))
    assert small.table.shape == (10, 4)


def centred(self, x):
    return F.linear(x, self.weight - self.weight.mean(1, keepdim=True), self.bias)


def halved(layer, x):
    return layer.before(x * 0.5)


@pytest.mark.parametrize("how", ["method", "wrapped"])
def test_a_forward_that_was_replaced_on_one_layer_is_followed_inside(how):
    net = nn.Sequential(
        nn.Linear(4, 8), nn.Sigmoid(), nn.Linear(8, 8), nn.Sigmoid(), nn.Linear(8, 2)
    )
    layer = net[2]
    if how == "method":
        layer.forward = types.MethodType(centred, layer)
    else:  # as libraries do that move layers between devices
        layer.before = layer.forward
        layer.forward = functools.partial(halved, layer)
    plan, small = check(net, rows())
    assert small[4].weight.shape == (2, 4)


class Flattening(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(4, 8), nn.Linear(8, 6)

    def forward(self, x):
        return self.b(self.a(x).view(-1, 8).sigmoid())


def test_a_forward_that_was_replaced_on_the_module_is_not_written_anew():
    net = nn.Sequential(Flattening(), nn.Sigmoid(), nn.Linear(6, 2))
    net[0].before = net[0].forward
    net[0].forward = functools.partial(halved, net[0])
    plan, small = check(net, rows())
    assert "replaced on the module itself" in dict(plan.skipped)["0.a"]
    assert small[0].b.out_features == 3


def mixes(layer, args, y):
    return y - y.mean(1, keepdim=True)


def writes(layer, args, y):
    y.mul_(2).add_(1)


def turns_its_input(layer, args):
    return (args[0].flip(1) * 2 + 1,)


@pytest.mark.parametrize("hook", [mixes, writes, turns_its_input])
@pytest.mark.parametrize("place", [1, 2])
def test_hooks_that_change_what_goes_in_or_comes_out_are_followed(hook, place):
    net = nn.Sequential(
        nn.Conv2d(3, 8, 3), nn.Sigmoid(), nn.Conv2d(8, 8, 3, groups=2), nn.Sigmoid(),
        nn.Conv2d(8, 2, 1),
    )  # fmt: skip
    if hook is turns_its_input:
        net[place].register_forward_pre_hook(hook)
    else:
        net[place].register_forward_hook(hook)
    plan, small = check(net, image())
    assert small[2].weight.shape[0] == 4


def test_a_hook_that_only_looks_leaves_the_layer_one_call():
    seen = []
    net = nn.Sequential(nn.Linear(4, 8), nn.Sigmoid(), nn.Linear(8, 2))
    net[0].register_forward_hook(lambda layer, args, y: seen.append(y.shape))
    plan, small = check(net, rows())
    assert seen and small[0].out_features == 4


class Doubled(nn.Module):
    """A layer that a hook makes its parent's business."""

    def __init__(self, inner):
        super().__init__()
        self.first, self.inner, self.last = nn.Linear(4, 8), inner, nn.Linear(8, 2)
        inner.register_forward_hook(lambda layer, args, y: (y[0] * 2, y[1]))

    def forward(self, x):
        h = torch.sigmoid(self.first(x))
        inputs = (h,) if isinstance(self.inner, nn.LSTM) else (h, h, h)
        return self.last(torch.sigmoid(self.inner(*inputs)[0]))


def test_hooks_on_layers_that_are_one_kernel_inside_have_it_followed():
    model = Doubled(nn.LSTM(8, 8, batch_first=True))
    plan, small = check(model, torch.randn(2, 5, 4, dtype=torch.float64))
    assert small.inner.hidden_size == 4 and small.first.out_features == 4


def test_hooks_on_layers_that_are_python_inside_have_what_is_inside_followed():
    model = Doubled(nn.MultiheadAttention(8, 2, batch_first=True))
    plan, small = check(model, torch.randn(2, 5, 4, dtype=torch.float64))
    assert small.inner.num_heads == 1 and small.first.out_features == 4


@torch.jit.script
def swish(x):
    return x * torch.sigmoid(x)


@torch.jit.script
def in_parts(x, parts: int, scale: float = 2.0):
    return swish(x.view(x.size(0), parts, x.size(1) // parts)).flatten(1) * scale


@pytest.mark.parametrize("function", [swish, lambda x: in_parts(x, 2)], ids=["swish", "parts"])
def test_functions_that_were_scripted_are_followed(function):
    net = Net(lambda s, x: s.b(function(s.a(x))), a=nn.Linear(4, 8), b=nn.Linear(8, 3))
    plan, small = check(net, rows())
    assert small.a.out_features == 4


def test_a_function_that_was_traced_is_refused_with_the_reason():
    one_run = torch.jit.trace(lambda x: x.sin(), torch.randn(3))
    net = Net(lambda s, x: s.b(one_run(s.a(x))), a=nn.Linear(4, 8), b=nn.Linear(8, 3))
    with pytest.raises(fxprune.ModelError, match=r"function that torch\.jit\.trace made"):
        fxprune.plan(net, rows().float())


def on_doubled_weights(layer):
    names = [name for name, _ in layer.named_parameters()]
    return lambda x: torch.func.functional_call(
        layer, {name: layer.get_parameter(name) * 2 for name in names}, (x,)
    )


@pytest.mark.parametrize("middle", [
    lambda: nn.Linear(8, 8), lambda: nn.Sequential(nn.Linear(8, 6), nn.Tanh(), nn.Linear(6, 8)),
    lambda: nn.BatchNorm1d(8),
], ids=["linear", "sequential", "norm"])  # fmt: skip
def test_layers_that_run_on_other_tensors_than_their_own(middle):
    net = Net(
        lambda s, x: s.b(on_doubled_weights(s.middle)(s.a(x).sigmoid()).sigmoid()),
        a=nn.Linear(4, 8), middle=middle(), b=nn.Linear(8, 3),
    )  # fmt: skip
    plan, small = check(net, rows())
    assert small.a.out_features == 4
    graph = fxprune.trace(net, rows())
    x = torch.randn(5, 4, dtype=torch.float64)
    assert torch.allclose(graph(x), net(x))


def test_a_layer_that_runs_on_buffers_of_others():
    def forward(s, x):
        given = {"running_mean": s.norm.running_mean + 1}
        return s.b(torch.func.functional_call(s.norm, given, (s.a(x),)))

    net = Net(forward, a=nn.Linear(4, 8), norm=nn.BatchNorm1d(8), b=nn.Linear(8, 3))
    plan, small = check(net, rows())
    assert small.a.out_features == 4


def test_code_is_not_written_anew_around_a_layer_on_computed_weights():
    def forward(s, x):
        w = s.weights(x).mean(0)
        given = {"weight": w[:64].view(8, 8), "bias": w[64:]}
        return s.b(torch.func.functional_call(s.middle, given, (s.a(x).sigmoid(),)).sigmoid())

    net = Net(forward, a=nn.Linear(4, 8), middle=nn.Linear(8, 8), weights=nn.Linear(4, 72),
              b=nn.Linear(8, 3))  # fmt: skip
    plan, small = check(net, rows(), shrinks=False)
    assert "middle runs on tensors that are not its own" in dict(plan.skipped)["a"]


@pytest.mark.parametrize("passed, back", [
    (list, list), (tuple, list), (lambda t: {"a": t[0], "b": t[1]}, lambda d: list(d.values())),
    (lambda t: [t, None], lambda g: g[0]),
])  # fmt: skip
def test_an_identity_passes_on_what_is_no_tensor(passed, back):
    def forward(s, x):
        assert s.same(None) is None
        return s.c(torch.cat(back(s.same(passed([s.a(x).relu(), s.b(x).sigmoid()]))), 1))

    net = Net(forward, a=nn.Linear(4, 8), b=nn.Linear(4, 12), same=nn.Identity(),
              c=nn.Linear(20, 3))  # fmt: skip
    plan, small = check(net, rows())
    assert (small.a.out_features, small.b.out_features) == (4, 6)


def test_a_width_that_is_a_tensor_is_no_weight_that_a_hook_computes():
    net = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 3))
    net[2].in_features = torch.tensor(8)
    plan, small = check(net, rows())
    assert small[2].weight.shape == (4, 4) and small[2].in_features == 4


def test_tuples_of_a_class_that_has_no_length():
    class Pair(tuple):
        def __len__(self):
            raise NotImplementedError

    net = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 3))
    net[0].kinds = (Pair((1, "a")), Pair((2, "b")))
    plan, small = check(net, rows())
    assert small[0].out_features == 4
