"""fxprune.trace: one run as a graph that computes what the model does, and a model left alone."""

from __future__ import annotations

import dataclasses
import itertools
import math
import operator
import pickle
import types
import weakref
from typing import Any

import pytest
import torch
from torch import fx, nn
from torch.nn import functional as F

import fxprune
from fxprune.tracing.record import record

from .oracle import difference, run


class Net(nn.Module):
    """A network of named layers (or plain attributes) and a forward function over them."""

    def __init__(self, forward, **attributes: Any) -> None:
        super().__init__()
        self._run = forward
        for name, value in attributes.items():
            setattr(self, name, value)

    def forward(self, *args, **kwargs):
        return self._run(self, *args, **kwargs)


class Double(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x * 2 + 1

    @staticmethod
    def backward(ctx, grad):
        return grad * 2


@torch.library.custom_op("fxprune_test::halve", mutates_args=())
def halve(x: torch.Tensor) -> torch.Tensor:
    return x / 2


@torch.library.custom_op("fxprune_test::shift_", mutates_args={"x"})
def shift_(x: torch.Tensor, by: float) -> None:
    x += by


@dataclasses.dataclass
class Output:
    logits: torch.Tensor
    extra: Any = None


def attention(s, x):
    b, n, c = x.shape
    qkv = s.qkv(x).view(b, n, 3, s.num_heads, c // s.num_heads).permute(2, 0, 3, 1, 4)
    q, k, v = qkv.unbind(0)
    y = torch.softmax(q @ k.transpose(-2, -1) * s.scale, -1) @ v
    return y.transpose(1, 2).reshape(b, n, -1)


def in_place(s, x):
    y = s.a(x)
    y.sigmoid_()
    y += 1
    y[:, 1:3] = 0.5
    part = y[:, :2]
    part.mul_(x.size(-1))
    y[:, 3].zero_()  # the view is gone at once
    y.view(-1)[:2] -= 7
    torch.add(y, 1, out=y)
    return s.b(y), part


def branch(s, x):
    return s.a(x) if x.shape[1] == 6 and float(x.sum()) > -1e9 else s.never(x)


def dictionary(s, x):
    y = s.a(x)
    return {"y": y, "none": None, "more": [(y.mean(), 3)], "size": x.shape[0]}


def line(*widths):
    return [nn.Linear(a, b) for a, b in itertools.pairwise(widths)]


def tied():
    net = Net(lambda s, x: s.b(torch.tanh(s.a(x))), a=nn.Linear(6, 6), b=nn.Linear(6, 6))
    net.b.weight = net.a.weight
    return net


def make(kind):
    a, b = line(6, 8, 6)
    square = nn.Linear(6, 6)
    return {
        "sequential": lambda: nn.Sequential(a, nn.ReLU(), b),
        "attention": lambda: Net(attention, qkv=nn.Linear(6, 18), num_heads=2, scale=3**-0.5),
        "lstm": lambda: Net(lambda s, x: s.l(x)[0], l=nn.LSTM(6, 4, batch_first=True)),
        "in place": lambda: Net(in_place, a=square, b=nn.Linear(6, 2)),
        "called twice": lambda: Net(lambda s, x: s.a(torch.tanh(s.a(x))), a=square),
        "tied": tied,
        "bare": lambda: Net(lambda s, x: F.linear(x @ s.w, s.w, s.w[0]),
                            w=nn.Parameter(torch.randn(6, 6))),
        "constants": lambda: Net(lambda s, x: s.a(x * s.t + torch.arange(6)) / torch.tensor(3.0),
                                 a=a, t=torch.randn(6)),
        "dict": lambda: Net(dictionary, a=a),
        "dataclass": lambda: Net(lambda s, x: Output(s.a(x)), a=a),
        "nothing": lambda: Net(lambda s, x: (s.a(x), None), a=a),
        "branch": lambda: Net(branch, a=a, never=b),
        "autograd function": lambda: Net(lambda s, x: Double.apply(s.a(x)) * 3, a=a),
        "custom op": lambda: Net(lambda s, x: halve(s.a(x)) * 3, a=a),
        "custom op in place": lambda: Net(lambda s, x: (y := s.a(x), shift_(y, 1.0), y * 2)[2],
                                          a=a),
    }[kind]().eval()  # fmt: skip


KINDS = [
    "sequential", "attention", "lstm", "in place", "called twice", "tied", "bare", "constants",
    "dict", "dataclass", "nothing", "branch", "autograd function", "custom op",
    "custom op in place",
]  # fmt: skip


def data(batch=2, seed=0):
    return torch.randn(batch, 6, 6, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("kind", KINDS)
def test_the_graph_computes_what_the_model_computes_on_other_inputs_and_batch_sizes(kind):
    model = make(kind)
    graph = fxprune.trace(model, data())
    assert isinstance(graph, fx.GraphModule)
    for x in (data(), data(seed=1), data(batch=5, seed=2)):
        assert difference(run(model, x), run(graph, x.clone())) == 0
        with torch.no_grad():
            assert type(graph(x.clone())) is type(model(x))
    graph.graph.lint()
    compile(graph.code, "trace", "exec")


def test_outputs_keep_their_structure_and_plain_values():
    out = fxprune.trace(make("dict"), data())(data(batch=5))
    assert list(out) == ["y", "none", "more", "size"] and out["none"] is None
    assert out["more"][0][1] == 3 and out["size"] == 5
    assert fxprune.trace(make("dataclass"), data())(data()).extra is None


def test_inputs_by_position_and_by_name_are_the_arguments_of_the_graph():
    net = Net(lambda s, x, *, scale: s.a(x) * scale, a=nn.Linear(6, 6))
    inputs = {"x": data(), "scale": torch.tensor(3.0)}
    assert torch.equal(fxprune.trace(net, inputs)(**inputs), net(**inputs))
    two = nn.Bilinear(6, 6, 3)
    assert torch.equal(fxprune.trace(two, (data(), data()))(data(), data()), two(data(), data()))


def test_leaf_modules_are_call_module_and_containers_are_not():
    graph = fxprune.trace(nn.Sequential(nn.Sequential(*line(6, 8)), nn.GELU()), data())
    assert [n.target for n in graph.graph.nodes if n.op == "call_module"] == ["0.0", "1"]


def test_a_shared_module_is_called_twice_under_one_name_and_a_tied_weight_read_under_one():
    calls = [n for n in fxprune.trace(make("called twice"), data()).graph.nodes]
    assert [n.target for n in calls if n.op == "call_module"] == ["a", "a"]
    net = Net(lambda s, x: x @ s.w @ s.v, w=nn.Parameter(torch.randn(6, 6)))
    net.v = net.w
    reads = [n.target for n in fxprune.trace(net, data()).graph.nodes if n.op == "get_attr"]
    assert reads == ["w"]


def sizes_of(forward, **attributes):
    """The size arguments of the one view in ``forward``."""
    graph = fxprune.trace(Net(forward, **attributes), data())
    node = next(n for n in graph.graph.nodes if n.target in ("view", "reshape"))
    given = node.args[1:]
    return given[0] if len(given) == 1 and isinstance(given[0], (tuple, list)) else given


def test_sizes_of_tensors_and_attributes_are_nodes_and_literals_are_plain_ints():
    batch, one, heads, rest, literal = sizes_of(
        lambda s, x: x.view(x.shape[0], x.size(1) // 6, s.heads, x.size(dim=-1) // s.heads, 6),
        heads=2,
    )
    assert (batch.op, batch.target, batch.args[1]) == ("call_method", "size", 0)
    assert one.target is operator.floordiv and one.args[0].target == "size" and one.args[1] == 6
    assert (heads.op, heads.target) == ("get_attr", "heads")
    assert rest.args[0].args[1] == 2 and rest.args[1] is heads
    assert literal == 6 and type(literal) is int


def test_sizes_keep_their_origin_through_products_sequences_and_a_config():
    config = types.SimpleNamespace(width=6)
    batch, product, width, item = sizes_of(
        lambda s, x: x.view(
            [*x.shape[:1], math.prod(x.shape[1:]) // 6, s.config.width, s.sizes[1]]
        ),
        config=config, sizes=(3, 1),
    )  # fmt: skip
    assert batch.target == "size" and product.target is operator.floordiv
    assert width.target == "config.width"
    assert item.target is operator.getitem and item.args[0].target == "sizes" and item.args[1] == 1
    assert type(config.width) is int


@pytest.mark.parametrize(
    "read",
    [bool, int, float, complex, torch.is_nonzero, torch.Tensor.is_nonzero, torch.Tensor.item,
     torch.ops.aten._local_scalar_dense, torch.Tensor.__dlpack__, torch.Tensor.numpy],
)  # fmt: skip
def test_a_run_whose_code_looks_at_values_says_so(read):
    def forward(net, x):
        read(x.sum())
        return net.a(x)

    recorded = record(Net(forward, a=nn.Linear(4, 2)), torch.ones(3, 4))
    assert recorded.calls[0].reads_data
    assert [str(node.target) for node, _, _ in recorded.kept_whole] == ["sum"]


class Cache:
    """What a model hands from module to module."""

    def __init__(self) -> None:
        self.keys: list[torch.Tensor] = []


def test_a_recording_lets_go_of_objects_that_are_only_handed_on():
    caches = []

    class Layer(nn.Linear):
        def forward(self, x, cache):
            cache.keys.append(super().forward(x))
            return cache.keys[-1]

    def forward(net, x):
        cache = Cache()
        caches.append(weakref.ref(cache))
        return net.b(net.a(x, cache), cache)

    recorded = record(Net(forward, a=Layer(4, 4), b=Layer(4, 2)), torch.ones(3, 4))
    assert len(recorded.graph.nodes) > 3 and caches[0]() is None


@pytest.mark.parametrize("steps", [lambda x: range(x.size(1)), lambda x: range(len(x[0]))])
@pytest.mark.parametrize("parts", [False, True])
def test_a_graph_that_went_through_a_sequence_refuses_one_of_another_length(steps, parts):
    def forward(s, x):
        h = x.new_zeros(x.shape[0], 8)
        for y in x.unbind(1) if parts else (x[:, t] for t in steps(x)):
            h = s.cell(y, h)
        return h

    model = Net(forward, cell=nn.GRUCell(6, 8)).eval()
    graph = fxprune.trace(model, torch.randn(2, 5, 6))
    other = torch.randn(3, 5, 6)
    assert torch.equal(graph(other), model(other))
    with pytest.raises(fxprune.PruningError, match="it is 7 now"):
        graph(torch.randn(3, 7, 6))


def test_a_graph_that_took_a_branch_by_a_size_asks_again():
    def forward(s, x):
        q, k = s.a(x).view(x.shape[0], -1, 2, 3).permute(2, 0, 1, 3).unbind(0)
        return q + k if x.shape[1] > 4 else q - k

    model = Net(forward, a=nn.Linear(6, 6)).eval()
    graph = fxprune.trace(model, torch.randn(2, 5, 6))
    other = torch.randn(3, 6, 6)
    assert torch.equal(graph(other), model(other))
    with pytest.raises(fxprune.PruningError, match=r"gt\(5, 4\) was True; it is False now"):
        graph(torch.randn(3, 3, 6))


def test_a_cache_that_asks_whether_the_batch_is_as_large_as_the_last_one_is_no_condition():
    def forward(s, x):
        if s.seen != tuple(x.shape):  # as detectors keep their anchors
            s.seen, s.table = tuple(x.shape), torch.arange(x.shape[1]).to(x)
        return s.a(x) * s.table[:, None]

    model = Net(forward, a=nn.Linear(6, 6), seen=None, table=None).eval()
    model(torch.randn(2, 5, 6))
    graph = fxprune.trace(model, torch.randn(2, 5, 6))
    other = torch.randn(3, 5, 6)
    assert torch.equal(graph(other), model(other))
    with pytest.raises(fxprune.PruningError, match="it is False now"):
        graph(torch.randn(3, 7, 6))


class Asks(nn.Module):
    def __init__(self):
        super().__init__()
        self.a = nn.Linear(6, 6)

    def forward(self, x):
        x = self.a(x) / math.sqrt(x.size(-1))
        if x.shape[-1] < 3 or x.shape[1].bit_length() > 9:  # which no graph asks again
            raise ValueError
        parts = x.permute(dims=(1, 0, 2)).unbind(0)
        return sum(parts)


@pytest.mark.parametrize("how", ["pickle", "symbolic", "jit", "compile"])
def test_a_graph_that_asks_again_is_pickled_recorded_and_compiled(how):
    x = torch.randn(2, 5, 6)
    model = Asks().eval()
    graph = fxprune.trace(model, x)
    if how == "pickle":
        again = pickle.loads(pickle.dumps(graph))
    elif how == "symbolic":
        again = fx.symbolic_trace(graph)
    elif how == "jit":
        again = torch.jit.trace(graph, x)
    else:
        again = torch.compile(graph, backend="eager", fullgraph=True)
    assert torch.equal(again(x), model(x))
    if how in ("pickle", "symbolic"):
        with pytest.raises(fxprune.PruningError, match="it is 7 now"):
            again(torch.randn(2, 7, 6))


@pytest.mark.parametrize("parts", [
    lambda x: torch.unbind(x, 1), lambda x: x.unbind(dim=1), lambda x: x.split(3, 1),
    lambda x: torch.split(x, 2, dim=1), lambda x: x.split(1, 1),
    lambda x: x.view(torch.int32).unbind(1),
])  # fmt: skip
def test_a_graph_counts_parts_of_a_sequence_however_it_is_taken_apart(parts):
    model = Net(lambda s, x: sum(part.sum() for part in parts(s.a(x))), a=nn.Linear(6, 6)).eval()
    graph = fxprune.trace(model, torch.randn(2, 6, 6))
    other = torch.randn(3, 6, 6)
    assert torch.equal(graph(other), model(other))
    with pytest.raises(fxprune.PruningError, match=r"len\(\w+\) was"):
        graph(torch.randn(2, 9, 6))


def test_a_graph_cannot_take_objects():
    def forward(s, box):
        return s.a(box.x)

    model = Net(forward, a=nn.Linear(6, 6)).eval()
    with pytest.raises(fxprune.ModelError, match="takes a SimpleNamespace with tensors in it"):
        fxprune.trace(model, types.SimpleNamespace(x=torch.randn(2, 6)))


GLOBAL = torch.tensor(3.0, dtype=torch.float64)


def test_a_constant_does_not_take_the_name_of_a_buffer():
    net = Net(lambda s, x: x * s._tensor_constant0 + GLOBAL)
    net.register_buffer("_tensor_constant0", torch.tensor(2.0, dtype=torch.float64))
    x = torch.ones(2, dtype=torch.float64)
    assert fxprune.trace(net, x)(x).tolist() == [5.0, 5.0]
