"""What optimizers hold of a parameter is cut by the very indices that the parameter is cut by."""

from __future__ import annotations

import copy
import warnings

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.nn.utils import parametrizations

import fxprune
from fxprune import PruningWarning, SettingError

from .oracle import awake
from .snapshot import Snapshot

IMAGE = torch.randn(2, 3, 6, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
TOKENS = torch.randn(2, 5, 12, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
WORDS = torch.randint(0, 20, (2, 5), generator=torch.Generator().manual_seed(1))


class Shuffled(nn.Module):
    """Grouped convolutions, whose groups keep channels of their own, around a channel shuffle."""

    def __init__(self):
        super().__init__()
        self.a = nn.Conv2d(3, 12, 3, padding=1)
        self.b = nn.Conv2d(12, 16, 3, padding=1, groups=2)
        self.norm, self.c = nn.BatchNorm2d(16), nn.Conv2d(16, 8, 1, groups=2)
        self.d = nn.Conv2d(8, 4, 1)

    def forward(self, x):
        y = F.relu(self.b(F.relu(self.a(x))))
        n, c, h, w = y.shape
        y = y.view(n, 2, c // 2, h, w).transpose(1, 2).reshape(n, c, h, w)
        return self.d(F.relu(self.c(self.norm(y))))


class Attention(nn.Module):
    """One layer makes queries, keys and values."""

    def __init__(self):
        super().__init__()
        self.qkv, self.out, self.heads = nn.Linear(12, 48), nn.Linear(16, 12), 4

    def forward(self, x):
        q, k, v = self.qkv(x).chunk(3, -1)
        q, k, v = (t.unflatten(-1, (self.heads, -1)).transpose(1, 2) for t in (q, k, v))
        return self.out(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))


class Recurrent(nn.Module):
    """A tied table, an LSTM, and nn.MultiheadAttention."""

    def __init__(self):
        super().__init__()
        self.table = nn.Embedding(20, 8)
        self.lstm = nn.LSTM(8, 6, batch_first=True)
        self.mha = nn.MultiheadAttention(6, 2, batch_first=True)
        self.up, self.words = nn.Linear(6, 8), nn.Linear(8, 20)
        self.words.weight = self.table.weight

    def forward(self, ids):
        y = self.lstm(self.table(ids))[0]
        return self.words(torch.tanh(self.up(y + self.mha(y, y, y)[0])))


MODELS = {
    "shuffled": (Shuffled, IMAGE), "attention": (Attention, TOKENS), "recurrent": (Recurrent, WORDS)
}  # fmt: skip
OPTIMIZERS = {
    "sgd": lambda p: torch.optim.SGD(p, 0.1, momentum=0.9, weight_decay=0.01),
    "nesterov": lambda p: torch.optim.SGD(p, 0.1, momentum=0.9, nesterov=True, foreach=True),
    "fused sgd": lambda p: torch.optim.SGD(p, 0.1, momentum=0.9, fused=True),
    "adam": lambda p: torch.optim.Adam(p, 0.01, amsgrad=True, foreach=False),
    "adamw": lambda p: torch.optim.AdamW(p, 0.01, foreach=True),
    "fused adamw": lambda p: torch.optim.AdamW(p, 0.01, amsgrad=True, fused=True),
    "rmsprop": lambda p: torch.optim.RMSprop(p, 0.01, momentum=0.9, centered=True),
    "adagrad": lambda p: torch.optim.Adagrad(p, 0.01, initial_accumulator_value=0.1),
    "nadam": lambda p: torch.optim.NAdam(p, 0.01), "radam": lambda p: torch.optim.RAdam(p, 0.01),
    "adadelta": lambda p: torch.optim.Adadelta(p), "adamax": lambda p: torch.optim.Adamax(p, 0.01),
    "asgd": lambda p: torch.optim.ASGD(p, 0.01), "rprop": lambda p: torch.optim.Rprop(p, 0.01),
}  # fmt: skip


def trained(kind, make, steps=3):
    """A model after some steps of an optimizer, with the gradient of the last one."""
    build, x = MODELS[kind]
    torch.manual_seed(0)
    model = awake(build())
    optimizer = make(model.parameters())
    for _ in range(steps):
        optimizer.zero_grad()
        model(x).square().mean().backward()
        optimizer.step()
    return model, optimizer, x


def taken(t, dims):
    """The kept entries of a tensor, as ``plan.kept`` says in words."""
    for dim, kept in sorted(dims.items()):
        if kept.dim() == 1:
            t = t.index_select(dim, kept)
        else:  # a row for each group
            parts = zip(t.chunk(len(kept)), kept, strict=True)
            t = torch.cat([part.index_select(dim, row) for part, row in parts])
    return t


@pytest.mark.parametrize("kind", MODELS)
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_every_state_is_the_old_one_at_the_kept_indices(name, kind):
    model, optimizer, x = trained(kind, OPTIMIZERS[name])
    named = dict(model.named_parameters())
    before = {
        n: {k: copy.deepcopy(v) for k, v in optimizer.state[p].items()} for n, p in named.items()
    }
    gradients = {n: p.grad.clone() for n, p in named.items()}
    pruner = fxprune.Pruner(model, x, optimizer=optimizer)
    pruner.step()
    changed = [n for n in named if n in pruner.kept]
    assert len(changed) > 2 and dict(model.named_parameters()).items() == named.items()
    for n in named:
        dims = pruner.kept.get(n, {})
        assert torch.equal(named[n].grad, taken(gradients[n], dims))
        state = optimizer.state[named[n]]
        assert state.keys() == before[n].keys()
        for key, old in before[n].items():
            if isinstance(old, torch.Tensor):
                wanted = taken(old, dims) if old.shape == gradients[n].shape else old
                assert torch.equal(state[key], wanted), (n, key)
            else:
                assert state[key] == old


@pytest.mark.parametrize("kind", MODELS)
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_the_next_step_is_that_of_training_at_full_size_on_what_is_kept(name, kind):
    model, optimizer, x = trained(kind, OPTIMIZERS[name])
    whole, twin = copy.deepcopy((model, optimizer))
    pruner = fxprune.Pruner(model, x, optimizer=optimizer, bias="drop")  # nothing is folded
    pruner.step()
    small, generator = dict(model.named_parameters()), torch.Generator().manual_seed(2)
    for _ in range(2):
        for n, p in whole.named_parameters():
            p.grad = torch.randn(p.shape, generator=generator, dtype=p.dtype)
            small[n].grad = taken(p.grad, pruner.kept.get(n, {})).clone()
        optimizer.step()
        twin.step()
    for n, p in whole.named_parameters():
        wanted = taken(p.detach(), pruner.kept.get(n, {}))
        assert torch.allclose(small[n].detach(), wanted, rtol=1e-12, atol=1e-12), n


def test_rows_and_columns_of_factored_moments_are_cut_where_it_is_sure_which():
    model, optimizer, x = trained("attention", lambda p: torch.optim.Adafactor(p, 0.01))
    state = optimizer.state[model.qkv.weight]
    rows, columns = state["row_var"].clone(), state["col_var"].clone()
    assert rows.shape == (48, 1) and columns.shape == (1, 12)
    pruner = fxprune.Pruner(model, x, optimizer=optimizer)
    pruner.step()
    assert torch.equal(state["row_var"], rows[pruner.kept["qkv.weight"][0]])
    assert torch.equal(state["col_var"], columns)
    model(x).sum().backward()
    optimizer.step()


@pytest.mark.parametrize("groups", [1, 2, 4])
def test_rows_and_columns_of_kernels_are_cut_group_by_group(groups):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(3, 8, 1), nn.Conv2d(8, 8, 3, groups=groups), nn.ReLU(),
                          nn.Conv2d(8, 5, 1))  # fmt: skip
    optimizer = torch.optim.Adafactor(model.parameters(), 0.01)
    x = torch.randn(2, 3, 8, 8)
    model(x).sum().backward()
    optimizer.step()
    state = optimizer.state[model[1].weight]
    whole = {"row_var": (8, 8 // groups, 3, 3), "col_var": (8, 8 // groups, 3, 3)}
    whole = {key: state[key].expand(shape).clone() for key, shape in whole.items()}
    pruner = fxprune.Pruner(model, x, optimizer=optimizer)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        pruner.step()
    small = model[1].weight.shape
    assert small == (4, 4 // groups, 3, 3)
    for key, value in whole.items():
        wanted = taken(value, pruner.kept["1.weight"])
        assert torch.equal(state[key].expand(small), wanted)
    model(x).sum().backward()
    optimizer.step()


class Odd(torch.optim.Optimizer):
    """Holds whatever ``states`` gives for a parameter."""

    def __init__(self, params, states):
        super().__init__(params, {})
        for p in self.param_groups[0]["params"]:
            self.state[p] |= states(p)

    def step(self, closure=None):
        pass


def test_states_without_a_dimension_are_cut_and_those_that_could_be_two_things_stay():
    net = awake(nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 8), nn.ReLU(),
                              nn.Linear(8, 2)))  # fmt: skip
    odd = Odd(net.parameters(), lambda p: {
        "rows": torch.arange(p.shape[0]), "columns": torch.arange(p.shape[-1]),
        "inside": [torch.full_like(p, 2.0)], "none": None, "number": 3, "one": torch.ones(1),
        "gram": torch.ones(3, 3), "compressed": torch.zeros(p.shape, dtype=torch.uint8),
    })  # fmt: skip
    pruner = fxprune.Pruner(net, torch.ones(2, 6).double(), optimizer=odd)
    with pytest.warns(PruningWarning, match="left as it is") as caught:
        pruner.step()
    first, middle = pruner.kept["0.weight"][0], pruner.kept["2.weight"]
    assert middle.keys() == {0, 1} and not torch.equal(middle[0], middle[1])
    state = odd.state[net[0].weight]
    assert torch.equal(state["rows"], first) and torch.equal(state["columns"], torch.arange(6))
    assert state["inside"][0].shape == net[0].weight.shape
    assert (state["none"], state["number"], len(state["one"])) == (None, 3, 1)
    assert state["gram"].shape == (3, 3) and state["compressed"].shape == (8, 6)
    # Of a square weight, eight numbers could be for rows or for columns.
    assert len(odd.state[net[2].weight]["rows"]) == 8
    assert len(odd.state[net[0].bias]["rows"]) == 4
    text = str(caught[0].message)
    assert "'gram' of 0.weight" in text and "(8, 6) uint8" in text


def test_a_state_of_all_parameters_together_is_named():
    net = awake(nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 2)))
    x = torch.ones(2, 6).double()
    optimizer = torch.optim.LBFGS([net[2].bias, net[0].weight])

    def closure():
        optimizer.zero_grad()
        loss = net(x).square().mean()
        loss.backward()
        return loss

    optimizer.step(closure)
    with pytest.warns(PruningWarning, match=r"a \(50,\) of LBFGS.*new optimizer"):
        fxprune.Pruner(net, x, optimizer=optimizer).step()


def no_biases():
    """Channels say sigmoid(0) when they go: the layers that read them get a bias."""
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Linear(6, 8, bias=False), nn.Sigmoid(), nn.Linear(8, 8, bias=False), nn.Sigmoid(),
        nn.Linear(8, 2, bias=False),
    ).double()  # fmt: skip


ROWS = torch.randn(4, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize("name", ["sgd", "adamw", "adagrad", "fused adamw"])
def test_biases_that_folding_makes_join_the_group_of_their_weight_behind_it(name):
    net = no_biases()
    make = OPTIMIZERS[name]
    weights = [net[i].weight for i in (0, 2, 4)]
    optimizer = make([{"params": weights[:2], "lr": 0.5}, {"params": weights[2:], "lr": 0.25}])
    net(ROWS).sum().backward()
    optimizer.step()
    fxprune.Pruner(net, ROWS, optimizer=optimizer).step()
    first, second = (g["params"] for g in optimizer.param_groups)
    assert [id(p) for p in first] == [id(weights[0]), id(weights[1]), id(net[2].bias)]
    assert [id(p) for p in second] == [id(weights[2]), id(net[4].bias)]
    assert net[2].bias.shape == (4,) and [g["lr"] for g in optimizer.param_groups] == [0.5, 0.25]
    assert [id(p) for g in optimizer.param_groups for p in g["params"]] == (
        [id(p) for p in net.parameters()]
    )
    before = net[4].bias.clone()
    net(ROWS).sum().backward()
    optimizer.step()
    assert not torch.equal(before, net[4].bias)


def test_names_of_parameters_in_the_groups_keep_step():
    net = no_biases()
    optimizer = torch.optim.AdamW([(f"net.{n}", p) for n, p in net.named_parameters()])
    fxprune.Pruner(net, ROWS, optimizer=optimizer).step()
    assert optimizer.param_groups[0]["param_names"] == [f"net.{n}" for n, _ in
                                                        net.named_parameters()]  # fmt: skip


def test_several_optimizers_and_parameters_of_others():
    net, other = no_biases(), nn.Linear(8, 4)
    weights = [net[i].weight for i in (0, 2, 4)]
    first = torch.optim.SGD([weights[0], *other.parameters()], 0.1, momentum=0.9)
    second = torch.optim.AdamW(weights[1:])
    (net(ROWS).sum() + other(torch.ones(8)).sum()).backward()
    for optimizer in (first, second):
        optimizer.step()
    held = {k: v.clone() for k, v in first.state[other.weight].items()}
    fxprune.Pruner(net, ROWS, optimizer=[first, second]).step()
    assert torch.equal(first.state[other.weight]["momentum_buffer"], held["momentum_buffer"])
    assert first.state[weights[0]]["momentum_buffer"].shape == (4, 6)
    assert len(first.param_groups[0]["params"]) == 3
    assert len(second.param_groups[0]["params"]) == 4
    assert second.state[weights[2]]["exp_avg"].shape == (2, 4)


def test_weights_that_a_parametrization_computes_begin_anew_with_a_warning():
    net = nn.Sequential(
        parametrizations.weight_norm(nn.Linear(6, 8)), nn.ReLU(), nn.Linear(8, 2)
    ).double()
    for make in (OPTIMIZERS["adamw"], OPTIMIZERS["adagrad"]):
        model = copy.deepcopy(net)
        optimizer = make(model.parameters())
        loss = model(ROWS).sum()
        loss.backward()
        optimizer.step()
        with pytest.warns(PruningWarning, match="new optimizer state: 0.weight"):
            fxprune.Pruner(model, ROWS, optimizer=optimizer).step()
        loss = model(ROWS).sum()  # while the last one is alive
        loss.backward()
        optimizer.step()
        state = optimizer.state[model[0].parametrizations.weight.original1]
        assert int(state["step"]) == 1 and int(optimizer.state[model[2].weight]["step"]) == 2


def test_state_dicts_of_the_optimizer_go_round():
    model, optimizer, x = trained("shuffled", OPTIMIZERS["adamw"])
    fxprune.Pruner(model, x, optimizer=optimizer).step()
    twin = copy.deepcopy(model)
    other = OPTIMIZERS["adamw"](twin.parameters())
    other.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    for m, o in ((model, optimizer), (twin, other)):
        m.zero_grad()
        m(x).square().mean().backward()
        o.step()
    for a, b in zip(model.parameters(), twin.parameters(), strict=True):
        assert torch.equal(a, b)


def test_sparse_gradients_stay_sparse():
    net = nn.Sequential(nn.Embedding(20, 8, sparse=True), nn.Linear(8, 8), nn.Linear(8, 2))
    optimizer = torch.optim.SparseAdam([net[0].weight])
    net(WORDS).square().mean().backward()
    optimizer.step()
    before = net[0].weight.grad.to_dense()
    pruner = fxprune.Pruner(net, WORDS, optimizer=optimizer)
    pruner.step()
    kept = pruner.kept["0.weight"]
    assert net[0].weight.grad.is_sparse
    assert torch.equal(net[0].weight.grad.to_dense(), taken(before, kept))
    assert optimizer.state[net[0].weight]["exp_avg"].shape == (20, 4)
    optimizer.step()


def test_a_state_that_is_sparse_is_cut_and_stays_sparse():
    net = no_biases()
    optimizer = torch.optim.SGD(net.parameters(), 0.1)
    before = net[0].weight.detach().clone()
    optimizer.state[net[0].weight]["seen"] = before.to_sparse()
    optimizer.state[net[0].weight]["rows"] = before.to_sparse_csr()
    pruner = fxprune.Pruner(net, ROWS, optimizer=optimizer)
    with pytest.warns(PruningWarning, match="'rows' of 0.weight"):
        pruner.step()
    state = optimizer.state[net[0].weight]
    assert state["seen"].is_sparse and state["rows"].shape == before.shape
    assert torch.equal(state["seen"].to_dense(), taken(before, pruner.kept["0.weight"]))


def test_optimizers_of_something_else_are_refused():
    net = no_biases()
    for wrong, message in (
        ("adam", "is no torch.optim.Optimizer"),
        (torch.optim.SGD(no_biases().parameters(), 0.1), "made for a copy"),
    ):
        with pytest.raises(SettingError, match=message):
            fxprune.Pruner(net, ROWS, optimizer=wrong)


def test_nothing_is_said_where_all_is_sure():
    model, optimizer, x = trained("shuffled", OPTIMIZERS["adam"])
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        fxprune.Pruner(model, x, optimizer=optimizer).step()


def test_a_bias_that_is_made_has_a_momentum_where_the_fused_kernel_takes_all_or_none():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 16), nn.Sigmoid(), nn.Linear(16, 4, bias=False))
    x = torch.randn(4, 6)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, fused=True)
    pruner = fxprune.Pruner(model, x, optimizer=optimizer, schedule="once")
    for _ in range(2):
        model(x).square().mean().backward()
        optimizer.step()
        pruner.step()
    assert model[2].bias is not None and optimizer.state[model[2].bias]["momentum_buffer"].any()


@pytest.mark.skipif(not hasattr(torch.optim, "Muon"), reason="came with PyTorch 2.9")
def test_an_optimizer_that_takes_no_vectors_is_an_error_that_says_what_to_do():
    model = nn.Sequential(nn.Linear(6, 16), nn.Sigmoid(), nn.Linear(16, 4, bias=False))
    optimizer = torch.optim.Muon([p for p in model.parameters() if p.dim() == 2])
    pruner = fxprune.Pruner(model, torch.randn(4, 6), optimizer=optimizer, schedule="once")
    before = Snapshot(model)
    with pytest.raises(fxprune.PruningError, match=r"Muon does not take the bias.*bias='drop'"):
        pruner.step()
    assert before.differences() == []
