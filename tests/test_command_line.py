"""The command line: models by name, what it prints, and how it refuses."""

from __future__ import annotations

import inspect
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from click.testing import CliRunner
from safetensors.torch import load_file, save_file
from torch import nn

import fxprune
from fxprune.cli import inputs, models, options
from fxprune.cli.commands import fxprune as program
from fxprune.cli.mistakes import Mistake

HERE = "tests.test_command_line"
NET, SHAPE = f"{HERE}:Net", ("--input", "1,3,8,8")


class Net(nn.Module):
    def __init__(self, classes: int = 5):
        super().__init__()
        self.first = nn.Conv2d(3, 8, 3, padding=1)
        self.norm = nn.BatchNorm2d(8)
        self.second = nn.Conv2d(8, 12, 3)
        self.head = nn.Linear(12, classes)

    def forward(self, x):
        return self.head(self.second(self.norm(self.first(x)).relu()).mean((2, 3)))


class Masked(nn.Module):
    """Inputs by keyword, of two types."""

    def __init__(self):
        super().__init__()
        self.embed, self.up, self.out = nn.Embedding(20, 8), nn.Linear(8, 16), nn.Linear(16, 3)

    def forward(self, *, ids, mask):
        return self.out((self.up(self.embed(ids)) * mask[..., None]).relu())


class Holds(nn.Module):
    """Code with a width in it."""

    def __init__(self):
        super().__init__()
        self.conv, self.out = nn.Conv2d(3, 4, 3, padding=1), nn.Linear(4 * 64, 3)

    def forward(self, x):
        return self.out(self.conv(x).relu().view(-1, 4 * 64))


class Drifting(nn.Module):
    """Its proof fails: it is another function at each run."""

    runs = 0

    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x):
        type(self).runs += 1
        return self.b(self.a(x).relu()) * type(self).runs


def broken():
    raise RuntimeError("the weights are elsewhere")


def order(slices):
    return torch.arange(float(slices[0].count))


built = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 4))
seven = 7


def call(*arguments, status=0):
    """What the program says: the standard output, or the errors where it is to fail."""
    result = CliRunner().invoke(program, [str(a) for a in arguments])
    assert result.exit_code == status, (result.output, result.exception)
    assert "Traceback" not in result.output
    if status == 0:
        return result.stdout
    assert result.stdout == "" or "Usage:" in result.output
    assert 0 < len(result.stderr.strip().splitlines()) <= 4
    return result.stderr


# -- what the commands do -------------------------------------------------------------------------


def test_inspect_shows_the_plan_and_its_sizes():
    said = call("inspect", NET, *SHAPE)
    assert "8 -> 4" in said and "it is an output of the model" in said
    assert "parameters:" in said and "left" in said
    detailed = call("inspect", NET, *SHAPE, "--groups", "--skipped", "--code")
    assert "  second.weight dim 1 (in)" in detailed and "coupled by: norm, second" in detailed
    assert "head: it is an output of the model" in detailed
    assert "neither attributes nor code change" in detailed
    assert "def forward(" in call("inspect", f"{HERE}:Holds", *SHAPE, "--code")


def test_json_is_all_that_stdout_has():
    about = json.loads(call("inspect", NET, *SHAPE, "--json"))
    assert about["model"] == "Net"
    assert [g["kept"] for g in about["groups"] if g["frozen"] is None] == [4, 6]
    pruned = json.loads(call("prune", NET, *SHAPE, "--json", "-s", "0.25"))
    assert pruned["proof"] < 1e-3 and pruned["output"] is None
    assert [g["kept"] for g in pruned["groups"] if g["frozen"] is None] == [6, 9]
    timed = json.loads(call("bench", NET, *SHAPE, "--json", "--seconds", "0.001"))
    assert timed["after"]["macs"] < timed["before"]["macs"] and timed["speed_up"] > 0
    rows = json.loads(call("patterns", "shuffle", "--json"))
    assert rows and all("shuffle" in json.dumps(row).lower() for row in rows)
    assert call("inspect", NET, "--input", "1,4,8,8", "--json", status=2)


class Chatty(Net):
    def forward(self, x):
        print("what a model says")
        return super().forward(x)


def test_what_a_model_prints_is_not_in_what_was_asked_for():
    result = CliRunner().invoke(program, ["prune", f"{HERE}:Chatty", *SHAPE, "--json"])
    assert json.loads(result.stdout)["model"] == "Chatty"
    assert "what a model says" in result.stderr


@pytest.mark.parametrize("option", ["--html", "--draw"])
def test_a_place_that_cannot_be_written_is_told(option, tmp_path):
    if option == "--draw" and shutil.which("dot") is None:
        pytest.skip("Graphviz's program dot is not on this machine")
    path = tmp_path / f"{'x' * 300}.svg"  # longer than a name may be
    assert "xxx.svg: " in call("inspect", NET, *SHAPE, option, path, status=2)


class TwoHeads(Net):
    def __init__(self, width: int = 7):
        super().__init__()
        self.other = nn.Linear(12, width)

    def forward(self, x):
        y = self.second(self.norm(self.first(x)).relu()).mean((2, 3))
        return self.head(y), self.other(y)


@pytest.mark.parametrize("given, said", [
    (["--target", "params=0.5"], "params asked"), (["--target", "macs=0.5"], "macs asked"),
    (["--outputs", "0"], "7 -> "), (["--outputs", "1"], "5 -> "), (["--set", "width=9"], "9 "),
])  # fmt: skip
def test_settings_of_a_plan_are_read_from_text(given, said):
    assert said in call("inspect", f"{HERE}:TwoHeads", *SHAPE, *given)


@pytest.mark.parametrize("given, said", [
    (["--target", "flops=0.5"], "'flops' is none of params, macs"),
    (["--target", "params=half"], "params='half'"), (["--outputs", "2"], "returns no 2"),
    (["--set", "width=wide"], "cannot be made: TypeError"), (["--dtype", "int8"], "floating-point"),
    (["--input", f"1,3,{10**9},{10**9}"], "--input cannot be made"),
])  # fmt: skip
def test_a_setting_that_means_nothing_is_told_in_a_line(given, said):
    assert said in call("inspect", f"{HERE}:TwoHeads", *SHAPE, *given, status=2)


def test_a_file_that_holds_no_weights_is_told(tmp_path):
    torch.save([1, 2], tmp_path / "list.pt")
    said = call("inspect", NET, *SHAPE, "--weights", tmp_path / "list.pt", status=2)
    assert "holds no state dict, but a list" in said


def test_prune_says_what_went_and_that_it_is_proved():
    said = call("prune", NET, *SHAPE)
    assert "2 groups of Net pruned" in said and "proof: differs" in said
    assert "proof" not in call("prune", NET, *SHAPE, "--no-verify")


def test_bench_shows_both(tmp_path):
    said = call("bench", NET, *SHAPE, "--seconds", "0.001", "--threads", "1")
    assert "before" in said and "after" in said and "1 thread" in said


def test_compact_takes_out_what_weights_have_dead(tmp_path):
    net = Net()
    with torch.no_grad():
        net.second.weight[:5] = 0
    save_file(net.state_dict(), tmp_path / "sparse.safetensors")
    weights = ("--weights", tmp_path / "sparse.safetensors")
    about = json.loads(call("compact", NET, *SHAPE, *weights, "--json"))
    lost = 5 * (8 * 9 + 1 + 5)  # filters with their biases, and the columns that read them
    assert about["parameters"][0] - about["parameters"][1] == lost
    assert "no channel is dead" in call("compact", NET, *SHAPE)


def test_masks_of_torch_prune_are_applied(tmp_path):
    net = Net()
    nn.utils.prune.ln_structured(net.second, "weight", 4, n=2, dim=0)
    torch.save({"state_dict": net.state_dict()}, tmp_path / "masked.pt")
    weights = ("--weights", tmp_path / "masked.pt")
    about = json.loads(call("compact", NET, *SHAPE, *weights, "--json"))
    assert about["parameters"][0] - about["parameters"][1] == 4 * (8 * 9 + 1 + 5)


def test_pages_are_written(tmp_path):
    call("inspect", NET, *SHAPE, "--html", tmp_path / "plan.html")
    assert "<title>Net</title>" in (tmp_path / "plan.html").read_text()
    call("prune", NET, *SHAPE, "--html", tmp_path / "other.html")
    assert (tmp_path / "other.html").exists()


def test_the_pruned_model_is_saved_for_load(tmp_path):
    path = tmp_path / "small.safetensors"
    assert "saved in" in call("prune", NET, *SHAPE, "--output", path)
    small = fxprune.load(Net(), path)
    assert small.first.out_channels == 4
    assert load_file(path)["first.weight"].shape == small.first.weight.shape
    assert small(torch.randn(2, 3, 8, 8)).shape == (2, 5)


def test_it_says_which_version_it_is_and_what_it_can_do():
    assert fxprune.__version__ in call("--version")
    helped = call("--help")
    assert "Examples:" in helped
    assert all(word in helped for word in ("inspect", "prune", "compact", "bench", "patterns"))
    assert "No such command" in call("bogus", status=2)


def test_the_same_call_says_the_same():
    assert call("inspect", NET, *SHAPE) == call("inspect", NET, *SHAPE)


# -- settings -------------------------------------------------------------------------------------


def test_every_setting_of_a_plan_has_an_option():
    takes = set(inspect.signature(fxprune.plan).parameters)
    elsewhere = {"model", "example_input", "patterns", "calibration", "calibration_batches",
                 "calibration_mode"}  # fmt: skip
    assert takes - elsewhere == options._SETTINGS.keys()


@pytest.mark.parametrize(
    ("given", "kept"),
    [
        (["-s", "first=0.5"], [4, 12]),
        (["-s", "f*=0.25", "-s", "second=0.5"], [6, 6]),
        (["--min-width", "first=6", "--max-sparsity", "0.25"], [6, 9]),
        (["--ignore", "first"], [8, 6]),
        (["--ignore", "fir*", "--ignore", "second"], [8, 12]),
        (["--round-to", "4"], [4, 8]),
        (["--importance", f"{HERE}:order"], [4, 6]),
    ],
)
def test_settings_reach_the_plan(given, kept):
    about = json.loads(call("inspect", NET, *SHAPE, *given, "--json"))
    groups = {g["name"]: g["kept"] for g in about["groups"]}
    assert [groups["first"], groups["second"]] == kept


def test_words_and_flags_reach_the_plan():
    given = {"bias": "drop", "attention": "head_dim", "importance": "l1", "exact": True}
    words = [f"--{k}={v}" for k, v in given.items() if v is not True]
    about = json.loads(call("inspect", NET, *SHAPE, "--exact", *words, "--json"))
    assert given.items() <= about["settings"].items()


def test_inputs_have_names_types_and_ranges():
    given = inputs.example(["ids=2,5:int64:3-7", "mask=2,5:bool", "scale=4:float64"])
    assert given["ids"].shape == (2, 5) and 3 <= given["ids"].min() <= given["ids"].max() <= 7
    assert given["mask"].dtype == torch.bool and given["scale"].dtype == torch.float64
    (first, second) = inputs.example(["1,3,8,8", "2:int32"])
    assert first.dtype == torch.float32 and second.dtype == torch.int32 and second.max() <= 9
    assert inputs.example(["2:int64:-3--3"])[0].tolist() == [-3, -3]
    shapes = ("--input", "ids=1,6:int64:0-19", "--input", "mask=1,6")
    assert "8 -> 4" in call("inspect", f"{HERE}:Masked", *shapes)


@pytest.mark.parametrize("kind", ["float64", "bfloat16", "float16"])
def test_models_and_inputs_are_moved_together(kind):
    assert "proof" in call("prune", NET, *SHAPE, "--dtype", kind, "--device", "cpu")


# -- models ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "arguments", "kind"),
    [
        (NET, {}, "Net"),
        (NET, {"classes": 3}, "Net"),
        (f"{HERE}:built", {}, "Sequential"),
        ("torch.nn:Identity", {}, "Identity"),
        ("torchvision:resnet18", {"num_classes": 3}, "ResNet"),
        ("mobilenet_v3_small", {}, "MobileNetV3"),
        ("transformers:BertConfig", {"num_hidden_layers": 1, "hidden_size": 24}, "BertModel"),
        ("ViTForImageClassification", {"num_hidden_layers": 1, "hidden_size": 24},
         "ViTForImageClassification"),
    ],
)  # fmt: skip
def test_models_are_found_by_name(name, arguments, kind):
    model = models.find(name, arguments)
    assert type(model).__name__ == kind and not model.training


def test_timm_is_asked_where_it_is_there():
    timm = pytest.importorskip("timm")
    model = models.find("timm:test_vit", {})
    assert isinstance(model, timm.models.VisionTransformer)
    assert models.example(model).shape == (1, *model.pretrained_cfg["input_size"])
    assert type(models.find("test_vit", {})) is type(model)


def test_libraries_say_what_their_models_take():
    assert models.example(models.find("resnet18", {})).shape == (1, 3, 224, 224)
    small = {"num_hidden_layers": 1, "hidden_size": 24, "image_size": 32}
    vit = models.find("ViTModel", small)
    assert models.example(vit)["pixel_values"].shape == (1, 3, 32, 32)
    assert (
        models.example(models.find("BertModel", {"num_hidden_layers": 1}))["input_ids"].dim() == 2
    )
    assert models.example(Net()) is None
    about = json.loads(call("inspect", "GPT2Model", "--set", "n_layer=1", "--set", "n_embd=48",
                            "--json"))  # fmt: skip
    assert about["parameters"][1] < about["parameters"][0]


def test_a_model_that_would_not_fit_is_not_built(monkeypatch):
    monkeypatch.setattr(models, "_memory", lambda: 1.0)
    said = call("inspect", "transformers:LlamaForCausalLM", status=2)
    assert "6,738,415,616 parameters" in said and "--set num_hidden_layers=2" in said


# -- mistakes -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["resnet81"], "did you mean torchvision:resnet18"),
        (["torchvision:resnet81"], "torchvision has no model 'resnet81'"),
        (["transformers:torch"], "transformers has no model 'torch'"),
        (["no.such.module:build"], "there is no module 'no'"),
        ([f"{HERE}:Nett"], "did you mean 'Net'"),
        (["models.py:build"], "name it as a module, models:build"),
        ([f"{HERE}:broken"], "RuntimeError: the weights are elsewhere"),
        ([f"{HERE}:seven"], "is a int, neither model nor factory"),
        (["collections:OrderedDict"], "no torch.nn.Module"),
        ([f"{HERE}:built", "--set", "x=1"], "--set can set nothing"),
        ([NET, "--set", "nothing"], "not of the form KEY=VALUE"),
        ([NET, "--set", "nothing=1"], "unexpected keyword argument"),
        ([NET], "needs --input"),
        ([NET, "-i", "1,3,x"], "not of the form"),
        ([NET, "-i", "1,4,8,8"], "expected input[1, 4, 8, 8] to have 3 channels"),
        ([NET, "-i", "1,3,8,8:int64"], "does not run"),
        ([NET, "-i", "1,3,8,8:floaty"], "'floaty' is not a type"),
        ([NET, "-i", "1,3,8,8:float32:0-1"], "only integers have a range"),
        ([NET, "-i", "1:int64:9-2"], "no integer is from 9 to 2"),
        ([NET, "-i", "x=1,3,8,8", "-i", "1"], "names to all inputs or to none"),
        ([NET, "-i", "x=1", "-i", "x=1"], "stands there twice"),
        ([NET, *SHAPE, "--ignore", "frist"], "did you mean 'first'"),
        ([NET, *SHAPE, "-s", "2"], "not a fraction"),
        ([NET, *SHAPE, "-s", "0.1", "-s", "0.2"], "several values need names"),
        ([NET, *SHAPE, "--importance", "l7"], "is unknown"),
        ([NET, *SHAPE, "--importance", f"{HERE}:ordre"], "did you mean 'order'"),
        ([NET, *SHAPE, "--device", "toaster"], "--device 'toaster' cannot be used"),
        ([NET, *SHAPE, "--dtype", "int8"], "floating-point"),
        ([NET, *SHAPE, "--weights", "nowhere.pt"], "does not exist"),
        ([NET, *SHAPE, "--html", "nowhere/plan.html"], "folder 'nowhere' does not exist"),
        ([NET, *SHAPE, "--draw", "a.xyz"], "'a.xyz': pictures end in .svg, .pdf or .png"),
    ],
)  # fmt: skip
def test_mistakes_are_told_in_a_line_or_two(arguments, words):
    assert words in call("inspect", *arguments, status=2)


@pytest.mark.parametrize("command", ["prune", "compact"])
@pytest.mark.parametrize("name", ["small.pt", "small.PTH", "small.bin"])
def test_no_safetensors_file_gets_a_name_of_a_pickled_one(command, name, tmp_path):
    said = call(command, NET, *SHAPE, "-o", tmp_path / name, status=2)
    assert "let its name end in .safetensors" in said and not (tmp_path / name).exists()


@pytest.mark.parametrize("form", [[], ["--json"]])
def test_a_word_that_no_pattern_has_is_a_mistake(form):
    assert "no pattern has 'zzzz'" in call("patterns", "zzzz", *form, status=2)


@pytest.mark.parametrize("suffix", [".pt", ".safetensors"])
@pytest.mark.parametrize("content", [b"", b"hi\n", b"\x80\x02}q\x00.", b"PK\x03\x04 no archive"])
def test_files_that_hold_no_weights(tmp_path, suffix, content):
    path = tmp_path / f"junk{suffix}"
    path.write_bytes(content)
    said = call("inspect", NET, *SHAPE, "--weights", path, status=2)
    assert str(path) in said


def test_weights_of_another_model(tmp_path):
    torch.save(Net(classes=4).state_dict() | {"more": torch.ones(1)}, tmp_path / "other.pt")
    said = call("inspect", NET, *SHAPE, "--weights", tmp_path / "other.pt", status=2)
    assert "1 unknown (more); 2 of another shape (head.bias, head.weight)" in said


def test_a_proof_that_fails_is_status_1(tmp_path):
    page = tmp_path / "plan.html"
    said = call("prune", f"{HERE}:Drifting", "-i", "2,8", "--html", page, status=1)
    assert "differs" in said and not page.exists()


def test_a_warning_is_a_line_on_stderr():
    result = CliRunner().invoke(program, ["inspect", NET, *SHAPE, "--ignore", "*", "--json"])
    assert result.exit_code == 0 and json.loads(result.stdout)
    assert result.stderr.startswith("Warning: nothing of Net can be pruned")


def test_debug_shows_the_traceback():
    result = CliRunner().invoke(program, ["inspect", f"{HERE}:broken", "--debug"])
    assert result.exit_code == 2 and "Traceback" in result.stderr and "in broken" in result.stderr


def test_weights_are_not_trusted(tmp_path):
    torch.save({"w": Net()}, tmp_path / "code.pt")  # a class, which weights_only refuses
    with pytest.raises(Mistake, match="cannot be read"):
        inputs.load_weights(Net(), tmp_path / "code.pt")


# -- the program itself ---------------------------------------------------------------------------

MINE = """
from torch import nn

def build():
    return nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 4))
"""


CALLS = {
    "inspect": ["mine:build", "--input", "2,8"],
    "prune": ["mine:build", "--input", "2,8", "--json"],
    "compact": ["mine:build", "--input", "2,8", "--weights", "w.safetensors"],
    "bench": ["mine:build", "--input", "2,8", "--seconds", "0.001"],
    "patterns": ["Conv2d"],
}
SAYS = {"inspect": "8 -> 4", "prune": '"proof": ', "compact": "no channel is dead",
        "bench": "before", "patterns": "Conv2d"}  # fmt: skip


@pytest.mark.parametrize(
    "command", ["prune", *(pytest.param(c, marks=pytest.mark.slow) for c in CALLS if c != "prune")]
)
def test_each_command_runs_as_a_program(command, tmp_path):
    (tmp_path / "mine.py").write_text(MINE)
    save_file(built.state_dict(), tmp_path / "w.safetensors")
    space = os.environ | {"PYTHONPATH": str(Path(fxprune.__file__).parent.parent)}
    ran = subprocess.run(
        [sys.executable, "-m", "fxprune", command, *CALLS[command]],
        cwd=tmp_path, env=space, text=True, capture_output=True,
    )  # fmt: skip
    assert ran.returncode == 0 and SAYS[command] in ran.stdout, ran.stderr
    if command == "prune":
        assert json.loads(ran.stdout)["proof"] < 1e-3
