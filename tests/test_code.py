"""Forwards that are written anew: right for other inputs, or an error; never silently wrong."""

from __future__ import annotations

import copy
import pickle

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import fxprune

from .oracle import awake, check, difference, run, state
from .test_trace import Net

pytestmark = pytest.mark.usefixtures("from_the_graph")


class Literal(nn.Module):
    """A view with a literal, a dropout, a flag, and a question asked of the batch size."""

    def __init__(self):
        super().__init__()
        self.conv, self.out = nn.Conv2d(3, 16, 3), nn.Linear(16 * 36, 10)

    def forward(self, x, *, flip=False):
        y = self.out(F.dropout(torch.sigmoid(self.conv(x)).view(-1, 16 * 36), 0.5, self.training))
        if x.shape[0] > 3:
            y = y * 100
        return -y if flip else y


def batch(n):
    generator = torch.Generator().manual_seed(n)
    return torch.randn(n, 3, 8, 8, dtype=torch.float64, generator=generator)


@pytest.fixture
def planned():
    model = awake(Literal())
    plan = fxprune.plan(model, batch(2))
    return model, plan, plan.apply(model)


def test_the_new_forward_is_right_for_other_batch_sizes(planned):
    model, plan, small = planned
    assert plan.code[""].source.count("288") == 1
    for n in (1, 2, 3):
        assert difference(run(plan.mask(model), batch(n)), run(small, batch(n))) < 1e-9


def test_a_size_that_sends_the_code_another_way_is_an_error(planned):
    with pytest.raises(fxprune.PruningError, match="gt"):
        planned[2](batch(5))


def test_a_flag_that_sends_the_code_another_way_is_an_error(planned):
    small = planned[2]
    assert difference([small(batch(2), flip=False)], [small(batch(2))]) == 0
    with pytest.raises(fxprune.PruningError, match="flip=False"):
        small(batch(2), flip=True)


def test_dropout_follows_the_training_flag(planned):
    small = planned[2]
    x = batch(2)
    assert difference([small.train()(x)], [small(x)]) > 0
    assert difference([small.eval()(x)], [small(x)]) == 0


class TrainsOtherwise(nn.Module):
    """A number that depends on the mode, as people write it around attention."""

    def __init__(self):
        super().__init__()
        self.conv, self.out = nn.Conv2d(3, 8, 1), nn.Linear(8, 2)
        self.norm = nn.BatchNorm2d(8)
        self.drop = nn.Dropout(0.4)

    def forward(self, x):
        y = F.silu(self.norm(self.conv(x))).view(-1, 8, 64).transpose(1, 2)
        y = F.scaled_dot_product_attention(
            y, y, y, dropout_p=self.drop.p if self.training else 0.0, scale=0.3
        )
        return self.out(y)


def test_a_number_that_depends_on_the_mode_goes_on_doing_so():
    model = awake(TrainsOtherwise())
    before = state(model)
    plan = fxprune.plan(model, batch(2))
    small = plan.apply(model)
    assert small.conv.out_channels == 4 and "0.4" in plan.code[""].source
    assert difference(run(plan.mask(model), batch(3)), run(small, batch(3))) < 1e-9
    assert torch.equal(small(batch(2)), small(batch(2)))
    assert not torch.equal(small.train()(batch(2)), small(batch(2)))
    # Looking at what the code does in training mode has left the statistics alone.
    assert all(torch.equal(value, before[name]) for name, value in state(model).items())


def test_code_that_differs_in_training_mode_is_left_whole():
    class Other(Literal):
        def forward(self, x):
            y = torch.sigmoid(self.conv(x)).view(-1, 16 * 36)
            return self.out(y * 2 if self.training else y)

    plan = fxprune.plan(awake(Other()), batch(2))
    assert "training mode" in dict(plan.skipped)["conv"] and not plan.code


def test_pruning_twice_works_on_a_rewritten_forward(planned):
    small = planned[2]
    again = fxprune.prune(small, batch(2))
    assert again.conv.out_channels == 4 and type(again).__name__ == "Literal"
    assert type(again).__mro__[1] is Literal


class TakesLists(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv, self.out = nn.Conv2d(3, 8, 1), nn.Conv2d(8, 2, 1)

    def forward(self, x, scales=(1.0, 2.0), *, more=None):
        y = torch.sigmoid(self.conv(x)).view(-1, 8, 64)
        for scale in scales:
            y = y * scale
        return self.out(y.view(-1, 8, 8, 8)) + sum(more["add"])


def test_lists_and_mappings_that_are_arguments_have_to_be_those_of_the_recorded_run():
    x, one = batch(2), torch.ones(1, dtype=torch.float64)
    small = fxprune.prune(awake(TakesLists()), {"x": x, "more": {"add": [one, 3]}})
    assert small.conv.out_channels == 4
    added = small(x, more={"add": [one * 2, 3]}) - small(x, more={"add": [one, 3]})
    assert torch.allclose(added, torch.ones_like(added))
    for changed in ({"scales": (1.0, 3.0)}, {"scales": (1.0,)}):
        with pytest.raises(fxprune.PruningError, match="scales"):
            small(x, more={"add": [one, 3]}, **changed)
    for add in ([one, 4], [one, 3, one]):
        with pytest.raises(fxprune.PruningError, match="more"):
            small(x, more={"add": add})


@pytest.mark.parametrize(
    "norm", [nn.LayerNorm(12), nn.RMSNorm(12), nn.GroupNorm(3, 12), nn.BatchNorm1d(12)]
)
def test_a_layer_that_goes_by_two_names_is_resized_as_the_one_that_is_called(norm):
    net = Net(lambda s, x: s.b(torch.sigmoid(s.n(s.a(x)))), a=nn.Linear(8, 12), b=nn.Linear(12, 3))
    net.n = net.other = norm
    _, small = check(net, torch.randn(4, 8, dtype=torch.float64))
    assert small.n is small.other and small.n.weight.shape == (6,)


class Gated(nn.Module):
    """A layer of another module's, of which half is a gate."""

    def __init__(self, shared):
        super().__init__()
        self.fc = shared

    def forward(self, x):
        y = self.fc(x)
        return y[:, :8] * torch.sigmoid(y[:, 8:])


def test_a_layer_that_modules_share_is_called_by_its_name_in_each():
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.shared = nn.ModuleList([nn.Linear(6, 16)])
            self.first, self.second = (Gated(self.shared[0]) for _ in range(2))
            self.out = nn.Linear(8, 3)

        def forward(self, x):
            return self.out(self.first(x) + self.second(x.flip(0)))

    plan, small = check(Net(), torch.randn(4, 6, dtype=torch.float64))
    assert small.shared[0].out_features == 8 and sorted(plan.code) == ["first", "second"]


class Coder(nn.Module):
    """Users call the parts of its forward, too."""

    def __init__(self):
        super().__init__()
        self.a, self.b, self.c = nn.Linear(3, 8), nn.Linear(8, 16), nn.Linear(8, 3)

    def encode(self, x):
        return self.b(self.a(x).sigmoid())

    def decode(self, y):
        return self.c(y.sigmoid().view(-1, 2, 8).mean(1))

    def forward(self, x):
        return self.decode(self.encode(x))

    def twice(self, x):
        return self.decode(self.encode(x) * 2)


def test_methods_that_hold_the_old_sizes_are_an_error_and_not_wrong():
    x = torch.randn(2, 3, generator=torch.Generator().manual_seed(1)).double()
    plan, small = check(Coder(), x)
    assert "and no decode, with the old sizes" in str(plan)
    masked = plan.mask(plan._trace.model)
    assert small.encode(x).shape[1] < 16 and small.decode.__name__ == "decode"
    again = fxprune.prune(small, x, sparsity=0.5)
    for each in (small, pickle.loads(pickle.dumps(small)), copy.deepcopy(small), again):
        assert each(x).shape == masked(x).shape
        for call in (lambda m: m.decode(torch.ones(2, 16)), lambda m: m.twice(x)):
            with pytest.raises(fxprune.PruningError, match=r"Coder\.decode holds sizes"):
                call(each)


@pytest.mark.parametrize("asked", [
    lambda s, n: 2.0 if n & 1 else 1.0, lambda s, n: (n | 1) ^ 3, lambda s, n: n >> 1,
    lambda s, n: {4: 1.0, 6: 3.0}.get(n, 2.0), lambda s, n: getattr(s, f"w{n}", 2.0),
    lambda s, n: getattr(s, "w" + str(n), 2.0),
], ids=["and", "or", "shift", "miss", "format", "str"])  # fmt: skip
def test_what_python_makes_of_a_size_is_worked_out_or_asked_again(asked):
    """Or new code would have the recorded run's answer for all inputs."""

    def forward(s, x):
        y = s.a(x).view(-1, x.shape[1], 8).sigmoid()
        return s.b(y * asked(s, x.shape[1]))

    net = awake(Net(forward, a=nn.Linear(3, 8), b=nn.Linear(8, 2), w4=nn.Buffer(torch.tensor(3.0))))
    x = torch.randn(2, 5, 3, generator=torch.Generator().manual_seed(1)).double()
    plan = fxprune.plan(net, x)
    small = plan.apply(net)
    assert list(plan.code) == [""] and small.a.out_features == 4
    masked = plan.mask(net)
    assert difference(run(masked, x), run(small, x)) < 1e-9
    for other in (x[:, :4], torch.cat([x, x[:, :1]], 1)):
        try:
            found = run(small, other)
        except fxprune.PruningError as error:
            assert "was written from a run" in str(error)
        else:
            assert difference(run(masked, other), found) < 1e-9
