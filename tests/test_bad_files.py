"""Files that are damaged, of others, or made to do harm: a clear error, and the model as it was."""

from __future__ import annotations

import base64
import json
import os
import pickle
import random
import struct
import subprocess
import sys
import zlib
from pathlib import Path

import pytest
import torch
from torch import nn

import fxprune
from fxprune import masks
from fxprune.records import container
from fxprune.saving import loader

from .snapshot import Snapshot
from .test_rewritten import ViewLiteral, images
from .test_saving import IDS, Hard


class Net(nn.Module):
    """A plain one: an attribute, a tied weight, a mask, a layer that gets a bias."""

    def __init__(self):
        super().__init__()
        self.width = 8
        self.a, self.b = nn.Conv2d(3, 8, 3), nn.Conv2d(8, 8, 3, bias=False)
        self.c = nn.Conv2d(8, 4, 1)
        self.norm, self.again = nn.BatchNorm2d(8), nn.BatchNorm2d(8)
        self.again.weight = self.norm.weight

    def forward(self, x):
        y = torch.sigmoid(self.norm(self.a(x)))
        y = torch.relu(self.again(self.b(y)))
        return self.c(y.view(y.shape[0], self.width, -1, 1))


def net():
    small = fxprune.prune(Net().eval(), torch.randn(2, 3, 8, 8))
    masks.l1_unstructured(small.c, "weight", 0.3)
    return small


BUILDS = {
    "net": (Net, net),
    "code": (ViewLiteral, lambda: fxprune.prune(ViewLiteral().eval(), images(2).float())),
    "hard": (Hard, lambda: fxprune.prune(Hard().eval(), IDS)),
}


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    folder = tmp_path_factory.mktemp("files")
    for name, (_, make) in BUILDS.items():
        torch.manual_seed(0)
        fxprune.save(make(), folder / f"{name}.safetensors")
    return folder


def refused(model, path):
    """The error that loading raises; the model is as it was."""
    before = Snapshot(model)
    with pytest.raises(fxprune.PruningError) as caught:
        fxprune.load(model, path)
    assert before.differences() == []
    assert len(str(caught.value)) < 700
    return caught.value


@pytest.mark.parametrize("name", BUILDS)
def test_the_files_can_be_loaded(name, files):
    fxprune.load(BUILDS[name][0](), files / f"{name}.safetensors")


@pytest.mark.parametrize("name", BUILDS)
def test_any_bit_that_flips_is_told(name, files, tmp_path):
    whole = (files / f"{name}.safetensors").read_bytes()
    rng = random.Random(name)
    bad = tmp_path / "bad.safetensors"
    header = 8 + int.from_bytes(whole[:8], "little")
    places = [rng.randrange(header) for _ in range(20)]
    places += [rng.randrange(header, len(whole)) for _ in range(20)]
    for at in places:
        data = bytearray(whole)
        data[at] ^= 1 << rng.randrange(8)
        bad.write_bytes(data)
        refused(BUILDS[name][0](), bad)


@pytest.mark.parametrize("name", BUILDS)
def test_a_file_that_is_cut_off_is_told(name, files, tmp_path):
    whole = (files / f"{name}.safetensors").read_bytes()
    rng = random.Random(name)
    bad = tmp_path / "bad.safetensors"
    for length in [0, 1, 7, 8, 9, len(whole) - 1, *(rng.randrange(len(whole)) for _ in range(9))]:
        bad.write_bytes(whole[:length])
        assert isinstance(refused(BUILDS[name][0](), bad), fxprune.FileError)


def others(folder: Path) -> dict[str, bytes]:
    """What is no safetensors file, or none of ours."""
    from safetensors.torch import save

    class Evil:
        def __reduce__(self):
            return os.mkdir, (str(folder / "executed"),)

    deep = b'{"__metadata__":{"fxprune":"' + b"[" * 100_000 + b'","fxprune.sha256":"0"}}'
    return {
        "empty": b"", "noise": random.Random(0).randbytes(5000), "pickle": pickle.dumps(Evil()),
        "zeros": b"\0" * 4096, "text": b"hello\n" * 100,
        "a huge header": struct.pack("<Q", 2**63) + b"{}",
        "a header as long as the file": struct.pack("<Q", 10**6) + b"{" * 10**6,
        "a long header": struct.pack("<Q", 10**7) + b" " * 10**7,
        "deep": struct.pack("<Q", len(deep)) + deep,
        "safetensors": save({"a": torch.ones(3)}),
        "no sum": save({"a": torch.ones(3)}, {"fxprune": "{}"}),
        "not json": save({"a": torch.ones(3)}, {"fxprune": "{", "fxprune.sha256": ""}),
        "twice": save({"a": torch.ones(3)}, {"fxprune": '{"a":1,"a":1}', "fxprune.sha256": ""}),
        "a number": save({"a": torch.ones(3)}, {"fxprune": "1" * 5000, "fxprune.sha256": ""}),
        "a list": save({"a": torch.ones(3)}, {"fxprune": "[]", "fxprune.sha256": ""}),
    }  # fmt: skip


OTHERS = sorted(others(Path()))


@pytest.mark.parametrize("what", OTHERS)
def test_what_is_no_file_of_ours_is_told(what, tmp_path):
    bad = tmp_path / "bad.safetensors"
    bad.write_bytes(others(tmp_path)[what])
    assert isinstance(refused(Net(), bad), fxprune.FileError)
    assert not (tmp_path / "executed").exists()


def test_a_folder_nothing_and_a_pipe_are_told(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    for path in (tmp_path, tmp_path / "nothing", tmp_path / "pipe"):
        assert isinstance(refused(Net(), path), fxprune.FileError)
        with pytest.raises(fxprune.FileError):
            fxprune.PruningPlan.load(path, Net())


# -- made with care: the checksum is right, what it says is not ------------------------------------


def rewritten(source, target, change):
    """``source`` with its description and tensors changed, and a checksum that is right."""
    from safetensors import safe_open

    with safe_open(source, "pt") as file:
        about = json.loads(file.metadata()["fxprune"])
        tensors = {key: file.get_tensor(key).clone() for key in file.keys()}  # noqa: SIM118
    change(about, tensors)
    container.write(target, tensors, json.dumps(about))


def put(*keys, value):
    """A change: ``about[k][k]… = value``; of tensors with ``"tensors"`` first."""

    def change(about, tensors):
        place = {"about": about, "tensors": tensors}
        *path, last = keys if keys[0] == "tensors" else ("about", *keys)
        for key in path:
            place = place[key]
        if isinstance(place, list) and last == "+":
            place.append(value)
        elif value is None and isinstance(place, dict):
            del place[last]
        else:
            place[last] = value

    return change


STEP, BIG = ("steps", "", 0), 2**31 - 1
BOMB = base64.b64encode(zlib.compress(bytes(1 << 27), 9)).decode()
NET = {
    "another schema": put("schema", value=2),
    "a schema in words": put("schema", value="1"),
    "no schema": put("schema", value=None),
    "an unknown key": put("code", value="import os"),
    "no ties": put("ties", value=None),
    "a model that is no name": put("model", value=["Net"]),
    "steps in a list": put("steps", value=[]),
    "a step that is none": put("steps", "", value=[1]),
    "a step that nobody knows": put(*STEP, "exec", value="print()"),
    "a step of an unknown part": put("steps", "nowhere", value=[]),
    "a part above": put(*STEP, "path", value=".."),
    "kept that is none": put(*STEP, "kept", value=3),
    "kept without sets": put(*STEP, "kept", "a.weight", "0", value=99),
    "a negative set": put(*STEP, "kept", "a.weight", "0", value=-1),
    "a negative dimension": put(*STEP, "kept", "a.weight", "-1", value=0),
    "a dimension too many": put(*STEP, "kept", "a.weight", "7", value=0),
    "a huge dimension": put(*STEP, "kept", "a.weight", "9" * 30, value=0),
    "kept of an unknown tensor": put(*STEP, "kept", "x.weight", value={"0": 0}),
    "a set of more": put(*STEP, "sets", 0, value=[16, None, "//8="]),
    "a set of other bits": put(*STEP, "sets", 0, value=[8, None, "/w=="]),
    "a set of a huge size": put(*STEP, "sets", 0, value=[2**40, None, "/w=="]),
    "a set of a large size": put(*STEP, "sets", 0, value=[BIG, None, "/w=="]),
    "a set of a negative size": put(*STEP, "sets", 0, value=[-8, None, "/w=="]),
    "a set of half a size": put(*STEP, "sets", 0, value=[8.5, None, "/w=="]),
    "a set that is no base64": put(*STEP, "sets", 0, value=[8, None, "%%"]),
    "a set that is no text": put(*STEP, "sets", 0, value=[8, None, 3]),
    "a set of three": put(*STEP, "sets", 0, value=[8, None]),
    "indices twice": put(*STEP, "sets", 0, value=[8, 0, "AAAAAAAAAAACAAAAAwAAAA=="]),
    "indices below": put(*STEP, "sets", 0, value=[8, 0, "/////wEAAAACAAAAAwAAAA=="]),
    "indices above": put(*STEP, "sets", 0, value=[8, 0, "CAAAAAEAAAACAAAAAwAAAA=="]),
    "indices in broken rows": put(*STEP, "sets", 0, value=[8, 3, "AAAAAAEAAAACAAAAAwAAAA=="]),
    "a huge attribute": put(*STEP, "attributes", "width", value=10**12),
    "an infinite attribute": put(*STEP, "attributes", "norm.eps", value=float("inf")),
    "an attribute of text": put(*STEP, "attributes", "width", value="8"),
    "an attribute of nothing": put(*STEP, "attributes", "width", value=[None]),
    "a flag for a number": put(*STEP, "attributes", "width", value=True),
    "nested attributes": put(*STEP, "attributes", "width", value=[[1]]),
    "an attribute that is not there": put(*STEP, "attributes", "wide", value=3),
    "a module that is not there": put(*STEP, "attributes", "x.width", value=3),
    "a class": put(*STEP, "attributes", "__class__", value=3),
    "a class of a class": put(*STEP, "attributes", "__class__.forward", value=3),
    "a forward": put(*STEP, "attributes", "forward", value=1),
    "a module": put(*STEP, "attributes", "a", value=1),
    "parameters": put(*STEP, "attributes", "_parameters", value=[1]),
    "a padding that is a tuple of five": put(*STEP, "attributes", "a.padding", value=[1] * 5),
    "a lent forward that is none": put(*STEP, "lent", value=["a"]),
    "a lent forward of nowhere": put(*STEP, "lent", value=["nowhere"]),
    "a lent forward in words": put(*STEP, "lent", value="a"),
    "code without a run": put(*STEP, "code", value=[""]),
    "code of nowhere": put(*STEP, "code", value=["nowhere"]),
    "a tie to nothing": put("ties", "again.weight", value="x"),
    "a tie to another": put("ties", "again.weight", value="a.weight"),
    "a tie to a number": put("ties", "again.weight", value=3),
    "a mask that is not there": put("masks", "+", value="a.weight"),
    "a mask of nothing": put("masks", "+", value="x.weight"),
    "a mask of another type": put("tensors", "c.weight:mask", value=torch.ones(4, 4, 1, 1)),
    "a mask of another shape": put("tensors", "c.weight:mask", value=torch.ones(4) > 0),
    "channels last of a vector": put("channels_last", "+", value="a.bias"),
    "a buffer of another type": put("others", "a.bias", value="int64"),
    "a buffer of no type": put("others", "a.bias", value="nn"),
    "a missing tensor": put("tensors", "a.weight", value=None),
    "a tensor more": put("tensors", "d.weight", value=torch.ones(3)),
    "a bias of a norm": put("tensors", "norm.more", value=torch.ones(3)),
    "a large bias": put("tensors", "b.bias", value=torch.ones(10**6)),
    "a bias of two dimensions": put("tensors", "b.bias", value=torch.ones(2, 2)),
    "a bias of integers": put("tensors", "b.bias", value=torch.ones(4).long()),
    "a wider tensor": put("tensors", "a.weight", value=torch.ones(5, 3, 3, 3)),
    "a flat tensor": put("tensors", "a.weight", value=torch.ones(108)),
    "an empty tensor": put("tensors", "a.weight", value=torch.ones(0)),
    "a tensor of integers": put("tensors", "a.weight", value=torch.ones(4, 3, 3, 3).int()),
    "a count of floats": put("tensors", "norm.num_batches_tracked", value=torch.ones(())),
}  # fmt: skip
RUN = (*STEP, "run")
CODE = {
    "no run": put(*RUN, value=None),
    "a run in words": put(*RUN, value="model.train()"),
    "a run with more": put(*RUN, "exec", value="print()"),
    "attention of another kind": put(*RUN, "attention", value="all"),
    "a type that is none": put(*RUN, "dtype", value="nn"),
    "a type of integers": put(*RUN, "dtype", value="int64"),
    "outputs that are none": put(*RUN, "outputs", value=[3]),
    "outputs of nothing": put(*RUN, "outputs", value=["logits"]),
    "no axes": put(*RUN, "axes", value=[]),
    "an axis of nothing": put(*RUN, "axes", 0, value=["x", [8], [8], [0], [0, None, None]]),
    "an axis of another shape": put(*RUN, "axes", 0, 1, value=[9, 3, 3, 3]),
    "an axis along another": put(*RUN, "axes", 0, 3, value=[2]),
    "an axis with other units": put(*RUN, "sets", 0, value=[8, None, "8A=="]),
    "an axis of fewer units": put(*RUN, "sets", 0, value=[4, None, "8A=="]),
    "an axis without a set": put(*RUN, "axes", 0, 4, value=[7, None, None]),
    "an axis in words": put(*RUN, "axes", 0, value="a.weight"),
    "no example": put(*RUN, "example", value=None),
    "an example that is none": put(*RUN, "example", value=[1]),
    "an example of objects": put(*RUN, "example", value=[["object", 3], ["dict", {}]]),
    "a huge example": put(*RUN, "example", 0, 1, 0, value=["tensor", "float32", [BIG, BIG], None]),
    "a large example": put(*RUN, "example", 0, 1, 0, value=["tensor", "float32", [1 << 26], None]),
    "a negative example": put(*RUN, "example", 0, 1, 0, value=["tensor", "float32", [-1], None]),
    "an example of no type": put(*RUN, "example", 0, 1, 0, value=["tensor", "load", [1], None]),
    "integers that are not there": put(*RUN, "example", 0, 1, 0,
                                       value=["tensor", "int64", [1], None]),
    "a bomb": put(*RUN, "example", 0, 1, 0,
                  value=["tensor", "uint8", [9], BOMB]),
    "another number of arguments": put(*RUN, "example", 0, value=["tuple", []]),
    "an example of another shape": put(*RUN, "example", 0, 1, 0,
                                       value=["tensor", "float32", [2, 5, 6, 6], None]),
}  # fmt: skip
CRAFTED = [("net", what) for what in NET] + [("code", what) for what in CODE]


@pytest.mark.parametrize("name, what", CRAFTED, ids=lambda value: value)
def test_what_is_made_with_care_is_told(name, what, files, tmp_path):
    bad = tmp_path / "bad.safetensors"
    change = (NET if name == "net" else CODE)[what]
    rewritten(files / f"{name}.safetensors", bad, change)
    error = refused(BUILDS[name][0](), bad)
    assert isinstance(error, (fxprune.FileError, fxprune.PlanError))


def test_an_error_at_the_very_end_is_taken_back(files, monkeypatch):
    def fail(*_):
        raise KeyboardInterrupt

    for name, (build, _) in BUILDS.items():
        model = build()
        before = Snapshot(model)
        with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
            patch.setattr(loader, "as_texts", fail)
            fxprune.load(model, files / f"{name}.safetensors")
        assert before.differences() == []


_CHILD = """
import json, resource, sys, time
import torch, fxprune
from tests import test_bad_files as t
def peak():
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
for name, (build, make) in t.BUILDS.items():
    fxprune.load(build(), f"{sys.argv[1]}/{name}.safetensors")  # imports, caches
found = []
for name in sys.stdin.read().split():
    model = t.BUILDS[name.split("-")[0]][0]()
    before, start = peak(), time.monotonic()
    try:
        fxprune.load(model, f"{sys.argv[1]}/{name}.bad")
    except fxprune.PruningError:
        found.append((name, peak() - before, time.monotonic() - start))
print(json.dumps(found))
"""


def measured(folder: Path, names: list[str]) -> list[tuple[str, int, float]]:
    root = Path(__file__).parent.parent
    done = subprocess.run(
        [sys.executable, "-c", _CHILD, str(folder)], cwd=root, text=True, capture_output=True,
        input=" ".join(names), env={**os.environ, "PYTHONPATH": str(root), "OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-2000:]
    return json.loads(done.stdout)


def make_all(files: Path, folder: Path, crafted: list[tuple[str, str]]) -> list[str]:
    names = []
    for name in BUILDS:
        (folder / f"{name}.safetensors").write_bytes((files / f"{name}.safetensors").read_bytes())
    for i, data in enumerate(others(folder).values()):
        names.append(f"net-o{i}")
        (folder / f"{names[-1]}.bad").write_bytes(data)
    for i, (name, what) in enumerate(crafted):
        names.append(f"{name}-c{i}")
        change = (NET if name == "net" else CODE)[what]
        rewritten(files / f"{name}.safetensors", folder / f"{names[-1]}.bad", change)
    return names


MEMORY = 100 * 2**20


def test_hostile_files_take_no_memory(files, tmp_path):
    some = [(n, w) for n, w in CRAFTED if "huge" in w or "large" in w or "bomb" in w]
    names = make_all(files, tmp_path, some)
    found = measured(tmp_path, names)
    assert [name for name, *_ in found] == names
    assert max(memory for _, memory, _ in found) < MEMORY


@pytest.mark.slow
def test_no_bad_file_takes_memory_or_time(files, tmp_path):
    names = make_all(files, tmp_path, CRAFTED)
    whole = {name: (files / f"{name}.safetensors").read_bytes() for name in BUILDS}
    rng = random.Random(0)
    for name, data in whole.items():
        for i in range(100):
            names.append(f"{name}-f{i}")
            flipped = bytearray(data)
            flipped[rng.randrange(len(data))] ^= 1 << rng.randrange(8)
            cut = rng.randrange(len(data))
            (tmp_path / f"{names[-1]}.bad").write_bytes(flipped if i % 2 else data[:cut])
    found = measured(tmp_path, names)
    assert [name for name, *_ in found] == names
    assert max(memory for _, memory, _ in found) < MEMORY
    assert max(seconds for *_, seconds in found) < 5
