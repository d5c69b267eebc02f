"""The plan says what goes, what stays and why, and chooses what the settings ask for."""

from __future__ import annotations

from collections import OrderedDict
from typing import NamedTuple

import networkx as nx
import pytest
import torch
from torch import nn
from torch.nn import functional as F

import fxprune

from .oracle import awake, difference, run

X = torch.randn(2, 3, 8, 8, generator=torch.Generator().manual_seed(1))


def coupled(seed=0):
    """conv - batch norm - ReLU - conv: one group of 8 units over 4 tensors and 2 statistics."""
    torch.manual_seed(seed)
    net = nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Conv2d(8, 4, 3))
    for p in net.parameters():
        nn.init.normal_(p)
    return net.eval()


def deep():
    return nn.Sequential(
        nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Conv2d(8, 12, 3), nn.ReLU(), nn.Flatten(),
        nn.Linear(192, 10), nn.Tanh(), nn.Linear(10, 4),
    )  # fmt: skip


def group(plan, name):
    return next(g for g in plan.groups if g.name == name)


def widths(plan):
    return {g.name: g.kept for g in plan.groups if not g.name.endswith("(input)")}


# -- what a plan holds ---------------------------------------------------------------------------


def test_a_group_lists_each_tensor_and_dimension_that_shrinks_together():
    net = coupled()
    plan = fxprune.plan(net, X, sparsity=0.25)
    found = group(plan, "0")
    assert sorted(found.members) == sorted([
        ("0.weight", 0), ("0.bias", 0), ("1.weight", 0), ("1.bias", 0), ("1.running_mean", 0),
        ("1.running_var", 0), ("3.weight", 1),
    ])  # fmt: skip
    assert (found.width, found.kept, len(found.removed)) == (8, 6, 2)
    assert found.frozen is None and found.approximate == [] and found.importance.shape == (8,)
    assert group(plan, "3").frozen == "it is an output of the model"
    tensors = net.state_dict()
    assert all(dim < tensors[name].dim() for g in plan.groups for name, dim in g.members)


def test_kept_are_the_indices_that_a_slice_by_hand_needs():
    net = coupled()
    plan = fxprune.plan(net, X)
    stays = torch.tensor([i for i in range(8) if i not in group(plan, "0").removed.tolist()])
    assert set(plan.kept) == {name for name, _ in group(plan, "0").members}
    small, state = plan.apply(net), net.state_dict()
    for name, dims in plan.kept.items():
        ((dim, indices),) = dims.items()
        assert torch.equal(indices, stays) and indices.dtype == torch.int64
        if name not in ("3.bias",):
            expected = state[name].index_select(dim, indices)
            assert torch.equal(small.state_dict()[name], expected)


def test_kept_counts_slices_where_a_unit_has_several():
    plan = fxprune.plan(deep(), X)
    rows = plan.kept["2.weight"][0].tolist()
    assert plan.kept["5.weight"][1].tolist() == [16 * r + i for r in rows for i in range(16)]


def test_the_lowest_scores_go():
    plan = fxprune.plan(deep(), X)
    for g in plan.groups:
        if len(g.removed):
            assert sorted(g.importance.argsort()[: len(g.removed)].tolist()) == g.removed.tolist()


# -- settings ------------------------------------------------------------------------------------


@pytest.mark.parametrize("sparsity, left", [(0, 8), (0.25, 6), (0.5, 4), (0.9, 1), (0.99, 1)])
def test_sparsity_is_the_share_of_units_that_go_and_one_always_stays(sparsity, left):
    plan = fxprune.plan(coupled(), X, sparsity=sparsity)
    assert widths(plan) == {"0": left, "3": 4}
    assert plan.apply(coupled())[0].out_channels == left


def test_sparsity_by_glob_and_by_type_leaves_other_layers_whole_with_a_reason():
    plan = fxprune.plan(deep(), X, sparsity={"[0-1]*": 0.25, nn.Linear: 0.5})
    assert widths(plan) == {"0": 6, "2": 12, "5": 5, "7": 4}
    assert dict(plan.skipped)["2"] == group(plan, "2").frozen == "sparsity does not name 2"


@pytest.mark.parametrize("key", ["2", "[2]", "module", [nn.Linear, "2"], nn.Conv2d], ids=str)
def test_ignore_by_name_glob_module_or_type_keeps_every_output_channel(key):
    net = deep()
    plan = fxprune.plan(net, X, ignore=net[2] if key == "module" else key)
    expected = {"0": 4, "2": 12, "5": 5, "7": 4}
    expected |= {"5": 10} if isinstance(key, list) else {"0": 8} if key is nn.Conv2d else {}
    assert widths(plan) == expected
    assert "ignore" in dict(plan.skipped)["2"]
    assert plan.apply(net)[2].out_channels == 12


class Part(nn.Sequential):
    pass


def nested():
    """Three layers that make channels, two of them inside of parts, and that of the output."""
    return nn.Sequential(
        Part(nn.Conv2d(3, 8, 1), nn.ReLU(), Part(nn.Conv2d(8, 16, 1), nn.ReLU())),
        nn.Conv2d(16, 12, 1), nn.ReLU(), nn.Flatten(), nn.Linear(768, 4),
    )  # fmt: skip


@pytest.mark.parametrize("key, inside", [
    ("0", ["0.0", "0.2.0"]), ("0.2", ["0.2.0"]), ("?.2", ["0.2.0"]), (Part, ["0.0", "0.2.0"]),
    ("module", ["0.0", "0.2.0"]), (nn.Module, ["0.0", "0.2.0", "1"]), ("1", ["1"]),
], ids=str)  # fmt: skip
def test_what_is_said_of_a_container_holds_for_every_layer_inside(key, inside):
    net = nested()
    key = net[0] if key == "module" else key
    full = {"0.0": 8, "0.2.0": 16, "1": 12, "4": 4}

    def kept(**settings):
        return widths(fxprune.plan(net, X, **settings))

    def among(share, other):
        left = {n: round(w * (share if n in inside else other)) for n, w in full.items()}
        return left | {"4": 4}

    assert kept(ignore=[key]) == among(1, 0.5)
    assert kept(sparsity={key: 0.25}) == among(0.75, 1)
    assert kept(min_width={key: 0.75}) == kept(max_sparsity={key: 0.25}) == among(0.75, 0.5)
    assert kept(min_width={key: 0.75}, scope="global") == kept(
        min_width=dict.fromkeys(inside, 0.75), scope="global"
    )


def test_of_a_layer_and_what_contains_it_the_first_key_counts():
    plan = fxprune.plan(nested(), X, sparsity={"0.0": 0.25, "0": 0.5})
    assert widths(plan) == {"0.0": 6, "0.2.0": 8, "1": 12, "4": 4}
    plan = fxprune.plan(nested(), X, sparsity={"0": 0.5, "0.0": 0.25})
    assert widths(plan) == {"0.0": 4, "0.2.0": 8, "1": 12, "4": 4}


def test_a_layer_is_inside_of_everything_that_holds_it():
    net = nested()
    net.also = net[0]  # not called by this name
    net.forward = lambda x: nn.Sequential.forward(net[:5], x)
    assert widths(fxprune.plan(net, X, ignore="also"))["0.2.0"] == 16


def test_layers_that_are_coupled_lose_the_least_that_is_said_of_one():
    class Sum(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b, self.c = nn.Conv2d(3, 8, 1), nn.Conv2d(3, 8, 1), nn.Conv2d(8, 2, 1)

        def forward(self, x):
            return self.c(self.a(x) + self.b(x))

    for sparsity in ({"a": 0.75, "b": 0.25}, {"b": 0.25, "a": 0.75}):
        assert widths(fxprune.plan(Sum(), X, sparsity=sparsity))["a"] == 6


@pytest.mark.parametrize("settings", [
    {"ignore": "2"}, {"ignore": ["1", "0.1"]}, {"ignore": nn.Flatten}, {"sparsity": {"0.1": 0.5}},
    {"sparsity": {"0": 0.25, "2": 0.5}}, {"min_width": {nn.ReLU: 4}}, {"max_sparsity": {"3": 0.5}},
], ids=str)  # fmt: skip
def test_a_key_that_matches_nothing_that_makes_channels_is_refused(settings):
    with pytest.raises(fxprune.SettingError, match="matches only modules that make no channels"):
        fxprune.plan(nested(), X, **settings)


def test_a_norm_may_be_ignored_but_has_no_width_of_its_own():
    assert widths(fxprune.plan(coupled(), X, ignore="1"))["0"] == 8
    with pytest.raises(fxprune.SettingError, match="sparsity: '1' matches only modules that make"):
        fxprune.plan(coupled(), X, sparsity={"1": 0.5})


def test_a_layer_that_is_not_called_may_be_named():
    net = deep()
    net[1].never = nn.Linear(2, 2)
    plan = fxprune.plan(net, X, ignore=["1.never"])
    assert dict(plan.skipped)["1.never"] == "it is not called on the example input"


@pytest.mark.parametrize("round_to, left", [(1, 5), (2, 6), (3, 6), (4, 8), (16, 10)])
def test_round_to_gives_multiples_and_never_more_than_there_were(round_to, left):
    net = nn.Sequential(nn.Linear(6, 10), nn.ReLU(), nn.Linear(10, 2))
    plan = fxprune.plan(net, torch.ones(1, 6), round_to=round_to)
    assert widths(plan)["0"] == left


# -- reports -------------------------------------------------------------------------------------


def test_the_table_takes_no_name_for_markup():
    names = ["[bold]a[/bold]", "[/b]", ":smile:", "[red"]
    layers = {n: nn.Linear(8, 8) for n in names}
    model = nn.Sequential(OrderedDict(layers))
    shown = str(fxprune.plan(model, torch.randn(2, 8)))
    assert all(name in shown for name in names)


def test_the_table_fits_a_terminal_and_names_every_layer_with_its_widths():
    net = nn.Sequential()
    net.add_module("a_module_with_a_very_long_name_indeed_to_break_tables", deep())
    text = str(fxprune.plan(net, X, ignore="*.5"))
    assert max(map(len, text.splitlines())) <= 100
    assert "8 -> 4" in text and "12 -> 6" in text and "is in ignore" in text
    plain = str(fxprune.plan(deep(), X))
    for name, width in (("0", "8 -> 4"), ("2", "12 -> 6"), ("5", "10 -> 5"), ("7", "4")):
        assert any(line.startswith(name) and width in line for line in plain.splitlines())


def test_every_layer_that_stays_whole_is_skipped_with_its_reason():
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b, self.never = nn.Conv2d(3, 8, 3), nn.Conv2d(8, 4, 1), nn.Linear(2, 2)

        def forward(self, x):
            return F.softmax(self.b(F.relu(self.a(x))), 1)

    plan = fxprune.plan(Net(), X)
    assert [what for what, _ in plan.skipped] == ["b", "never"]
    assert "softmax" in plan.skipped[0][1] and "not called" in plan.skipped[1][1]


def test_components_of_the_graph_are_the_groups():
    plan = fxprune.plan(deep(), X)
    assert isinstance(plan.graph, nx.Graph)
    parts = [sorted({plan.graph.nodes[n]["name"] for n in part})
             for part in nx.connected_components(plan.graph)]  # fmt: skip
    assert sorted(parts) == sorted(sorted({name for name, _ in g.members}) for g in plan.groups)


def test_planning_twice_gives_the_same_plan_and_a_plan_serves_a_retrained_model():
    first, second = (fxprune.plan(coupled(), X) for _ in range(2))
    assert str(first) == str(second)
    other = coupled(seed=3)
    small, masked = first.apply(other), first.mask(other)
    assert difference(run(small, X), run(masked, X)) < 1e-5


class Both(NamedTuple):
    logits: torch.Tensor
    hidden: torch.Tensor


class Returns(nn.Module):
    def __init__(self, how):
        super().__init__()
        self.a, self.b, self.how = nn.Linear(4, 8), nn.Linear(8, 2), how

    def forward(self, x):
        hidden = torch.sigmoid(self.a(x))
        if self.how == "tensor":
            return self.b(hidden)
        if self.how == "tuple":
            return self.b(hidden), (hidden, hidden.cos())
        if self.how == "named":
            return Both(self.b(hidden), hidden)
        return {"logits": self.b(hidden), "hidden": hidden}


def test_outputs_that_are_not_asked_for_may_shrink():
    model = awake(Returns("mapping"))
    x = torch.randn(3, 4, dtype=torch.float64)
    assert fxprune.prune(model, x)(x)["hidden"].shape == (3, 8)
    small = fxprune.prune(model, x, outputs="logits")
    assert small(x)["hidden"].shape == (3, 4) and small(x)["logits"].shape == (3, 2)


@pytest.mark.parametrize("how, only", [("tuple", 0), ("named", "logits"), ("named", [0])])
def test_places_of_a_tuple_name_outputs_too(how, only, tmp_path):
    model = awake(Returns(how))
    x = torch.randn(3, 4, dtype=torch.float64)
    small = fxprune.prune(model, x, outputs=only)
    logits, hidden = small(x)
    assert logits.shape == (3, 2) and small.a.out_features == 4
    plan = fxprune.plan(model, x, outputs=only)
    assert difference([plan.mask(model)(x)[0]], [logits]) < 1e-9
    plan.save(tmp_path / "plan.json")
    again = fxprune.PruningPlan.load(tmp_path / "plan.json", model)
    assert again.apply(model).a.out_features == 4
    assert fxprune.prune(model, x)(x)[0].shape == (3, 2)


@pytest.mark.parametrize("how, name, words", [
    ("mapping", "logit", "only 'logits', 'hidden'"), ("tensor", "logits", "one thing"),
    ("tensor", 0, "one thing"), ("tuple", 2, "only 0, 1"), ("mapping", 0, "only 'logits'"),
])  # fmt: skip
def test_outputs_that_the_model_does_not_return_are_an_error(how, name, words):
    with pytest.raises(fxprune.SettingError, match=words):
        fxprune.plan(Returns(how), torch.randn(3, 4), outputs=[name])


def test_a_plan_holds_for_a_model_whose_buffers_have_moved():
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Conv2d(3, 8, 3, bias=False), nn.BatchNorm2d(8), nn.Sigmoid(),
        nn.Conv2d(8, 6, 3, bias=False), nn.BatchNorm2d(6),
    )  # fmt: skip
    x = torch.randn(2, 3, 9, 9, dtype=torch.float64)
    plan = fxprune.plan(awake(model).float(), x.float())
    model.double()
    model.load_state_dict({k: v.clone() for k, v in model.state_dict().items()}, assign=True)
    with torch.no_grad():
        assert torch.allclose(plan.apply(model)(x), plan.mask(model)(x), rtol=0, atol=1e-9)


WITHOUT_SOURCE = """
class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x):
        self.seen = True
        return self.down(self.up(x).view(-1, 8))
"""


def test_as_many_groups_as_there_are_may_turn_out_to_have_to_stay():
    space = {"nn": nn}
    exec(WITHOUT_SOURCE, space)
    model = nn.Sequential(*(space["Block"]() for _ in range(55))).eval()
    plan = fxprune.plan(model, torch.randn(2, 8))
    assert sum("sets seen as it runs" in (g.frozen or "") for g in plan.groups) == 55


def test_a_plan_fits_where_code_has_made_its_own_tensors_for_another_batch():
    class Cached(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b, self.last = nn.Linear(6, 8), nn.Linear(8, 3), -1
            self.register_buffer("mask", None, persistent=False)

        def forward(self, x):
            if self.last != len(x):
                self.mask, self.last = torch.ones(len(x), 6), len(x)
            return self.b(self.a(x * self.mask).sigmoid())

    model = Cached()
    model(torch.randn(4, 6))
    plan = fxprune.plan(model, torch.randn(4, 6))
    model(torch.randn(2, 6))
    assert plan.apply(model).a.out_features == 4
