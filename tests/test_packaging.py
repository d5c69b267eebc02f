"""What is packed: every package, the types, the licence, and nothing else."""

from __future__ import annotations

import importlib.metadata
import re
from pathlib import Path

import pytest

import fxprune

SOURCE = Path(__file__).parent.parent


def test_the_version_is_that_of_the_distribution():
    assert importlib.metadata.version("fxprune") == fxprune.__version__


def test_both_packages_are_typed():
    for package in (fxprune, fxprune.patterns):
        assert (Path(package.__file__).parent / "py.typed").is_file()


IN_SOURCE = (SOURCE / "pyproject.toml").exists()


@pytest.mark.skipif(not IN_SOURCE, reason="not run in the source tree")
def test_every_package_of_the_source_is_packed():
    text = (SOURCE / "pyproject.toml").read_text()
    packed = set(
        re.findall(r'"([\w.]+)"', re.search(r"^packages = \[(.*?)\]", text, re.M | re.S)[1])
    )
    found = {
        ".".join(p.parent.relative_to(SOURCE).parts) for p in SOURCE.glob("fxprune/**/__init__.py")
    }
    assert packed == found | {"fxprune.patterns"}


@pytest.mark.skipif(IN_SOURCE, reason="not installed from a wheel (make wheel-test)")
def test_the_wheel_holds_the_package_and_its_licence_only():
    installed = importlib.metadata.distribution("fxprune")
    assert Path(fxprune.__file__) == Path(installed.locate_file("fxprune/__init__.py"))
    files = [file.as_posix() for file in installed.files or ()]
    assert any(re.fullmatch(r"fxprune-.*dist-info/licenses/LICENSE", name) for name in files)
    wanted = ("py.typed", "patterns/py.typed", "patterns/linear.py", "html/page.html")
    assert {f"fxprune/{name}" for name in wanted} <= {*files}
    outside = [name for name in files if name.startswith("..")]
    assert [name.rpartition("/")[2] for name in outside] == ["fxprune"]  # the command
    inside = {*files} - {*outside}
    assert {name.split("/")[0].split("-")[0] for name in inside} == {"fxprune"}
