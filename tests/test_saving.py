"""A pruned model is saved, and made of its original again: the same outputs bit for bit."""

from __future__ import annotations

import copy
import gc
import io
import os
import subprocess
import sys
import tempfile
import weakref
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from safetensors import safe_open
from safetensors.torch import save_file
from torch import nn
from torch.nn import functional as F
from torch.nn.utils import parametrizations

import fxprune
from fxprune import masks
from fxprune.parametrized.mask import mask_of
from fxprune.records.history import STEPS, steps

from .networks import networks, settings_of_a_plan
from .oracle import awake, run
from .snapshot import Snapshot
from .test_architectures import GraphAttention
from .test_result import MODELS
from .test_rewritten import ATTRIBUTES, CODE, Base, ViewLiteral, images

IDS = torch.randint(0, 20, (2, 9), generator=torch.Generator().manual_seed(0))


class Hard(nn.Module):
    """Tied weights, a recurrent layer, attention, grouped layers, a computed weight, a layer that
    gets a bias, a buffer that is in no state dict."""

    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(20, 16)
        self.lstm = nn.LSTM(16, 12, batch_first=True, bidirectional=True, num_layers=2)
        self.attention = nn.MultiheadAttention(24, 4, batch_first=True)
        self.conv = parametrizations.weight_norm(nn.Conv1d(24, 16, 3, padding=1, groups=2))
        self.grouped = nn.Conv1d(16, 16, 3, groups=4)
        self.plain = nn.Conv1d(16, 16, 1, bias=False)
        self.scale = nn.Buffer(torch.rand(16, 1) + 1, persistent=False)
        self.head = nn.Linear(16, 20, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, ids):
        x = self.lstm(self.embed(ids))[0]
        x = self.attention(x, x, x)[0].transpose(1, 2)
        x = F.softplus(self.grouped(torch.sigmoid(self.conv(x)) * self.scale))
        return self.head(self.plain(x).transpose(1, 2))


def fresh(build, seed=1):
    """The original, built again: with whatever weights it comes with."""
    torch.manual_seed(seed)
    return build()


def same(a, b, *inputs):
    """Equal bit for bit: outputs, tensors, attributes that say widths."""
    a, b = a.eval(), b.eval()
    for x in inputs:
        pairs = list(zip(run(a, x), run(b, x), strict=True))
        assert pairs and all(torch.equal(s, t) for s, t in pairs)
    mine, theirs = a.state_dict(), b.state_dict()
    assert mine.keys() == theirs.keys()
    assert all(t.dtype == mine[k].dtype and torch.equal(mine[k], t) for k, t in theirs.items())
    for (path, first), (_, second) in zip(a.named_modules(), b.named_modules(), strict=True):
        assert type(first).__name__ == type(second).__name__
        for key, value in vars(first).items():
            if type(value) in (int, float, tuple):
                assert vars(second)[key] == value, (path, key)


def trip(small, build, path, *inputs):
    """``small``, saved and loaded into a model that was built anew."""
    fxprune.save(small, path)
    loaded = fresh(build)
    assert fxprune.load(loaded, path) is loaded
    same(small, loaded, *inputs)
    return loaded


@pytest.fixture
def path(tmp_path):
    return tmp_path / "small.safetensors"


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("chosen", [{}, {"exact": True}, {"bias": "drop"}], ids=str)
def test_what_was_pruned_is_made_of_the_original_again(name, chosen, path):
    build, x = MODELS[name]
    small = fxprune.prune(awake(build()), x, **chosen)
    loaded = trip(small, lambda: build().double(), path, x, torch.cat([x, x]))
    loaded.train()(x).square().sum().backward()
    assert all(p.grad is not None for p in loaded.parameters())


class Doubled(nn.Module):
    def forward(self, w):
        return 2 * w

    def right_inverse(self, w):
        return w / 2


@pytest.mark.parametrize("computed", ["weight_norm", "weight", "bias"])
def test_what_a_parametrization_computes_is_made_smaller_again(computed, path):
    def build():
        net = nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 4))
        for layer in (net[0], net[2]):
            if computed == "weight_norm":
                parametrizations.weight_norm(layer)
            else:
                nn.utils.parametrize.register_parametrization(layer, computed, Doubled())
        return net.double()

    x = torch.randn(3, 6, dtype=torch.float64)
    loaded = trip(fxprune.prune(awake(build()), x), build, path, x)
    assert loaded[0].weight.shape == (4, 6) and loaded[2].bias.shape == (4,)
    loaded.train()(x).sum().backward()


@pytest.mark.parametrize("norm", [
    parametrizations.weight_norm, nn.utils.weight_norm,
    lambda m: nn.utils.parametrize.register_parametrization(m, "weight", Doubled()) or m,
])  # fmt: skip
def test_a_new_bias_is_loaded_into_a_layer_whose_weight_is_computed(norm, path):
    def build():
        first, last = nn.Linear(6, 8), norm(nn.Linear(8, 4, bias=False))
        return nn.Sequential(first, nn.Sigmoid(), last).double()

    x = torch.randn(3, 6, dtype=torch.float64)
    loaded = trip(fxprune.prune(awake(build()), x), build, path, x)
    assert loaded[2].bias.shape == (4,)


@pytest.mark.parametrize("norm", [parametrizations.weight_norm, nn.utils.weight_norm])
def test_a_norm_that_was_put_on_since_is_refused_while_saving(norm, path):
    x = torch.randn(3, 6)
    net = nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 4))
    small = fxprune.prune(net, x)
    norm(small[0])
    with pytest.raises(fxprune.ModelError, match=r"0\.weight is computed by what was put on"):
        fxprune.save(small, path)
    assert not path.exists()


class OfNumPy(nn.Module):
    """Attributes that are numbers of NumPy's."""

    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(6, 8), nn.Linear(8, 4)
        self.width, self.sizes = np.int64(8), [np.int32(2), np.int32(4)]

    def forward(self, x):
        return self.b(self.a(x).relu().view(-1, self.width))


def test_attributes_that_are_numbers_of_numpy_are_set_again(path):
    x = torch.randn(3, 6, dtype=torch.float64)
    small = fxprune.prune(awake(OfNumPy()), x)
    loaded = trip(small, lambda: OfNumPy().double(), path, x)
    assert small.width == loaded.width == 4


class Normed(ViewLiteral):
    """Its forward is written anew, and its constants come from a norm."""

    def __init__(self):
        super().__init__()
        self.a = nn.Sequential(self.a, nn.BatchNorm2d(8))


@pytest.mark.parametrize("build, x", [MODELS["residual"], (Normed, images(2))],
                         ids=["residual", "code"])  # fmt: skip
@pytest.mark.parametrize("chosen", [
    {"bias": "expected"}, {"target": fxprune.Target(params=0.7)}, {"scope": "global"},
    {"importance": {"*": "l1"}, "sparsity": {nn.Conv2d: 0.5}},
    {"calibration": "x", "importance": "reconstruction"},
], ids=lambda chosen: next(iter(chosen)))  # fmt: skip
def test_however_units_were_chosen(build, x, chosen, path):
    if "calibration" in chosen:
        chosen = {**chosen, "calibration": [x]}
    small = fxprune.prune(awake(build()), x, **chosen)
    assert sum(p.numel() for p in small.parameters()) < sum(p.numel() for p in build().parameters())
    trip(small, lambda: build().double(), path, x)


@pytest.mark.parametrize("kind", [*CODE, *ATTRIBUTES], ids=lambda kind: kind.__name__)
def test_forwards_that_hold_sizes_are_written_again(kind, path):
    small = fxprune.prune(awake(kind()), images(2))
    loaded = trip(small, lambda: kind().double(), path, images(2), images(5))
    assert loaded.a.out_channels == 4


@pytest.mark.parametrize("kind", CODE[:2], ids=lambda kind: kind.__name__)
def test_a_forward_is_written_for_the_types_of_then(kind, path):
    small = fxprune.prune(awake(kind()), images(2))
    trip(small, kind, path, images(2))  # built in float32


@pytest.mark.parametrize("chosen", [
    {}, {"exact": True}, {"bias": "drop"}, {"attention": "head_dim"},
], ids=str)  # fmt: skip
def test_tied_recurrent_attentive_grouped_and_computed_weights(chosen, path):
    small = fxprune.prune(Hard().eval(), IDS, **chosen)
    loaded = trip(small, Hard, path, IDS)
    assert loaded.head.weight is loaded.embed.weight
    assert isinstance(loaded.embed.weight, nn.Parameter) and loaded.conv.weight.shape[0] == 8
    optimizer = torch.optim.SGD(loaded.train().parameters(), 0.1)
    before = loaded(IDS).detach()
    loaded(IDS).square().sum().backward()
    optimizer.step()
    assert not torch.equal(before, loaded(IDS)), "the recurrent layer reads what is trained"


@pytest.mark.parametrize("build, x", [
    (Hard, IDS), (MODELS["attention"][0], MODELS["attention"][1].float()),
    (ViewLiteral, images(2).float()),
], ids=["hard", "attention", "code"])  # fmt: skip
def test_pruned_several_times(build, x, path):
    model = fresh(build, 0).eval()
    for sparsity in (0.25, 0.5, 0.3):
        model = fxprune.prune(model, x, sparsity=sparsity)
        trip(model, build, path, x)


class Twice(nn.Module):
    """The first half needs no new code, the second does."""

    def __init__(self):
        super().__init__()
        self.first = nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), nn.Tanh(), nn.Conv2d(8, 3, 1))
        self.second = ViewLiteral()

    def forward(self, x):
        return self.second(self.first(x))


def test_steps_with_and_without_new_code(path):
    x = images(2).float()
    small = fxprune.prune(fresh(Twice, 0).eval(), x, sparsity={"first.*": 0.5})
    small = fxprune.prune(small, x, sparsity={"first.*": 0.5})
    assert [step.code for step in steps(small)] == [()]
    small = fxprune.prune(small, x, sparsity={"second.*": 0.5})
    small = fxprune.prune(small, x, sparsity={"first.*": 0.5})
    assert [step.code for step in steps(small)] == [(), ("second",), ()]
    trip(small, Twice, path, x)


class Late(nn.Module):
    """A layer gets a bias when it is pruned, and the bias is pruned later, with new code."""

    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Conv2d(3, 8, 3, padding=1), nn.Conv2d(8, 8, 1, bias=False)
        self.c = nn.Conv2d(8, 4, 1)

    def forward(self, x):
        return self.c(F.softplus(self.b(F.softplus(self.a(x)))).view(-1, 8, 6, 6))


@pytest.mark.parametrize("order", ["ab", "ba", "aab"])
def test_biases_that_are_made_first_and_pruned_later(order, path):
    x = images(2).float()
    small = fresh(Late, 0).eval()
    for layer in order:
        small = fxprune.prune(small, x, sparsity={layer: 0.25})
    assert small.b.bias is not None and any(step.code for step in steps(small))
    trip(small, Late, path, x, images(5).float())


@pytest.mark.parametrize("build, x", [(Hard, IDS), (ViewLiteral, images(2).float())],
                         ids=["hard", "code"])  # fmt: skip
def test_what_was_pruned_while_it_trained(build, x, path):
    model = fresh(build, 0)
    optimizer = torch.optim.SGD(model.parameters(), 0.01)
    pruner = fxprune.Pruner(model, x, optimizer=optimizer, steps=3, sparsity=0.5)
    for _ in range(4):
        optimizer.zero_grad()
        model(x).square().mean().backward()
        optimizer.step()
        pruner.step()
    trip(model, build, path, x)


def test_parts_that_were_pruned_alone(path):
    x = images(2).float()
    model = fresh(Twice, 0).eval()
    model.first = fxprune.prune(model.first, x)
    trip(model, Twice, path, x)
    model.second = fxprune.prune(model.second, x)
    trip(model, Twice, path, x)
    whole = fxprune.prune(model, x, sparsity=0.25)
    trip(whole, Twice, path, x)
    whole.first = fxprune.prune(whole.first, x, sparsity={"0": 0.5})
    trip(whole, Twice, path, x)


def test_the_kept_indices_of_prunings_in_a_row_are_those_of_the_original():
    model = awake(nn.Sequential(nn.Conv1d(3, 12, 1), nn.ReLU(), nn.Conv1d(12, 12, 3, groups=3),
                                nn.ReLU(), nn.Conv1d(12, 4, 1)))  # fmt: skip
    x = torch.randn(2, 3, 8, dtype=torch.float64)
    small = model
    for sparsity in (0.25, 0.34):
        small = fxprune.prune(small, x, sparsity=sparsity, bias="drop")
    (step,) = steps(small)
    for name, dims in step.tensors().items():
        found = model.get_parameter(name).detach()
        for dim, kept in dims.items():
            if kept.dim() == 1:
                found = found.index_select(dim, kept)
            else:
                parts = zip(found.chunk(len(kept)), kept, strict=True)
                found = torch.cat([part.index_select(dim, row) for part, row in parts])
        assert torch.equal(found, small.get_parameter(name)), name


@settings(max_examples=20, derandomize=True, deadline=None, database=None)
@given(networks(norms_over_channels=True), settings_of_a_plan())
def test_random_networks_pruned_twice(network, chosen):
    x = torch.randn(2, 3, 8, 8, dtype=torch.float64)
    model = awake(network)
    small = fxprune.plan(model, x, **chosen).apply(model)
    small = fxprune.plan(small, x, **chosen).apply(small)
    with tempfile.TemporaryDirectory() as folder:
        trip(small, lambda: copy.deepcopy(model), Path(folder) / "small.safetensors", x)


def test_dimensions_of_one_tensor_that_channels_lie_along_together(path):
    x = (torch.randn(5, 6, dtype=torch.float64), torch.ones(5, 5))
    for attention in ("heads", "head_dim"):
        model = awake(GraphAttention())
        plan = fxprune.plan(model, x, attention=attention)
        small = plan.apply(model)
        for name, dims in plan.kept.items():
            old = model.get_parameter(name).shape
            shape = [dims[d].shape[-1] if d in dims else n for d, n in enumerate(old)]
            assert small.get_parameter(name).shape == torch.Size(shape), name
        trip(small, lambda: copy.deepcopy(model), path, x)


def test_the_history_is_small_and_stays_with_the_model():
    model = awake(ViewLiteral())
    small = fxprune.prune(model, images(2))
    assert STEPS not in vars(model) and not any(STEPS in key for key in small.state_dict())
    file = io.BytesIO()
    torch.save(small, file)
    file.seek(0)
    loaded = torch.load(file, weights_only=False)
    assert type(vars(loaded)[STEPS]) is tuple and all(type(t) is str for t in vars(loaded)[STEPS])
    for other in (copy.deepcopy(small), loaded):
        assert steps(other) == steps(small) != []
    wide = fxprune.prune(nn.Sequential(nn.Linear(64, 4096), nn.ReLU(), nn.Linear(4096, 8)),
                         torch.randn(2, 64))  # fmt: skip
    assert sum(map(len, vars(wide)[STEPS])) < 2000


@pytest.mark.parametrize("build", [
    ViewLiteral, lambda: nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Conv2d(8, 4, 3)),
])  # fmt: skip
def test_a_history_that_is_not_written_yet_holds_neither_plan_nor_model(build):
    model = build().double().eval()
    seen = weakref.ref(model)
    small = fxprune.prune(model, images(2), verify=False)
    del model
    gc.collect()
    assert seen() is None and steps(small)


def test_in_place_and_by_a_plan_and_compact(path):
    x = images(2).float()
    model, kind = fresh(ViewLiteral, 0).eval(), ViewLiteral
    trip(fxprune.plan(model, x).apply(model), kind, path, x)
    dead = copy.deepcopy(model)
    with torch.no_grad():
        dead.a.weight[[1, 4]] = 0
    trip(fxprune.compact(dead, x), kind, path, x)
    fxprune.prune(model, x, inplace=True)
    trip(model, kind, path, x)


def test_what_training_and_conversions_have_made_of_it(path):
    build, x = MODELS["residual"]
    small = fxprune.prune(build().eval(), x.float())
    small.train()(x.float()).square().sum().backward()
    torch.optim.SGD(small.parameters(), 0.1).step()
    trip(small, build, path, x.float())
    for dtype in (torch.bfloat16, torch.float16, torch.float64):
        trip(copy.deepcopy(small).to(dtype), build, path, x.to(dtype))
    last = copy.deepcopy(small).to(memory_format=torch.channels_last)
    loaded = trip(last, build, path, x.float())
    assert loaded.stem.weight.stride() == last.stem.weight.stride()


class WithTables(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(6, 8), nn.Linear(8, 3)
        self.table = nn.Buffer(torch.ones(5).to(torch.float8_e4m3fn))
        self.wave = nn.Buffer(torch.ones(5, dtype=torch.complex64))
        self.count = nn.Buffer(torch.arange(5, dtype=torch.uint8))
        self.empty = nn.Buffer(torch.zeros(0, 3))
        self.cache = nn.Buffer(torch.ones(4), persistent=False)

    def forward(self, x):
        return self.b(torch.relu(self.a(x))) * self.cache.sum()


class Spectral(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(6, 8).double(), nn.Linear(8, 3).double()
        self.weight = nn.Parameter(torch.randn(8, 8, dtype=torch.complex128))
        self.pairs = nn.Parameter(torch.randn(4, 2, dtype=torch.float64))
        self.one = nn.Buffer(torch.tensor(1j, dtype=torch.complex128).conj())

    def forward(self, x):
        y = torch.einsum("bi,io->bo", self.a(x).to(self.weight.dtype), self.weight)
        return self.b((y * self.one).imag) + self.pairs.sum()


def test_complex_numbers_of_double_precision_are_pairs_in_the_file(path):
    x = torch.randn(3, 6, dtype=torch.float64)
    small = fxprune.prune(Spectral().eval(), x)
    loaded = trip(small, Spectral, path, x)
    assert loaded.weight.dtype == torch.complex128 and loaded.weight.shape == (4, 4)
    with safe_open(path, "pt") as file:
        assert torch.equal(file.get_tensor("weight"), torch.view_as_real(small.weight.detach()))


@pytest.mark.parametrize("pairs, words", [
    ('["gone"]', "no pairs that are called 'gone'"), ('["a.weight"]', "no pairs that are called"),
    ("3", "no pairs that are called 3"), ("[[]]", "no pairs that are called"),
    ('["weight", "weight"]', "no pairs that are called 'weight'"), ('["pairs"]', "has shape "),
    ("{", "cannot be read"),
])  # fmt: skip
def test_a_file_that_is_wrong_about_its_pairs_is_refused(path, pairs, words):
    fxprune.save(fxprune.prune(Spectral().eval(), torch.randn(3, 6, dtype=torch.float64)), path)
    with safe_open(path, "pt") as file:
        about, tensors = file.metadata(), {n: file.get_tensor(n) for n in file.keys()}  # noqa: SIM118
    save_file(tensors, path, {**about, "fxprune.pairs": pairs})
    with pytest.raises((fxprune.FileError, fxprune.PlanError), match=words):
        fxprune.load(Spectral(), path)


def test_tensors_of_other_types_and_buffers_that_are_not_saved(path):
    small = fxprune.prune(WithTables().eval(), torch.randn(2, 6))
    with torch.no_grad():
        small.count.add_(1)
        small.wave.mul_(1j)
    loaded = trip(small, WithTables, path, torch.randn(3, 6))
    assert loaded.table.dtype == torch.float8_e4m3fn and loaded.wave[0] == 1j
    double = trip(small.double(), WithTables, path, torch.randn(3, 6).double())
    assert double.cache.dtype == torch.float64


def test_masks_on_the_pruned_model_are_put_on_again(path):
    small = fxprune.prune(fresh(Hard, 0).eval(), IDS)
    for layer in (small.grouped, small.conv, small.plain):
        masks.l1_unstructured(layer, "weight", 0.3)
    loaded = trip(small, Hard, path)
    for name in ("grouped", "conv", "plain"):
        mine, theirs = (mask_of(getattr(m, name), "weight") for m in (small, loaded))
        assert torch.equal(mine, theirs) and not mine.all()
    plain = fxprune.prune(MODELS["residual"][0]().eval(), MODELS["residual"][1].float())
    masks.l1_unstructured(plain.branch, "weight", 0.5)
    trip(plain, MODELS["residual"][0], path, MODELS["residual"][1].float())


def test_onto_a_model_without_memory(path):
    build, x = MODELS["residual"]
    small = fxprune.prune(build().eval(), x.float())
    fxprune.save(small, path)
    with torch.device("meta"):
        empty = build()
    same(small, fxprune.load(empty, path), x.float())
    with torch.device("meta"):
        empty = Hard()
    fxprune.save(fxprune.prune(Hard().eval(), IDS, ignore="conv"), path)
    with pytest.raises(fxprune.PlanError, match="scale, which the file does not hold"):
        fxprune.load(empty, path)
    fxprune.save(fxprune.prune(ViewLiteral(), images(2).float()), path)
    with torch.device("meta"), pytest.raises(fxprune.PlanError, match="has to run once"):
        fxprune.load(ViewLiteral(), path)


def test_models_of_hugging_face_with_their_configuration(path):
    transformers = pytest.importorskip("transformers")
    config = transformers.LlamaConfig(
        vocab_size=50, hidden_size=32, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, intermediate_size=48, max_position_embeddings=32,
    )  # fmt: skip
    ids = torch.randint(0, 50, (1, 7))

    def build():
        return transformers.LlamaForCausalLM(copy.deepcopy(config)).eval()

    small = fxprune.prune(build(), {"input_ids": ids})
    loaded = trip(small, build, path, {"input_ids": ids})
    assert loaded.config.to_dict() == small.config.to_dict() != config.to_dict()
    generated = [m.generate(ids, max_new_tokens=5, do_sample=False) for m in (small, loaded)]
    assert torch.equal(*generated)


def test_any_reader_of_safetensors_gets_the_state_dict(path):
    from safetensors.torch import load_file

    small = fxprune.prune(MODELS["residual"][0]().eval(), MODELS["residual"][1].float())
    fxprune.save(small, path)
    read = load_file(path)
    assert read.keys() == small.state_dict().keys()
    assert all(torch.equal(read[key], t) for key, t in small.state_dict().items())


_CHILD = """
import sys, torch, fxprune
from tests import test_result, test_rewritten, test_saving
for i, kind in enumerate((test_saving.Hard, test_result.Residual, test_rewritten.SplitLiteral)):
    model = fxprune.load(kind().eval(), f"{sys.argv[1]}/{i}.safetensors")
    x, y = torch.load(f"{sys.argv[1]}/{i}.pt")
    with torch.no_grad():
        assert torch.equal(model(x), y), i
print("the same")
"""


def test_in_another_process(tmp_path):
    cases = [(Hard, IDS), (MODELS["residual"][0], MODELS["residual"][1].float()),
             (CODE[1], images(2).float())]  # fmt: skip
    for i, (kind, x) in enumerate(cases):
        small = fxprune.prune(kind().eval(), x)
        fxprune.save(small, tmp_path / f"{i}.safetensors")
        with torch.no_grad():
            torch.save((x, small(x)), tmp_path / f"{i}.pt")
    root = Path(__file__).parent.parent
    done = subprocess.run(
        [sys.executable, "-c", _CHILD, str(tmp_path)], cwd=root, text=True, capture_output=True,
        env={**os.environ, "PYTHONPATH": str(root), "OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    assert done.stdout == "the same\n", done.stderr[-2000:]


class Counts(nn.Module):
    """Takes what no text can say."""

    def __init__(self):
        super().__init__()
        self.inner = ViewLiteral()

    def forward(self, x, table):
        return self.inner(x) + table["shift"](x)


def half(y):
    return y.mean() / 2


def test_an_input_that_no_text_can_say_is_asked_for(path):
    inputs = {"x": images(2).float(), "table": {"shift": half}}
    small = fxprune.prune(Counts().eval(), inputs)
    fxprune.save(small, path)
    with pytest.raises(fxprune.PlanError, match="example_input="):
        fxprune.load(Counts(), path)
    same(small, fxprune.load(fresh(Counts), path, example_input=inputs), inputs)


def test_patterns_of_one_call_are_given_again(path):
    class Odd(nn.Module):
        def __init__(self):
            super().__init__()
            self.w = nn.Parameter(torch.randn(8, 6))

        def forward(self, x):
            return (x @ self.w.t()).view(-1, 8)

    def build():
        return nn.Sequential(Odd(), nn.ReLU(), nn.Linear(8, 3)).eval()

    odd = fxprune.pattern(Odd, layout={"x": "b i", "w": "o i", "return": "b o"})
    x = torch.randn(2, 6)
    small = fxprune.prune(fresh(build, 0), x, patterns=odd, sparsity=0.5, verify=False)
    fxprune.save(small, path)
    loaded = fxprune.load(fresh(build), path, patterns=odd)
    assert torch.equal(small[0].w, loaded[0].w)


# -- what cannot be saved, and what cannot be loaded -----------------------------------------------


def pruned(kind=ViewLiteral):
    return fxprune.prune(kind().eval(), images(2).float())


def quantized():
    small = fxprune.prune(WithTables().eval(), torch.randn(2, 6))
    small.table = torch.quantize_per_tensor(torch.ones(5), 0.1, 0, torch.qint8)
    return small


def narrow():
    small = fxprune.prune(WithTables().eval(), torch.randn(2, 6))
    small.wave = small.wave.to(torch.complex32)
    return small


def other_head():
    small = pruned()
    small.b = nn.Conv2d(5, 4, 3)
    return small


@pytest.mark.parametrize("make, error, words", [
    (Base, fxprune.ModelError, "does not say what was pruned"),
    (lambda: fxprune.prune(WithTables().eval(), torch.randn(2, 6), as_graph=True),
     fxprune.ModelError, "as_graph=False"),
    (lambda: {}, fxprune.ModelError, "is a dict"),
    (quantized, fxprune.ModelError, "table is a Tensor of torch.qint8"),
    (narrow, fxprune.ModelError, "wave is a Tensor of torch.complex32"),
    (other_head, fxprune.ModelError, "b.weight has shape"),
    (lambda: pruned().to("meta"), fxprune.ModelError, "meta device"),
], ids=["whole", "graph", "dict", "quantized", "complex", "changed", "meta"])  # fmt: skip
def test_what_cannot_be_saved_is_said(make, error, words, path):
    with pytest.raises(error, match=words):
        fxprune.save(make(), path)
    assert not list(path.parent.iterdir())


def test_a_file_that_is_there_stays_until_the_new_one_is_whole(path):
    fxprune.save(pruned(), path)
    before = path.read_bytes()
    with pytest.raises(fxprune.ModelError):
        fxprune.save(quantized(), path)
    with pytest.raises(fxprune.FileError, match="No such file"):
        fxprune.save(pruned(), path.parent / "nowhere" / "x.safetensors")
    assert path.read_bytes() == before and len(list(path.parent.iterdir())) == 1


class Wider(ViewLiteral):
    def __init__(self):
        super().__init__()
        self.a = nn.Conv2d(3, 9, 3, padding=1)


class Renamed(ViewLiteral):
    def __init__(self):
        super().__init__()
        self.c = nn.Conv2d(3, 8, 3, padding=1)


@pytest.mark.parametrize("kind, words", [
    (Wider, r"of dimension 0 of a.weight, 4 of 8 were kept there, and it has shape \(9, 3, 3, 3\)"),
    (Renamed, "the file has no c.weight"),
    (Hard, "the file has no embed.weight"),
], ids=lambda k: getattr(k, "__name__", ""))  # fmt: skip
def test_another_model_is_told_by_the_first_tensor_that_differs(kind, words, path):
    fxprune.save(pruned(), path)
    model = kind()
    before = Snapshot(model)
    with pytest.raises(fxprune.PlanError, match=words):
        fxprune.load(model, path)
    assert before.differences() == []


def test_a_model_that_is_pruned_already_is_refused(path):
    small = pruned()
    fxprune.save(small, path)
    with pytest.raises(fxprune.ModelError, match="freshly built"):
        fxprune.load(small, path)
    with pytest.raises(fxprune.ModelError, match="not a torch"):
        fxprune.load(type(small), path)


class Elsewhere(ViewLiteral):
    def forward(self, x):
        return self.b(torch.relu(self.a(x)))


def test_code_that_goes_another_way_is_refused_and_leaves_the_model_alone(path):
    fxprune.save(pruned(ViewLiteral), path)
    model = Elsewhere()
    before = Snapshot(model)
    with pytest.raises(fxprune.PlanError, match="code differ"):
        fxprune.load(model, path)
    assert before.differences() == []


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_on_a_gpu(path):
    x = images(2).float()
    small = fxprune.prune(ViewLiteral().eval().cuda(), x.cuda())
    fxprune.save(small, path)
    same(small, fxprune.load(ViewLiteral().cuda(), path), x.cuda())
    loaded = fxprune.load(ViewLiteral(), path)
    assert all(torch.equal(p.cpu(), q) for p, q in zip(small.parameters(), loaded.parameters(),
                                                       strict=True))  # fmt: skip


@pytest.mark.parametrize(
    "given", [{"bias": "drop"}, {"bias": "expected"}, {"exact": True}], ids=lambda given: min(given)
)
def test_every_setting_of_a_model_with_a_new_forward_loads_again(given, tmp_path):
    model = awake(ViewLiteral())
    x = images(2)
    small = fxprune.prune(model, x, **given)
    assert steps(small)[0].code
    fxprune.save(small, tmp_path / "small.safetensors")
    again = fxprune.load(ViewLiteral().eval(), tmp_path / "small.safetensors")
    assert torch.equal(again(x), small(x))
    fxprune.plan(model, x, **given).save(tmp_path / "plan.json")
    plan = fxprune.PruningPlan.load(tmp_path / "plan.json", model)
    assert torch.equal(plan.apply(model)(x), small(x))
