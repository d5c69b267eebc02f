"""The code in README, docs and the notebook runs as written, and what they name exists."""

from __future__ import annotations

import ast
import inspect
import pkgutil
import re
import runpy
import sys
import types
from pathlib import Path
from xml.etree import ElementTree

import pytest
import torch
from torch import nn

import fxprune

ROOT = Path(__file__).parent.parent
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
NEEDS = {"exporting.md": {"onnxruntime": None, "onnxscript": None, "torchao": None, "torch": "2.7"}}


def blocks(page: Path) -> str:
    return "\n".join(re.findall(r"```python\n(.*?)```", page.read_text(), flags=re.S))


@pytest.mark.parametrize("page", [p for p in PAGES if blocks(p)], ids=lambda p: p.name)
def test_code_blocks_run(page, monkeypatch, tmp_path):
    monkeypatch.setenv("FXPRUNE_CACHE", str(tmp_path))
    monkeypatch.chdir(tmp_path)  # for what they write
    for package, version in NEEDS.get(page.name, {}).items():
        pytest.importorskip(package, minversion=version)
    module = types.ModuleType(f"page_{page.stem}")
    monkeypatch.setitem(sys.modules, module.__name__, module)  # so that its classes can be saved
    exec(compile(blocks(page), str(page), "exec"), vars(module))


def test_no_code_escapes_by_its_label():
    for page in PAGES:
        opened = re.findall(r"^ *```(.*)$", page.read_text(), re.M)[::2]
        assert {*opened} <= {"python", "sh", "text", "toml"}, page.name


NOTEBOOKS = sorted((ROOT / "examples").glob("*.ipynb"))


@pytest.mark.parametrize("file", NOTEBOOKS, ids=lambda file: file.name)
def test_notebooks_run_from_top_to_bottom_and_are_kept_without_outputs(file):
    nbformat = pytest.importorskip("nbformat")
    nbclient = pytest.importorskip("nbclient")
    pytest.importorskip("ipykernel")
    notebook = nbformat.read(file, as_version=4)
    code = [cell for cell in notebook.cells if cell.cell_type == "code"]
    assert code and not any(cell.outputs or cell.execution_count for cell in code)
    nbclient.NotebookClient(notebook, timeout=120, kernel_name="python3").execute()
    assert any(cell.outputs for cell in code)


def test_the_pictures_are_those_that_are_drawn(tmp_path):
    runpy.run_path(str(ROOT / "docs/pictures.py"))["main"](tmp_path)
    drawn = {file.name: file for file in tmp_path.glob("*.svg")}
    assert len(drawn) == 5
    shown = re.findall(r"images/(\S+\.svg)", (ROOT / "docs/five-pictures.md").read_text())
    assert shown == sorted(drawn)
    for name, file in drawn.items():
        assert ElementTree.parse(file).getroot().get("aria-label")
        assert (ROOT / "docs/images" / name).is_file()


def test_every_setting_is_explained():
    page = (ROOT / "docs/settings.md").read_text()
    taken = {*inspect.signature(fxprune.plan).parameters}
    taken |= {*inspect.signature(fxprune.prune).parameters}
    assert taken - {"model", "example_input"} == set(re.findall(r"^\| `(\w+)` \|", page, re.M))


def rows(page: str) -> list[tuple[str, str]]:
    """The two columns of a page's tables."""
    found = re.findall(r"^\| (.*?) \| (.*?) \|$", (ROOT / "docs" / page).read_text(), re.M)
    return [(old, new) for old, new in found if not set(old) <= {"-", " "}]


SHORT = {"tp": "torch_pruning", "prune": "torch.nn.utils.prune"}


def old_calls() -> list[str]:
    called = r"`((?:tp|prune|torch\.ao\.pruning)\.[\w.]+)"
    return sorted({name for old, _ in rows("moving.md") for name in re.findall(called, old)})


@pytest.mark.parametrize("name", old_calls())
def test_a_call_that_one_moves_from_exists(name):
    short, _, rest = name.partition(".")
    assert pkgutil.resolve_name(f"{SHORT.get(short, short)}.{rest}")


MASKS = [(old.strip("`"), new.split("`")[1]) for old, new in rows("moving.md")
         if old.startswith("`prune.") and "(" in old and "(" in new]  # fmt: skip


@pytest.mark.parametrize("old, new", MASKS, ids=[new.split("(")[0] for _, new in MASKS])
def test_the_mask_that_one_moves_to_does_what_the_old_one_did(old, new):
    results = []
    for call in (old, new):
        torch.manual_seed(0)
        m = nn.Linear(6, 8)
        known = {"m": m, "pairs": [(m, "weight")], "prune": torch.nn.utils.prune,
                 "masks": fxprune.masks, "mask": torch.eye(8)[:, :6]}  # fmt: skip
        if "remove" in call:
            eval(call.replace("remove", "identity"), known)
        eval(call, known)
        results.append(m.weight.detach())
    assert (results[0] == 0).sum() == (results[1] == 0).sum()
    if "random" not in old:
        assert torch.equal(*results)


# Calls that take a reason, and variables that hold one.
TAKE_REASONS = ("freeze", "freeze_all", "freeze_dims", "unknown", "CannotRewrite", "Mismatch",
                "Unscored", "_unsaid", "refuse")  # fmt: skip


def words(node: ast.expr) -> str:
    """A string or f-string as text, with … for what is filled in."""
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        return node.value
    if isinstance(node, ast.JoinedStr):
        return "".join(words(part) or "…" for part in node.values)
    return ""


def reasons() -> set[str]:
    found: set[str] = set()
    for file in [*ROOT.glob("fxprune/**/*.py"), *ROOT.glob("patterns/*.py")]:
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.Call):
                name = getattr(node.func, "attr", getattr(node.func, "id", ""))
                if name in TAKE_REASONS:
                    found |= {words(a) for a in [*node.args, *(k.value for k in node.keywords)]}
            elif isinstance(node, ast.Assign) and any(
                getattr(t, "attr", getattr(t, "id", "")) in ("reason", "frozen")
                for t in node.targets
            ):
                found.add(words(node.value))
    return {text for text in found if text.count(" ") > 1 and text != "…, and …"}


def test_every_reason_to_leave_a_layer_whole_is_explained():
    page = " ".join((ROOT / "docs/why-not-pruned.md").read_text().split())
    assert len(reasons()) > 30
    missing = {r for r in reasons() if not all(part.strip() in page for part in r.split("…"))}
    assert not missing
