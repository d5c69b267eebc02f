"""The public interface: what exists, with which parameters, and that the reference has it."""

from __future__ import annotations

import dataclasses
import difflib
import importlib
import inspect
import re
from pathlib import Path

import fxprune
from fxprune.choosing.settings import Settings

from . import public_api

HERE = Path(__file__).parent


def test_the_public_interface_is_the_one_that_is_written_down():
    pinned, found = (HERE / "public_api.txt").read_text(), public_api.text()
    changes = "\n".join(difflib.unified_diff(pinned.splitlines(), found.splitlines(), "pinned",
                                             "found", lineterm="", n=8))  # fmt: skip
    assert not changes, f"\n{changes}\nIf this is meant: make api"


def test_settings_have_the_defaults_of_plan():
    given = inspect.signature(fxprune.plan).parameters
    own = {f.name: f.default for f in dataclasses.fields(Settings) if f.name != "rounding"}
    assert own == {name: given[name].default for name in own}


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
