"""The public interface: what exists, with which parameters, and that the reference has it."""

from __future__ import annotations

import difflib
import importlib
import re
from pathlib import Path

import fxprune

from . import public_api

HERE = Path(__file__).parent


def test_the_public_interface_is_the_one_that_is_written_down():
    pinned, found = (HERE / "public_api.txt").read_text(), public_api.text()
    changes = "\n".join(difflib.unified_diff(pinned.splitlines(), found.splitlines(), "pinned",
                                             "found", lineterm="", n=8))  # fmt: skip
    assert not changes, f"\n{changes}\nIf this is meant: make api"


def test_all_exports_exist_in_order():
    assert fxprune.__all__ == sorted(fxprune.__all__)
    assert all(hasattr(fxprune, name) for name in fxprune.__all__)


def test_the_reference_has_every_public_name():
    pages = "\n".join(page.read_text() for page in (HERE.parent / "docs/api").glob("*.md"))
    written, whole = set(re.findall(r"[\w.]+", pages)), set(re.findall(r"^::: (\S+)", pages, re.M))
    for path in public_api.MODULES:
        module = importlib.import_module(path)
        for name in public_api.names(module):
            home = getattr(getattr(module, name), "__module__", path)
            assert f"{path}.{name}" in written or {path, home} & whole, f"{path}.{name}"
