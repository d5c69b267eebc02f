"""A pytest plugin: which tests exercise which pattern and which fusion, as a page of markdown.

python -m pytest -n 2 -p tests.pattern_table --pattern-table docs/pattern-table.md
"""

from __future__ import annotations

import json
from collections import defaultdict
from pathlib import Path
from typing import Any

import pytest

from fxprune.relating import walk
from fxprune.rules import registry
from fxprune.rules.targets import label
from fxprune.tracing import fusions

Found = dict[str, dict[str, set[str]]]  # row -> what was called -> tests


class Recorder:
    def __init__(self, file: str) -> None:
        self.file = file
        self.test = ""
        self.found: Found = defaultdict(lambda: defaultdict(set))
        self.apply, self.find = walk.Walk.apply, fusions.find

    def watch(self) -> None:
        def apply(a: Any, call: Any) -> Any:
            if call.pattern is not None and call.pattern.is_builtin:
                self.found[row(call.pattern)][call.word].add(self.test)
            return self.apply(a, call)

        def find(trace: Any) -> Any:
            result = self.find(trace)
            for fusion in result:
                self.found[f"run {fusion.name}"][fusion.name].add(self.test)
            return result

        walk.Walk.apply = apply
        fusions.find = find

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(self, item: Any) -> Any:
        self.test = item.nodeid.partition("[")[0].removeprefix("tests/")
        return (yield)

    def as_data(self) -> str:
        return json.dumps({k: {w: sorted(t) for w, t in v.items()} for k, v in self.found.items()})

    def add(self, data: str) -> None:
        for key, words in json.loads(data).items():
            for word, tests in words.items():
                self.found[key][word] |= set(tests)

    def pytest_testnodedown(self, node: Any) -> None:
        self.add(node.workeroutput["pattern_table"])

    def pytest_sessionfinish(self, session: Any) -> None:
        output = getattr(session.config, "workeroutput", None)
        if output is not None:
            output["pattern_table"] = self.as_data()
        else:
            Path(self.file).write_text(page(self.found))


def pytest_addoption(parser: Any) -> None:
    parser.addoption("--pattern-table", metavar="FILE", default="")


def pytest_configure(config: Any) -> None:
    file = config.getoption("--pattern-table")
    if file:
        recorder = Recorder(file)
        recorder.watch()
        config.pluginmanager.register(recorder, "pattern table recorder")


def row(pattern: Any) -> str:
    return f"{pattern.source.removeprefix('fxprune.')} {pattern.rule.__name__}"


def page(found: Found) -> str:
    lines = [
        "# Patterns and the tests that exercise them",
        "",
        "Written by `make pattern-table`.",
        "",
        "| pattern | what it says | for | tests |",
        "|---|---|---|---|",
    ]
    merged: dict[str, tuple[str, list[str]]] = {}
    runs = []
    for pattern in registry.every():
        names = [label(t) for t in pattern.targets]
        if pattern.rule is None:
            runs += names
            continue
        summary, targets = merged.setdefault(row(pattern), (pattern.summary, []))
        targets += names
    for key, (summary, targets) in sorted(merged.items()):
        words = found.get(key, {})
        tests = sorted({t for ts in words.values() for t in ts})
        lines.append(f"| {key} | {escape(summary)} | {', '.join(targets)} | {some(tests)} |")
    lines += ["", "| run | tests |", "|---|---|"]
    for name in runs:
        tests = sorted({t for ts in found.get(f"run {name}", {}).values() for t in ts})
        lines.append(f"| {name} | {some(tests)} |")
    return "\n".join(lines) + "\n"


def some(tests: list[str]) -> str:
    shown = ", ".join(f"`{t}`" for t in tests[:3])
    return f"{shown} and {len(tests) - 3} more" if len(tests) > 3 else shown or "**none**"


def escape(text: str) -> str:
    return text.replace("|", "\\|")
