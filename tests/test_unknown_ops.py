"""Calls that no pattern is known for: followed through their aten ops, or left whole and named."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import fxprune

from .oracle import check
from .test_constructs import Net, image


@pytest.mark.parametrize("function", [
    torch.special.expit, torch.logaddexp, torch.special.log_ndtr, torch.erfc, torch.sinc,
    nn.functional.softplus, torch.special.xlog1py,
], ids=lambda f: f.__name__)  # fmt: skip
def test_elementwise_ops_are_recognised_by_their_aten_ops(function):
    two = function in (torch.logaddexp, torch.special.xlog1py)

    def forward(s, x):
        y, z = torch.sigmoid(s.a(x)), torch.sigmoid(s.b(x))
        return s.c(function(y, z) if two else function(y) + z)

    net = Net(forward, a=nn.Conv2d(3, 8, 3), b=nn.Conv2d(3, 8, 3), c=nn.Conv2d(8, 4, 3))
    plan, small = check(net, image())
    assert small.c.in_channels == 4


def test_a_composite_is_followed_through_its_aten_ops():
    def forward(s, x):
        return s.c(torch.addcmul(s.a(x), torch.special.logit(torch.sigmoid(s.b(x))), s.b(x)))

    net = Net(forward, a=nn.Conv2d(3, 8, 3), b=nn.Conv2d(3, 8, 3), c=nn.Conv2d(8, 4, 3))
    plan, small = check(net, image())
    assert small.c.in_channels == 4


@pytest.mark.parametrize("name", ["fft", "cumsum", "sort", "Bilinear"])
def test_what_mixes_channels_is_left_whole_and_named(name):
    def forward(s, x):
        y = torch.tanh(s.a(x))
        if name == "fft":
            y = torch.fft.fft(y).real
        elif name in ("cumsum", "sort"):
            y = torch.cumsum(y, -1) if name == "cumsum" else y.sort(-1)[0]
        else:
            y = s.bilinear(y, y)
        return s.c(y)

    net = Net(forward, a=nn.Linear(6, 8), bilinear=nn.Bilinear(8, 8, 8), c=nn.Linear(8, 3))
    x = torch.randn(2, 5, 6, dtype=torch.float64)
    plan, small = check(net, x, shrinks=False)
    reason = dict(plan.skipped)["a"]
    assert small.a.out_features == 8
    assert name.lower() in reason.lower() or "no pattern" in reason, reason


def test_an_elementwise_op_with_two_results_is_followed():
    def forward(s, x):
        mantissa, exponent = torch.frexp(torch.sigmoid(s.a(x)))
        return s.b(mantissa * 2 + exponent)

    net = Net(forward, a=nn.Linear(6, 8), b=nn.Linear(8, 3))
    _, small = check(net, torch.randn(2, 6, dtype=torch.float64))
    assert small.a.out_features == 4


@torch.library.custom_op("fxprune_tests::bend", mutates_args=())
def bend(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return x.sin() * y + 1


@torch.library.custom_op("fxprune_tests::blur", mutates_args=())
def blur(x: torch.Tensor) -> torch.Tensor:
    return (x + x.roll(1, 2)) / 2 + 1


@torch.library.custom_op("fxprune_tests::rank", mutates_args=())
def rank(x: torch.Tensor) -> torch.Tensor:
    return x * torch.arange(x.shape[1]).view(1, -1, 1, 1)


@torch.library.custom_op("fxprune_tests::noise", mutates_args=())
def noise(x: torch.Tensor) -> torch.Tensor:
    return x + torch.rand(()) * 1e-3


def opaque(function):
    def forward(s, x):
        return s.c(function(torch.sigmoid(s.a(x)), torch.sigmoid(s.b(x))))

    return Net(forward, a=nn.Conv2d(3, 8, 3), b=nn.Conv2d(3, 8, 3), c=nn.Conv2d(8, 4, 3))


def test_an_elementwise_op_that_nobody_knows_is_found_out_and_told():
    plan, small = check(opaque(bend), image())
    assert small.c.in_channels == small.a.out_channels == small.b.out_channels == 4
    assert any("bend" in what and "probed" in why and why.endswith("dimension 1")
               for what, why in plan.notes), plan.notes  # fmt: skip


def test_a_probed_op_through_which_no_channel_goes_is_not_said_to_pass_any():
    plan = fxprune.plan(opaque(lambda y, z: rank(y) + z).double(), image())
    assert not any("probed" in why for _, why in plan.notes)


def test_an_op_that_mixes_positions_but_not_channels_lets_channels_pass():
    plan, small = check(opaque(lambda y, z: blur(y) + z), image())
    assert small.c.in_channels == small.a.out_channels == 4


@pytest.mark.parametrize("op", [rank, noise], ids=["goes by position", "random"])
def test_an_op_that_is_not_the_same_without_some_channels_leaves_them_whole(op):
    plan = fxprune.plan(opaque(lambda y, z: op(y) + z).double(), image())
    assert "a" in dict(plan.skipped) and not plan.kept


@torch.library.custom_op("fxprune_tests::neighbours", mutates_args=())
def neighbours(x: torch.Tensor) -> torch.Tensor:
    return nn.functional.local_response_norm(x, 5)


@torch.library.custom_op("fxprune_tests::quantise", mutates_args=())
def quantise(x: torch.Tensor) -> torch.Tensor:
    step = x.abs().max() / 127
    return (x / step).round() * step


@torch.library.custom_op("fxprune_tests::power", mutates_args=())
def power(x: torch.Tensor) -> torch.Tensor:
    step = 2.0 ** x.abs().max().log2().ceil() / 127
    return (x / step).round() * step


@pytest.mark.parametrize("op", [neighbours, quantise, power], ids=["lrn", "int8", "power of two"])
@pytest.mark.parametrize("seed", range(3))
def test_an_op_that_mixes_channels_by_very_little_is_found_out(op, seed):
    torch.manual_seed(seed)
    plan = fxprune.plan(opaque(lambda y, z: op(y) + z), image().float())
    assert "a" in dict(plan.skipped)


@torch.library.custom_op("fxprune_tests::positive", mutates_args=())
def positive(x: torch.Tensor) -> torch.Tensor:
    if (x <= 0).any():
        raise ValueError("only positive values")
    return x.log() + 2


def test_an_op_that_does_not_take_every_value_is_followed_as_far_as_it_goes():
    plan, small = check(opaque(lambda y, z: positive(y) + z), image())
    assert small.a.out_channels == 4


class Distance(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, y):
        return torch.zeros_like(x) if torch.equal(x, y) else (x - y).abs()


def test_a_question_about_values_beneath_a_call_is_no_elementwise_op():
    def forward(s, x):
        return s.c(Distance.apply(torch.tanh(s.a(x)), torch.tanh(s.b(x))))

    net = Net(forward, a=nn.Linear(6, 8), b=nn.Linear(6, 8), c=nn.Linear(8, 3))
    plan, small = check(net, torch.randn(2, 6, dtype=torch.float64))
    assert small.a.out_features == 4 and "probed as it ran" in str(plan.notes)


class Through(torch.autograd.Function):
    """What a function of the caller's makes of an array."""

    @staticmethod
    def forward(ctx, x, function):
        return torch.from_numpy(function(x.detach().numpy()).copy())


def test_what_is_found_of_one_function_is_not_taken_for_another():
    def forward(s, x):
        y = Through.apply(s.a(x), lambda t: t * 2)
        return s.c(Through.apply(s.b(y), lambda t: t[:, ::-1]))

    net = Net(forward, a=nn.Linear(6, 8), b=nn.Linear(8, 8), c=nn.Linear(8, 3))
    plan, small = check(net, torch.randn(2, 6, dtype=torch.float64))
    assert small.a.out_features == 4 and small.b.out_features == 8
    assert "Through" in dict(plan.skipped)["b"]


@pytest.mark.parametrize("given", [lambda y: y[:0], lambda y: y.to_sparse()])
def test_empty_and_sparse_tensors_are_not_probed(given):
    class Out(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return torch.from_numpy(x.to_dense().numpy() * 2).to_sparse() if x.is_sparse else x * 2

    def forward(s, x):
        y = s.a(x)
        return s.c(y) + Out.apply(given(y)).sum()

    net = Net(forward, a=nn.Linear(6, 8), c=nn.Linear(8, 3))
    check(net, torch.randn(2, 6, dtype=torch.float64), shrinks=False)


def test_what_goes_into_a_condition_that_is_an_op_stays():
    def forward(s, x):
        y = torch.sigmoid(s.a(x))
        y = torch.cond(y.sum() > 0, lambda t: t * 2, lambda t: t + 1, (y,))
        return s.c(torch.sigmoid(s.b(y)))

    net = Net(forward, a=nn.Linear(4, 12), b=nn.Linear(12, 8), c=nn.Linear(8, 2))
    plan, small = check(net, torch.randn(3, 4, dtype=torch.float64))
    assert (small.a.out_features, small.b.out_features) == (12, 4)
    assert "cond" in dict(plan.skipped)["a"]


class Beneath(torch.autograd.Function):
    """As reversible layers do it, to save memory."""

    @staticmethod
    def forward(ctx, x, block):
        return torch.from_numpy(block(x).numpy().cumsum(-1))


def test_layers_that_run_beneath_a_call_that_nobody_knows_are_not_said_not_to_run():
    def forward(s, x):
        return s.c(s.b(Beneath.apply(s.a(x), s.block)))

    block = nn.Sequential(nn.Linear(8, 12), nn.ReLU(), nn.Linear(12, 8))
    net = Net(forward, a=nn.Linear(6, 8), block=block, b=nn.Linear(8, 8), c=nn.Linear(8, 3))
    plan, small = check(net, torch.randn(2, 6, dtype=torch.float64))
    reasons = dict(plan.skipped)
    assert "runs beneath Beneath" in reasons["block.0"] and "runs beneath" in reasons["block.2"]
    assert small.c.in_features == 4


class Normed(torch.autograd.Function):
    """A norm over channels with a backward pass of its own, as networks for images have it."""

    @staticmethod
    def forward(ctx, x, weight, eps):
        c = x.shape[1]
        x = x - x.mean(1, keepdim=True)
        variance = x.square().mean(1, keepdim=True) + eps
        ctx.save_for_backward(y := x / variance.sqrt(), variance, weight)
        return weight.view(1, c, 1, 1) * y

    @staticmethod
    def backward(ctx, gradient):
        y, variance, weight = ctx.saved_tensors
        g = gradient * weight.view(1, gradient.shape[1], 1, 1)
        g = g - y * (g * y).mean(1, keepdim=True) - g.mean(1, keepdim=True)
        return g / variance.sqrt(), (gradient * y).sum((0, 2, 3)), None


def test_a_norm_in_an_autograd_function_is_followed_and_keeps_its_backward_pass():
    def forward(s, x):
        return s.b(Normed.apply(s.a(x), s.weight, 1e-6))

    weight = nn.Parameter(torch.rand(8) + 0.5)
    net = Net(forward, a=nn.Conv2d(3, 8, 3), b=nn.Conv2d(8, 3, 1), weight=weight)
    plan, small = check(net, image())
    assert small.a.out_channels == len(small.weight) == 4 and plan.approximate
    x = torch.randn(1, 3, 4, 4, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(small, x)
    assert "Normed" in type(small(x).grad_fn.next_functions[0][0]).__name__


def test_code_around_an_autograd_function_is_not_written_anew_without_its_backward_pass():
    def forward(s, x):
        y = Normed.apply(s.a(x), s.weight, 1e-6)
        return s.b(torch.cat([y.view(-1, n, 6, 6) for n in [8]]))

    weight = nn.Parameter(torch.rand(8) + 0.5)
    net = Net(forward, a=nn.Conv2d(3, 8, 3), b=nn.Conv2d(8, 3, 1), weight=weight)
    plan, small = check(net, image(), shrinks=False)
    assert "runs a torch.autograd.Function of its own" in dict(plan.skipped)["a"]


class Coupled(torch.autograd.Function):
    """Layers whose inputs a backward pass computes again, to save memory."""

    @staticmethod
    def forward(ctx, x, y, f, g):
        ctx.layers = f, g
        x = x + f(y)
        y = y + g(x)
        ctx.save_for_backward(x.detach(), y.detach())
        return x, y

    @staticmethod
    def backward(ctx, dx, dy):
        (x, y), (f, g) = ctx.saved_tensors, ctx.layers
        with torch.enable_grad():
            x = x.detach().requires_grad_()
            z = g(x)
            torch.autograd.backward(z, dy)
            dx = dx + x.grad
            y = (y - z).detach().requires_grad_()
            torch.autograd.backward(f(y), dx)
        return dx, dy + y.grad, None, None


def test_layers_in_an_autograd_function_that_computes_them_again_are_followed():
    def forward(s, x):
        x, y = Coupled.apply(s.a(x), s.b(x), s.f, s.g)
        return s.c(x + y)

    f, g = (nn.Sequential(nn.Linear(8, 12), nn.ReLU(), nn.Linear(12, 8)) for _ in "fg")
    net = Net(forward, a=nn.Linear(6, 8), b=nn.Linear(6, 8), f=f, g=g, c=nn.Linear(8, 3))
    plan, small = check(net, torch.randn(2, 6, dtype=torch.float64))
    assert small.f[0].weight.shape == (6, 4) and small.c.in_features == 4
    small(torch.randn(2, 6, dtype=torch.float64)).sum().backward()
    assert small.f[0].weight.grad.shape == (6, 4) and small.a.weight.grad.any()


class Quantised(nn.Linear):
    """A layer that trains with its weights as they will be: rounded."""

    def __init__(self, *sizes):
        super().__init__(*sizes)
        self.register_buffer("scale", torch.full((sizes[1],), 0.01))
        self.register_buffer("zero", torch.zeros(sizes[1], dtype=torch.int32))

    def forward(self, x):
        w = torch.fake_quantize_per_channel_affine(
            self.weight, self.scale.float(), self.zero, 0, -128, 127
        )
        return nn.functional.linear(x, w, self.bias)


def test_weights_that_their_own_layers_code_puts_into_an_unknown_call_are_named():
    net = nn.Sequential(Quantised(6, 8), nn.ReLU(), Quantised(8, 3))
    plan, small = check(net, torch.randn(2, 6, dtype=torch.float64), shrinks=False)
    assert "goes into fake_quantize" in dict(plan.skipped)["0.weight"]
    assert "goes into fake_quantize" in dict(plan.skipped)["2.weight"]
