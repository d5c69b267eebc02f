"""Twelve ways to hold a width in the code: each pruned model runs at other batch sizes, trains,
saves, copies, exports and compiles."""

from __future__ import annotations

import copy
import io
import pickle
import types

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import fxprune

from .oracle import awake, difference, run


def images(n):
    generator = torch.Generator().manual_seed(n)
    return torch.randn(n, 3, 6, 6, dtype=torch.float64, generator=generator)


class Base(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Conv2d(3, 8, 3, padding=1), nn.Conv2d(8, 4, 3, padding=1)

    def forward(self, x):
        return self.b(self.middle(F.softplus(self.a(x))))


class ViewLiteral(Base):
    def middle(self, y):
        return F.dropout(y.view(-1, 8, 36), 0.2, self.training).view(-1, 8, 6, 6)


class SplitLiteral(Base):
    def __init__(self):
        super().__init__()
        self.c = nn.Conv2d(6, 6, 1)

    def middle(self, y):
        first, second = y.split([2, 6], 1)
        return torch.cat([first, self.c(second)], 1)


class SliceLiteral(Base):
    def middle(self, y):
        return torch.cat([y[:, :3] * 2, y[:, 3:]], 1)


class Written(Base):
    def middle(self, y):
        y[:, 2:5] = torch.tanh(y[:, 2:5])
        return y


class ExpandLiteral(Base):
    def middle(self, y):
        return y * y.mean((2, 3)).view(-1, 8, 1, 1).expand(-1, 8, 6, 6)


class ZerosLiteral(Base):
    def middle(self, y):
        return y + torch.full((8, 1, 1), 0.5, dtype=y.dtype)


class Scaled(Base):
    def middle(self, y):
        return y / y.shape[1] ** 0.5


class Asserted(Base):
    def middle(self, y):
        assert y.shape[1] == 8, y.shape
        return y


class Keywords(Base):
    def middle(self, y, **flags):
        return y.reshape(y.shape[0], 8, -1).reshape(y.shape)

    def forward(self, x, **flags):
        return self.b(self.middle(torch.sigmoid(self.a(x)), **flags))


class Attribute(Base):
    def __init__(self):
        super().__init__()
        self.width = 8

    def middle(self, y):
        return y.view(-1, self.width, 36).view(-1, self.width, 6, 6)


class Item(Base):
    def __init__(self):
        super().__init__()
        self.sizes = (8, 6, 6)

    def middle(self, y):
        return y.flatten(2).view(-1, *self.sizes)


class Config(Base):
    def __init__(self):
        super().__init__()
        self.config = types.SimpleNamespace(width=8)

    def middle(self, y):
        return y.reshape(-1, self.config.width, 6, 6)


class Sliced(Base):
    def __init__(self):
        super().__init__()
        self.some = 4

    def middle(self, y):
        return torch.cat([y[:, : self.some] * 2, y[:, self.some :]], 1)


CODE = [ViewLiteral, SplitLiteral, SliceLiteral, Written, ExpandLiteral, ZerosLiteral, Scaled,
        Asserted, Keywords]  # fmt: skip
ATTRIBUTES = {
    Attribute: {"width": 4},
    Item: {"sizes": (4, 6, 6)},
    Config: {"config.width": 4},
    Sliced: {"some": 2},
}


@pytest.fixture(params=["source", "graph"])
def written(request):
    """How new code is made."""
    if request.param == "graph":
        request.getfixturevalue("from_the_graph")
    return request.param


@pytest.fixture(params=[*CODE, *ATTRIBUTES], ids=lambda kind: kind.__name__)
def case(request, written):
    model = awake(request.param())
    plan = fxprune.plan(model, images(2))
    return model, plan, plan.apply(model)


def test_the_plan_tells_what_it_writes_anew(case):
    model, plan, small = case
    kind = type(model)
    assert small.a.out_channels == 4
    if kind in ATTRIBUTES:
        assert plan.attributes == ATTRIBUTES[kind] and not plan.code
        assert all(f"{name} becomes" in str(plan) for name in plan.attributes)
    else:
        assert "(self, " in plan.code[""].source and "new sizes" in str(plan)


def test_it_runs_at_another_batch_size(case):
    model, plan, small = case
    assert difference(run(plan.mask(model), images(5)), run(small, images(5))) < 1e-9


def test_it_trains(case):
    _, _, small = case
    small.train()
    small(images(2)).square().mean().backward()
    assert all(p.grad is not None and p.grad.abs().sum() > 0 for p in small.parameters())


def test_it_is_saved_loaded_and_copied(case):
    _, _, small = case
    file = io.BytesIO()
    torch.save(small, file)
    file.seek(0)
    for other in (torch.load(file, weights_only=False), copy.deepcopy(small)):
        assert difference(run(small, images(3)), run(other, images(3))) == 0
        assert other.state_dict().keys() == small.state_dict().keys()


def test_it_exports(case):
    _, _, small = case
    exported = torch.export.export(small, (images(2),)).module()
    with torch.no_grad():
        assert torch.allclose(exported(images(2)), small(images(2)))


def test_it_compiles(case):
    _, _, small = case
    torch.compiler.reset()
    compiled = torch.compile(small, backend="eager", fullgraph=True)
    with torch.no_grad():
        assert torch.allclose(compiled(images(2)), small(images(2)))
        assert torch.allclose(compiled(images(3)), small(images(3)))


def test_it_is_one_graph_if_asked(case):
    model, _, small = case
    graph = fxprune.prune(model, images(2), as_graph=True)
    assert isinstance(graph, torch.fx.GraphModule)
    assert graph.state_dict().keys() == small.state_dict().keys()
    for other in (graph, copy.deepcopy(graph)):
        assert difference(run(small, images(4)), run(other, images(4))) < 1e-9
    graph.train()
    graph(images(2)).square().mean().backward()
    assert all(p.grad is not None for p in graph.parameters())


def test_it_is_pruned_again_after_training(case):
    _, _, small = case
    optimizer = torch.optim.SGD(small.parameters(), 0.1)
    small(images(2)).square().mean().backward()
    optimizer.step()
    plan = fxprune.plan(small, images(2))
    smaller = plan.apply(small)
    assert smaller.a.out_channels < 4
    assert difference(run(plan.mask(small), images(3)), run(smaller, images(3))) < 1e-9


def test_a_graph_follows_the_training_flag():
    graph = fxprune.prune(awake(ViewLiteral()), images(2), as_graph=True)
    assert torch.equal(graph.eval()(images(2)), graph(images(2)))
    assert not torch.equal(graph.train()(images(2)), graph(images(2)))


def test_a_graph_and_inplace_are_not_asked_for_together():
    with pytest.raises(fxprune.SettingError, match="as_graph"):
        fxprune.prune(awake(Scaled()), images(2), as_graph=True, inplace=True)


def test_a_graph_module_whose_forward_is_written_anew_has_no_graph_of_old_sizes():
    class Flat(nn.Module):
        def forward(self, x):
            return torch.relu(x).view(-1, 8 * 4)

    layers = nn.Sequential(nn.Conv2d(3, 8, 3), Flat(), nn.Linear(32, 5)).eval()
    model = torch.fx.symbolic_trace(layers)
    x = torch.randn(2, 3, 4, 4)
    small = fxprune.prune(model, x)
    last = small.get_submodule("2")
    assert last.in_features == 16 and "view(-1, 16)" in small.code
    assert torch.equal(copy.deepcopy(small)(x), small(x))
    for use in (small.recompile, lambda: pickle.dumps(small)):
        with pytest.raises(fxprune.PruningError, match="sizes from before it was pruned"):
            use()
    assert fxprune.trace(small, x)(x).shape == (2, 5)
    assert torch.equal(fxprune.prune(model, x)(x), small(x))


class Shuffled(nn.Module):
    """Its channels come out of the shuffle in another order than the next layer's are left in."""

    def __init__(self):
        super().__init__()
        self.a = nn.Conv2d(12, 24, 1, groups=3)
        self.b = nn.Conv2d(24, 24, 3, padding=1, groups=24)
        self.c = nn.Conv2d(24, 12, 1, groups=3)

    def forward(self, x):
        h = torch.relu(self.a(x))
        n, c, *size = h.shape
        h = h.view(n, 3, c // 3, *size).transpose(1, 2).contiguous().view(n, c, *size)
        return x + self.c(self.b(h))


def test_what_a_new_forward_puts_in_order_is_pruned_again():
    torch.manual_seed(0)
    net = nn.Sequential(nn.Conv2d(3, 12, 3), Shuffled(), nn.ReLU(), nn.Conv2d(12, 5, 3))
    net, x = net.double().eval(), torch.randn(2, 3, 10, 10).double()
    once = fxprune.prune(net, x, sparsity=0.5)
    plan = fxprune.plan(once, x, sparsity=0.5)
    twice = plan.apply(once)
    assert (once[1].a.out_channels, twice[1].a.out_channels) == (12, 6)
    other = torch.randn(3, 3, 9, 12).double()
    assert torch.allclose(plan.mask(once)(other), twice(other), rtol=0, atol=1e-9)


class Cut(nn.Module):
    """Heads cut by a number that the class does not say, in code that is in no file."""

    exec("def forward(self, x): return x.view(*x.shape[:-1], 4, -1)")


class Longer(Cut):
    exec("def forward(self, x): return x.view(*x.shape[:-1], 4, -1) * (x.shape[1] / 5)")


class Gated(nn.Module):
    def __init__(self, cut):
        super().__init__()
        self.a, self.b, self.c = nn.Linear(7, 12), nn.Linear(7, 12), nn.Linear(12, 3)
        self.cut, self.d = cut, nn.Linear(12, 3)

    def forward(self, x):
        first, second = self.cut(self.a(x)), self.cut(self.b(x))
        return self.c((torch.sigmoid(first.softmax(-1) + 1) * second).flatten(2))


class Apart(Gated):
    def forward(self, x):
        first, second = (self.cut(layer(x)).softmax(-1).flatten(2) for layer in (self.a, self.b))
        return self.c(first) + self.d(second)


@pytest.mark.parametrize("cut", [Cut(), Longer()])
def test_a_module_that_runs_alike_each_time_has_one_new_forward(cut):
    model = awake(Gated(cut))
    plan = fxprune.plan(model, torch.randn(2, 5, 7, dtype=torch.float64), sparsity=0.5)
    small = plan.apply(model)
    assert list(plan.code) == ["cut"] and small.c.in_features == 6
    for other in (torch.randn(3, 5, 7), torch.randn(2, 8, 7)):
        expected = plan.mask(model)(other.double())
        assert torch.allclose(small(other.double()), expected, rtol=0, atol=1e-9)


def test_a_module_that_runs_otherwise_the_second_time_keeps_its_code():
    x = torch.randn(2, 5, 7, dtype=torch.float64)
    assert list(fxprune.plan(awake(Apart(Cut())), x).code) == ["cut"]
    plan = fxprune.plan(awake(Apart(Cut())), x, ignore="b")
    assert any("runs more than once, not always alike" in str(g.frozen) for g in plan.groups)
