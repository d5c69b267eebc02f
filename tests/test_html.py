"""The plan as a page, a picture and a notebook's table."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from html.parser import HTMLParser

import numpy as np
import pytest
import torch
import torchvision
from torch import nn

import fxprune
from fxprune import benchmarking, html
from fxprune.reporting import drawing
from fxprune.reporting.describing import describe, histogram

X = torch.randn(1, 3, 16, 16)
EVIL = "<script>alert(1)</script>"


class Residual(nn.Module):
    def __init__(self):
        super().__init__()
        self.first = nn.Conv2d(3, 8, 3, padding=1)
        self.second = nn.Conv2d(8, 8, 3, padding=1)
        self.norm = nn.BatchNorm2d(8)
        self.late = nn.Linear(8, 5)
        self.never = nn.Linear(3, 3)

    def forward(self, x):
        x = self.first(x).sigmoid()
        return self.late((x + self.norm(self.second(x))).mean((2, 3)))


class Evil(nn.Module):
    """Names that would be markup, and code that has to be written anew."""

    def __init__(self):
        super().__init__()
        self.add_module(EVIL, nn.Conv2d(3, 4, 3, padding=1))
        self.after = nn.Linear(4 * 256, 6)
        self.last = nn.Linear(6, 2)

    def forward(self, x):
        x = getattr(self, EVIL)(x).relu().view(-1, 4 * 256)
        return self.last(self.after(x).relu())


Evil.__name__ = "Evil" + EVIL


class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Linear(6, 16)
        self.attend = nn.MultiheadAttention(16, 4, batch_first=True)
        self.norm = nn.LayerNorm(16)
        self.head = nn.Linear(16, 3)

    def forward(self, x):
        x = self.embed(x)
        return self.head(self.norm(x + self.attend(x, x, x)[0]))


class Grouped(nn.Module):
    """Bins, a concatenation, and halves of one tensor that go different ways."""

    def __init__(self):
        super().__init__()
        self.wide = nn.Conv2d(3, 8, 1)
        self.grouped = nn.Conv2d(8, 8, 1, groups=2)
        self.left, self.right = nn.Conv2d(4, 6, 1), nn.Conv2d(4, 6, 1)
        self.join = nn.Conv2d(12, 4, 1)

    def forward(self, x):
        a, b = self.grouped(self.wide(x)).chunk(2, 1)
        return self.join(torch.cat([self.left(a), self.right(b)], 1))


class Tied(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(10, 8)
        self.run = nn.LSTM(8, 12, batch_first=True)
        self.back = nn.Linear(12, 8)
        self.out = nn.Linear(8, 10, bias=False)
        self.out.weight = self.embed.weight

    def forward(self, x):
        return self.out(self.back(self.run(self.embed(x))[0]))


MODELS = {
    "residual": (Residual, X),
    "evil": (Evil, X),
    "attention": (Attention, torch.randn(2, 5, 6)),
    "grouped": (Grouped, X),
    "tied": (Tied, torch.randint(0, 10, (2, 7))),
}


def planned(name: str, **settings) -> fxprune.PruningPlan:
    make, x = MODELS[name]
    return fxprune.plan(make().eval(), x, **settings)


def data_of(page: str) -> dict:
    return json.loads(
        re.search(r'<script type="application/json" id="plan">(.*?)</script>', page)[1]
    )


class Tags(HTMLParser):
    def __init__(self):
        super().__init__()
        self.found: list[str] = []

    def handle_starttag(self, tag, attrs):
        self.found.append(tag)


@pytest.mark.parametrize("name", MODELS)
def test_members_and_couplings_are_those_of_each_group(name):
    plan = planned(name)
    about = describe(plan)
    paths = [layer["path"] for layer in about["layers"]]
    for group, told in zip(plan.groups, about["groups"], strict=True):
        members = [(".".join(p for p in (paths[i], n) if p), d) for i, n, d, _ in told["members"]]
        assert set(members) == set(group.members)
        assert (told["name"], told["width"], told["kept"]) == (group.name, group.width, group.kept)
        here = {i for i, *_ in told["members"]}
        for _, layers in told["calls"]:
            assert layers and set(layers) <= here
    lit = {(g, i) for g, told in enumerate(about["groups"]) for i, *_ in told["members"]}
    assert lit == {
        (g, i) for i, layer in enumerate(about["layers"]) for g in layer["groups"] + layer["reads"]
    }


@pytest.mark.parametrize("name", MODELS)
def test_sizes_are_those_of_the_models(name):
    plan = planned(name, exact=True)
    model, (_, x) = plan._trace.model, MODELS[name]
    small = plan.apply(model)
    about = describe(plan)
    assert about["parameters"] == [sum(p.numel() for p in m.parameters()) for m in (model, small)]
    assert about["macs"] == [benchmarking.macs(m, x) for m in (model, small)]
    tensors = small.state_dict()
    for layer in about["layers"]:
        for inside, _, after in layer["tensors"]:
            assert list(tensors[".".join(p for p in (layer["path"], inside) if p)].shape) == after


def test_layers_stand_in_the_order_in_which_they_run():
    layers = describe(planned("residual"))["layers"]
    assert [layer["path"] for layer in layers] == ["first", "second", "norm", "late", "never"]
    assert [layer["out"] for layer in layers[:4]] == [[8, 4], [8, 4], [8, 4], [5, 5]]
    assert [layer["runs"] for layer in layers] == [True] * 4 + [False]
    assert layers[1]["macs"] == [8 * 8 * 9 * 256, 4 * 4 * 9 * 256]


def test_the_call_that_couples_two_branches_is_named():
    about = describe(planned("residual"))
    group = next(g for g in about["groups"] if g["name"] == "first")
    calls = {via: [about["layers"][i]["path"] for i in met] for via, met in group["calls"]}
    (add,) = [via for via in calls if via.startswith("add (test_html.py:")]
    assert calls[add] == ["first", "second"]


def test_bars_of_importance_hold_every_unit():
    scores, removed = torch.tensor([3.0, 1.0, 2.0, 1.0, float("inf")]), torch.tensor([1, 3])
    found = histogram(scores, removed)
    assert sum(found["removed"]) == 2 and sum(found["kept"]) == 2
    assert (found["low"], found["high"]) == (1.0, 3.0)
    assert found["removed"][0] == 2 and found["kept"][-1] == 1
    assert histogram(torch.ones(4), torch.tensor([0]))["kept"][0] == 3  # all alike
    assert histogram(torch.ones(4), torch.tensor([], dtype=torch.int64)) is None
    for group in describe(planned("residual"))["groups"]:
        if group["importance"]:
            bars = group["importance"]
            assert np.sum(bars["kept"]) == group["kept"]
            assert np.sum(bars["removed"]) == group["width"] - group["kept"]


def test_names_of_the_model_are_text_and_nothing_else():
    page = html.page(planned("evil"))
    tags = Tags()
    tags.feed(page)
    assert tags.found.count("script") == 2 and "alert(1)" in page
    assert page.count("</script>") == 2
    about = data_of(page)
    assert about["layers"][0]["path"] == EVIL and about["model"] == Evil.__name__
    assert "&lt;script&gt;" in re.search("<title>(.*?)</title>", page)[1]
    assert "view" in next(iter(about["code"].values()))


def test_the_page_needs_nothing_but_itself(tmp_path):
    plan = planned("residual")
    plan.to_html(tmp_path / "plan.html")
    page = (tmp_path / "plan.html").read_text(encoding="utf-8")
    links = set(re.findall(r"""https?://[^"' ]+""", page))
    assert links <= {"http://www.w3.org/2000/svg"}  # a name, not an address
    assert not re.search(r"<link[^>]+stylesheet|<script[^>]+src|@import|url\(", page)
    assert data_of(page) == describe(plan)


def test_a_plan_whose_model_was_pruned_in_place_says_so(tmp_path):
    make, x = MODELS["residual"]
    model = make().eval()
    plan = fxprune.plan(model, x)
    plan.apply(model, inplace=True)
    with pytest.raises(fxprune.PlanError):
        plan.to_html(tmp_path / "plan.html")
    plan.to_html(tmp_path / "plan.html", model=make().eval())
    assert (tmp_path / "plan.html").exists()


def test_training_mode_and_random_state_stay():
    make, x = MODELS["residual"]
    model = make().train()
    plan = fxprune.plan(model, x)
    before, state = torch.get_rng_state(), {k: v.clone() for k, v in model.state_dict().items()}
    describe(plan)
    assert torch.equal(before, torch.get_rng_state()) and all(m.training for m in model.modules())
    assert all(torch.equal(v, state[k]) for k, v in model.state_dict().items())


def test_large_models_give_small_pages():
    model = torchvision.models.densenet121().eval()
    assert len(html.page(fxprune.plan(model, torch.randn(1, 3, 64, 64)))) < 1_000_000


def test_notebooks_show_a_table_of_text():
    table = planned("evil")._repr_html_()
    tags = Tags()
    tags.feed(table)
    assert "script" not in tags.found and "&lt;script&gt;alert" in table
    assert tags.found.count("tr") == 4 and "4 → 2" in table and "output of the model" in table


def test_notebooks_show_a_benchmark():
    model = Residual().eval()
    table = fxprune.benchmark(model, fxprune.prune(model, X), X, seconds=1e-3)._repr_html_()
    assert table.count("<tr>") == 3 and "times as fast: eager on cpu" in table


@pytest.mark.parametrize("name", MODELS)
def test_pictures_are_drawn_of_every_group(name):
    plan = planned(name)
    source = drawing.source(plan)
    paths = {name.rpartition(".")[0] for g in plan.groups for name, _ in g.members}
    assert all(p.replace("<", "&lt;").replace(">", "&gt;") in source for p in paths)
    if shutil.which("dot"):
        ran = subprocess.run(["dot", "-Tsvg"], input=source, capture_output=True, text=True)
        assert ran.returncode == 0 and not ran.stderr and "<script" not in ran.stdout


def test_lines_of_a_picture_lead_through_what_goes_together():
    source = drawing.source(planned("residual"))
    names = dict(re.findall(r"(n\d) \[label=.*?>(first|second|late)</td>", source))
    lines = re.findall(r"(n\d):(\w+) -> (n\d):(\w+) (.*)", source)
    assert [(names[a], port, names[b], other) for a, port, b, other, _ in lines] == [
        ("first", "out", "second", "in"),
        ("second", "in", "second", "out"),
        ("second", "out", "late", "in"),
    ]
    assert ["add (test_html.py" in style for *_, style in lines] == [False, True, False]


def test_pictures_are_written_by_their_suffix(tmp_path):
    pytest.importorskip("graphviz")
    plan = planned("residual")
    with pytest.raises(fxprune.SettingError, match=r"\.svg"):
        plan.draw(tmp_path / "plan.doc")
    assert "first" in plan.draw().source
    if shutil.which("dot") is None:
        pytest.skip("Graphviz's program dot is not on this machine")
    plan.draw(tmp_path / "plan.svg")
    assert (tmp_path / "plan.svg").read_text().count("<svg") == 1
