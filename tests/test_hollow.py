"""Recording without the values of costly calls: the same trace, and the real run where a value is
needed."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode

import fxprune
from fxprune import recorder
from fxprune.hollow import ValuesNeeded, stand_in

from .networks import networks
from .oracle import check
from .test_trace import Net, halve


class Computed(TorchDispatchMode):
    """Which costly ops ran on tensors that hold values."""

    def __init__(self) -> None:
        super().__init__()
        self.ops: list[str] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = func.overloadpacket.__name__
        if name in ("convolution", "addmm", "mm", "bmm") and args[0].device.type != "meta":
            self.ops.append(name)
        return func(*args, **(kwargs or {}))


def computed(model, x) -> list[str]:
    with Computed() as mode:
        fxprune.trace(model, x)
    return mode.ops


def written(trace) -> list[tuple]:
    """All that a trace says of its nodes."""
    return [
        (n.op, str(n.target), str(n.args), str(n.kwargs), n.meta["spec"], n.meta.get("where"))
        for n in trace.graph.nodes
        if n.op != "output"
    ]


def of_both(model, x):
    return [
        written(recorder._record(recorder._Recorder(model.eval(), hollow=hollow), x, None, False))
        for hollow in (True, False)
    ]


class Vision(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 8, 4, 4)
        self.norm = nn.LayerNorm(8)
        self.attention = nn.MultiheadAttention(8, 2, batch_first=True)
        self.memory = nn.LSTM(8, 6, batch_first=True, bidirectional=True)
        self.up = nn.Conv1d(12, 5, 3, 2)
        self.table = nn.Parameter(torch.randn(5, 5))

    def forward(self, x):
        x = self.stem(x).flatten(2).transpose(1, 2)
        seen = x.new_zeros(x.shape[1], x.shape[1], dtype=torch.bool)
        x = x + self.attention(*[self.norm(x)] * 3, attn_mask=seen)[0]
        x, _ = self.memory(x)
        x = self.up(x.transpose(1, 2)).softmax(1)
        x = x.max(2).values @ self.table
        return F.linear(x, self.table)


def test_the_costly_calls_of_a_recording_are_not_computed():
    model, x = Vision().eval(), torch.randn(2, 3, 16, 16)
    with Computed() as mode, torch.no_grad():
        model(x)
    assert len(mode.ops) == 4  # fewer than it has: some are kernels of their own
    assert computed(model, x) == []


def test_the_trace_is_that_of_a_real_run():
    hollow, real = of_both(Vision(), torch.randn(2, 3, 16, 16))
    assert hollow == real


@given(networks())
def test_the_traces_of_random_networks_are_those_of_real_runs(model):
    hollow, real = of_both(model, torch.randn(2, 3, 8, 8))
    assert hollow == real


@st.composite
def convolutions(draw):
    """A convolution and its input, contiguous or turned."""
    dims = draw(st.integers(1, 3))
    groups, per_group = draw(st.integers(1, 3)), draw(st.integers(1, 2))
    kinds = {1: (nn.Conv1d, nn.ConvTranspose1d), 2: (nn.Conv2d, nn.ConvTranspose2d),
             3: (nn.Conv3d, nn.ConvTranspose3d)}  # fmt: skip
    kind = draw(st.sampled_from(kinds[dims]))
    given = {"stride": draw(st.integers(1, 2)), "padding": draw(st.integers(0, 1))}
    if kind not in (nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d):
        given["dilation"] = draw(st.integers(1, 2))
        given["padding_mode"] = draw(st.sampled_from(["zeros", "circular"]))
    layer = kind(
        groups * per_group, groups * 2, draw(st.sampled_from([1, 3])), groups=groups, **given
    )
    sizes = [draw(st.integers(5, 7)) for _ in range(dims)]
    x = torch.randn(draw(st.integers(1, 2)), *sizes, groups * per_group).movedim(-1, 1)
    return layer, x if draw(st.booleans()) else x.contiguous()


@given(convolutions())
def test_zeros_lie_in_memory_as_the_result_of_a_convolution_would(drawn):
    layer, x = drawn
    with torch.no_grad():
        found, real = stand_in(layer, (x,), {}, {}), layer(x)
    if found is None:
        assert x.movedim(1, -1).is_contiguous()
        return
    assert (found.shape, found.stride(), found.dtype) == (real.shape, real.stride(), real.dtype)


@pytest.mark.parametrize(
    "function, shapes",
    [
        (F.linear, [(2, 5, 3), (4, 3), (4,)]),
        (torch.matmul, [(2, 3, 4, 5), (5, 6)]),
        (torch.bmm, [(2, 4, 5), (2, 5, 6)]),
        (torch.addmm, [(6,), (4, 5), (5, 6)]),
        (torch.baddbmm, [(2, 4, 6), (2, 4, 5), (2, 5, 6)]),
    ],
)
@pytest.mark.parametrize("turned", [False, True])
def test_zeros_lie_in_memory_as_the_result_of_a_product_would(function, shapes, turned):
    args = tuple(torch.randn(shape) for shape in shapes)
    if turned:
        args = tuple(t.transpose(-1, -2).contiguous().mT if t.dim() > 1 else t for t in args)
    found, real = stand_in(function, args, {}, {}), function(*args)
    assert (found.shape, found.stride(), found.dtype) == (real.shape, real.stride(), real.dtype)


def branch(net, x):
    x = net.one(x)
    return net.two(x) if x.mean() > -1e9 else net.three(x)


def ones_only(net, x):
    x = net.one(x)
    return net.two(x[x.mean((1, 2, 3)) != 0])


def picked(net, x):
    x = net.one(x)
    order = x.mean((0, 2, 3)).argsort()
    return net.two(x.index_select(1, order))


def listed(net, x):
    x = net.one(x)
    return net.two(x * float(x.abs().max() + 1))


def by_an_op_of_its_own(net, x):
    return net.two(halve(net.one(x)))


def handled(net, x):
    x = net.one(x)
    try:
        flag = bool(x.sum() > -1e9)
    except:  # noqa: E722  as some models do
        flag = False
    return net.two(x) if flag else net.three(x)


def singular(net, x):
    x = net.one(x)
    square = x.mean((0, 3))[:, :6].mT @ x.mean((0, 3))[:, :6]
    return net.two(x) + torch.linalg.inv(square + 1e-3 * net.eye).sum() * 0 - torch.logdet(square)


@pytest.mark.parametrize(
    "forward", [branch, ones_only, picked, listed, by_an_op_of_its_own, handled, singular]
)
def test_where_a_value_is_needed_the_model_runs_for_real(forward):
    model = Net(
        forward, one=nn.Conv2d(3, 8, 3), two=nn.Conv2d(8, 4, 1), three=nn.Conv2d(8, 4, 1),
        eye=torch.eye(6),
    )  # fmt: skip
    x = torch.randn(2, 3, 8, 8)
    assert "convolution" in computed(model, x)
    with pytest.raises((ValuesNeeded, fxprune.InputError)):
        recorder._record(recorder._Recorder(model.eval(), hollow=True), x, None, False)
    assert "three" not in str(fxprune.trace(model, x).graph)


def test_a_hook_of_the_users_sees_the_real_values():
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU(), nn.Conv2d(4, 2, 3))
    x, seen = torch.randn(2, 3, 8, 8), []
    model[0].register_forward_hook(lambda _, args, y: seen.append(y.clone()))
    fxprune.trace(model, x)
    with torch.no_grad():
        model(x)
    assert torch.equal(seen[0], seen[1])


def test_a_layer_with_a_forward_of_its_own_runs():
    layer = nn.Linear(3, 3)
    layer.forward = lambda x: x
    assert stand_in(layer, (torch.randn(2, 3),), {}, {}) is None


def test_other_dtypes_in_one_call_and_autocast_run():
    a, b = torch.randn(2, 3), torch.randn(3, 4)
    assert stand_in(torch.matmul, (a, b.double()), {}, {}) is None
    assert stand_in(torch.matmul, (a, b), {}, {}) is not None
    with torch.autocast("cpu", torch.bfloat16):
        assert stand_in(torch.matmul, (a, b), {}, {}) is None


def test_a_mask_made_of_a_hollow_tensors_shape_is_real():
    def forward(net, x):
        x = net.one(x).flatten(2).transpose(1, 2)
        mask = torch.ones_like(x[0, :, :1]).cumsum(0)
        far = (mask - mask.mT).abs() > 2
        scores = (x @ x.mT).masked_fill(far, -1e9).softmax(-1)
        return net.two(scores @ x)

    model = Net(forward, one=nn.Conv2d(3, 8, 3, 2), two=nn.Linear(8, 4)).double()
    x = torch.randn(2, 3, 8, 8, dtype=torch.float64)
    assert computed(model, x) == []
    check(model, x)


def test_the_models_own_error_is_the_one_that_is_chained():
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.Linear(7, 2))
    with pytest.raises(fxprune.InputError) as caught:
        fxprune.trace(model, torch.randn(1, 3, 8, 8))
    assert "mat1 and mat2" in str(caught.value.__cause__)


class Keeping(nn.Module):
    """Keeps what it computes where recording does not put it back."""

    def __init__(self, decide: bool) -> None:
        super().__init__()
        self.table = nn.Linear(4, 6)
        self.conv = nn.Conv2d(3, 6, 3)
        self.out = nn.Conv2d(6, 2, 1)
        self.kept: list[torch.Tensor] = []
        self.decide = decide

    def forward(self, x):
        if not self.kept:
            self.kept.append(self.table(torch.eye(4)).relu_().mean(0)[:, None, None])
        x = self.conv(x) + self.kept[0]
        if self.decide and x.mean() > 1e9:
            return x
        return self.out(x)


@pytest.mark.parametrize("decide", [False, True])
def test_what_a_model_keeps_of_a_recording_has_its_values(decide):
    model, x = Keeping(decide).eval(), torch.randn(2, 3, 8, 8)
    with torch.no_grad():
        before = model(x)
        expected = model.kept.pop()
        fxprune.trace(model, x)
        assert torch.equal(model.kept[0], expected)
        assert torch.equal(model(x), before)


def test_no_hollow_tensor_outlives_a_recording():
    model, x = Vision().eval(), torch.randn(2, 3, 16, 16)
    made = recorder._Recorder(model, hollow=True)
    recorder._record(made, x, None, False)
    assert made.nodes.hollow.nodes
    assert made.nodes.kept_hollow() == []
