"""What the benchmarks make up and compare by is right; no package's data is needed."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

import fxprune


@pytest.fixture(autouse=True)
def _benchmarks(monkeypatch):
    monkeypatch.syspath_prepend(str(Path(__file__).parent.parent / "benchmarks"))


def test_tones_have_the_pitch_that_is_said():
    synthetic = importlib.import_module("synthetic")
    length = 4096
    sounds, hertz = synthetic.tones(40, length, np.random.default_rng(0))
    middle = sounds[:, length // 2 - 512 : length // 2 + 512].double()
    spectrum = torch.fft.rfft(middle * torch.hann_window(1024), 1 << 16).abs()
    frequencies = torch.arange(spectrum.shape[1]) * synthetic.RATE / (1 << 16)
    for row, f0 in zip(spectrum, hertz, strict=True):
        near = (frequencies > 0.7 * f0) & (frequencies < 1.4 * f0)
        found = frequencies[near][row[near].argmax()]
        assert abs(float(found / f0) - 1) < 0.06


def test_no_two_takes_of_a_voice_are_the_same_and_sentences_go_on():
    synthetic = importlib.import_module("synthetic")
    first, second = synthetic.voices(2, np.random.default_rng(0))
    assert first.shape == second.shape == (2, 280, synthetic.MELS)
    assert not torch.allclose(first, second)
    made = synthetic.sentences(np.random.default_rng(0))
    assert len({next(made) for _ in range(50)}) > 45


@pytest.mark.parametrize("wanted", [20, 137, 400, 990])
def test_the_peer_is_compared_at_the_same_number_of_parameters(wanted):
    accuracy = importlib.import_module("accuracy")

    def at(ratio: float) -> nn.Module:
        return nn.Linear(1, round(1000 * (1 - ratio)) or 1, bias=False)

    assert abs(accuracy.count(accuracy.bisect(at, wanted)) - wanted) <= max(2, 0.02 * wanted)


def test_a_mean_over_runs_that_failed_is_none():
    accuracy = importlib.import_module("accuracy")
    rows = [
        accuracy.Result("net", "conv", seed, 0.5, "l1", 1.0, 0.5, 0.5, score)
        for seed, score in enumerate([0.5, 1.0])
    ]
    assert accuracy.mean(rows, "score", variant="l1") == 0.75
    rows.append(accuracy.Result("net", "conv", 2, 0.5, "l1", 1.0, 0.5, why="RuntimeError"))
    assert accuracy.mean(rows, "score", variant="l1") is None
    assert accuracy.remarks(rows) == ["net, l1: RuntimeError"]


def test_labelled_networks_read_calibration_from_the_training_part():
    real, digits = importlib.import_module("real"), importlib.import_module("digits")
    train = (torch.zeros(100, 3), torch.zeros(100).long())
    data = digits.Data(train, (torch.ones(10, 3), torch.zeros(10).long()))
    net = real.labelled("net", "conv", nn.Linear(3, 2), data, 0, 0.1, "")
    assert sum(len(batch) for batch in net.calibration) == 100
    assert not any(batch.any() for batch in net.calibration)


def test_methods_are_compared_at_equal_work():
    real, digits, methods = (importlib.import_module(n) for n in ("real", "digits", "methods"))
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Conv2d(1, 20, 3), nn.ReLU(), nn.Conv2d(20, 30, 3), nn.ReLU(), nn.Flatten(),
        nn.Linear(480, 40), nn.ReLU(), nn.Linear(40, 4),
    )  # fmt: skip
    images, labels = torch.randn(50, 1, 8, 8), torch.randint(4, (50,))
    data = digits.Data((images, labels), (images[:2], labels[:2]))
    net = real.labelled("net", "conv", model.eval(), data, 0, 0.1, "7")
    made = methods.Methods(net, 0)
    wanted = methods.work(net, made._small(0.5))
    for name in ("l2 global", "lamp isomorphic", "fisher local", "wanda global"):
        assert abs(methods.work(net, made.prune(name, 0.5)) / wanted - 1) <= methods.FAR, name
    with pytest.raises(methods.Impossible, match="no sparsity leaves"):
        made.prune("bn_scale local", 0.5)


@pytest.mark.parametrize("prunings", [1, 2])
def test_the_ways_to_prune_in_training_share_all_that_was_before(prunings, monkeypatch):
    training, digits = importlib.import_module("training"), importlib.import_module("digits")
    monkeypatch.setattr(training, "APART", 2)
    part = (torch.rand(8 * digits.BATCH, 1, 28, 28), torch.zeros(8 * digits.BATCH).long())
    runs = training.runs(digits.Data(part, part), "AdamW", 0, 3, 8, 0.5, prunings)
    assert [run.way for run in runs] == ["not pruned", "state cut", "state new"]
    whole, cut, new = runs
    assert {len(run.losses) for run in runs} == {8}
    assert whole.losses[:3] == cut.losses[:3] == new.losses[:3]
    assert cut.losses[3] == new.losses[3] and cut.losses[4:] != new.losses[4:]
    assert cut.parameters == new.parameters < whole.parameters / 3


def test_the_stages_of_a_profile_are_functions_that_run():
    profiles = importlib.import_module("profiles")
    samples = profiles.Samples()

    def look(frame, event, _):
        if event == "call":
            samples._look(0, frame)

    net = nn.Sequential(nn.Conv2d(3, 8, 1), nn.ReLU(), nn.Conv2d(8, 4, 1)).eval()
    before = sys.getprofile()
    sys.setprofile(look)
    try:
        fxprune.prune(net, torch.randn(1, 3, 4, 4), verify=False)
    finally:
        sys.setprofile(before)
    assert set(samples.stages) == {*profiles.STAGES.values(), "other"}


def test_networks_of_packages_that_are_not_installed_are_left_out_and_inputs_differ_by_seed():
    packages, zoo = importlib.import_module("packages"), importlib.import_module("zoo")
    family = zoo.FAMILIES["packages"]
    names = [name for name, _ in packages.names()]
    assert sorted([*family.names(True), *family.left_out()]) == sorted(names)
    for name in names:
        first, again, other = (repr(family.example(name, seed)) for seed in (0, 0, 1))
        assert first == again != other, name
