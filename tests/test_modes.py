"""Forwards that are written anew do all that the old ones did: in training mode, under contexts, in
the backward pass, on other inputs. What a recorded graph cannot say is left as it is."""

from __future__ import annotations

import collections
import dataclasses
import math

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import fxprune

from .oracle import awake, check
from .test_constructs import Net as NetOf

pytestmark = pytest.mark.usefixtures("from_the_graph")


def x(n=5, seed=1):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(n, 6, dtype=torch.float64, generator=generator)


def parts(h):
    """A size that only new code can change."""
    return h.view(-1, 2, 4).flatten(1)


def net(forward, **attributes):
    """A network of a class of its own."""

    class Net(nn.Module):
        p = 0.0

        def __init__(self):
            super().__init__()
            self.a, self.b, self.aux = nn.Linear(6, 8), nn.Linear(8, 4), nn.Linear(6, 3)
            for name, value in attributes.items():
                setattr(self, name, value)

        def doubled(self, h):
            return h * 2 if self.training else h

    Net.forward = forward
    return awake(Net()).double().eval()


def both(forward, **attributes):
    """The plan; the masked and the pruned model."""
    model = net(forward, **attributes)
    plan = fxprune.plan(model, x(), sparsity=0.5, bias="drop")
    return plan, plan.mask(model), plan.apply(model)


def difference(a, b, n=5, training=False):
    outs = []
    for model in (a, b):
        torch.manual_seed(3)
        outs.append(model.train(training)(x(n)))
    return float((outs[0] - outs[1]).detach().abs().max())


def reason(plan):
    return dict(plan.skipped)["a"]


# -- training mode ---------------------------------------------------------------------------------


def a_branch_beside_a_flag(s, x):
    h = F.dropout(s.a(x).sigmoid(), s.p, training=s.training)
    if s.training:
        h = h * 2
    return s.b(parts(h))


def a_second_output(s, x):
    y = s.b(parts(F.dropout(s.a(x).sigmoid(), s.p, training=s.training)))
    return (y, s.aux(x)) if s.training else y


def an_output_that_is_there_anyway(s, x):
    h = s.a(x).sigmoid()
    y = s.b(parts(h))
    return (y, h) if s.training else y


def a_branch_in_a_method(s, x):
    return s.b(parts(s.doubled(s.a(x).sigmoid())))


def a_flag_by_name(s, x):
    flag = getattr(s, "training")  # noqa: B009
    return s.b(parts(s.a(x).sigmoid() * 2 if flag else s.a(x).sigmoid()))


def a_list_around_the_output(s, x):
    h = s.b(parts(s.a(x).sigmoid()))
    return h if s.training else [h, h]


def another_order(s, x):
    h, g = s.a(x).sigmoid(), s.a(x)
    return s.b(parts(torch.cat([h, g] if s.training else [g, h])))


@pytest.mark.parametrize("forward", [
    a_list_around_the_output, another_order, a_branch_beside_a_flag, a_second_output,
    an_output_that_is_there_anyway, a_branch_in_a_method, a_flag_by_name,
], ids=lambda f: f.__name__)  # fmt: skip
def test_code_that_does_something_else_in_training_is_not_written_anew(forward):
    plan, masked, small = both(forward)
    assert not plan.code and "in training mode" in reason(plan)


def test_a_flag_for_a_helper_of_others_that_does_nothing_by_it_is_not_forgotten():
    """Of the calls that the graph of the run in eval mode has, none takes the flag."""
    layers = pytest.importorskip("timm.layers")

    class Drops(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b = nn.Linear(6, 8), nn.Linear(8, 4)

        def forward(self, x):
            h = parts(self.a(x).sigmoid())
            return self.b(layers.drop_path(h, 0.5, training=self.training))

    plan = fxprune.plan(awake(Drops()), x(), sparsity=0.5)
    assert not plan.code and "in training mode" in reason(plan)


FLAGS = {
    "never": (lambda s, x: s.b(parts(F.dropout(s.a(x), 0.5, training=False))), {}),
    "switched off": (
        lambda s, x: s.b(parts(F.dropout(s.a(x), 0.5, training=s.training and s.use))),
        {"use": False},
    ),
    "own flag": (lambda s, x: s.b(parts(F.dropout(s.a(x), 0.5, s.mc))), {"mc": False}),
    "the mode and never": (
        lambda s, x: s.b(
            parts(F.dropout(F.dropout(s.a(x), 0.5, training=False), s.p, training=s.training))
        ),
        {"p": 0.0},
    ),
    "the mode": (lambda s, x: s.b(parts(F.dropout(s.a(x), 0.5, s.training))), {}),
    "a number": (
        lambda s, x: s.b(parts(F.dropout(s.a(x), 0.5 if s.training else 0.0, True))),
        {},
    ),
    "frozen norm": (
        lambda s, x: s.b(parts(F.batch_norm(s.a(x), s.mean, s.mean + 1, training=False))),
        {"mean": torch.zeros(8, dtype=torch.float64)},
    ),
    "the mode and a norm that nobody told": (
        lambda s, x: s.b(
            parts(F.batch_norm(F.dropout(s.a(x), 0.0, training=s.training), s.mean, s.mean + 1))
        ),
        {"mean": torch.zeros(8, dtype=torch.float64)},
    ),
    "a word": (
        lambda s, x: s.b(parts(F.gelu(s.a(x), approximate="tanh" if s.training else "none"))),
        {},
    ),
}


@pytest.mark.parametrize("case", FLAGS)
@pytest.mark.parametrize("training", [False, True])
def test_new_code_takes_of_the_mode_what_the_old_code_took(case, training):
    forward, attributes = FLAGS[case]
    plan, masked, small = both(forward, **attributes)
    assert plan.code and small.a.out_features == 4
    if "dropout" in plan.code[""].source and training and case in ("the mode", "a number"):
        # Other widths draw other noise: what is left of it is that there is some.
        assert not torch.equal(small.train()(x()), small(x()))
    else:
        assert difference(masked, small, training=training) <= 1e-9


@pytest.mark.parametrize("beside", [False, True])
@pytest.mark.parametrize("as_graph", [False, True])
def test_a_graph_reads_the_mode_where_the_code_did_and_nowhere_else(as_graph, beside):
    class Frozen(nn.Module):
        def __init__(self):
            super().__init__()
            self.register_buffer("mean", torch.ones(8))

        def forward(self, y):
            y = F.dropout(y, 0.0, self.training) if beside else y
            return F.batch_norm(y, self.mean, self.mean)

    model = nn.Sequential(nn.Linear(6, 8), Frozen(), nn.Linear(8, 3)).double().eval()
    small = fxprune.prune(model, x(), as_graph=True) if as_graph else fxprune.trace(model, x())
    assert torch.equal(small.train()(x()), small.eval()(x()))


@pytest.mark.parametrize("as_graph", [False, True])
def test_a_graph_takes_the_flag_along_where_the_code_does_more_by_the_mode(as_graph):
    """What it does besides is not in a graph, which is of eval mode."""

    def forward(s, x):
        h = F.dropout(s.a(x).sigmoid(), 0.5, s.training)
        if s.training:
            h = h + 1
        return s.b(h)

    model = net(forward)
    small = fxprune.prune(model, x(), as_graph=True) if as_graph else fxprune.trace(model, x())
    assert torch.equal(small(x()), small(x())) and not torch.equal(small.train()(x()), small(x()))


class Noisy(nn.Module):
    """A layer whose weights are disturbed as it trains."""

    def __init__(self, i, o):
        super().__init__()
        self.weight, self.sigma = (nn.Parameter(torch.randn(o, i)) for _ in range(2))
        self.register_buffer("noise", torch.randn(o, i))

    def forward(self, x):
        weight = self.weight + self.sigma * self.noise if self.training else self.weight
        return F.linear(x, weight)


class Helped(nn.Module):
    """A network with a second head for training."""

    def __init__(self):
        super().__init__()
        self.a, self.c, self.b = nn.Linear(6, 8), nn.Linear(8, 8), nn.Linear(8, 4)
        self.aux = nn.Linear(8, 3)

    def forward(self, x):
        h = self.a(x).sigmoid()
        y = self.b(self.c(h).sigmoid())
        return (y, self.aux(h)) if self.training else y


def test_what_an_auxiliary_head_reads_stays_and_the_rest_goes():
    plan, small = check(Helped(), x())
    assert dict(plan.skipped)["a"] == "aux.weight meets them, in training mode alone"
    assert (small.a.out_features, small.c.out_features) == (8, 4)
    assert [tuple(y.shape) for y in small.train()(x())] == [(5, 4), (5, 3)]


def test_weights_with_noise_in_training_alone_stay_and_train():
    net = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), Noisy(8, 8), nn.Tanh(), nn.Linear(8, 6),
                        nn.Tanh(), nn.Linear(6, 2))  # fmt: skip
    plan, small = check(net, x())
    assert small[4].out_features == 3 and "in training mode alone" in dict(plan.skipped)["0"]
    small.train()(x()).sum().backward()


def test_a_layer_that_never_runs_costs_no_run_and_no_channels():
    class Unused(Helped):
        def forward(self, x):
            return self.b(self.c(self.a(x).sigmoid()).sigmoid())

    plan, small = check(Unused(), x())
    assert small.a.out_features == 4


# -- contexts and the backward pass ----------------------------------------------------------------


def under_no_grad(s, x):
    with torch.no_grad():
        h = s.a(x).sigmoid()
    return s.b(parts(h))


def under_autocast(s, x):
    with torch.autocast("cpu", dtype=torch.bfloat16):
        return s.b(parts(s.a(x.float()).sigmoid())).double()


def a_hook_on_a_tensor(s, x):
    h = s.a(x).sigmoid()
    if h.requires_grad:
        h.register_hook(lambda g: g * 0)
    return s.b(parts(h))


def a_map_that_is_kept(s, x):
    s.last = parts(s.a(x).sigmoid())
    return s.b(s.last)


def a_list_that_is_kept(s, x):
    h = parts(s.a(x).sigmoid())
    s.seen.append(h)
    return s.b(h)


def a_mapping_that_is_kept(s, x):
    h = parts(s.a(x).sigmoid())
    s.by_name["h"] = h
    return s.b(h)


def a_seed(s, x):
    torch.manual_seed(0)
    return s.b(parts(s.a(x).sigmoid()))


def the_strides(s, x):
    return s.b(parts(s.a(x).sigmoid())) * x.stride(1)


def the_bytes(s, x):
    return s.b(parts(s.a(x).sigmoid())) * x.nbytes


class DropPath(nn.Module):
    def forward(self, x):
        return x * 2 if self.training else x


def an_island_of_float32(s, x):
    with torch.autocast("cpu", enabled=False):
        return s.b(parts(s.a(x).sigmoid()))


def the_flag_of_a_child(s, x):
    return s.b(parts(F.dropout(s.a(x), 0.5, s.aux.training)))


def whether_gradients_are_recorded(s, x):
    h = s.a(x).sigmoid()
    return s.b(parts(h * 2 if torch.is_grad_enabled() else h))


@pytest.mark.parametrize("forward, words", [
    (an_island_of_float32, "under a context of its own"),
    (the_flag_of_a_child, "goes by the mode of another module"),
    (whether_gradients_are_recorded, "goes by whether gradients are recorded"),
    (a_map_that_is_kept, "sets last as it runs"),
    (under_no_grad, "switches the recording of gradients"),
    (a_hook_on_a_tensor, "puts hooks on tensors"),
    (a_list_that_is_kept, "changes what is in seen"),
    (a_mapping_that_is_kept, "changes what is in by_name"),
    (a_seed, "sets where random numbers begin"),
    (the_strides, "goes by the stride of a tensor"),
    (the_bytes, "goes by the nbytes of a tensor"),
])  # fmt: skip
def test_what_a_graph_does_not_hold_is_not_written_anew(forward, words):
    plan, masked, small = both(forward, drop=DropPath(), seen=[], by_name={"h": None})
    assert not plan.code and words in reason(plan)


def test_a_child_that_gives_back_what_it_gets_is_not_lost():
    model = NetOf(lambda s, x: s.b(parts(s.drop(s.a(x).sigmoid()))), a=nn.Linear(6, 8),
                  drop=DropPath(), b=nn.Linear(8, 4)).double()  # fmt: skip
    plan = fxprune.plan(model, x())
    assert not plan.code and "drop gives back what it gets" in reason(plan)


def test_a_default_that_is_no_plain_value_is_a_reason():
    def forward(s, x, act=torch.sigmoid):
        return s.b(parts(act(s.a(x))))

    plan, masked, small = both(forward)
    assert not plan.code and "the default of act is no plain value" in reason(plan)


def test_code_under_autocast_is_not_written_anew():
    model = net(under_autocast).float()
    plan = fxprune.plan(model, x().float())
    assert "under a context of its own" in reason(plan)


class Reversed(torch.autograd.Function):
    @staticmethod
    def forward(ctx, h):
        return h.view_as(h)

    @staticmethod
    def backward(ctx, g):
        return -g


class StraightThrough(torch.autograd.Function):
    @staticmethod
    def forward(ctx, h):
        return h.sign()

    @staticmethod
    def backward(ctx, g):
        return g


taken_before = StraightThrough.apply


@pytest.mark.parametrize("function", [Reversed.apply, taken_before], ids=["reversed", "straight"])
def test_new_code_keeps_a_backward_pass_of_its_own(function):
    plan, masked, small = both(lambda s, x: s.b(parts(function(s.a(x)))))
    assert plan.code and small.a.out_features == 4
    grads = []
    for model in (masked, small):
        given = x().requires_grad_()
        model(given).square().sum().backward()
        grads.append(given.grad)
    assert float(grads[0].norm()) > 0
    assert torch.allclose(*grads, atol=1e-9)


# -- other inputs ----------------------------------------------------------------------------------


def in_a_loop(s, x):
    return torch.cat([s.b(parts(s.a(x[i : i + 1]).sigmoid())) for i in range(x.shape[0])])


def in_steps_of_two(s, x):
    return torch.cat([s.b(parts(s.a(x[i : i + 2]).sigmoid())) for i in range(0, len(x), 2)])


def by_a_plain_number(s, x):
    return s.b(s.a(x).sigmoid().reshape(int(x.shape[0]), 2, 4).flatten(1))


@pytest.mark.parametrize("forward", [
    in_a_loop, in_steps_of_two, by_a_plain_number,
], ids=lambda f: f.__name__)  # fmt: skip
def test_code_that_goes_by_the_size_of_the_batch_is_not_written_anew(forward):
    plan, masked, small = both(forward)
    assert not plan.code and "inputs may have others" in reason(plan)
    assert difference(masked, small, n=3) <= 1e-9


def through_features(s, x):
    h = x.new_zeros(x.shape[0], 8)
    for t in range(x.shape[1]):
        h = torch.tanh(s.a(x) * x[:, t, None] + h)
    return s.b(h)


def test_a_size_that_a_weight_reads_is_the_same_for_all_inputs():
    plan, masked, small = both(through_features)
    assert plan.code and difference(masked, small, n=3) <= 1e-9


def test_a_number_that_keeps_its_origin_is_read_anew():
    plan, masked, small = both(
        lambda s, x: s.b(
            s.a(x).sigmoid().reshape(divmod(math.prod(x.shape[:1]), 1)[0], 2, 4).flatten(1)
        )
    )
    assert plan.code and difference(masked, small, n=3) <= 1e-9


def test_the_product_of_a_shape_keeps_its_origin():
    plan, masked, small = both(
        lambda s, x: (
            s.b(s.a(x).sigmoid()[:, None].view(x.shape[0], x.shape[1:].numel() // 6 * 8))
            * x.size().numel()
        )
    )
    assert plan.code and difference(masked, small, n=3) <= 1e-9
    plan, masked, small = both(
        lambda s, x: s.b((h := s.a(x).sigmoid()[:, None]).view(len(x), h.shape[1:].numel()))
    )
    assert not plan.code and difference(masked, small, n=3) <= 1e-9 and small.a.out_features == 4


@pytest.mark.parametrize("each", [
    lambda x: x.split(1), lambda x: torch.vsplit(x, x.shape[0]), lambda x: x[:, None].unbind(0),
    lambda x: [row for row in x[:, None]],
], ids=["split", "vsplit", "unbind", "iteration"])  # fmt: skip
def test_as_many_parts_are_expected_as_were_recorded(each):
    plan, masked, small = both(
        lambda s, x: torch.cat([s.b(parts(s.a(part).sigmoid())) for part in each(x)])
    )
    assert difference(masked, small) <= 1e-9
    for n in (3, 7):
        with pytest.raises(fxprune.PruningError, match=f"was 5; it is {n} now"):
            small(x(n))


def test_widths_that_loops_and_logarithms_go_by():
    def looped(s, x):
        h = s.a(x).sigmoid()
        for _ in range(h.shape[1] // 4):
            h = h * 1.5
        return s.b(h)

    def logarithm(s, x):
        h = s.a(x).sigmoid()
        return s.b(h * int(math.log2(s.a.out_features)))

    def remainder(s, x):
        h = s.a(x).sigmoid()
        return s.b(h * divmod(h.shape[1], 3)[1])

    for forward in (looped, logarithm, remainder):
        check(net(forward), x(), shrinks=False)


# -- settings and results --------------------------------------------------------------------------


def by_a_flag(s, x):
    y = s.b(parts(s.a(x).sigmoid()))
    return y.softmax(-1) if s.deploy else y


def by_a_word(s, x):
    y = s.b(parts(s.a(x).sigmoid()))
    return y.softmax(-1) if s.mode == "probs" else y


def by_what_is_there(s, x):
    y = s.b(parts(s.a(x).sigmoid()))
    return y if s.head is None else s.head(y)


def by_a_number(s, x):
    return s.b(parts(s.a(x).sigmoid())) / s.temperature


@pytest.mark.parametrize("forward, name, value, other", [
    (by_a_flag, "deploy", False, True), (by_a_word, "mode", "raw", "probs"),
    (by_a_number, "temperature", float("nan"), 4.0),
    (by_what_is_there, "head", None, nn.Softmax(-1)), (by_a_number, "temperature", 1.0, 4.0),
])  # fmt: skip
def test_new_code_does_not_pass_over_a_setting_that_is_another_now(forward, name, value, other):
    plan, masked, small = both(forward, **{name: value})
    assert plan.code and not difference(masked, small) > 1e-9  # which may be NaN
    setattr(small, name, other)
    with pytest.raises(fxprune.PruningError, match=rf"self\.{name} was "):
        small(x())


class Own(collections.OrderedDict):
    pass


@pytest.mark.parametrize("container", [collections.OrderedDict, Own])
def test_a_container_of_its_own_is_not_made_a_plain_one(container):
    model = net(lambda s, x: container(y=s.b(parts(s.a(x)))))
    plan = fxprune.plan(model, x())
    assert not plan.code and f"container of its own ({container.__name__})" in reason(plan)


@dataclasses.dataclass
class Result:
    y: torch.Tensor


def test_a_dataclass_is_returned_by_new_code():
    model = net(lambda s, x: Result(s.b(parts(s.a(x)))))
    small = fxprune.prune(model, x())
    assert small.a.out_features == 4 and type(small(x(3))) is Result


def test_what_fx_cannot_write_is_left_as_it_is():
    def forward(s, x, *, scale=1.0, flag=None):
        return s.b(parts(s.a(x).sigmoid() * scale))

    def by_keyword(s, x, scale=1.0, *, flag):
        return s.b(parts(s.a(x).sigmoid() * scale))

    assert both(forward)[0].code
    model = net(by_keyword)
    plan = fxprune.plan(model, {"x": x(), "flag": None})
    assert not plan.code and "takes flag by keyword only" in reason(plan)


def test_new_code_asks_again_how_many_bits_a_batch_has():
    def forward(s, x):
        h = s.a(x).sigmoid()
        h = h * x.shape[0].bit_length()
        return s.b(parts(h))

    plan, masked, small = both(forward)
    assert plan.code and difference(masked, small, n=6) <= 1e-9
    with pytest.raises(fxprune.PruningError, match="bit_length"):
        small(x(9))
