"""A pruned model is an ordinary module: it trains, saves, exports, compiles and is pruned again."""

from __future__ import annotations

import copy
import io

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.nn.utils import parametrizations

import fxprune

from .oracle import awake, difference, run, state
from .test_trace import Net

X = torch.randn(4, 3, 8, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
ROWS = torch.randn(4, 5, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(1))


class Residual(nn.Module):
    def __init__(self):
        super().__init__()
        self.stem = nn.Conv2d(3, 8, 3, padding=1, bias=False)
        self.norm, self.branch = nn.BatchNorm2d(8), nn.Conv2d(8, 8, 3, padding=1)
        self.gate, self.width = nn.Parameter(torch.ones(8)), 8
        self.fc = nn.Linear(8, 5)

    def forward(self, x):
        y = F.gelu(self.norm(self.stem(x)))
        y = y + torch.sigmoid(self.branch(y)) * self.gate.view(1, -1, 1, 1)
        return self.fc(y.mean((2, 3)).view(-1, self.width))


class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.heads, self.qkv, self.out = 4, nn.Linear(6, 48), nn.Linear(16, 6)
        self.norm, self.up, self.down = nn.LayerNorm(6), nn.Linear(6, 12), nn.Linear(12, 6)

    def forward(self, x):
        b, n, _ = x.shape
        q, k, v = self.qkv(x).view(b, n, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        y = F.scaled_dot_product_attention(q, k, v).transpose(1, 2).reshape(b, n, -1)
        x = x + self.out(y)
        return x + self.down(F.gelu(self.up(self.norm(x))))


class Recurrent(nn.Module):
    def __init__(self):
        super().__init__()
        self.lstm, self.fc = nn.LSTM(6, 8, batch_first=True), nn.Linear(8, 3)

    def forward(self, x):
        return self.fc(self.lstm(x)[0])


MODELS = {"residual": (Residual, X), "attention": (Attention, ROWS), "lstm": (Recurrent, ROWS)}


@pytest.fixture(params=MODELS)
def pruned(request):
    build, x = MODELS[request.param]
    torch.manual_seed(0)
    return fxprune.prune(awake(build()), x, exact=True), x


def test_every_parameter_trains_and_the_loss_falls(pruned):
    small, x = pruned
    goal = torch.randn_like(small(x))
    optimizer = torch.optim.SGD(small.train().parameters(), lr=0.02)
    losses = []
    for _ in range(10):
        optimizer.zero_grad()
        loss = F.mse_loss(small(x), goal)
        loss.backward()
        assert all((p.grad != 0).any() and p.grad.shape == p.shape for p in small.parameters())
        optimizer.step()
        losses.append(float(loss.detach()))
    assert losses[-1] < losses[0]


def test_saving_loading_and_copying_give_the_same_outputs(pruned):
    small, x = pruned
    expected, buffer = run(small, x), io.BytesIO()
    torch.save(small, buffer)
    buffer.seek(0)
    loaded = torch.load(buffer, weights_only=False)
    assert type(loaded) is type(small) and difference(run(loaded, x), expected) == 0
    twin = copy.deepcopy(small)
    weights = state(small)
    with torch.no_grad():
        for p in twin.parameters():
            p.zero_()
    assert difference(run(small, x), expected) == 0
    twin.load_state_dict(weights)
    assert difference(run(twin, x), expected) == 0


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("how", ["export", "jit trace", "compile", "fxprune"])
def test_other_tools_capture_it_and_compute_the_same(pruned, how):
    small, x = pruned
    capture = {
        "export": lambda: torch.export.export(small, (x,)).module(),
        "jit trace": lambda: torch.jit.trace(small, x),
        "compile": lambda: torch.compile(small, backend="eager"),
        "fxprune": lambda: fxprune.trace(small, x),
    }[how]
    assert difference(run(capture(), x), run(small, x)) < 1e-12


def test_it_runs_at_other_batch_sizes_like_the_masked_model():
    for build, x in MODELS.values():
        torch.manual_seed(0)
        model = awake(build())
        plan = fxprune.plan(model, x, exact=True)
        other = torch.cat([x, x + 1, x - 1])
        if not plan.approximate:
            assert difference(run(plan.mask(model), other), run(plan.apply(model), other)) < 1e-9


@pytest.mark.parametrize("name", MODELS)
def test_pruning_twice_in_a_row_is_right_both_times(name):
    build, x = MODELS[name]
    small = fxprune.prune(awake(build()), x, sparsity=0.25)
    plan = fxprune.plan(small, x, sparsity=0.5)
    smaller = plan.apply(small)
    if not plan.approximate:
        assert difference(run(plan.mask(small), x), run(smaller, x)) < 1e-9
    sizes = [sum(p.numel() for p in m.parameters()) for m in (build(), small, smaller)]
    assert sizes[0] > sizes[1] > sizes[2]


@pytest.mark.parametrize("dtype, tolerance", [
    (torch.float16, 5e-2), (torch.bfloat16, 2e-1), (torch.float32, 1e-4),
], ids=str)  # fmt: skip
def test_half_precision_models_are_proved_and_keep_their_dtype(dtype, tolerance):
    model = awake(Residual()).to(dtype)
    small = fxprune.prune(model, X.to(dtype), exact=True)
    assert {t.dtype for t in small.state_dict().values() if t.is_floating_point()} == {dtype}
    plan = fxprune.plan(model, X.to(dtype), exact=True)
    assert difference(run(plan.mask(model), X.to(dtype)), run(small, X.to(dtype))) < tolerance


def test_channels_last_weights_stay_channels_last():
    model = awake(Residual()).to(memory_format=torch.channels_last)
    small = fxprune.prune(model, X)
    for name in ("stem", "branch"):
        weight = getattr(small, name).weight
        assert weight.is_contiguous(memory_format=torch.channels_last), name
        assert not weight.is_contiguous(), name
    plain = fxprune.prune(awake(Residual()), X)
    assert plain.branch.weight.is_contiguous()


def chain(*, act, bias=False, norm=False):
    norms = [nn.BatchNorm2d(6)] if norm else []
    return awake(nn.Sequential(nn.Conv2d(3, 8, 3), nn.Sigmoid(), nn.Conv2d(8, 6, 3, bias=bias),
                               *norms, act, nn.Conv2d(6, 4, 1, bias=False)))  # fmt: skip


@pytest.mark.parametrize("model, made", [
    (chain(act=nn.ReLU()), ["2.bias"]),  # 2 reads sigmoid(b); 4 reads ReLU(0) = 0
    (chain(act=nn.Softplus(), bias=True), ["4.bias"]),  # 2 has one; 4 reads softplus of it
    (chain(act=nn.Softplus(), norm=True), ["5.bias"]),  # the norm's mean takes what 2 reads
], ids=["without", "with", "norm"])  # fmt: skip
def test_a_bias_is_made_only_where_a_constant_has_nowhere_else_to_go(model, made):
    small = fxprune.prune(model, X)
    assert set(small.state_dict()) - set(model.state_dict()) == set(made)
    assert set(model.state_dict()) <= set(small.state_dict())
    assert set(fxprune.prune(model, X, bias="drop").state_dict()) == set(model.state_dict())


def test_no_bias_is_made_where_every_constant_is_zero():
    model = nn.Sequential(nn.Conv2d(3, 8, 3, bias=False), nn.ReLU(), nn.Conv2d(8, 4, 1, bias=False))
    small = fxprune.prune(awake(model), X)
    assert set(small.state_dict()) == {"0.weight", "2.weight"}


def test_in_train_mode_batch_norm_statistics_follow_those_of_the_masked_model():
    model = awake(nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.Sigmoid(),
                                nn.Conv2d(8, 4, 3, bias=False), nn.BatchNorm2d(4)))  # fmt: skip
    plan = fxprune.plan(model, X)
    masked, small = plan.mask(model).train(), plan.apply(model).train()
    for shift in (0, 1, 2):
        assert difference(run(masked, X * 2 + shift), run(small, X * 2 + shift)) < 1e-9
    before = model[1].running_mean[plan.kept["0.weight"][0]]
    assert difference([small[1].running_mean], [before]) > 0.1  # it did train
    assert difference(run(masked.eval(), X), run(small.eval(), X)) < 1e-9
    assert difference([masked[4].running_var], [small[4].running_var]) < 1e-9


def test_weight_norm_goes_on_being_trained_as_direction_and_length():
    model = nn.Sequential(parametrizations.weight_norm(nn.Linear(6, 8)), nn.Tanh(), nn.Linear(8, 3))
    small = fxprune.prune(awake(model), ROWS)
    small(ROWS).square().sum().backward()
    originals = dict(small[0].parametrizations.weight.named_parameters())
    assert [p.shape for p in originals.values()] == [(4, 1), (4, 6)]
    assert all(p.grad is not None and (p.grad != 0).any() for p in originals.values())
    assert torch.allclose(originals["original0"], small[0].weight.norm(dim=1, keepdim=True))


@pytest.mark.parametrize("norm", [nn.GroupNorm(2, 16), lambda y: F.group_norm(y, 2)])
def test_what_a_norm_returns_lies_in_memory_as_in_the_model_where_a_proof_counts(norm):
    def forward(s, x):
        return s.b(norm(s.a(x)).permute(0, 2, 3, 1).view(-1, 16))

    held = {"norm": norm} if isinstance(norm, nn.Module) else {}
    model = awake(Net(forward, a=nn.Conv2d(3, 16, 3), b=nn.Linear(16, 3), **held))
    form = torch.channels_last
    x = torch.randn(2, 3, 6, 6, dtype=torch.float64).to(memory_format=form)
    assert fxprune.prune(model.to(memory_format=form), x).a.out_channels == 8
