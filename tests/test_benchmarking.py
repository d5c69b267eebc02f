"""fxprune.benchmark: what it measures, what it leaves alone and what it refuses. No wall times."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import fxprune
from fxprune import benchmarking
from fxprune.benchmarking import BenchmarkResult, Measured, macs

SHORT = {"seconds": 1e-3}


def convolutions() -> nn.Sequential:
    return nn.Sequential(nn.Conv2d(3, 8, 3, bias=False), nn.ReLU(), nn.Dropout(0.5),
                         nn.Conv2d(8, 4, 3, bias=False))  # fmt: skip


def pair() -> tuple[nn.Module, nn.Module, torch.Tensor]:
    torch.manual_seed(0)
    model, x = convolutions(), torch.randn(2, 3, 8, 8)
    return model, fxprune.prune(model, x), x


def test_work_and_sizes_are_counted_before_and_after():
    model, small, x = pair()
    found = fxprune.benchmark(model, small, x, **SHORT)
    inner = 2 * 36 * 27 * 8, 2 * 16 * 72 * 4  # batch, positions, a kernel, its channels
    assert (found.before.macs, found.after.macs) == (sum(inner), sum(inner) // 2)
    assert (found.before.parameters, found.after.parameters) == (27 * 8 + 72 * 4, 27 * 4 + 36 * 4)
    assert found.reduction == 2


def test_every_block_counts_and_quartiles_are_in_order():
    model, small, x = pair()
    found = fxprune.benchmark(model, small, x, seconds=0.05)
    for one in (found.before, found.after):
        assert one.runs >= 5
        assert 0 < one.quartiles[0] <= one.median <= one.quartiles[1]
    assert found.speed_up == found.before.median / found.after.median
    assert found.efficiency == found.speed_up / found.reduction


def test_models_take_turns_and_quartiles_are_of_blocks(monkeypatch):
    order = []

    def timer(call, device, threads):
        blocks = iter([1.0, *range(1, 100)])  # the first is for the size of blocks

        def time(number):
            order.append(call)
            return next(blocks) * call

        return time

    monkeypatch.setattr(benchmarking, "_timer", timer)
    first, second = benchmarking._time([2, 1], torch.device("cpu"), 1, 15.0)
    assert order == [2, 1] * 6
    assert first == (6.0, (4.0, 8.0), 5) and second == (3.0, (2.0, 4.0), 5)


def test_result_is_frozen_and_its_text_says_what_was_run():
    one = Measured(0.004, (0.003, 0.005), 10, 2_000_000, 1000)
    two = Measured(0.002, (0.002, 0.002), 10, 1_000_000, 250)
    result = BenchmarkResult(one, two, "cpu", "eager", "float32", True, 2)
    text = str(result)
    for part in ("4.000 ms", "3.000–5.000", "2.0 M", "1,000", "2.00x", "4.00x",
                 "eager on cpu, 2 threads, float32, channels last"):  # fmt: skip
        assert part in text
    assert one.spread == pytest.approx(0.5)
    with pytest.raises(AttributeError):
        result.mode = "compile"


def test_work_that_the_counter_does_not_know_is_no_ratio():
    none = Measured(1.0, (1.0, 1.0), 5, 0, 10)
    result = BenchmarkResult(none, none, "cpu", "eager", "float32", False, 1)
    assert result.reduction is None and result.efficiency is None and "1.00x" in str(result)


def test_models_input_and_global_state_are_left_alone():
    model, small, x = pair()
    model.train()
    small[0].eval()
    models = (model, small)
    flags = [[m.training for m in one.modules()] for one in models]
    states = [{k: v.clone() for k, v in one.state_dict().items()} for one in models]
    kept, random, threads = x.clone(), torch.get_rng_state(), torch.get_num_threads()
    fast_path = torch.backends.mha.get_fastpath_enabled()
    fxprune.benchmark(model, small, x, dtype=torch.bfloat16, channels_last=True, threads=1, **SHORT)
    assert [[m.training for m in one.modules()] for one in models] == flags
    for one, state in zip(models, states, strict=True):
        assert all(torch.equal(v, state[k]) for k, v in one.state_dict().items())
        assert all(v.dtype == state[k].dtype for k, v in one.state_dict().items())
        assert all(p.is_contiguous() for p in one.parameters())
    assert torch.equal(x, kept) and torch.equal(torch.get_rng_state(), random)
    assert torch.get_num_threads() == threads
    assert torch.backends.mha.get_fastpath_enabled() == fast_path
    assert torch.is_grad_enabled()


def test_models_run_in_eval_mode_in_the_form_that_was_asked_for():
    class Look(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv = nn.Conv2d(3, 4, 1)

        def forward(self, x):
            seen.append((self.training, x.dtype, self.conv.weight.dtype, torch.is_grad_enabled(),
                         x.is_contiguous(memory_format=torch.channels_last)))  # fmt: skip
            return self.conv(x)

    seen: list[tuple] = []
    x = torch.randn(2, 3, 4, 5)
    found = fxprune.benchmark(Look(), Look(), x, dtype=torch.bfloat16, channels_last=True, **SHORT)
    half = torch.bfloat16
    assert set(seen) == {(False, half, half, False, True)}
    assert (found.dtype, found.channels_last, found.device) == ("bfloat16", True, "cpu")


def test_inputs_may_be_a_tuple_or_a_mapping():
    class Add(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(4, 4)

        def forward(self, x, ids):
            return self.linear(x) + ids

    x, ids = torch.randn(2, 4), torch.arange(4)
    for given in ((x, ids), {"x": x, "ids": ids}):
        assert fxprune.benchmark(Add(), Add(), given, **SHORT).reduction == 1


def test_attention_is_counted_whatever_kernel_runs_it():
    layer = nn.TransformerEncoderLayer(16, 2, 32, batch_first=True).eval()
    b, n, d, hidden = 2, 5, 16, 32
    products = b * n * (4 * d * d + 2 * d * hidden) + 2 * b * n * n * d
    assert macs(layer, torch.randn(b, n, d)) == products


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"mode": "fast"}, "mode='fast' is unknown; use 'eager', 'compile', 'cuda_graph'"),
        ({"mode": "cuda_graph", "device": "cpu"}, "needs a CUDA device"),
        ({"device": "nowhere"}, "is not a device"),
        ({"device": "meta"}, "only the CPU and CUDA"),
        ({"dtype": torch.int8}, "not a floating-point type"),
        ({"dtype": "bfloat16"}, "not a floating-point type"),
        ({"channels_last": 1}, "neither True nor False"),
        ({"threads": 0}, "not a positive integer"),
        ({"threads": True}, "not a positive integer"),
        ({"seconds": 0}, "no length of time"),
        ({"seconds": float("nan")}, "no length of time"),
    ],
)
def test_settings_that_mean_nothing_are_refused(settings, words):
    model, small, x = pair()
    with pytest.raises(fxprune.SettingError, match=words.replace("(", r"\(")):
        fxprune.benchmark(model, small, x, **settings)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_a_gpu_that_is_not_there_is_said():
    model, small, x = pair()
    with pytest.raises(fxprune.SettingError, match="sees no GPU"):
        fxprune.benchmark(model, small, x, device="cuda")


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")
@pytest.mark.parametrize("mode", benchmarking.MODES)
def test_on_a_gpu(mode):
    model, small, x = pair()
    found = fxprune.benchmark(model, small, x, device="cuda", mode=mode, **SHORT)
    assert found.device.startswith("cuda") and found.mode == mode and found.after.median > 0
    assert next(model.parameters()).device.type == "cpu"


def test_models_that_cannot_be_run_are_named():
    model, small, x = pair()
    with pytest.raises(fxprune.ModelError, match="after is a int"):
        fxprune.benchmark(model, 3, x)
    with pytest.raises(fxprune.ModelError, match="before is compiled"):
        fxprune.benchmark(torch.compile(model), small, x)
    with pytest.raises(fxprune.InputError, match="before does not run on example_input") as error:
        fxprune.benchmark(model, small, x[0, 0])
    assert isinstance(error.value.__cause__, RuntimeError)


@pytest.mark.slow
def test_compiled():
    model, small, x = pair()
    assert fxprune.benchmark(model, small, x, mode="compile", **SHORT).mode == "compile"
