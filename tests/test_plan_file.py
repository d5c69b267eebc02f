"""A plan is saved, and holds for other weights of the same architecture."""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import nn

import fxprune
from fxprune.reporting.describing import describe
from fxprune.saving import plan_file

from .oracle import awake, difference, run, state
from .snapshot import Snapshot
from .test_result import MODELS
from .test_rewritten import CODE, ViewLiteral, images
from .test_saving import IDS, Hard

CASES = {
    **{name: (build, x) for name, (build, x) in MODELS.items()},
    **{kind.__name__: (kind, images(2)) for kind in CODE[:4]},
    "Hard": (Hard, IDS),
}


@pytest.fixture
def path(tmp_path):
    return tmp_path / "plan.json"


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("settings", [{}, {"exact": True}, {"bias": "drop", "round_to": 2}],
                         ids=str)  # fmt: skip
def test_it_does_the_same_to_other_weights(name, settings, path):
    build, x = CASES[name]
    holds_for_other_weights(build, x, settings, path)


class Normed(nn.Sequential):
    def __init__(self):
        super().__init__(
            nn.Conv2d(3, 32, 3, padding=1, bias=False), nn.BatchNorm2d(32), nn.ReLU(),
            nn.Conv2d(32, 48, 3, padding=1), nn.BatchNorm2d(48), nn.GELU(),
            nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(48, 4),
        )  # fmt: skip


REACHED = {"measure": "params", "original": 2.0, "asked": 1.0, "got": 1.0, "least": 0.5}
WAYS = {
    "expected": {"bias": "expected"},
    "params": {"target": fxprune.Target(params=0.6)},
    "macs": {"target": fxprune.Target(macs=0.5), "bias": "expected"},
    "global": {"scope": "global", "max_sparsity": {"0": 0.5}},
    "isomorphic": {"scope": "isomorphic", "sparsity": 0.6, "min_width": 20},
    "importance by group": {"importance": {"0": "l1", "*": "lamp"}},
    "importance by numbers": {"importance": {"0": torch.arange(32.0), "*": "fpgm"}},
    "a criterion": {"importance": fxprune.importance.Taylor(
        [(images(2), torch.tensor([0, 1]))], loss=nn.functional.cross_entropy)},
    "sparsity by type": {"sparsity": {nn.Conv2d: 0.25}, "ignore": "3"},
    "auto": {"round_to": "auto"},
}  # fmt: skip


@pytest.mark.parametrize("way", WAYS)
def test_however_units_were_chosen(way, path):
    plan, again = holds_for_other_weights(Normed, images(2), WAYS[way], path)
    assert plan.kept and again.target == plan.target
    about, wanted = describe(again), describe(plan)
    assert about["parameters"] == wanted["parameters"] and about["macs"] == wanted["macs"]
    assert all(wanted["settings"][name] == v for name, v in about["settings"].items())


def holds_for_other_weights(build, x, settings, path):
    plan = fxprune.plan(awake(build()), x, **settings)
    plan.save(path)
    other = awake(build(), seed=3)
    before = Snapshot(other)
    again = fxprune.PruningPlan.load(path, other)
    assert before.differences() == []
    assert str(again) == str(plan) and repr(again) == repr(plan)
    assert again.attributes == plan.attributes and again.code == plan.code
    assert again.skipped == plan.skipped and again.kept.keys() == plan.kept.keys()
    wanted = plan.apply(other)
    small = again.apply(other)
    mine, theirs = state(wanted), state(small)
    assert mine.keys() == theirs.keys()
    assert all(torch.equal(mine[key], t) for key, t in theirs.items())
    assert difference(run(again.mask(other), x), run(plan.mask(other), x)) == 0
    assert difference(run(again.apply(again.mask(other)), x), run(wanted, x)) < 1e-9
    return plan, again


def test_what_it_makes_can_be_saved_and_pruned_again(tmp_path, path):
    fxprune.plan(awake(ViewLiteral()), images(2)).save(path)
    model = awake(ViewLiteral(), seed=3)
    small = fxprune.PruningPlan.load(path, model).apply(model)
    fxprune.save(small, tmp_path / "small.safetensors")
    loaded = fxprune.load(awake(ViewLiteral()), tmp_path / "small.safetensors")
    assert difference(run(small, images(3)), run(loaded, images(3))) == 0
    assert fxprune.prune(loaded, images(2)).a.out_channels == 2


def test_importance_and_reasons_are_in_it(path):
    model = awake(MODELS["residual"][0]())
    plan = fxprune.plan(model, MODELS["residual"][1], ignore="branch", sparsity=0.25)
    plan.save(path)
    again = fxprune.PruningPlan.load(path, model)
    for mine, theirs in zip(plan.groups, again.groups, strict=True):
        for key in ("name", "frozen", "members", "width", "line"):
            assert getattr(mine, key) == getattr(theirs, key)
        assert torch.equal(mine.removed, theirs.removed)
        if mine.importance is not None:
            assert torch.allclose(mine.importance, theirs.importance, rtol=1e-6)


def test_in_the_type_of_the_model_that_it_is_for(path):
    model = awake(ViewLiteral())
    plan = fxprune.plan(model, images(2))
    plan.save(path)
    half = fxprune.PruningPlan.load(path, ViewLiteral().eval())
    assert half.apply(ViewLiteral().eval())(images(2).float()).shape == (2, 4, 6, 6)


def test_an_example_input_of_ones_own(path):
    fxprune.plan(awake(ViewLiteral()), images(2)).save(path)
    model = awake(ViewLiteral(), seed=3)
    small = fxprune.PruningPlan.load(path, model, example_input=images(5)).apply(model)
    assert small(images(5)).shape[0] == 5
    with pytest.raises(fxprune.InputError):
        fxprune.PruningPlan.load(path, model, example_input=torch.ones(3))


def test_in_another_process(path):
    plan = fxprune.plan(awake(ViewLiteral()), images(2))
    plan.save(path)
    code = (
        "import sys, fxprune\nfrom tests.oracle import awake\n"
        "from tests.test_rewritten import ViewLiteral\n"
        "plan = fxprune.PruningPlan.load(sys.argv[1], awake(ViewLiteral()))\n"
        "print(plan.kept['a.weight'][0].tolist())"
    )
    root = Path(__file__).parent.parent
    env = {**os.environ, "PYTHONPATH": str(root), "OMP_NUM_THREADS": "1"}
    done = subprocess.run([sys.executable, "-c", code, str(path)], cwd=root, text=True,
                          capture_output=True, env=env)  # fmt: skip
    assert json.loads(done.stdout) == plan.kept["a.weight"][0].tolist(), done.stderr[-2000:]


class Wider(ViewLiteral):
    def __init__(self):
        super().__init__()
        self.a = nn.Conv2d(3, 9, 3, padding=1)


class Coupled(ViewLiteral):
    def forward(self, x):
        y = torch.tanh(self.a(x))
        return self.b(y.view(-1, 8, 36).flip(1).view(-1, 8, 6, 6) + y)


@pytest.mark.parametrize("kind, words", [
    (Wider, r"a.weight has shape \(8, 3, 3, 3\); this Wider has shape \(9, 3, 3, 3\)"),
    (Hard, "a.weight has shape .* this Hard has no such tensor"),
    (Coupled, "does not fit this Coupled|are coupled in another way"),
], ids=lambda k: getattr(k, "__name__", ""))  # fmt: skip
def test_another_model_is_told_by_the_first_tensor_that_differs(kind, words, path):
    fxprune.plan(awake(ViewLiteral()), images(2)).save(path)
    model = awake(kind())
    before = Snapshot(model)
    with pytest.raises(fxprune.PlanError, match=words):
        fxprune.PruningPlan.load(path, model)
    assert before.differences() == []


def test_a_calibrated_plan_is_not_saved(path):
    model = MODELS["residual"][0]().eval()
    x = MODELS["residual"][1].float()
    plan = fxprune.plan(model, x, calibration=[x])
    with pytest.raises(fxprune.PlanError, match="calibrated"):
        plan.save(path)
    assert not path.exists()


def test_any_byte_that_changes_is_told(path):
    fxprune.plan(awake(ViewLiteral()), images(2)).save(path)
    whole, rng = path.read_bytes(), random.Random(0)
    bad, model = path.with_name("bad.json"), awake(ViewLiteral())
    for i in range(60):
        data = bytearray(whole)
        data[rng.randrange(len(data) - 1)] ^= 1 << rng.randrange(8)
        bad.write_bytes(whole[: rng.randrange(len(whole) - 1)] if i % 4 == 0 else data)
        with pytest.raises(fxprune.FileError):
            fxprune.PruningPlan.load(bad, model)
    about = json.loads(whole)
    del about["sha256"]
    for key, value in (("rounding", 3), ("target", {}), ("target", {"measure": "params"}),
                       ("target", {**REACHED, "measure": "x"}),
                       ("target", {**REACHED, "got": "1"})):  # fmt: skip
        wrong = {**about, key: value}
        bad.write_text(json.dumps({**wrong, "sha256": plan_file._sum(wrong)}))
        with pytest.raises(fxprune.FileError, match=r"target|text"):
            fxprune.PruningPlan.load(bad, model)
    ours = '{"fxprune": "plan"'
    for text in ("", "[]", "{}", ours + "}", ours + ', "schema": 9}', "[" * 9999):
        bad.write_text(text)
        with pytest.raises(fxprune.FileError):
            fxprune.PruningPlan.load(bad, model)
    bad.write_bytes(b"\xff" * 99)
    for other in (bad, path.parent, path.with_name("nothing")):
        with pytest.raises(fxprune.FileError):
            fxprune.PruningPlan.load(other, model)
    with pytest.raises(fxprune.FileError, match="No such file"):
        fxprune.plan(model, images(2)).save(path.parent / "nowhere" / "plan.json")
    with pytest.raises(fxprune.ModelError):
        fxprune.PruningPlan.load(path, ViewLiteral)
