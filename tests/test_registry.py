"""Registering patterns: globally, in a scope, by other packages; and what cannot be registered."""

from __future__ import annotations

import functools
import importlib.metadata
import subprocess
import sys

import pytest
import torch
from torch import nn

import fxprune
from fxprune.__main__ import main
from fxprune.rules import registry
from fxprune.rules.pattern_types import Pattern

from .test_user_patterns import GATED, Gated, gated_net, image

LAYOUT = {"x": "n c", "return": "n c"}


class Mine(nn.Module):
    def forward(self, x):
        return torch.from_numpy((x.detach() * 2).numpy().copy())


class Subclass(Mine):
    pass


class Different(Mine):
    def forward(self, x):
        return super().forward(x).cumsum(1)


def net(layer):
    return nn.Sequential(nn.Linear(6, 8), layer, nn.Linear(8, 4)).double()


def width(model, **settings):
    x = torch.randn(2, 6, dtype=torch.float64)
    return fxprune.plan(model, x, **settings).apply(model)[0].out_features


def test_a_registered_class_is_known_until_it_is_unregistered():
    made = fxprune.register(Mine, layout=LAYOUT)
    try:
        assert isinstance(made, Pattern) and registry.find(Mine) is made
        assert width(net(Mine())) == 4
        assert width(net(Subclass())) == 4, "a subclass that runs the same forward"
        assert width(net(Different())) == 8, "and one that does not"
    finally:
        fxprune.unregister(Mine)
    assert registry.find(Mine) is None
    with pytest.raises(fxprune.PatternError, match="no pattern that could be unregistered"):
        fxprune.unregister(Mine)


def test_one_target_has_one_pattern_unless_it_is_overridden():
    first = fxprune.register(Mine, layout=LAYOUT)
    try:
        with pytest.raises(fxprune.PatternError, match=r"has a pattern already, from .*override"):
            fxprune.register(Mine, layout=LAYOUT)
        with pytest.raises(fxprune.PatternError, match=r"fxprune\.patterns\.elementwise"):
            fxprune.register("relu", layout={"input": "...", "return": "..."})
        assert registry.find(Mine) is first
        second = fxprune.register(Mine, layout=LAYOUT, override=True)
        assert registry.find(Mine) is second
    finally:
        fxprune.unregister(Mine)


def test_a_scope_ends_with_its_block_whatever_happens_in_it():
    made = fxprune.pattern(Mine, layout=LAYOUT)
    with pytest.raises(KeyError), fxprune.patterns(made):
        assert width(net(Mine())) == 4
        raise KeyError
    assert registry.find(Mine) is None


def test_a_scope_can_override_and_an_inner_one_wins():
    outer = fxprune.pattern(nn.ReLU, rule=lambda a, call: a.unknown(call), name="outer")
    inner = fxprune.pattern(nn.ReLU, layout={"input": "n c", "return": "n c"}, name="inner")
    with pytest.raises(fxprune.PatternError, match="override=True"), fxprune.patterns(outer):
        pass
    with fxprune.patterns(outer, override=True):
        assert width(net(nn.ReLU())) == 8
        with fxprune.patterns(inner, override=True):
            assert width(net(nn.ReLU())) == 4
        assert width(net(nn.ReLU())) == 8
    assert width(net(nn.ReLU())) == 4


def test_patterns_can_hold_for_one_call_only_and_the_plan_remembers_them():
    model, x = net(Mine()), torch.randn(2, 6, dtype=torch.float64)
    made = fxprune.pattern(Mine, layout=LAYOUT)
    plan = fxprune.plan(model, x, patterns=[made])
    assert plan.apply(model)[0].out_features == 4  # no longer registered, but of the plan
    assert fxprune.prune(model, x, patterns=[made])[0].out_features == 4
    assert width(model) == 8


def test_installed_packages_provide_patterns_by_an_entry_point(monkeypatch):
    entry = importlib.metadata.EntryPoint("mine", f"{__name__}:provide", registry.ENTRY_POINTS)
    monkeypatch.setattr(
        importlib.metadata, "entry_points",
        lambda *, group: [entry] if group == registry.ENTRY_POINTS else [],
    )  # fmt: skip
    registry.load_provided()
    try:
        assert width(net(Mine())) == 4
    finally:
        fxprune.unregister(Mine)


def provide():
    fxprune.register(Mine, layout=LAYOUT)


def test_a_package_whose_patterns_fail_is_named(monkeypatch):
    entry = importlib.metadata.EntryPoint("broken", "no_such_module", registry.ENTRY_POINTS)
    monkeypatch.setattr(importlib.metadata, "entry_points", lambda *, group: [entry])
    with pytest.raises(fxprune.PatternError, match=r"'broken'.*no_such_module"):
        registry.load_provided()


@pytest.mark.parametrize("make, words", [
    (lambda: fxprune.pattern(rule=lambda a, call: None), "needs a target"),
    (lambda: fxprune.pattern(Mine, rule=lambda a: None), r"called as rule\(a, call\)"),
    (lambda: fxprune.pattern(Mine, rule=3), "is no rule"),
    (lambda: fxprune.pattern(Mine, layout=LAYOUT, rule=lambda a, call: None), "not both"),
    (lambda: fxprune.pattern(Mine, layout={"x": "n c"}), "what the 'return' is"),
    (lambda: fxprune.pattern(Mine, layout={"x": "n c c", "return": "n"}), "'c' stands twice"),
    (lambda: fxprune.pattern(Mine, layout={"x": "n,c", "return": "n"}), "','.* is no name"),
    (lambda: fxprune.pattern(Mine, layout={"x": 2, "return": "n"}), "is a string"),
    (lambda: fxprune.pattern(Mine, layout=LAYOUT, biases=["b"]), "'b' is not in the layout"),
    (lambda: fxprune.pattern(Mine, layout=LAYOUT, sizes={"k": 2}), "'k' is not a name of one"),
    (lambda: fxprune.pattern(Mine, layout=LAYOUT, border="zeros"), "neither 'padding'"),
    (lambda: fxprune.pattern(Mine, layout=LAYOUT, attributes={"width": "w"}), "'w' is not a name"),
    (lambda: fxprune.pattern(Mine, layout=LAYOUT, folds={"w": "b"}), "'w' is not in the layout"),
    (lambda: fxprune.pattern(Mine, rule=lambda a, call: None, biases=["b"]), "only with a layout"),
    (lambda: fxprune.pattern(torch.outer, layout={"q": "n", "return": "n m"}),
     "takes input, vec2"),
    (lambda: fxprune.pattern(Mine, layout="n c"), "is a mapping"),
    (lambda: fxprune.pattern(Mine, layout=LAYOUT, sizes=["k"]), "is no mapping"),
    (lambda: fxprune.pattern(Mine, layout=LAYOUT, folds="b"), "is no mapping"),
    (lambda: fxprune.pattern(Mine, layout=LAYOUT, attributes=["a"]), "is no mapping"),
    (lambda: fxprune.pattern("rellu", layout=LAYOUT), "no op that is called 'rellu'"),
    (lambda: fxprune.pattern(("conv", None), steps={0: LAYOUT}), "None in a run is no"),
    (lambda: fxprune.pattern(["conv", Mine]), "is a tuple"),
    (lambda: fxprune.pattern("conv-conv", layout=LAYOUT), "a layout is for one node"),
    (lambda: fxprune.pattern(functools.partial(provide), layout=LAYOUT), "take the function"),
    (lambda: fxprune.pattern(provide, layout={"q": "n", "return": "n"}), "'q' is not an arg"),
    (lambda: fxprune.pattern(("conv", Mine), steps={2: LAYOUT}), "names 2 of a run of 2"),
    (lambda: fxprune.pattern(("conv",)), "two nodes at least"),
    (lambda: fxprune.pattern(Mine, steps={0: LAYOUT}), "needs a run"),
    (lambda: fxprune.register(7, layout=LAYOUT), "7 is no module class"),
    (lambda: fxprune.patterns(Mine).__enter__(), "is no Pattern"),
    (lambda: fxprune.pattern(Mine, layout=LAYOUT | {1: "n"}), "parameters, not 1"),
    (lambda: fxprune.pattern(Mine, layout=LAYOUT, biases=3), "biases=3 are no names"),
    (lambda: fxprune.pattern(Mine, layout=LAYOUT, attributes={"width": 3}), "3 is no name"),
    (lambda: fxprune.pattern(Mine, layout=LAYOUT, refresh=3), "refresh=3 is no function"),
    (lambda: fxprune.pattern(Mine, folds={"w": "b"},
                             layout={"x": "n c", "w": "o p c", "b": "o p", "return": "n o p"}),
     r"no dimension of \[o p c\] is cut as b is: \[o p\]"),
])  # fmt: skip
def test_what_cannot_be_a_pattern_is_said_when_it_is_made(make, words):
    with pytest.raises(fxprune.PatternError, match=words):
        make()


def test_a_parameter_that_the_layer_has_not_is_said_when_it_is_used():
    wrong = fxprune.pattern(Gated, layout={"x": "n in h w", "weight": "out in", "return": "n out"})
    with pytest.raises(fxprune.PatternError, match=r"'weight', which 2 \(Gated\) has not"):
        fxprune.plan(gated_net(), image().float(), patterns=[wrong])


def test_a_layout_that_does_not_fit_leaves_the_layer_whole_and_says_so():
    wrong = fxprune.pattern(Gated, layout={"x": "n in h", "return": "n out"})
    plan = fxprune.plan(gated_net(), image().float(), patterns=[wrong])
    assert "layout 'n in h' of x does not fit" in dict(plan.skipped)["0"]


def test_a_pattern_can_be_for_some_modules_only():
    made = fxprune.pattern(Mine, layout=LAYOUT, only=lambda m: m.good)
    model = net(Mine())
    for good in (True, False):
        model[1].good = good
        assert width(model, patterns=[made]) == (4 if good else 8)


def test_a_rule_that_raises_is_named():
    def rule(a, call):
        raise ZeroDivisionError("oh")

    made = fxprune.pattern(Mine, rule=rule)
    with pytest.raises(fxprune.PatternError, match=r"ZeroDivisionError: oh.*Mine .*test_registry"):
        width(net(Mine()), patterns=[made])


def test_a_pattern_that_is_wrong_fails_the_proof_which_names_it():
    made = fxprune.pattern(Different, layout=LAYOUT)
    with pytest.raises(fxprune.ProofError, match=r"rests on patterns.*Different.*test_registry"):
        fxprune.prune(net(Different()), torch.randn(2, 6, dtype=torch.float64), patterns=[made])


def test_the_command_line_lists_what_is_known(capsys):
    with fxprune.patterns(GATED), pytest.raises(SystemExit, match=r"^0$"):
        main(["patterns"])
    text = capsys.readouterr().out
    assert "Gated" in text and "Conv2d" in text and "x[n in" in text
    with pytest.raises(SystemExit, match=r"^0$"):
        main(["patterns", "embedding"])
    assert "Conv2d" not in capsys.readouterr().out


def test_importing_fxprune_does_not_import_what_takes_long():
    code = "import sys, fxprune; print([m for m in ('scipy', 'rich', 'sympy') if m in sys.modules])"
    code = "import torch, sys; before = set(sys.modules); " + code.replace(
        "in sys.modules", "in set(sys.modules) - before"
    )
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert run.stdout.strip() == "[]"
