"""The code in README and docs runs as written."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]


def blocks(page: Path) -> str:
    return "\n".join(re.findall(r"```python\n(.*?)```", page.read_text(), flags=re.S))


@pytest.mark.parametrize("page", [p for p in PAGES if blocks(p)], ids=lambda p: p.name)
def test_code_blocks_run(page, monkeypatch, tmp_path):
    monkeypatch.setenv("FXPRUNE_CACHE", str(tmp_path))
    monkeypatch.chdir(tmp_path)  # for what they write
    exec(compile(blocks(page), str(page), "exec"), {"__name__": page.stem})


# Calls that take a reason, and variables that hold one.
TAKE_REASONS = ("freeze", "freeze_all", "freeze_dims", "unknown", "CannotRewrite", "Mismatch",
                "Unscored")  # fmt: skip


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
