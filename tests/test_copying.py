"""Copies of models that keep functions, and functions that keep parts of models."""

from __future__ import annotations

import copy
import functools
import gc
import threading
import types
import weakref

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import fxprune
from fxprune.modules.copying import copy_model

from .oracle import awake, check
from .snapshot import Snapshot


class Keeps(nn.Module):
    """A network whose first layers are called by what ``keep`` leaves in it."""

    def __init__(self, keep):
        super().__init__()
        self.mlp = nn.ModuleDict({"a": nn.Linear(6, 8), "b": nn.Linear(8, 6)})
        self.out = nn.Linear(6, 3)
        self.keep = keep
        keep(self, self.mlp)

    def forward(self, x):
        return self.out(F.softplus(self.run(x)))

    def made_again(self):
        """What ``copy.deepcopy`` does not give: another such network with the same numbers."""
        other = Keeps(self.keep).double().train(self.training)
        other.load_state_dict(self.state_dict())
        return other


def closure(net, m):
    net.run = lambda x: m.b(m.a(x).sigmoid())


def default(net, m):
    net.run = lambda x, m=m: m.b(m.a(x).sigmoid())


def keyword_default(net, m):
    def run(x, *, m=m):
        return m.b(m.a(x).sigmoid())

    net.run = run


def layers_in_a_list(net, m):
    layers = [m.a, m.b]
    net.run = lambda x: layers[1](layers[0](x).sigmoid())


def closure_of_a_closure(net, m):
    def first(x):
        return m.a(x).sigmoid()

    net.run = lambda x: m.b(first(x))


def recursion(net, m):
    def run(x, left=1):
        return run(x, left - 1) if left else m.b(m.a(x).sigmoid())

    net.run = run


def functions_that_call_each_other(net, m):
    def run(x, left=2):
        return other(x, left - 1) if left else m.b(m.a(x).sigmoid())

    def other(x, left):
        return run(x, left - 1)

    net.run = run


def partial(net, m):
    def run(m, x):
        return m.b(m.a(x).sigmoid())

    net.run = functools.partial(run, m)


def functions_in_a_dict(net, m):
    steps = {"a": lambda x: m.a(x).sigmoid(), "b": lambda x: m.b(x)}
    net.steps = steps
    net.run = lambda x: steps["b"](steps["a"](x))


def a_method_put_on_a_layer(net, m):
    before = m.a.forward
    m.a.forward = types.MethodType(lambda layer, x: before(x) * 2, m.a)
    net.run = lambda x: m.b(m.a(x).sigmoid())


def a_hook_that_calls_another_layer(net, m):
    m.a.register_forward_hook(lambda layer, given, result: m.b(result.sigmoid()))
    net.run = m.a


KEEPS = [
    closure, default, keyword_default, layers_in_a_list, closure_of_a_closure, recursion,
    functions_that_call_each_other, partial, functions_in_a_dict, a_method_put_on_a_layer,
    a_hook_that_calls_another_layer,
]  # fmt: skip
X = torch.randn(4, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(3))


@pytest.mark.parametrize("keep", KEEPS, ids=lambda f: f.__name__)
def test_functions_that_hold_layers_run_the_copys_own(keep):
    plan, small = check(Keeps(keep), X)
    assert (small.mlp["a"].out_features, small.mlp["b"].out_features) == (4, 3)


@pytest.mark.parametrize("keep", KEEPS, ids=lambda f: f.__name__)
def test_a_copy_is_none_of_the_originals_business(keep):
    net = awake(Keeps(keep)).double().eval()
    before, copied = net(X), copy_model(net)
    for p in net.parameters():
        p.data.zero_()
    assert torch.equal(copied(X), before)


def test_what_a_function_holds_besides_the_model_stays_shared():
    def counting(net, m):
        runs = 0

        def run(x):
            nonlocal runs
            runs += 1
            seen.append(runs)
            return m.b(m.a(x).sigmoid())

        net.run = run

    seen = []
    net = Keeps(counting).double().eval()
    copied = copy_model(net)
    net(X), copied(X), net(X)
    assert seen == [1, 2, 3]


def test_a_function_that_holds_nothing_of_the_model_is_the_same_in_the_copy():
    net = Keeps(closure)
    net.act = act = lambda x, scale=X: x * scale.mean()
    assert copy_model(net).act is act


def tensors_in_a_function(net, m):
    a, b = m.a.weight, m.b.weight
    net.run = lambda x: F.linear(F.linear(x, a).sigmoid(), b)


def tensors_in_a_list(net, m):
    net.weights = [m.a.weight, m.b.weight]
    net.run = lambda x: F.linear(F.linear(x, net.weights[0]).sigmoid(), net.weights[1])


@pytest.mark.parametrize("keep, place", [
    (tensors_in_a_function, "run"), (tensors_in_a_list, "weights"),
])  # fmt: skip
def test_a_parameter_that_is_read_where_no_mask_reaches_stays_whole(keep, place):
    plan, small = check(Keeps(keep), X, shrinks=False)
    assert dict(plan.skipped)["mlp.a"] == f"it is also kept in {place}, which no mask reaches"
    assert small.mlp["a"].out_features == 8


def test_a_list_of_parameters_that_the_code_does_not_read_is_no_obstacle():
    def keep(net, m):
        closure(net, m)
        net.trained = list(m.parameters())

    plan, small = check(Keeps(keep), X)
    assert small.mlp["a"].out_features == 4


def test_the_weights_that_a_hook_computes_are_named_as_the_reason():
    old = nn.utils.spectral_norm
    net = nn.Sequential(old(nn.Linear(6, 8)), nn.GELU(), old(nn.Linear(8, 3)))
    with pytest.warns(fxprune.PruningWarning, match="nothing of Sequential can be pruned"):
        plan = fxprune.plan(net, X.float())
    assert (
        dict(plan.skipped)["0"]
        == "a hook computes its weight, where a parametrization could be pruned"
    )


class Child(nn.Module):
    def __init__(self, parent):
        super().__init__()
        self.parent = weakref.ref(parent)
        self.out = nn.Linear(6, 4)

    def forward(self, x):
        return self.out(x + self.parent().shared(x))


class Parent(nn.Module):
    def __init__(self):
        super().__init__()
        self.shared = nn.Sequential(nn.Linear(6, 32), nn.Sigmoid(), nn.Linear(32, 6))
        self.child = Child(self)

    def forward(self, x):
        return self.child(x)

    def made_again(self):
        other = Parent().double().train(self.training)
        other.load_state_dict(self.state_dict())
        return other


def test_a_weak_reference_to_the_parent_is_to_the_parents_copy():
    model, x = awake(Parent()), torch.randn(2, 6, dtype=torch.float64)
    plan, small = check(model, x)
    assert small.child.parent() is small
    expected = small(x)
    del model
    gc.collect()
    assert torch.equal(small(x), expected)


def test_what_code_reads_of_the_model_by_a_global_name_is_refused_and_not_copied(monkeypatch):
    net = nn.Sequential(nn.Linear(6, 16), nn.Sigmoid(), nn.Linear(16, 3)).double()
    monkeypatch.setitem(globals(), "GLOBAL_NET", net)
    net.forward = lambda x: GLOBAL_NET[2](GLOBAL_NET[1](GLOBAL_NET[0](x)))  # noqa: F821
    x = torch.randn(2, 6, dtype=torch.float64)
    with pytest.raises(fxprune.ModelError, match="reads the global 'GLOBAL_NET'"):
        fxprune.prune(net, x)
    assert fxprune.prune(net, x, inplace=True, verify=False)[0].out_features == 8


def test_an_attribute_is_no_global_of_the_same_name(monkeypatch):
    class Wrapped(nn.Module):
        def __init__(self):
            super().__init__()
            self.GLOBAL_NET = nn.Sequential(nn.Linear(6, 16), nn.Sigmoid(), nn.Linear(16, 3))

        def forward(self, x):
            return self.GLOBAL_NET(x)

        def shown(self):  # which no run calls
            return str(GLOBAL_NET)  # noqa: F821

    model = awake(Wrapped())
    monkeypatch.setitem(globals(), "GLOBAL_NET", model.GLOBAL_NET)
    check(model, torch.randn(2, 6, dtype=torch.float64))


class Shared(nn.Module):
    """A part that is no copy in copies."""

    def __init__(self):
        super().__init__()
        self.l = nn.Linear(6, 8)

    def forward(self, x):
        return self.l(x).sigmoid()

    def __deepcopy__(self, memo):
        return self


class Rebuilt(Shared):
    def __deepcopy__(self, memo):
        return type(self)()


@pytest.mark.parametrize("kind", [Shared, Rebuilt])
def test_parts_whose_copy_is_none_are_an_error_and_the_model_stays(kind):
    net = awake(nn.Sequential(kind(), nn.Linear(8, 3)))
    before = Snapshot(net)
    plan = fxprune.plan(net, X)
    for call in (lambda: fxprune.prune(net, X), lambda: plan.mask(net), lambda: plan.apply(net)):
        with pytest.raises(fxprune.ModelError, match=f"__deepcopy__ of {kind.__name__} gives back"):
            call()
    assert {*before.differences()} <= {"rng"}  # what is built anew is drawn anew
    assert fxprune.prune(net, X, inplace=True, verify=False)[1].in_features == 4


class Remembers(nn.Module):
    """Its parts share what is empty at first, and hold each other besides."""

    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(6, 8), nn.Linear(8, 3)
        self.seen = self.a.seen = self.b.seen = {}
        self.b.before, self.a.after = [self.a], (self.b,)

    def forward(self, x):
        self.seen["x"] = x
        return self.b(self.b.before[0](x).sigmoid())


def test_parts_share_in_the_copy_what_they_share_and_hold_each_others_copies():
    net = awake(Remembers())
    net.seen.clear()
    copied = copy_model(net)
    assert copied.seen is copied.a.seen is copied.b.seen is not net.seen
    assert copied.b.before[0] is copied.a and copied.a.after == (copied.b,)
    assert copied.a._forward_hooks is not net.a._forward_hooks
    assert copied.a._forward_hooks is not copied.b._forward_hooks
    assert vars(copied).keys() == vars(net).keys()


class Says(nn.Linear):
    """A layer whose class says what is copied, in one way or another."""

    def __init__(self, *sizes):
        super().__init__(*sizes)
        self.lock = threading.Lock()


class ByState(Says):
    def __getstate__(self):
        return {key: value for key, value in vars(self).items() if key != "lock"}

    def __setstate__(self, state):
        super().__setstate__(state)
        self.lock = threading.Lock()


class ByReduce(Says):
    def __reduce__(self):
        return _made, (type(self), self.in_features, self.out_features, self.weight, self.bias)


def _made(cls, inputs, outputs, weight, bias):
    made = cls(inputs, outputs)
    made.weight, made.bias = weight, bias
    return made


@pytest.mark.parametrize("kind", [ByState, ByReduce])
def test_a_class_that_says_how_it_is_copied_is_asked(kind):
    net = awake(nn.Sequential(kind(6, 8), nn.Sigmoid(), nn.Linear(8, 3)))
    x = torch.randn(2, 6, dtype=torch.float64)
    copied = copy_model(net)
    assert type(copied[0]) is kind and copied[0].weight is not net[0].weight
    assert torch.equal(copied(x), net(x))
    assert fxprune.prune(net, x)[0].out_features == 4


class NeitherTrueNorFalse(nn.Linear):
    """A module that has no truth value, as a dictionary of tensors may."""

    def __deepcopy__(self, memo):
        made = type(self).__new__(type(self))
        memo[id(self)] = made
        made.__dict__.update(copy.deepcopy(self.__dict__, memo))
        return made

    def __bool__(self):
        raise RuntimeError("ask for its length instead")


class Held:
    def __init__(self, value):
        self.value = value


@pytest.mark.parametrize("hold", [
    lambda h: h, lambda h: [h, (h, 1)], lambda h: {"maps": h}, Held,
    lambda h: torch.distributions.Normal(h, h.exp()),
])  # fmt: skip
def test_what_a_run_with_gradients_has_left_in_a_model_is_copied_without_its_history(hold):
    class Leaves(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b, self.left = nn.Linear(6, 8), nn.Linear(8, 3), None

        def forward(self, x):
            h = self.a(x)
            self.left = hold(h)
            return self.b(h.sigmoid())

    model, x = awake(Leaves()), torch.randn(4, 6, dtype=torch.float64)
    model(x)
    copied = copy_model(model)
    assert copied.a.weight is not model.a.weight and copied.left is not model.left
    left = copied.left.value if hold is Held else copied.left
    assert not isinstance(left, (Held, torch.Tensor)) or not left.requires_grad
    assert fxprune.prune(model, x).a.out_features == 4


def test_a_module_without_a_truth_value_is_copied():
    net = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), NeitherTrueNorFalse(8, 8), nn.Linear(8, 2))
    plan, small = check(net, torch.randn(2, 4, dtype=torch.float64))
    assert small[2].weight.shape == (4, 4)


class Handles(nn.Module):
    """Keeps the handle of a hook of one of its layers."""

    def __init__(self):
        super().__init__()
        self.a, self.b, self.seen = nn.Linear(4, 8), nn.Linear(8, 3), []
        self.handle = self.a.register_forward_hook(Handles.look)

    @staticmethod
    def look(module, args, output):
        return None

    def forward(self, x):
        return self.b(self.a(x).sigmoid())


def test_the_handle_of_a_hook_is_one_of_the_copys_hook():
    net = awake(Handles())
    small = copy.deepcopy(fxprune.prune(net, torch.randn(2, 4, dtype=torch.float64)))
    assert small.a.out_features == 4 and len(small.a._forward_hooks) == 1
    small.handle.remove()
    assert not small.a._forward_hooks and len(net.a._forward_hooks) == 1


class Wakes(nn.Sequential):
    """Is copied as torchvision's graphs of features are: in training mode."""

    def __deepcopy__(self, memo):
        return Wakes(*(copy.deepcopy(child, memo) for child in self)).train()


@pytest.mark.parametrize("mode", [False, True])
def test_a_copy_is_in_the_mode_of_the_model(mode):
    net = nn.Sequential(Wakes(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8)), nn.Conv2d(8, 4, 1))
    net = net.train(mode)
    small = fxprune.prune(net, torch.randn(2, 3, 8, 8))
    assert small[0][0].out_channels == 4
    assert {module.training for module in small.modules()} == {mode}


class Shelf(nn.Module):
    """A dictionary of buffers."""

    def __init__(self, **tensors):
        super().__init__()
        for name, tensor in tensors.items():
            self.register_buffer(name, tensor)

    def __getitem__(self, name):
        return self._buffers[name]


class Reading(nn.Module):
    def __init__(self):
        super().__init__()
        self.shelf = Shelf(weight=torch.randn(8, 8))
        self.a, self.b, self.c = nn.Linear(4, 8), nn.Linear(8, 8), nn.Linear(8, 2)

    def forward(self, x):
        h = F.linear(torch.sigmoid(self.a(x)), self.shelf["weight"])
        return self.c(torch.sigmoid(self.b(torch.sigmoid(h))))


def test_a_tensor_that_is_read_past_its_name_stays_whole():
    plan, small = check(Reading(), torch.randn(2, 4, dtype=torch.float64))
    assert small.a.out_features == 8 and small.b.out_features == 4
    assert "past its name" in dict(plan.skipped)["a"]


def test_what_a_module_keeps_in_slots_is_copied():
    class Slots(nn.Module):
        __slots__ = ("heads", "unset")

        def __init__(self):
            super().__init__()
            self.a, self.heads = nn.Linear(6, 16), [4]

        def forward(self, x):
            return self.a(x).unflatten(-1, (self.heads[0], -1)).flatten(1)

    model = nn.Sequential(Slots(), nn.Linear(16, 3))
    copied = copy_model(model)[0]
    assert copied.heads == [4] and copied.heads is not model[0].heads
    x = torch.randn(4, 6, dtype=torch.float64)
    assert fxprune.prune(awake(model), x)[0].a.out_features == 8
