"""Registered functions are heard of however they are called, and others are left alone."""

from __future__ import annotations

import threading
import warnings
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from torch import nn
from torch.autograd import Function

import fxprune

from .oracle import check
from .test_trace import Net

L = {"x": "... c", "return": "... c"}


def opaque(t):
    return torch.from_numpy(t.detach().numpy().copy())


@torch.no_grad()
def decorated(x, factor=2.0):
    return opaque(x) * factor + 1


def closure():
    offset = 0.5
    return lambda x: opaque(x) * 2 + offset


made_inside = closure()


class Base(Function):
    @staticmethod
    def forward(ctx, x):
        return opaque(x) * 2 + 1

    @staticmethod
    def backward(ctx, grad):
        return grad * 2


class Inherits(Base):
    pass


class Different(Base):
    @staticmethod
    def forward(ctx, x):
        return opaque(x) * -7


class WithSetup(Function):
    @staticmethod
    def forward(x):
        return opaque(x) * 2 + 1

    @staticmethod
    def setup_context(ctx, inputs, output):
        ctx.n = 1


class InheritsSetup(WithSetup):
    pass


taken_before = Base.apply


def net(function):
    return Net(lambda s, x: s.c(function(torch.sigmoid(s.a(x)))), a=nn.Linear(6, 8),
               c=nn.Linear(8, 3)).double()  # fmt: skip


X = torch.randn(4, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize("target, call", [
    (decorated, decorated),
    (decorated, lambda x: decorated(x, factor=3.0)),
    (made_inside, lambda x: made_inside(x)),
    (Base, lambda x: Base.apply(x)),
    (Base, lambda x: taken_before(x)),
    (Base, lambda x: Inherits.apply(x)),
    (WithSetup, lambda x: WithSetup.apply(x)),
    (InheritsSetup, lambda x: InheritsSetup.apply(x)),
], ids=["decorated", "with a keyword", "closure", "autograd", "its apply, taken before",
        "an heir", "with setup_context", "its heir"])  # fmt: skip
def test_a_function_is_heard_of(target, call):
    with fxprune.patterns(fxprune.pattern(target, layout=L)):
        _, small = check(net(call), X)
    assert small.a.out_features == 4


def test_a_function_with_a_forward_of_its_own_is_another_one():
    with fxprune.patterns(fxprune.pattern(Base, layout=L)):
        traced = fxprune.trace(net(lambda x: Different.apply(x)), X)
        check(net(lambda x: Different.apply(x)), X)
    assert "Base" not in traced.code and "Different" in traced.code


def test_functions_are_as_they_were_afterwards():
    before = decorated.__code__, decorated.__defaults__, vars(Base)["forward"]
    made = [fxprune.pattern(t, layout=L) for t in (decorated, Base)]
    with pytest.raises(fxprune.InputError), fxprune.patterns(*made):
        fxprune.plan(net(lambda x: 1 / 0), X)
    assert (decorated.__code__, decorated.__defaults__, vars(Base)["forward"]) == before
    assert not any("fxprune_tell" in name for name in decorated.__globals__)


def test_functions_of_c_take_layouts_by_their_documented_names():
    made = fxprune.pattern("cumsum", layout={"input": "n c", "return": "n c2"})
    with fxprune.patterns(made, override=True):
        plan = fxprune.plan(net(lambda x: torch.cumsum(x, 1)), X)
        assert "slices are mixed there by cumsum" in dict(plan.skipped)["a"]
    relu = fxprune.pattern("relu", layout={"input": "... c", "return": "... c"})
    with fxprune.patterns(relu, override=True):
        for call in (torch.relu, torch.Tensor.relu, nn.functional.relu):
            assert check(net(call), X)[1].a.out_features == 4


def test_arguments_that_a_layout_does_not_name_stay_whole():
    def two(x, y):
        return opaque(x) * 2 + opaque(y).sum(1, keepdim=True)

    made = fxprune.pattern(two, layout=L)
    model = Net(lambda s, x: s.c(two(s.a(x), s.b(x))), a=nn.Linear(6, 8), b=nn.Linear(6, 8),
                c=nn.Linear(8, 3)).double()  # fmt: skip
    with fxprune.patterns(made):
        plan, small = check(model, X)
    assert (small.a.out_features, small.b.out_features) == (4, 8)
    assert "does not name it" in dict(plan.skipped)["b"]


class FiLM(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight, self.bias = nn.Parameter(torch.randn(6, 8)), None

    def forward(self, x, gate):
        y = opaque(x) @ self.weight.T
        y = y if self.bias is None else y + self.bias
        return y * gate


FILM = {"x": "... i", "gate": "... o", "weight": "o i", "bias": "o", "return": "... o"}


def test_channels_that_an_argument_and_a_weight_make_together():
    model = Net(lambda s, x: s.c(s.film(torch.sigmoid(s.a(x)), s.b(x))), a=nn.Linear(6, 8),
                b=nn.Linear(6, 6), film=FiLM(), c=nn.Linear(6, 3))  # fmt: skip
    made = fxprune.pattern(FiLM, layout=FILM, biases=["bias"])
    with fxprune.patterns(made):
        _, small = check(model, X)
    assert small.film.weight.shape == (3, 4) and small.b.out_features == 3


def test_a_bias_that_is_no_parameter_is_not_made():
    class Plain(FiLM):
        def forward(self, x):
            y = opaque(x) @ self.weight.T
            return y if self.bias is None else y + self.bias

    layout = {"x": "... i", "weight": "o i", "bias": "o", "return": "... o"}
    made = fxprune.pattern(Plain, layout=layout, biases=["bias"], folds={"weight": "bias"})
    model = Net(lambda s, x: s.c(s.plain(torch.sigmoid(s.a(x)))), a=nn.Linear(6, 8),
                plain=Plain(), c=nn.Linear(6, 3))  # fmt: skip
    with fxprune.patterns(made):
        plan, small = check(model, X)
    assert small.plain.weight.shape == (3, 4) and plan.notes


def test_threads_do_not_hear_of_each_other():
    made = fxprune.pattern(decorated, layout=L)
    stop, errors = threading.Event(), []

    def infer():
        other = net(decorated)
        with torch.no_grad():
            expected = other(X)
            while not stop.is_set():
                if not torch.equal(other(X), expected):
                    errors.append("another result")

    def prune(_):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return fxprune.prune(net(decorated), X, patterns=[made]).a.out_features

    call = nn.Module.__call__
    watcher = threading.Thread(target=infer)
    watcher.start()
    try:
        with ThreadPoolExecutor(4) as pool:
            assert list(pool.map(prune, range(8))) == [4] * 8
    finally:
        stop.set()
        watcher.join()
    assert not errors and nn.Module.__call__ is call


def test_a_custom_op_can_be_named_before_it_exists():
    made = fxprune.pattern("fxprune_later::twice", layout=L)

    @torch.library.custom_op("fxprune_later::twice", mutates_args=())
    def twice(x: torch.Tensor) -> torch.Tensor:
        return x * 2

    with fxprune.patterns(made):
        plan, small = check(net(lambda x: twice(x)), X)
    assert small.a.out_features == 4 and not plan.notes
