"""fxprune.trace watches one run: model, inputs and PyTorch are as before, activations die."""

from __future__ import annotations

import copy
import math
import random
import threading
import types
import weakref
from collections import deque

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional as F

import fxprune
from fxprune.modules.running import outputs

from .oracle import difference, run, tensors
from .snapshot import Snapshot
from .test_trace import Net, attention, data, line, make


def everything():
    """A model with something of all that tracing could disturb."""
    net = Net(attention, qkv=nn.Linear(6, 18), num_heads=2, scale=3**-0.5, sizes=[1, 2],
              config=types.SimpleNamespace(width=6, sizes=(1, 2)))  # fmt: skip
    net.norm, net.drop = nn.BatchNorm1d(6), nn.Dropout(0.5)
    net._run = lambda s, x: s.drop(s.norm(attention(s, x))) + 0 * torch.rand(6)
    net.norm.eval()
    net.qkv.bias.requires_grad_(False)
    net.register_forward_hook(lambda m, i, o: o * 2)
    net.qkv.register_forward_pre_hook(lambda m, i: None)
    net(data()).sum().backward()
    return net


def fails(s, x):
    s.qkv(x)
    raise s.error


def test_tracing_leaves_flags_hooks_buffers_attributes_random_state_and_gradients_alone():
    model = everything()
    before = Snapshot(model)
    graph = fxprune.trace(model, data())
    assert before.differences() == []
    model.eval()  # the noise and the dropout were off or multiplied by 0
    assert difference(run(graph, data(batch=3)), run(model, data(batch=3))) == 0


@pytest.mark.parametrize("error", [RuntimeError("wrong shape"), KeyboardInterrupt()], ids=repr)
def test_a_run_that_fails_leaves_the_model_and_module_calls_as_they_were(error):
    model = everything()
    model._run, model.error = fails, error
    before = Snapshot(model)
    with pytest.raises((fxprune.InputError, KeyboardInterrupt)):
        fxprune.trace(model, data())
    assert before.differences() == []


def test_an_error_of_the_model_is_chained_and_told():
    with pytest.raises(fxprune.InputError, match=r"mat1 and mat2.*\(2, 5\)|\(2, 5\).*mat1 and mat2"
                       ) as caught:  # fmt: skip
        fxprune.trace(nn.Linear(6, 3), torch.randn(2, 5))
    assert isinstance(caught.value.__cause__, RuntimeError)


def test_sizes_that_the_model_stores_while_it_runs_are_plain_ints_afterwards():
    def forward(s, x):
        s.length, s.shape = x.shape[1] * 2, x.shape
        return s.a(x)

    net = Net(forward, a=nn.Linear(6, 6))
    fxprune.trace(net, data())
    left = [getattr(net, "length", 12), *getattr(net, "shape", (2, 6, 6))]
    assert left == [12, 2, 6, 6] and {type(n) for n in left} == {int}


@pytest.mark.parametrize("how", ["in place", "rebound", "attribute"])
def test_state_that_the_model_changes_as_it_runs_is_put_back(how):
    def forward(s, x):
        if how == "in place":
            s.count += 1
        elif how == "rebound":
            s.count = s.count + 1
        else:
            s.number = s.number + 1
        return s.a(x)

    net = Net(forward, a=nn.Linear(6, 6), number=3)
    net.register_buffer("count", torch.zeros(()))
    before = Snapshot(net)
    fxprune.trace(net, data())
    assert before.differences() == []


@pytest.mark.parametrize("enabled", [True, False])
def test_the_fast_path_of_attention_is_as_the_user_set_it(enabled):
    try:
        torch.backends.mha.set_fastpath_enabled(enabled)
        fxprune.trace(make("attention"), data())
        assert torch.backends.mha.get_fastpath_enabled() == enabled
    finally:
        torch.backends.mha.set_fastpath_enabled(True)


def test_no_activation_outlives_the_models_own_use_of_it():
    alive = []

    def forward(s, x):
        y = s.a(x)
        watched = weakref.ref(y)
        z = torch.tanh(y)
        del y
        alive.append(watched() is not None)
        return s.b(z)

    net = Net(forward, **dict(zip("ab", line(6, 8, 6), strict=True)))
    fxprune.trace(net, data())
    assert alive == [False]


def test_the_graph_shares_parameters_and_keeps_no_tensor_of_the_run():
    model, x = make("attention"), data()
    watched = weakref.ref(x)
    graph = fxprune.trace(model, x)
    del x
    assert watched() is None
    assert tensors([node.meta for node in graph.graph.nodes]) == []
    with torch.no_grad():
        model.qkv.weight.mul_(2)
    assert difference(run(model, data()), run(graph, data())) == 0


def test_reading_the_weight_of_a_spectral_norm_is_no_step_of_its_iteration():
    first = nn.utils.parametrizations.spectral_norm(nn.Conv2d(3, 8, 3))
    model = nn.Sequential(first, nn.ReLU(), nn.Conv2d(8, 4, 3), nn.ReLU(), nn.Conv2d(4, 4, 3))
    model.train()
    x = torch.randn(2, 3, 9, 9)
    before = {name: t.clone() for name, t in model.state_dict().items()}
    plan = fxprune.plan(model, x, calibration=[x], importance="reconstruction")
    plan.mask(model), plan.apply(model), plan.penalty(model)
    fxprune.prune(model, x)
    assert all(torch.equal(before[name], t) for name, t in model.state_dict().items())
    assert all(module.training for module in model.modules())
    small = plan.apply(model, inplace=True)
    assert torch.equal(
        before["0.parametrizations.weight.0._u"], small[0].parametrizations.weight[0]._u
    )


def test_a_parameter_that_a_forward_sets_is_set_back():
    class PowerIteration(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.randn(6, 4))
            self.u = nn.Parameter(torch.randn(4), requires_grad=False)

        def forward(self, x):
            v = F.normalize(self.weight @ self.u, dim=0)
            self.u.data = F.normalize(self.weight.mT @ v, dim=0)
            return x @ (self.weight / (v @ self.weight @ self.u)).mT

    model, x = PowerIteration().eval(), torch.randn(3, 4)
    before, memory = model.u.detach().clone(), model.u.data_ptr()
    fxprune.plan(model, x)
    assert torch.equal(model.u, before) and model.u.data_ptr() == memory


class Untold(nn.Module):
    """A network that changes what no version tells of."""

    def __init__(self):
        super().__init__()
        self.a, self.norm, self.b = nn.Linear(6, 16), nn.BatchNorm1d(16), nn.Linear(16, 4)
        self.mean, self.count = nn.Buffer(torch.zeros(16)), nn.Buffer(torch.zeros(()))
        self.seen, self.last = [1], deque([2])

    def forward(self, x):
        self.norm.train()
        h = F.batch_norm(self.a(x), self.mean, torch.ones(16), training=True)
        self.count.data += 1
        self.seen.append(len(x))
        self.last.pop()
        return self.b(self.norm(h) * random.random() * np.random.rand())


@pytest.mark.parametrize("call", [fxprune.trace, fxprune.plan, fxprune.compact])
def test_what_no_version_tells_of_is_put_back(call):
    model, x = Untold(), torch.randn(4, 6)
    before = copy.deepcopy(model.state_dict())
    seeds = random.getstate(), np.random.get_state()[1].tolist()
    call(model, x)
    assert all(torch.equal(before[name], value) for name, value in model.state_dict().items())
    assert model.seen == [1] and list(model.last) == [2]
    assert seeds == (random.getstate(), np.random.get_state()[1].tolist())


def test_threads_that_prune_at_once_leave_the_process_as_it_was():
    models = [nn.Sequential(nn.Linear(6, 32), nn.ReLU(), nn.Linear(32, 4)) for _ in range(4)]
    x, state, small = torch.randn(2, 6), torch.get_rng_state(), []
    work = [
        threading.Thread(target=lambda m=m: small.append(fxprune.prune(m, x)[0].out_features))
        for m in models
    ]
    for thread in work:
        thread.start()
    for thread in work:
        thread.join()
    assert small == [16] * 4 and torch.backends.mha.get_fastpath_enabled()
    assert torch.equal(state, torch.get_rng_state())


class Moves(nn.Module):
    """Sets the data of a buffer to a part of it, which lies where it lay."""

    def __init__(self):
        super().__init__()
        self.a = nn.Linear(6, 3)
        self.register_buffer("b", torch.zeros(4, 6))
        self.register_buffer("nan", torch.full((1,), torch.nan).expand(6))

    def forward(self, x):
        self.b.data = self.b.data[:2]
        return self.a(x) + self.b.sum() + self.nan.nan_to_num().sum()


def test_a_buffer_that_is_cut_in_place_and_one_that_cannot_be_written_to_are_set_back():
    model = Moves().eval()
    fxprune.trace(model, torch.randn(2, 6))
    assert model.b.shape == (4, 6) and model.nan.stride() == (0,)


def test_a_thread_that_traces_beside_one_that_runs_the_model_leaves_its_flags():
    model, x = nn.Sequential(nn.Linear(6, 64), nn.ReLU(), nn.Linear(64, 3)), torch.randn(2, 6)
    threads = [
        threading.Thread(target=lambda f=f: [f(model, x) for _ in range(20)])
        for f in (fxprune.trace, fxprune.prune, outputs)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert model.training and type(model[0].in_features) is int


def test_a_hooked_layer_keeps_what_its_forward_sets_while_it_is_recorded():
    class Counts(nn.Linear):
        calls = 0

        def forward(self, x):
            self.calls += 1
            return super().forward(x) * self.calls

    fxprune.register(Counts, layout={"x": "... i", "weight": "o i", "bias": "o", "return": "... o"})
    try:
        layer, seen = Counts(6, 6), []
        layer.register_forward_hook(lambda m, i, o: seen.append(m.calls))
        fxprune.trace(Net(lambda s, x: s.a(s.a(x)), a=layer), torch.randn(2, 6))
        assert seen == [1, 2] and layer.calls == 0
    finally:
        fxprune.unregister(Counts)


def test_writes_are_noticed_where_the_caller_is_in_inference_mode():
    def forward(s, x):
        y = s.a(x)
        y[:, :4].mul_(3)
        return s.c(y)

    model = Net(forward, a=nn.Linear(6, 8), c=nn.Linear(8, 3)).eval()
    x = torch.randn(2, 6)
    with torch.inference_mode():
        graph = fxprune.trace(model, x)
        assert fxprune.prune(model, x).a.out_features == 4
    assert difference(run(graph, x), run(model, x)) == 0


@pytest.mark.filterwarnings("ignore::fxprune.PruningWarning")
@pytest.mark.parametrize("values", [torch.tensor(1j), torch.ones(2, 2).to_sparse()])
def test_complex_constants_and_sparse_ones_are_held(values):
    def forward(s, x):
        y = s.a(x)
        y = torch.sparse.mm(values, y) if values.is_sparse else (y * values).imag
        return s.c(y.relu_())

    model = Net(forward, a=nn.Linear(6, 8), c=nn.Linear(8, 3)).eval()
    expected = fxprune.trace(model, x := torch.randn(2, 6))(x)
    assert difference([expected], run(model, x)) == 0 and fxprune.prune(model, x)


def test_a_module_that_is_imported_during_the_run_finds_python_s_own_functions(
    tmp_path, monkeypatch
):
    (tmp_path / "imported_late.py").write_text("import math\nfound = [len, range, math.prod]\n")
    monkeypatch.syspath_prepend(tmp_path)

    def forward(s, x):
        from imported_late import found

        assert found[0] is not len and len(x) == 2
        return s.a(x) * found[0]((1, 2))

    model = Net(forward, a=nn.Linear(6, 3)).eval()
    fxprune.trace(model, torch.randn(2, 6))
    import imported_late

    assert imported_late.found == [len, range, math.prod]


def test_generators_and_tensors_in_containers_that_modules_have_are_set_back():
    def forward(s, x):
        s.seen[0].add_(1)
        s.table["last"].copy_(x[0])
        noise = torch.rand(6, generator=s.generator) * s.rng.random() * s.numpys.random()
        noise = noise * s.older.rand()
        return s.a(x + 0 * noise)

    model = Net(forward, a=nn.Linear(6, 3), seen=[torch.zeros(2)], table={"last": torch.zeros(6)},
                generator=torch.Generator().manual_seed(0), rng=random.Random(0),
                numpys=np.random.default_rng(0), older=np.random.RandomState(0),
                nowhere=torch.empty(3, device="meta")).eval()  # fmt: skip
    before = [model.generator.get_state(), model.rng.getstate(), model.numpys.bit_generator.state]
    fxprune.trace(model, torch.ones(2, 6))
    assert not model.seen[0].any() and not model.table["last"].any()
    assert torch.equal(before[0], model.generator.get_state())
    assert before[1:] == [model.rng.getstate(), model.numpys.bit_generator.state]
    assert model.older.rand() == np.random.RandomState(0).rand()
