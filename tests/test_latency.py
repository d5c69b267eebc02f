"""Latency targets, with times that are made up: no test asks a clock how fast it was."""

from __future__ import annotations

import copy
import json
import math
import warnings

import pytest
import torch
from torch import nn

import fxprune
from fxprune import LatencyTable, Target

from .snapshot import Snapshot

X = torch.randn(2, 3, 16, 16, generator=torch.Generator().manual_seed(0))


def net(seed=0):
    torch.manual_seed(seed)
    return nn.Sequential(
        nn.Conv2d(3, 64, 3), nn.BatchNorm2d(64), nn.ReLU(), nn.Conv2d(64, 96, 3), nn.ReLU(),
        nn.Conv2d(96, 64, 3), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(64, 32),
        nn.ReLU(), nn.Linear(32, 4),
    ).eval()  # fmt: skip


def up(width, by=16):
    return math.ceil(width / by) * by


class Device:
    """A device that works on 16 channels at once, and is slow where a width is no multiple."""

    def __init__(self, by=16, penalty=1.5):
        self.by, self.penalty = by, penalty
        self.calls = []

    def layer(self, m):
        if isinstance(m, nn.Conv2d):
            return self.cost(m.in_channels, m.out_channels, 9)
        if isinstance(m, nn.Linear):
            return self.cost(m.in_features, m.out_features, 1)
        return 1e-6 if isinstance(m, nn.BatchNorm2d) else 0.0

    def cost(self, a, b, kernel):
        slow = self.penalty if b % self.by and b > self.by else 1.0
        return up(a, self.by) * up(b, self.by) * kernel * 1e-8 * slow

    def __call__(self, module, args, kwargs):
        with torch.no_grad():
            module(*args, **kwargs)  # it has to run
        self.calls.append(module)
        return sum(self.layer(m) for m in module.modules())


def planned(model, latency, device=None, **settings):
    device = device or Device()
    target = Target(latency=latency, table=LatencyTable(timer=device))
    return fxprune.plan(model, X, target=target, **settings), device


@pytest.mark.parametrize("asked", [0.3, 0.5, 0.7])
def test_the_target_is_hit_and_what_is_foreseen_is_what_the_device_takes(asked):
    model = net()
    plan, device = planned(model, asked, Device(by=4, penalty=1.0))
    small = plan.apply(model)
    assert plan.target.original == pytest.approx(device(model, (X,), {}))
    assert plan.target.got == pytest.approx(device(small, (X,), {}))
    assert abs(plan.target.error) <= 0.02


@pytest.mark.parametrize("asked", [0.4, 0.6])
def test_no_width_is_chosen_that_is_slower_than_a_wider_one(asked):
    model = net()
    plan, _ = planned(model, asked)
    widths = [g.kept for g in plan.groups if len(g.removed)]
    assert widths and all(width % 16 == 0 for width in widths)
    assert plan.target.got <= plan.target.asked * 1.15  # steps are of 16 channels


def test_an_absolute_time_is_reached():
    model = net()
    device = Device(by=4, penalty=1.0)
    whole = device(model, (X,), {})
    plan, _ = planned(model, f"{whole * 0.5 * 1e6:.6f}us", device)
    assert plan.target.asked == pytest.approx(whole / 2)
    assert abs(plan.target.error) <= 0.02
    assert "(predicted)" in str(plan) and " ms" in str(plan.target)


@pytest.mark.parametrize("text, seconds", [("2ms", 2e-3), ("1.5 s", 1.5), ("350us", 3.5e-4)])
def test_times_have_units(text, seconds):
    assert Target(latency=text).goal(1.0) == pytest.approx(seconds)


def test_layers_are_made_with_the_widths_inputs_and_layout_in_question():
    model = net().to(memory_format=torch.channels_last)
    seen = []

    def timer(module, args, kwargs):
        if isinstance(module, nn.Conv2d):
            (x,) = args
            seen.append((module.in_channels, module.out_channels))
            assert x.shape[:2] == (2, module.in_channels)
            assert module.weight.shape[:2] == (module.out_channels, module.in_channels)
            assert x.is_contiguous(memory_format=torch.channels_last)
            assert module.weight.is_contiguous(memory_format=torch.channels_last)
        return 1e-3

    before = Snapshot(model)
    with pytest.warns(fxprune.PruningWarning, match="is not reached"):  # all widths take the same
        fxprune.plan(model, X, target=Target(latency=0.5, table=LatencyTable(timer=timer)))
    assert (64, 96) in seen and any(a < 64 and b < 96 for a, b in seen)
    assert before.differences() == []


def test_a_layer_is_timed_once():
    torch.manual_seed(0)
    layers = [m for _ in range(6) for m in (nn.Linear(32, 32), nn.ReLU())]
    model = nn.Sequential(*layers, nn.Linear(32, 4)).eval()
    device = Device(by=4, penalty=1.0)
    table = LatencyTable(timer=device)
    target = Target(latency=0.5, table=table)
    plan = fxprune.plan(model, torch.randn(2, 32), target=target)
    assert abs(plan.target.error) <= 0.02
    made = [(m.in_features, m.out_features) for m in device.calls if isinstance(m, nn.Linear)]
    assert len(made) == len(set(made))
    count = len(device.calls)
    fxprune.plan(model, torch.randn(2, 32), target=target)
    assert len(device.calls) == count == table.measured


def models():
    torch.manual_seed(0)
    attention = nn.TransformerEncoder(nn.TransformerEncoderLayer(32, 4, 64, batch_first=True), 1)
    recurrent = nn.LSTM(8, 32, 2, bidirectional=True)

    class Tail(nn.Module):
        def __init__(self):
            super().__init__()
            self.cells, self.out = recurrent, nn.Linear(64, 3)

        def forward(self, x):
            return self.out(self.cells(x)[0])

    grouped = nn.Sequential(
        nn.Conv2d(3, 32, 3), nn.ReLU(), nn.Conv2d(32, 32, 3, groups=4), nn.ReLU(),
        nn.Conv2d(32, 32, 3, groups=32), nn.GroupNorm(4, 32), nn.ReLU(),
        nn.ConvTranspose2d(32, 16, 2), nn.PReLU(16), nn.Conv2d(16, 2, 1),
    )  # fmt: skip
    words = nn.Sequential(nn.Embedding(20, 32), nn.LayerNorm(32), nn.Linear(32, 48), nn.ReLU(),
                          nn.Linear(48, 4))  # fmt: skip
    return {
        "attention": (attention, torch.randn(2, 5, 32)),
        "recurrent": (Tail(), torch.randn(4, 2, 8)),
        "grouped": (grouped, X),
        "words": (words, torch.arange(8)[None]),
    }


@pytest.mark.parametrize("kind", ["attention", "recurrent", "grouped", "words"])
def test_layers_of_every_kind_can_be_made_alone_at_other_widths(kind):
    model, x = models()[kind]

    def timer(module, args, kwargs):
        with torch.no_grad():
            module(*args, **kwargs)
        return sum(p.numel() for p in module.parameters()) * 1e-6

    target = Target(latency=0.6, table=LatencyTable(timer=timer))
    plan = fxprune.plan(model.eval(), x, target=target)
    small = plan.apply(model)
    found = timer(small, (x,), {}) / timer(model, (x,), {})
    assert found == pytest.approx(plan.target.got / plan.target.original, rel=1e-6)
    assert found < 0.75


def test_a_layer_that_does_not_run_alone_is_part_of_the_rest():
    class Picky(nn.Linear):
        def forward(self, x):
            if x.min() >= 0:
                raise ValueError("only what a model gives me")
            return super().forward(x)

    model = nn.Sequential(nn.Linear(16, 32), nn.Tanh(), Picky(32, 32), nn.Linear(32, 4)).eval()
    x = torch.randn(4, 16)
    known = fxprune.pattern(
        Picky, layout={"x": "n i", "weight": "o i", "bias": "o", "return": "n o"},
        attributes={"in_features": "i", "out_features": "o"},
    )  # fmt: skip
    device = Device(by=1, penalty=1.0)
    target = Target(latency=0.6, table=LatencyTable(timer=device))
    plan = fxprune.plan(model, x, target=target, patterns=known)
    assert not any(isinstance(m, Picky) for m in device.calls)
    assert plan.apply(model)[2].out_features < 32 and abs(plan.target.error) <= 0.02


def test_times_are_kept_by_device_and_version_and_read_again(tmp_path):
    device = Device(by=4, penalty=1.0)
    first = LatencyTable(tmp_path, timer=device)
    fxprune.plan(net(), X, target=Target(latency=0.5, table=first))
    (file,) = tmp_path.iterdir()
    assert torch.__version__ in file.name and len(json.loads(file.read_text())) == first.measured
    again = LatencyTable(tmp_path, timer=device)
    fxprune.plan(net(), X, target=Target(latency=0.5, table=again))
    assert again.measured == 0 and str(tmp_path) in repr(again)


@pytest.mark.parametrize("text", ["", "{", "[1, 2]", '{"a": "x"}', '{"a": -1}', '{"a": NaN}', "\0"])
def test_a_file_that_is_broken_is_measured_anew_and_said(tmp_path, text):
    device = Device(by=4, penalty=1.0)
    table = LatencyTable(tmp_path, timer=device)
    file = table.file(torch.device("cpu"))
    file.write_text(text)
    with pytest.warns(fxprune.PruningWarning, match="cannot be read.*measured anew"):
        fxprune.plan(net(), X, target=Target(latency=0.5, table=table))
    assert table.measured and json.loads(file.read_text()) == table.times


def test_a_folder_that_cannot_be_written_is_said_and_no_more(tmp_path):
    (tmp_path / "file").write_text("")
    table = LatencyTable(tmp_path / "file" / "inside", timer=Device(by=4, penalty=1.0))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        plan = fxprune.plan(net(), X, target=Target(latency=0.5, table=table))
    assert any("cannot be written" in str(w.message) for w in caught)
    assert abs(plan.target.error) <= 0.02


def test_the_folder_is_that_of_the_user_or_of_the_environment(tmp_path, monkeypatch):
    monkeypatch.delenv("FXPRUNE_CACHE", raising=False)
    assert LatencyTable().folder.parts[-2:] == (".cache", "fxprune")
    monkeypatch.setenv("FXPRUNE_CACHE", str(tmp_path))
    assert LatencyTable().folder == tmp_path
    assert LatencyTable(timer=Device()).folder is None  # made-up times are no one else's


def test_the_clock_is_asked_where_no_timer_is_given(tmp_path):
    model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # whatever such small layers take
        plan = fxprune.plan(model, torch.randn(2, 8),
                            target=Target(latency=0.9, table=LatencyTable(tmp_path)))  # fmt: skip
    assert plan.target.original > 0 and len(list(tmp_path.iterdir())) == 1


@pytest.mark.parametrize("timer, said", [
    (lambda *_: float("nan"), "nan"), (lambda *_: "fast", "'fast'"), (lambda *_: -1.0, "-1.0"),
])  # fmt: skip
def test_a_timer_that_tells_no_time_is_refused(timer, said):
    model = net()
    before = copy.deepcopy(model.state_dict())
    with pytest.raises(fxprune.SettingError, match=f"timer returned {said}"):
        fxprune.plan(model, X, target=Target(latency=0.5, table=LatencyTable(timer=timer)))
    assert all(torch.equal(before[k], v) for k, v in model.state_dict().items())


def test_tables_that_are_none_are_refused():
    with pytest.raises(fxprune.SettingError, match="timer=3"):
        LatencyTable(timer=3)
    with pytest.raises(fxprune.FileError, match="path is a int"):
        LatencyTable(3)
    with pytest.raises(fxprune.SettingError, match="LatencyTable"):
        Target(latency=0.5, table=3)
