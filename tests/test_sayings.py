"""What dead units say: heard in the first walk, as if all were dead, or told by another model."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.nn import functional as F

import fxprune
from fxprune.checking.cutting import values_of
from fxprune.relating.discover import discover
from fxprune.relating.fold import Folds
from fxprune.relating.sayings import Telling
from fxprune.tracing.record import record

from .networks import networks, settings_of_a_plan
from .oracle import awake, check, difference, masked_equals_pruned
from .test_trace import Net

X = torch.randn(2, 3, 6, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(5))


def assert_the_same(one: Folds, other: Folds) -> None:
    """But for the order of sums."""
    shifts = (
        {(s.path, s.attribute, s.masked_too): s.delta for s in f.shifts} for f in (one, other)
    )
    torch.testing.assert_close(*shifts, rtol=1e-12, atol=1e-12)
    carries = ({c.axis.name: [c.carriers, c.factors] for c in f.carries} for f in (one, other))
    torch.testing.assert_close(*carries, rtol=1e-12, atol=1e-12)
    dropped = ({axis.name: d for axis, d in f.dropped.values()} for f in (one, other))
    torch.testing.assert_close(*dropped, rtol=0, atol=0)
    assert one.notes == other.notes


def proved(model, bias):
    """The plan and the pruned model: it computes what the masked one does, and both walks hear the
    same."""
    plan = fxprune.plan(awake(model), X, bias=bias)
    small = plan.apply(model)
    masked_equals_pruned(plan, model, small, X)
    assert_the_same(plan._folds, plan.folds(model))
    return plan, small


HOW = [{"bias": "expected"}, {"bias": "propagate"}, {"bias": "drop"}, {"exact": True}]


@given(st.sampled_from(HOW), networks(), settings_of_a_plan())
def test_the_first_walk_hears_what_a_walk_of_its_own_is_told(how, model, settings):
    model = awake(model)
    plan = fxprune.plan(model, X, **how, **settings)
    assert_the_same(plan._folds, plan.folds(model))


@given(networks(), settings_of_a_plan())
def test_what_a_dead_slice_says_is_what_the_masked_model_has_there(model, settings):
    """Whoever else is dead: constants are followed as if all were, here some are."""
    model = awake(model)
    plan = fxprune.plan(model, X, bias="propagate", **settings)
    constants, there = plan.constants(model), values_of(plan._trace, plan.mask(model), X)
    for node in plan._trace.graph.nodes:
        if not node.op.startswith("call_") or not isinstance(there[node], torch.Tensor):
            continue
        for channels, said in constants.at(node):
            for axis, constant in zip(channels.axes, said, strict=True):
                known = constants.removed(axis.units) & ~constant.isnan()
                if len(axis.dims) > 1 or axis.border or not known.any():
                    continue
                found = there[node].movedim(axis.dims[0], 0).reshape(len(known), -1)[known]
                assert (found - constant[known][:, None]).abs().max() < 1e-9, node


class Gated(nn.Module):
    """Two maps whose product is summed: only zeros may be dead in it, so biases have to go."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 6, 1)
        self.a, self.b, self.c = nn.Conv2d(6, 8, 1), nn.Conv2d(6, 8, 1), nn.Conv2d(6, 4, 1)

    def forward(self, x):
        x = torch.sigmoid(self.stem(x))
        a, b = self.a(x).flatten(2), self.b(x).flatten(2)
        return torch.einsum("ncx,ncy->nxy", a, b).sum((1, 2)), self.c(x)


@pytest.mark.parametrize("bias", ["expected", "propagate"])
def test_units_that_have_to_be_silent_stand_beside_others_that_speak(bias):
    plan, small = proved(Gated(), bias)
    silent = plan._silent[plan._removed]
    assert silent.any() and not silent.all()
    assert small.stem.out_channels == 3 and small.a.out_channels == 4


def test_a_weight_that_turns_out_to_make_channels_speaks_as_one_that_does():
    """A parameter that is met bare before a product shows what it is: its slices are zeroed."""
    net = Net(
        lambda s, x: s.last(F.softplus(x.flatten(1) @ (s.scale * s.weight))),
        weight=nn.Parameter(torch.randn(108, 8)), scale=nn.Parameter(torch.rand(8)),
        last=nn.Linear(8, 3),
    )  # fmt: skip
    model = awake(net)
    assert discover(record(model, X), telling=Telling()).said is None  # it has to be told again
    for bias in ("propagate", "expected", "drop"):
        plan, _ = proved(model, bias)
        assert plan.groups[0].removed.numel() == 4


def test_a_weight_that_nobody_asked_before_it_makes_channels_needs_no_second_walk():
    net = Net(
        lambda s, x: s.last(F.softplus(x.flatten(1) @ s.weight[s.order] + s.shift)),
        weight=nn.Parameter(torch.randn(108, 8)), shift=nn.Parameter(torch.rand(8)),
        last=nn.Linear(8, 3), order=torch.arange(108).flip(0),
    )  # fmt: skip
    model = awake(net)
    relations = discover(record(model, X), telling=Telling())
    assert [s.role for s in relations.sources if s.name == "weight"] == ["bare0", "out"]
    assert relations.said is not None
    for bias in ("propagate", "expected", "drop"):
        plan, _ = proved(model, bias)
        assert [g.removed.numel() for g in plan.groups if g.frozen is None] == [4]


class Shut(nn.Module):
    """A norm behind a product that nothing is known of: masked, it says its shift all the same."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.norm = nn.Conv2d(3, 8, 1), nn.BatchNorm2d(8)
        self.last = nn.Conv2d(8, 4, 1)

    def forward(self, x):
        return self.last(F.softplus(self.norm(self.a(x) * x.mean())))


@pytest.mark.parametrize("bias", ["expected", "propagate"])
def test_a_masked_norm_says_its_shift_whatever_comes_in(bias):
    plan, small = proved(Shut(), bias)
    assert small.a.out_channels == 4
    assert not any("not constant" in note for _, note in plan.notes)


def test_what_was_heard_is_let_go_of_with_the_plan():
    model = awake(nn.Sequential(nn.Conv2d(3, 8, 1), nn.BatchNorm2d(8), nn.ReLU()))
    relations = fxprune.plan(model, X)._relations
    axes = [axis for value in relations.values.values() for axis in getattr(value, "axes", ())]
    assert axes and relations.said is None and all(axis.said is None for axis in axes)


def test_draws_are_followed_only_where_a_norm_could_tell():
    act, conv = nn.GELU(), nn.Conv2d(8, 4, 1)
    for middle, told in ((nn.Identity(), False), (nn.BatchNorm2d(8), True)):
        model = awake(nn.Sequential(nn.Conv2d(3, 8, 1), middle, act, conv))
        assert record(model, X).calls_any("norm") is told

    def forward(s, x):
        mean, variance = s.norm.running_mean, s.norm.running_var
        return s.last(F.relu(torch.ops.aten.batch_norm(
            s.a(x), s.norm.weight, s.norm.bias, mean, variance, False, 0.1, 1e-5, False
        )))  # fmt: skip

    net = Net(forward, a=nn.Conv2d(3, 8, 1), norm=nn.BatchNorm2d(8), last=nn.Conv2d(8, 4, 1))
    assert record(awake(net), X).calls_any("norm")


@pytest.mark.parametrize("bias", ["expected", "propagate", "drop"])
def test_functions_that_write_in_place_do_not_write_to_the_models_own_tensors(bias):
    layers = nn.Conv2d(3, 8, 1), nn.BatchNorm2d(8), nn.ReLU(inplace=True), nn.Conv2d(8, 4, 1)
    model = awake(nn.Sequential(*layers))
    before = {key: value.clone() for key, value in model.state_dict().items()}
    plan = fxprune.plan(model, X, bias=bias)
    plan.mask(model), plan.apply(model), fxprune.prune(model, X, bias=bias)
    assert all(torch.equal(value, before[key]) for key, value in model.state_dict().items())


THINNED = [
    lambda w: w * (w.abs() > 0.1),
    lambda w: w * (w.abs() > 0.1).float(),
    lambda w: torch.where(w.abs() > 0.1, w, torch.zeros_like(w)),
    lambda w: torch.where(w.abs() > 0.1, w, 0.0),
    lambda w: w.masked_fill(w.abs() < 0.1, 0.0),
    lambda w: w * torch.gt(w.abs(), 0.1).type_as(w),
    lambda w: w * ~(w.abs() < 0.1),
]


@pytest.mark.parametrize("thinned", THINNED)
def test_weights_that_go_through_flags_are_zero_where_they_are_masked(thinned):
    def forward(s, x):
        return s.c(torch.sigmoid(F.linear(torch.sigmoid(s.a(x)), thinned(s.b.weight), s.b.bias)))

    net = Net(forward, a=nn.Linear(4, 12), b=nn.Linear(12, 10), c=nn.Linear(10, 2))
    _, small = check(net, torch.randn(3, 4, dtype=torch.float64))
    assert small.a.out_features == 6


ACTIVATIONS = [
    lambda y: torch.where(y > 0, y, 0.1 * y),
    lambda y: y * (y > 0),
    lambda y: y * (y > 0).to(y.dtype),
    lambda y: torch.where((y > 0) & (y < 1), y, y.sign()),
    lambda y: y.masked_fill(y.lt(0.2), 0.3),
]


@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("norm", [nn.Identity, lambda: nn.BatchNorm1d(12)])
def test_constants_go_through_activations_that_are_written_with_flags(activation, norm):
    net = Net(lambda s, x: s.b(activation(s.n(s.a(x)))), a=nn.Linear(4, 12), n=norm(),
              b=nn.Linear(12, 3))  # fmt: skip
    plan, small = check(net, torch.randn(3, 4, dtype=torch.float64))
    assert small.a.out_features == 6 and not plan.notes


@pytest.mark.parametrize("how", ["linear", "matmul", "einsum"])
@pytest.mark.parametrize("same", [False, True])
def test_a_layer_that_reads_rows_which_a_view_has_cut_folds_what_they_say_alike(how, same):
    def forward(s, x):
        y = torch.sigmoid(s.a(x)).view(-1, 9, 4)
        z = s.l(y) if how == "linear" else y @ s.w if how == "matmul" else None
        z = torch.einsum("bnc,cd->bnd", y, s.w) if z is None else z
        return s.o(torch.tanh(z + s.bias).mean(1))

    torch.manual_seed(0)
    net = Net(forward, a=nn.Linear(4, 36, bias=not same), l=nn.Linear(4, 6),
              w=nn.Parameter(torch.randn(4, 6)), bias=nn.Parameter(torch.randn(6)),
              o=nn.Linear(6, 2))  # fmt: skip
    plan, small = check(net, torch.randn(3, 4, dtype=torch.float64))
    dropped = any("is dropped" in text for _, text in plan.notes)
    assert small.a.out_features == 18 and dropped is not same


def test_where_flags_are_set_is_no_number_of_a_channel():
    """As detectors pick the boxes whose scores are high enough."""

    def forward(s, x):
        y = torch.sigmoid(s.a(x))
        scores = torch.sigmoid(s.b(y)).flatten()
        at = torch.where(scores > 0.4)[0]
        return s.c(y), scores[at]

    net = Net(forward, a=nn.Linear(4, 12), b=nn.Linear(12, 5), c=nn.Linear(12, 3))
    _, small = check(net, torch.randn(3, 4, dtype=torch.float64))
    assert (small.a.out_features, small.b.out_features) == (6, 5)


SILENT = {
    "over a norm": lambda y: y / y.norm(dim=-1, keepdim=True),
    "over a sum": lambda y: torch.div(y, 1 + y.pow(2).sum(-1, keepdim=True)),
    "normalized": lambda y: F.normalize(y, dim=-1),
    "squashed": lambda y: y * (y.norm(dim=1, keepdim=True) / (1 + y.norm(dim=1, keepdim=True))),
    "heads under each other": lambda y: torch.cat(y.split(4, 1), 0),
    "rotated": lambda y: torch.view_as_real(
        torch.view_as_complex(y.reshape(-1, 4, 2)) * torch.tensor(0.6 + 0.8j).to(torch.complex128)
    ).flatten(1),
}  # fmt: skip


@pytest.mark.parametrize("how", SILENT)
def test_a_channel_that_is_zero_stays_zero(how):
    """So the products of two layers that have no biases can lose some."""

    def forward(s, x):
        return SILENT[how](s.a(x)) @ SILENT[how](torch.sin(s.b(x))).t()

    net = Net(forward, a=nn.Linear(5, 8, bias=False), b=nn.Linear(5, 8, bias=False))
    plan, small = check(net, X[:, 0, :, :5].flatten(0, 1))
    assert small.a.out_features == small.b.out_features == 4


def test_over_what_may_be_zero_a_zero_is_no_number():
    """0 / 0 is none: what divides channels by themselves keeps them."""

    def forward(s, x):
        y = s.a(x)
        return (y / y) @ s.b(x).t()

    net = Net(forward, a=nn.Linear(5, 8, bias=False), b=nn.Linear(5, 8, bias=False))
    plan, small = check(net, X[:, 0, :, :5].flatten(0, 1), shrinks=False)
    assert small.a.out_features == 8


def part_set(x, n):
    x = x.clone()
    x[:, 2:5] = n
    return x


SIZED = {
    "fill": lambda h, n: h * torch.zeros(8).fill_(n),
    "fill like": lambda h, n: h * torch.zeros_like(h).fill_(n / 2),
    "full like": lambda h, n: h * torch.full_like(h, n),
    "new full": lambda h, n: h * h.new_full((8,), n),
    "a part": part_set,
    "a part of zeros": lambda h, n: h * part_set(torch.zeros_like(h), n),
    "a row": lambda h, n: h * torch.arange(1.0, 9.0)[n],
}


@pytest.mark.parametrize("fill", SIZED.values(), ids=SIZED.keys())
@pytest.mark.parametrize("bias", ["expected", "propagate"])
def test_a_size_of_the_input_is_no_constant(fill, bias):
    class Sized(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.c = nn.Linear(6, 8), nn.Linear(8, 3)

        def forward(self, x):
            return self.c(fill(self.a(x).sigmoid(), len(x) if fill is part_set else x.shape[0]))

    x = torch.linspace(-2, 3, 24, dtype=torch.float64).cos().reshape(4, 6)
    model = awake(Sized())
    plan = fxprune.plan(model, x[:3], bias=bias)
    small = plan.apply(model)
    assert small.a.out_features == 4
    for rows in (x[:3], x[:2], x):
        masked_equals_pruned(plan, model, small, rows)


def by_list(net, x, h):
    return h * [0.25, 1.5, 2.5, 3.5, 4.5, 5.5, 6.5, 7.5, 8.5][x.shape[0]]


def by_attribute(net, x, h):
    net.factor = net.factor * 1.7
    return h * net.factor


def by_buffer(net, x, h):
    net.steps += 1
    return h * net.steps


def by_tensor(net, x, h):
    net.plain = net.plain + 1
    return h + net.plain


def before_it_is_counted(net, x, h):
    y = h * net.steps
    net.steps += 1
    return y


def by_words(net, x, h):
    return h * float(f"0.{x.shape[0]}")


def by_their_number(net, x, h):
    return h / 7.25 ** len(list(x))


def counted_to_one_in_the_code(net, x, h):
    net.count = net.count + 1
    return h * net.count + 0 * 2


def counted_in_a_list(net, x, h):
    net.seen.append(x)
    return h * len(net.seen) + 0 * 1


def by_a_flag(net, x, h):
    net.count = net.count + 1
    return h.sin() if net.count > 3 else h


def in_a_loop(net, x, h):
    for _ in range(x.shape[0]):
        h = h * 0.9
    return h


def for_each_row(net, x, h):
    for _ in x:
        h = h.sin()
    return h


def not_for_three(net, x, h):
    if x.shape[0] > 3:
        h = h.sin()
    return h


def pick(n):
    return 2.0 if n > 2 else 0.5


def where_gradients_are(net, x, h):
    return h if torch.is_grad_enabled() else h.sin()


CHANGING = {
    "a count that is in the code": counted_to_one_in_the_code,
    "a length that is in the code": counted_in_a_list,
    "a call by a count": by_a_flag,
    "the last of a range": lambda net, x, h: h * (list(range(x.shape[0]))[-1]) + 0 * 2,
    "one of two": lambda net, x, h: h * (2.0 if len(x) > 2 else 0.5),
    "one of two integers": lambda net, x, h: h * (2 if x.shape[0] > 2 else 3),
    "one of two attributes": lambda net, x, h: h * (net.factor if len(x) > 2 else net.other),
    "one of two by value": lambda net, x, h: h * (2.0 if x.mean() > 0.1 else 0.5),
    "one of two by any": lambda net, x, h: h * (2.0 if any(n > 2 for n in x.shape[:1]) else 0.5),
    "one of two elsewhere": lambda net, x, h: h * pick(x.shape[0]),
    "the least": lambda net, x, h: h * min(3, x.shape[0]),
    "the largest of a part": lambda net, x, h: h * max(1, x.shape[0] // 2),
    "one of two calls": lambda net, x, h: h.sin() if x.shape[0] > 2 else h.cos(),
    "a call for more": not_for_three,
    "calls in a loop": in_a_loop,
    "calls for each row": for_each_row,
    "calls by the mode": where_gradients_are,
    "a root": lambda net, x, h: h / math.sqrt(x.shape[0]),
    "a logarithm": lambda net, x, h: h * math.log(1 + x.shape[0]),
    "a root of NumPy's": lambda net, x, h: h * float(np.sqrt(x.shape[0])),
    "a mean": lambda net, x, h: h * x.mean().item(),
    "the largest": lambda net, x, h: h + float(x.abs().max()),
    "a value in a list": lambda net, x, h: h * x.mean(1).tolist()[0],
    "a list": by_list,
    "their number": by_their_number,
    "a word": by_words,
    "a sum over a range": lambda net, x, h: h * (0.3 * sum(range(x.shape[0]))),
    "an attribute": by_attribute,
    "a buffer": by_buffer,
    "a buffer before": before_it_is_counted,
    "a tensor": by_tensor,
}


class Changes(nn.Module):
    def __init__(self, change):
        super().__init__()
        self.a, self.c, self.change = nn.Linear(6, 8), nn.Linear(8, 3), change
        self.factor, self.plain = 1.3, torch.tensor(1.0, dtype=torch.float64)
        self.other, self.count, self.seen = 0.7, 1, []
        self.register_buffer("steps", torch.tensor(1.0))

    def forward(self, x):
        return self.c(self.change(self, x, self.a(x).sigmoid()))


@pytest.mark.parametrize("change", CHANGING.values(), ids=CHANGING.keys())
@pytest.mark.parametrize("bias", ["expected", "propagate"])
def test_a_number_that_is_another_in_another_run_is_no_constant(change, bias):
    x = torch.linspace(-2, 3, 24, dtype=torch.float64).cos().reshape(4, 6)
    model = awake(Changes(change))
    plan = fxprune.plan(model, x[:3], bias=bias)
    masked, small = plan.mask(model), plan.apply(model)
    assert small.a.out_features == 4
    for rows in (x[:3], x[:2], 2 * x, -x):
        for grad in (False, True):
            with torch.set_grad_enabled(grad):
                assert difference([masked(rows)], [small(rows)]) < 1e-9
        for net in (masked, small):  # as in another run: run() puts back what code sets
            net.factor, net.plain, net.steps = net.factor * 1.1, net.plain + 2, net.steps + 2
            net.count, net.seen = net.count + 2, [*net.seen, x]


SCALE = 1.75


def beside_others(net, x, h):
    y = (h * 0.7).cos()
    if x.shape[0] > 99 and x.shape[1] > 99:
        raise ValueError
    return y / 2


class Batch:
    def __init__(self, x):
        self.x = x


class Slots:
    __slots__ = ("x",)

    def __init__(self, x):
        self.x = x


class Attributes(dict):
    def __init__(self, x):
        super().__init__(x=x)
        self.__dict__ = self


class Named(dict):
    __getattr__ = dict.__getitem__

    def __init__(self, x):
        super().__init__(x=x)


@pytest.mark.parametrize("batch", [Batch, Slots, Attributes, Named])
def test_a_number_made_of_the_length_of_what_an_object_holds_is_no_constant(batch):
    class Held(Changes):
        def forward(self, given):
            return super().forward(given.x)

    x = torch.linspace(-2, 3, 24, dtype=torch.float64).cos().reshape(4, 6)
    model = awake(Held(by_list))
    plan = fxprune.plan(model, (batch(x[:3]),))
    small = plan.apply(model)
    assert small.a.out_features == 4
    for rows in (x[:3], x[:2], x):
        masked_equals_pruned(plan, model, small, (batch(rows),))


FIXED = {
    "in the code": lambda net, x, h: F.leaky_relu(h, 0.3) * 1.5 - 2,
    "an attribute": lambda net, x, h: h * net.factor,
    "by name": lambda net, x, h, factor=1.75: h * factor,
    "made of numbers": lambda net, x, h: h * (0.3 + 0.45 * 2),
    "a width": lambda net, x, h: h / math.sqrt(h.shape[1]),
    "of everybody": lambda net, x, h: h * SCALE,
    "by a setting": lambda net, x, h: h * 2 if net.factor > 1 else h * 3,
    "beside checks": beside_others,
}


@pytest.mark.parametrize("change", FIXED.values(), ids=FIXED.keys())
def test_one_that_is_the_same_in_every_run_is(change):
    model = awake(Changes(change))
    x = torch.linspace(-2, 3, 24, dtype=torch.float64).cos().reshape(4, 6)
    plan = fxprune.plan(model, x, bias="propagate")
    assert plan.notes == []
    assert any(shift.path == "c" for shift in plan.folds(model).shifts)


class Steps(nn.Module):
    """The same layers at each step of a sequence."""

    def __init__(self, unbinds):
        super().__init__()
        self.a, self.b, self.out = nn.Linear(4, 8), nn.Linear(8, 8), nn.Linear(8, 3)
        self.unbinds = unbinds

    def forward(self, x):
        found = []
        if self.unbinds:
            for step in x.unbind(1):
                found.append(self.b(torch.sigmoid(self.a(step))))
        else:
            for t in range(x.shape[1]):
                found.append(self.b(torch.sigmoid(self.a(x[:, t]))))
        return self.out(torch.stack(found, 1))


@pytest.mark.parametrize("unbinds", [False, True])
def test_a_loop_over_a_length_keeps_the_constants_of_calls_that_do_not_hang_on_each_other(unbinds):
    x = torch.randn(2, 5, 4, dtype=torch.float64)
    net = awake(Steps(unbinds))
    for steps in (1, 3):
        plan, small = check(net, x[:, :steps])
        assert bool(plan.notes) == (steps == 1)  # how a second step would go on nobody has seen
        for n in range(1, 6):
            assert difference([plan.mask(net)(x[:, :n])], [small(x[:, :n])]) < 1e-9
