"""Numbers that code makes of lengths of the input, alone or together with widths: at lengths that
were not recorded, the pruned model computes what the masked one does, or says that it cannot."""

from __future__ import annotations

import enum
import functools
import math
from typing import ClassVar

import numpy as np
import pytest
import torch
from torch import nn

import fxprune
from fxprune.code import Code, Patched
from fxprune.proving.proof import prove
from fxprune.tracing.runs import OtherRuns

from .oracle import awake, difference, run


class Times(enum.IntEnum):
    EIGHT = 8


def sequences(batch, length):
    generator = torch.Generator().manual_seed(length)
    return torch.randn(batch, length, 7, dtype=torch.float64, generator=generator)


def hidden(method):
    """No source of it is patched: new code comes from the graph."""

    @functools.wraps(method)
    def decorated(self, x):
        return method(self, x)

    return decorated


class Base(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b, self.shape = nn.Linear(7, 8), nn.Linear(8, 5), (-1, 8, 1)
        self.rate = 0.25

    def halves(self, x):
        """A literal of the width, so that the code has to change."""
        h = torch.sigmoid(self.a(x))
        return h.view(x.shape[0], x.shape[1], 2, 4).transpose(2, 3).flatten(2)


def pruned(forward, *, by_graph=False):
    methods = {"forward": forward}
    if by_graph:
        methods = {"forward": hidden(forward), "halves": hidden(Base.halves)}
    model = awake(type("Net", (Base,), methods)())
    plan = fxprune.plan(model, sequences(2, 6), sparsity=0.5)
    return plan, plan.mask(model), plan.apply(model)


LENGTHS = {
    "a float over it": lambda s, x: s.halves(x).sum(1) * (1.0 / x.shape[1]),
    "a part of it": lambda s, x: s.halves(x)[:, : int(0.5 * x.shape[1])].sum(1),
    "a logarithm over it": lambda s, x: s.halves(x).sum(1) * (-math.log(1e4) / x.shape[1]),
    "an attribute over it": lambda s, x: s.halves(x).sum(1) * (s.rate / x.shape[1]),
    "a part of a turn": lambda s, x: s.halves(x).sum(1) * (2 * math.pi / x.shape[1]),
    "less a float": lambda s, x: s.halves(x).sum(1) / (7.5 - x.shape[1]),
    "a comparison": lambda s, x: s.halves(x).sum(1) * (2.0 if 3.5 < x.shape[1] else 1.0),  # noqa: SIM300
    "rounded to digits": lambda s, x: s.halves(x).sum(1) * round(x.shape[1] / 7, 2),
    "a quotient and a rest": lambda s, x: s.halves(x).sum(1) * divmod(9.5, x.shape[1])[1],
    "an enumeration": lambda s, x: s.halves(x).sum(1) / (x.shape[1] * Times.EIGHT),
    "a flag": lambda s, x: s.halves(x).sum(1) / (x.shape[1] + True),
    "a number of numpy's": lambda s, x: s.halves(x).sum(1) / (x.shape[1] + np.int64(8)),
    "in a function inside": lambda s, x: (lambda n: s.halves(x).sum(1) * (0.5 * n))(x.shape[1]),
}


@pytest.mark.parametrize("source", ["patched", "from the graph"])
@pytest.mark.parametrize("case", LENGTHS)
def test_a_number_made_of_a_length_is_made_of_other_lengths(case, source):
    compute = LENGTHS[case]

    def forward(self, x):
        return self.b(compute(self, x))

    plan, masked, small = pruned(forward, by_graph=source == "from the graph")
    if (source, case) == ("from the graph", "a part of it"):  # an int does not know what it was
        assert "goes by int(3.0), and inputs may have others" in dict(plan.skipped)["a"]
        return
    assert small.a.out_features == 4
    assert isinstance(plan.code[""], Patched if source == "patched" else Code)
    for x in (sequences(2, 6), sequences(3, 4), sequences(1, 9)):
        try:
            found = run(small, x)
        except fxprune.PruningError as error:  # it goes another way there
            assert case == "a comparison" or "goes by" in str(error)
        else:
            assert difference(run(masked, x), found) < 1e-9


MIXED = {
    "root of a product": lambda s, h: s.b(h) * (h.shape[1] * h.shape[2]) ** -0.5,
    "sum": lambda s, h: s.b(h) / (h.shape[1] + h.shape[2]),
    "difference": lambda s, h: s.b(h) / (h.shape[2] - 2 * h.shape[1]),
    "negative": lambda s, h: s.b(h) / -(h.shape[1] * h.shape[2]),
    "product in a quotient": lambda s, h: s.b(h) / (h.shape[1] * h.shape[2]),
    "product of a variable": lambda s, h: (lambda n: s.b(h) / n)(h.shape[1] * h.shape[2]),
    "longer than wide": lambda s, h: s.b(h) * (2.0 if h.shape[1] > h.shape[2] else 1.0),
    "the larger": lambda s, h: s.b(h) / max(h.shape[1], h.shape[2]),
}


@pytest.mark.parametrize("case", MIXED)
def test_a_number_made_of_a_width_and_a_length_is_made_of_the_old_width(case):
    compute = MIXED[case]

    def forward(self, x):
        return compute(self, torch.sigmoid(self.a(x)))

    plan, masked, small = pruned(forward)
    assert small.a.out_features == 4
    for x in (sequences(2, 6), sequences(3, 4), sequences(1, 9), sequences(1, 7)):
        try:
            found = run(small, x)
        except fxprune.PruningError as error:
            assert case in ("longer than wide", "the larger") and "was" in str(error)
        else:
            assert difference(run(masked, x), found) < 1e-9


def divided(self, x):
    h = torch.sigmoid(self.a(x))
    n = h.shape[1] * h.shape[2]
    return self.b(h) * 100 / n


def by_power(self, x):
    h = torch.sigmoid(self.a(x))
    return self.b(h).abs() ** (h.shape[1] * h.shape[2]) ** 0.5


@pytest.mark.parametrize("forward", [divided, by_power])
def test_a_factor_stands_with_its_size_wherever_that_stands(forward):
    plan, masked, small = pruned(forward)
    for x in (sequences(2, 6), sequences(3, 9)):
        assert difference(run(masked, x), run(small, x)) < 1e-9


def held(self, x):
    return self.b(torch.sigmoid(self.a(x.mean(1))).view(self.shape).squeeze(-1))


def variable(self, x):
    h = torch.sigmoid(self.a(x.mean(1)))
    shape = (-1, 8)
    return self.b(h * x.sum((1, 2))[:, None].expand(shape))


@pytest.mark.parametrize("forward", [held, variable])
def test_what_an_op_works_out_by_itself_is_left_to_it(forward):
    plan, masked, small = pruned(forward)
    assert small.a.out_features == 4 and (forward is variable or small.shape == (-1, 4, 1))
    for x in (sequences(2, 6), sequences(1, 6), sequences(5, 3)):
        assert difference(run(masked, x), run(small, x)) < 1e-9


@pytest.mark.parametrize("take_apart", [
    lambda h: h.flatten(1).split(8, 1), lambda h: h.flatten(1).chunk(h.shape[1], 1),
    lambda h: h.split(1, 1),
], ids=["split", "chunk", "steps"])  # fmt: skip
def test_as_many_parts_as_a_sequence_has_steps_are_expected(take_apart):
    def forward(self, x):
        return self.b(torch.stack([t.flatten(1) for t in take_apart(self.halves(x))], 1))

    plan, masked, small = pruned(forward, by_graph=True)
    assert small.a.out_features == 4
    x = sequences(3, 6)
    assert difference(run(masked, x), run(small, x)) < 1e-9
    with pytest.raises(fxprune.PruningError, match="was 6; it is 9 now"):
        small(sequences(3, 9))


def test_a_scale_of_a_width_behind_a_float_stays_what_it_was():
    class Heads(nn.Module):
        def __init__(self):
            super().__init__()
            self.each, self.qkv, self.o = 8, nn.Linear(7, 48), nn.Linear(16, 5)

        def forward(self, x):
            b, t, _ = x.shape
            q, k, v = self.qkv(x).view(b, t, 3, 2, self.each).permute(2, 0, 3, 1, 4)
            scores = q @ k.mT * (1.0 / self.each)
            return self.o((scores.softmax(-1) @ v).transpose(1, 2).reshape(b, t, -1))

    model = awake(Heads())
    plan = fxprune.plan(model, sequences(2, 6), attention="head_dim")
    small = plan.apply(model)
    assert small.qkv.out_features == 24
    for x in (sequences(2, 6), sequences(3, 9)):
        assert difference(run(plan.mask(model), x), run(small, x)) < 1e-9


def test_code_is_as_it_was_once_a_run_is_recorded():
    def forward(self, x):
        return self.b(torch.sigmoid(self.a(x)) * (0.5 / x.shape[1]))

    code = forward.__code__
    plan, masked, small = pruned(forward)
    assert forward.__code__ is code and type(code.co_consts[1]) is float


def test_an_index_of_what_is_written_to_is_patched():
    def forward(self, x):
        h = torch.sigmoid(self.a(x))
        y = torch.zeros_like(h)
        y[..., :4] = h[..., :4].tanh()
        y[..., 4:] = h[..., 4:]
        y[..., :4] += 1.0
        return self.b(y)

    plan, masked, small = pruned(forward)
    assert small.a.out_features == 4 and isinstance(plan.code[""], Patched)
    assert difference(run(masked, sequences(3, 9)), run(small, sequences(3, 9))) < 1e-9


def test_code_that_goes_on_after_an_error_stays_whole():
    def forward(self, x):
        h = torch.sigmoid(self.a(x.mean(1)))
        try:
            h = h.view(-1, 9)
        except RuntimeError:
            h = h.view(-1, 8)
        return self.b(h)

    plan, masked, small = pruned(forward)
    assert small.a.out_features == 8
    assert "goes on after a call that failed" in dict(plan.skipped)["a"]


TABLE = [1 / (i + 1) for i in range(30)]
UNSEEN = {
    "an index of a list": lambda s, x: s.b(s.halves(x).sum(1)) * TABLE[x.shape[1]],
    "a flag before it": lambda s, x: s.b(s.halves(x).sum(1)) / (True + x.shape[1]),
    "an enumeration before it": lambda s, x: s.b(s.halves(x).sum(1)) / (Times.EIGHT * x.shape[1]),
    "a list as long": lambda s, x: s.b(s.halves(x).sum(1)) * len([0] * x.shape[1]),
    "text": lambda s, x: s.b(s.halves(x).sum(1)) * float("%d" % x.shape[1]),  # noqa: UP031
    "formatted text": lambda s, x: s.b(s.halves(x).sum(1)) * float(f"{x.shape[1]}"),
    "an array of numpy's": lambda s, x: s.b(s.halves(x).sum(1)) * np.linspace(0, 1, x.shape[1])[1],
    "a tensor": lambda s, x: s.b(s.halves(x).sum(1)) * torch.tensor(TABLE[x.shape[1]]),
    "the batch": lambda s, x: s.b(s.halves(x).sum(1)) * TABLE[len(x)],
}


@pytest.mark.parametrize("source", ["patched", "from the graph"])
@pytest.mark.parametrize("case", UNSEEN)
def test_a_number_that_python_makes_of_a_length_unseen_is_right_or_refused(case, source):
    def forward(self, x):
        return UNSEEN[case](self, x)

    plan, masked, small = pruned(forward, by_graph=source == "from the graph")
    if source == "patched":
        assert small.a.out_features == 4
    elif small.a.out_features == 8:
        assert "in a way that no recording sees: at other" in dict(plan.skipped)["a"]
    for x in (sequences(2, 6), sequences(3, 4), sequences(1, 9)):
        try:
            found = run(small, x)
        except fxprune.PruningError as error:
            assert "this code was written from a run in which" in str(error)
            assert case == "formatted text"
        else:
            assert difference(run(masked, x), found) < 1e-9


@pytest.mark.parametrize("case", UNSEEN)
def test_a_graph_asks_for_the_lengths_that_a_number_is_made_of_unseen(case):
    def forward(self, given):
        return UNSEEN[case](self, given["x"])

    methods = {"forward": forward, "halves": lambda self, x: torch.sigmoid(self.a(x))}
    model = awake(type("Net", (Base,), methods)())
    graph = fxprune.trace(model, ({"x": sequences(2, 6)},))
    for x in (sequences(2, 6), sequences(3, 6), sequences(2, 9)):
        counts = x.shape[0] if case == "the batch" else x.shape[1]
        if counts in (2, 6):
            assert difference(run(model, ({"x": x},)), run(graph, ({"x": x},))) < 1e-9
        else:
            with pytest.raises(fxprune.PruningError, match=rf"shape\[.\] was .; it is {counts}"):
                run(graph, ({"x": x},))


@pytest.mark.parametrize("wrong", [lambda y, x: y * len(x), lambda y, x: y[6]])
def test_the_proof_looks_at_another_batch_where_code_is_new(wrong):
    def forward(self, x):
        return self.b(self.halves(x))

    model = awake(type("Net", (Base,), {"forward": forward})())
    plan = fxprune.plan(model, sequences(6, 6))
    small = plan.apply(model)
    assert plan.code and prove(plan, model, small, sequences(6, 6)) < 1e-9
    right = type(small).forward
    type(small).forward = lambda self, x: (
        wrong(right(self, x), x) if len(x) != 6 else right(self, x)
    )
    with pytest.raises(fxprune.ProofError, match="on another batch than that of the example"):
        prove(plan, model, small, sequences(6, 6))


@pytest.mark.parametrize("halves", [
    lambda self, x: torch.sigmoid(self.a(x)).view(2, 8, -1).flatten(1).view(-1, 6, 8),  # its batch
    lambda self, x: (h := torch.sigmoid(self.a(x)).view(-1, 6, 2, 4).flatten(2)) - h.mean(0),
])  # fmt: skip
def test_a_batch_that_makes_another_result_of_a_sample_proves_nothing(halves):
    def forward(self, x):
        return self.b(halves(self, x))

    model = awake(type("Net", (Base,), {"forward": forward})())
    fxprune.prune(model, sequences(2, 6))


class Noted(nn.Linear):
    """Notes on what it runs."""

    ran: ClassVar[list] = []

    def forward(self, x):
        self.ran.append(tuple(x.shape))
        return super().forward(x)


def test_a_length_that_the_model_does_not_take_is_tried_once():
    found = OtherRuns(Noted(7, 8).double(), sequences(2, 3)).lengths
    assert Noted.ran == [(4, 3, 7), (2, 6, 7), (2, 3, 14)]
    assert len(found) == 2
