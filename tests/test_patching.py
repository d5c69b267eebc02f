"""Sizes that are wrong are replaced in the model's own source, and all else that its code does
stays: branches, flags, modes, random numbers, effects on other objects."""

from __future__ import annotations

import copy
import functools
import io
import math
import os
import pickle
import random
import traceback
import types

import einops
import pytest
import torch
from torch import nn
from torch.nn import functional as F

import fxprune
from fxprune.code import Code, Patched

from .oracle import awake, check, difference, run, zeroed_slices_equal_pruned


def images(n=2, size=8):
    generator = torch.Generator().manual_seed(n)
    return torch.randn(n, 3, size, size, dtype=torch.float64, generator=generator)


class Base(nn.Module):
    """Its head reads 9 places of 16 channels, by a literal."""

    def __init__(self):
        super().__init__()
        self.a, self.head = nn.Conv2d(3, 16, 3, padding=1), nn.Linear(144, 4)
        self.config = types.SimpleNamespace(twice=False)

    def features(self, x):
        return F.adaptive_avg_pool2d(F.softplus(self.a(x)), 3)

    def more(self, h):
        return h

    def forward(self, x):
        h = self.more(self.features(x))
        return self.head(h.view(-1, 144))


def pruned(model):
    """The plan, the masked and the pruned model. Removed channels say nothing: what they say may go
    by what the example had the code do."""
    check(model, images())
    plan = fxprune.plan(model, images(), bias="drop")
    assert isinstance(plan.code[""], Patched), plan.code
    return plan, plan.mask(model), plan.apply(model)


def test_only_the_number_is_another():
    plan, masked, small = pruned(Base())
    assert small.a.out_channels == 8
    assert plan.code[""].source.strip() == (
        "def forward(self, x):\n    h = self.more(self.features(x))\n"
        "    return self.head(h.view(-1, 72))"
    )
    for n in (1, 5):
        assert difference(run(masked, images(n, 11)), run(small, images(n, 11))) < 1e-9


FLAG = {"twice": False}
SEEN = []


class ByConfiguration(Base):
    def more(self, h):
        return h * 2 if self.config.twice else h


class ByClass(Base):
    twice = False

    def more(self, h):
        return h * 2 if self.twice else h


class ByGlobal(Base):
    def more(self, h):
        return h * 2 if FLAG["twice"] else h


class ByEnvironment(Base):
    def more(self, h):
        return h * 2 if os.environ.get("FXPRUNE_TEST_TWICE") else h


@pytest.mark.parametrize("kind", [ByConfiguration, ByClass, ByGlobal, ByEnvironment])
def test_what_the_code_goes_by_is_asked_as_it_runs(kind, monkeypatch):
    _, masked, small = pruned(kind())
    before = run(small, images())
    for model in (masked, small):
        model.config.twice = model.twice = True
    monkeypatch.setitem(FLAG, "twice", True)
    monkeypatch.setenv("FXPRUNE_TEST_TWICE", "1")
    assert difference(run(masked, images()), run(small, images())) < 1e-9
    assert difference(run(small, images()), before) > 0.1


def test_inputs_of_other_ranks_and_types_go_their_own_way():
    class Any(Base):
        def forward(self, x):
            single = x.dim() == 3
            x = x[None] if single else x
            x = x.double() / 255 if x.dtype == torch.uint8 else x
            y = self.head(self.features(x).view(-1, 144))
            return y[0] if single else y

    _, masked, small = pruned(Any())
    for x in (images()[0], (images().abs() * 50).to(torch.uint8)):
        assert difference(run(masked, x), run(small, x)) < 1e-9


def test_random_numbers_of_python_are_drawn_in_training():
    class Dropping(Base):
        def more(self, h):
            return h * 0 if self.training and random.random() < 0.5 else h

    _, masked, small = pruned(Dropping())
    for model in (masked.train(), small.train()):
        random.seed(0)
        outputs = {float(model(images()).sum()) for _ in range(20)}
        assert len(outputs) == 2


def test_effects_on_other_objects_go_on():
    class Noting(Base):
        def more(self, h):
            SEEN.append(h.shape[1])
            self.last = h.shape
            return h

    _, _, small = pruned(Noting())
    SEEN.clear()
    run(small, images())
    assert SEEN == [8] and small.last == (2, 8, 3, 3)


# -- sizes of every form ---------------------------------------------------------------------------


class Positions(Base):
    def forward(self, x):
        b, n = x.shape[0], 144
        h = self.features(x)
        return self.head(h.reshape(b * 16, 9).reshape(b, n))


class Slices(Base):
    def forward(self, x):
        h = self.features(x)
        low, high = h[:, :6], h[:, 6:16, ..., :]
        return self.head(torch.cat((low * 2, high), 1).flatten(1))


class Parts(Base):
    def forward(self, x):
        sizes = [4, 12]
        low, high = self.features(x).split(sizes, dim=1)
        first, second = torch.chunk(high, 2, 1)
        return self.head(torch.cat((low, second, first.sigmoid()), 1).flatten(1))


class Lines(Base):
    def forward(self, x):
        return self.head(
            self.features(x).reshape(
                -1,
                16 * 9,  # of all channels
            )
        )


class Scale(Base):
    def forward(self, x):
        h = self.features(x)
        return self.head((h / h.shape[1] ** 0.5).flatten(1))


class RestOfShape(Base):
    def forward(self, x):
        h = self.features(x)
        y = torch.zeros((h.shape[0], 16, *h.shape[2:]), dtype=h.dtype) + h
        return self.head(y.view(y.shape[0], 16, *y.shape[2:]).reshape(*y.shape[:1], 144))


class ScaleInPlace(Base):
    def forward(self, x):
        h = self.features(x).flatten(1)
        h *= 16**0.5 / (h.shape[1] // 9) ** 0.5
        return self.head(h)


class Attends(Base):
    """A default that goes by the width. (Removed channels of queries and keys have to say 0.)"""

    def __init__(self):
        super().__init__()
        self.a = nn.Conv2d(3, 16, 3, padding=1, bias=False)

    def forward(self, x):
        h = F.adaptive_avg_pool2d(torch.tanh(self.a(x)), 3).flatten(2).transpose(1, 2)
        h = F.scaled_dot_product_attention(h, h, h,)  # fmt: skip
        return self.head(h.transpose(1, 2).reshape(-1, 144))


class AttendsWithAComment(Attends):
    def forward(self, x):
        h = F.adaptive_avg_pool2d(torch.tanh(self.a(x)), 3).flatten(2).transpose(1, 2)
        h = F.scaled_dot_product_attention(
            h, h, h,
            dropout_p=0.0,  # none, in any mode
        )  # fmt: skip
        return self.head(h.transpose(1, 2).reshape(-1, 144))


class Twice(Base):
    def forward(self, x):
        for step in range(2):
            h = self.features(x + step).view(-1, 16, 9).view(-1, 144)
        return self.head(h)


@pytest.mark.parametrize("kind", [
    Positions, Slices, Parts, Lines, Scale, RestOfShape, ScaleInPlace, Attends, AttendsWithAComment,
    Twice])  # fmt: skip
def test_sizes_are_found_however_they_are_written(kind):
    _, masked, small = pruned(kind())
    assert small.a.out_channels == 8
    for n in (1, 3):
        assert difference(run(masked, images(n)), run(small, images(n))) < 1e-9


def test_a_module_that_runs_more_than_once_is_patched_once():
    class Block(nn.Module):
        def __init__(self):
            super().__init__()
            self.c = nn.Conv2d(8, 8, 3, padding=1)

        def forward(self, x):
            return self.c(x.view(-1, 8, 36).sigmoid().view(-1, 8, 6, 6))

    class Again(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.block, self.b = nn.Conv2d(3, 8, 1), Block(), nn.Conv2d(8, 2, 1)

        def forward(self, x):
            return self.b(self.block(self.block(self.a(x))))

    plan, small = check(Again(), images(2, 6))
    assert isinstance(plan.code["block"], Patched) and small.a.out_channels == 4


class Held(nn.Module):
    """Private names, a base class's method, a variable of a closure."""

    def __init__(self, scale):
        super().__init__()
        self.scale = scale

    def forward(self, x):
        return x * self.scale


def closing(factor):
    class Own(Held):
        def __init__(self):
            super().__init__(2.0)
            self.a, self.b = nn.Linear(3, 8), nn.Linear(8, 2)
            self.__offset = 0.5

        def forward(self, x):
            h = super().forward(self.a(x)) * factor + self.__offset
            return self.b(h.sigmoid().view(-1, 2, 4).flatten(1))

    return Own()


def test_private_names_bases_and_closures_are_those_of_the_class():
    x = images()[:, :, 0, 0].contiguous()
    plan, small = check(closing(3.0), x)
    assert isinstance(plan.code[""], Patched) and small.a.out_features == 4


# -- what the example did not come by --------------------------------------------------------------


class Branches(Base):
    wide = False

    def forward(self, x):
        h = self.features(x)
        if self.wide:
            return self.head(h.reshape(-1, 144)) * 2
        return self.head(h.view(-1, 144))


def test_a_size_in_a_branch_that_was_not_taken_is_an_error_when_it_is():
    _, _, small = pruned(Branches())
    small.wide = True
    with pytest.raises(fxprune.PruningError, match="left this part of its code out"):
        small(images())


def test_a_size_in_a_branch_of_training_mode_is_no_affair_of_the_source():
    class InTraining(Base):
        def forward(self, x):
            h = self.features(x)
            if self.training:
                return self.head(h.reshape(-1, 144)) * 2
            return self.head(h.view(-1, 144))

    plan, small = check(InTraining(), images(), shrinks=False)
    assert not isinstance(plan.code.get(""), Patched)
    assert small.train()(images()).shape == (2, 4)


def test_a_variable_that_holds_another_size_is_an_error():
    class Variable(Base):
        n = "small"

        def forward(self, x):
            width = {"small": 144, "large": 288}[self.n]
            return self.head(self.features(x).view(-1, width))

    _, _, small = pruned(Variable())
    small.n = "large"
    with pytest.raises(fxprune.PruningError, match="144, which is 72 now; it is 288 here"):
        small(images())


def helped(h, n):
    return h.view(-1, n)


def kept(method):
    def wrapped(self, x):
        return method(self, x)

    return wrapped


class InAFunction(Base):
    def forward(self, x):
        return self.head(helped(self.features(x), 144))


class Decorated(Base):
    @kept
    def forward(self, x):
        return self.head(self.features(x).view(-1, 144))


class InALambda(Base):
    forward = lambda self, x: self.head(self.features(x).view(-1, 144))  # noqa: E731


class TwoSizes(nn.Module):
    """The same place in the code is right for one width at a time."""

    def __init__(self):
        super().__init__()
        self.a, self.b, self.out = nn.Linear(3, 8), nn.Linear(3, 12), nn.Linear(20, 2)

    def forward(self, x):
        both = [h.view(-1, w) for h, w in ((self.a(x), 8), (self.b(x), 12))]
        return self.out(torch.cat(both, 1).sigmoid())


@pytest.mark.parametrize("kind", [InAFunction, Decorated, InALambda, TwoSizes])
def test_where_the_source_does_not_tell_the_graph_does(kind):
    x = images()[:, :, 0, 0].contiguous() if kind is TwoSizes else images()
    plan, small = check(kind(), x)
    assert isinstance(plan.code[""], Code)
    assert small.a.weight.shape[0] == plan._trace.model.a.weight.shape[0] // 2


def test_a_file_that_was_edited_since_is_not_read(tmp_path, monkeypatch):
    file = tmp_path / "edited.py"
    text = (
        "from torch import nn\n\nclass Net(nn.Module):\n    def __init__(self):\n"
        "        super().__init__()\n        self.a, self.b = nn.Linear(3, 8), nn.Linear(8, 2)\n"
        "    def forward(self, x):\n        return self.b(self.a(x).sigmoid().view(-1, 8))\n"
    )
    file.write_text(text)
    monkeypatch.syspath_prepend(tmp_path)
    import edited

    net = edited.Net()
    file.write_text(text.replace("sigmoid", "tanh"))
    plan = fxprune.plan(awake(net), images()[:, :, 0, 0])
    assert isinstance(plan.code[""], Code) and "sigmoid" in plan.code[""].source


# -- the result ------------------------------------------------------------------------------------


def test_it_is_copied_saved_and_pruned_again(tmp_path):
    model = awake(Base())
    small = fxprune.prune(model, images())
    file = io.BytesIO()
    torch.save(small, file)
    file.seek(0)
    fxprune.save(small, tmp_path / "small.safetensors")
    for each in (
        copy.deepcopy(small), pickle.loads(pickle.dumps(small)),
        torch.load(file, weights_only=False),
        fxprune.load(awake(Base()), tmp_path / "small.safetensors", example_input=images()),
    ):  # fmt: skip
        assert type(each).__name__ == "Base" and isinstance(each, Base)
        assert difference(run(each, images(3)), run(small, images(3))) == 0
    again = fxprune.prune(small, images())
    assert again.a.out_channels == 4 and type(again).__mro__[1] is Base
    assert (
        difference(run(again, images()), run(fxprune.plan(small, images()).mask(small), images()))
        < 1e-9
    )


class Two(Base):
    def __init__(self):
        super().__init__()
        self.mid, self.out = nn.Linear(144, 12), nn.Linear(12, 4)

    def middle(self, h):
        return self.mid(h.view(-1, 144)).sigmoid()

    def forward(self, x):
        return self.out(self.middle(self.features(x)).view(-1, 3, 4).flatten(1))


def test_patches_of_two_methods_add_up_over_two_prunings():
    first = fxprune.prune(awake(Two()), images(), ignore=["mid"])
    plan = fxprune.plan(first, images(), ignore=["a"])
    second = plan.apply(first)
    assert [name for name, _ in plan.code[""].methods] == ["forward", "middle"]
    assert second.a.out_channels == 8 and second.mid.out_features < 12
    assert difference(run(plan.mask(first), images()), run(second, images())) < 1e-9


class Checks(Base):
    def forward(self, x):
        if x.shape[-1] < 3 or x.shape[1] != 3:
            raise ValueError(x.shape)
        return self.head(self.features(x).view(-1, 144))


def test_it_is_exported_with_sizes_that_vary_and_scripted():
    small = fxprune.prune(awake(Checks()), images())
    size = torch.export.Dim("size", min=4, max=64)
    shapes = ({0: torch.export.Dim("n"), 2: size, 3: size},)
    program = torch.export.export(small, (images(2),), dynamic_shapes=shapes).module()
    assert difference(run(program, images(3, 12)), run(small, images(3, 12))) < 1e-9
    with pytest.raises(ValueError, match="3"):
        small(images(2, 2))


def test_errors_name_the_line_of_the_patched_source():
    small = fxprune.prune(awake(Base()), images())
    try:
        small.head.in_features, small.head.weight.data = 9, small.head.weight.data[:, :9]
        small(images())
    except RuntimeError as error:
        text = "".join(traceback.format_exception(error))
    assert "return self.head(h.view(-1, 72))" in text


class Nested(Base):
    def forward(self, x):
        low, high = (F.softplus(h.reshape(-1, 144)) for h in (self.features(x), -self.features(x)))
        again = [h.view(-1, 16, 9) for h in (low, high)]
        flat = lambda h: h.view(-1, 144)  # noqa: E731
        return self.head(flat(again[0]) + flat(again[1]))


def test_sizes_in_comprehensions_and_functions_inside_are_found():
    _, masked, small = pruned(Nested())
    for n in (1, 3):
        assert difference(run(masked, images(n)), run(small, images(n))) < 1e-9


class Child(Base):
    def more(self, h):
        return h.sigmoid()


def test_classes_that_share_a_method_are_patched_each_by_itself():
    class Both(nn.Module):
        def __init__(self):
            super().__init__()
            self.one, self.other = Base(), Child()

        def forward(self, x):
            return self.one(x) + self.other(x)

    plan, small = check(Both(), images())
    assert {path: type(code) for path, code in plan.code.items()} == {
        "one": Patched, "other": Patched,
    }  # fmt: skip
    assert small.one.a.out_channels == small.other.a.out_channels == 8
    assert isinstance(small.other, Child)


def outside(self, x):
    h = self.features(x)
    if self.config.twice:
        return self.head(h.reshape(-1, 144)) * 2
    return self.head(h.view(-1, 144))


def test_methods_go_by_the_name_that_the_class_gives_them():
    class Lent(Base):
        forward = outside

    plan, _, small = pruned(Lent())
    assert [name for name, _ in plan.code[""].methods] == ["forward"]
    small.config.twice = True
    with pytest.raises(fxprune.PruningError, match="left this part of its code out"):
        small(images())


# -- found by attack -------------------------------------------------------------------------------


class NamesItself(Base):
    factor = 0.5

    def more(self, h):
        """A method that names its class.

        And whose words are on several lines.
        """
        return h * NamesItself.factor if isinstance(self, NamesItself) else h

    def forward(self, x):
        """As above,

        the flattened features.
        """
        names = ["one", "two", "three"][1:]
        count = len(["a", "b", "c"]) + len(names)
        return self.head(self.more(self.features(x)).view(-1, 144)) * count


def test_code_names_its_class_and_takes_apart_what_is_no_tensor():
    plan, masked, small = pruned(NamesItself())
    assert NamesItself.factor == 0.5
    assert difference(run(masked, images(3)), run(small, images(3))) < 1e-9


class OtherPart(Base):
    """A part that the example leaves out, whose result is as wide as ever."""

    def __init__(self):
        super().__init__()
        self.b = nn.Conv2d(3, 16, 1)

    def forward(self, x, other=False):
        h = F.adaptive_avg_pool2d(self.b(x), 3) if other else self.features(x)
        return self.head(h.view(-1, 144))


def test_a_part_that_the_example_leaves_out_is_none_of_the_patched_sizes():
    plan, small = check(OtherPart(), images())
    assert isinstance(plan.code[""], Code)
    with pytest.raises(fxprune.PruningError, match="other=False"):
        small(images(), other=True)


def test_methods_that_users_call_are_patched_or_an_error():
    class Embeds(Base):
        def flat(self, x):
            return self.features(x).view(-1, 144)

        def embed(self, x):
            return self.features(x).reshape(-1, 144)

        def forward(self, x):
            return self.head(self.flat(x))

    _, masked, small = pruned(Embeds())
    assert small.flat(images()).shape == (2, 72)
    with pytest.raises(fxprune.PruningError, match="left this part of its code out"):
        small.embed(images())


def test_token_ids_are_no_channels_in_methods_that_the_run_did_not_come_by():
    class Generates(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.head, self.most = nn.Embedding(9, 8), nn.Linear(16, 9), 2

        def forward(self, ids):
            return self.head(self.a(ids).sigmoid().view(-1, 16))

        def generate(self, ids):
            for _ in range(3):
                following = self(ids[:, -self.most :]).argmax(1, keepdim=True)
                ids = torch.cat((ids, following), 1)
            return ids

    ids = torch.tensor([[1, 5], [7, 2]])
    plan, small = check(Generates(), ids)
    assert isinstance(plan.code[""], Patched) and small.a.embedding_dim == 4
    assert torch.equal(small.generate(ids), plan.mask(plan._trace.model).generate(ids))


def test_a_plan_is_no_plan_for_a_class_with_other_methods():
    class Doubling(Base):
        def forward(self, x):
            return self.head(self.features(x).view(-1, 144)) * 2

    plan = fxprune.plan(awake(Base()), images())
    with pytest.raises(fxprune.PlanError, match="forward of Doubling differ"):
        plan.apply(awake(Doubling()))


@pytest.mark.parametrize("kind", ["alias", "bound", "table", "super"])
def test_methods_that_other_names_lead_to_are_left_to_the_graph(kind):
    class Named(Base):
        def flat(self, h):
            return h.view(-1, 144)

        flatten = flat if kind == "alias" else None
        table = {"flat": flat} if kind == "table" else None

        def __init__(self):
            super().__init__()
            if kind == "bound":
                self.way = self.flat

        def forward(self, x):
            h = self.features(x)
            way = {"alias": self.flatten, "table": lambda h: self.table["flat"](self, h)}.get(kind)
            if kind == "bound":
                way = self.way
            return self.head(way(h) if way else self.flat(h))

    class Inherits(Named):
        def forward(self, x):
            h = self.features(x)
            return self.head(super().flat(h) if self.training else self.flat(h))

    plan, small = check(Inherits() if kind == "super" else Named(), images())
    assert not isinstance(plan.code.get(""), Patched)


def test_a_lambda_that_a_method_has_made_before_the_run_is_not_edited_there():
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b = nn.Linear(3, 16), nn.Linear(16, 4)
            self.setup(16)

        def setup(self, width):
            self.same = lambda t: t.view(-1, width)

        def forward(self, x):
            return self.b(self.same(torch.relu(self.a(x))))

    plan, small = check(Net(), torch.randn(4, 3, dtype=torch.float64))
    assert small.a.out_features == 8 and "view(-1, 8)" in plan.code[""].source


def repeat(rows, times):
    return torch.stack([rows] * times)


def test_a_function_that_is_called_like_a_method_of_tensors_is_none():
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.rows = nn.Parameter(torch.randn(4, 6))
            self.a, self.b = nn.Linear(6, 12), nn.Linear(12, 2)

        def forward(self, x):
            y = repeat(self.rows, x.shape[0]) + einops.repeat(self.rows, "n d -> b n d", b=2)
            return self.b(torch.sigmoid(self.a(y + x)).view(-1, 4, 12))

    plan, small = check(Net(), torch.randn(2, 4, 6, dtype=torch.float64))
    assert small.a.out_features == 6 and "untaken" not in plan.code[""].methods[0][1]


class Scaled(nn.Module):
    """Attention as it is often written: its scale is a root of the width, and what it keeps of the
    weights lets no forward be written from the graph."""

    def __init__(self, scaled):
        super().__init__()
        self.heads, self.d_k, self.scaled, self.weights = 4, 4, scaled, None
        self.q, self.k, self.v = nn.Linear(6, 16), nn.Linear(6, 16), nn.Linear(6, 16)
        self.o = nn.Linear(16, 3)

    def forward(self, x):
        b, n, _ = x.shape
        q, k, v = (f(x).view(b, n, self.heads, self.d_k).transpose(1, 2)
                   for f in (self.q, self.k, self.v))  # fmt: skip
        self.weights = self.scaled_(q @ k.transpose(-2, -1), q).softmax(-1)
        return self.o((self.weights @ v).transpose(1, 2).reshape(b, n, self.heads * self.d_k))

    def scaled_(self, scores, q):
        if self.scaled == "attribute":
            return scores / math.sqrt(self.d_k)
        if self.scaled == "size":
            return scores / math.sqrt(q.size(-1))
        if self.scaled == "variable":
            scale = 1.0 / math.sqrt(self.d_k)
            return scores * scale
        return scores / float(self.d_k)


@pytest.mark.parametrize("scaled", ["attribute", "size", "variable", "float"])
def test_a_scale_that_is_a_root_of_a_width_stays_what_it_was(scaled):
    torch.manual_seed(0)
    x = torch.randn(2, 5, 6, dtype=torch.float64)
    plan, small = check(Scaled(scaled), x, attention="head_dim")
    assert small.q.out_features == small.o.in_features == 8 and small.d_k == 2


class Squeezed(nn.Module):
    """Code that squeezes what has several channels, and may have a single one left."""

    def __init__(self, form):
        super().__init__()
        self.form = form
        self.a, self.b, self.c = nn.Conv2d(3, 4, 3), nn.Linear(4, 2), nn.Linear(2, 5)

    def forward(self, x):
        h = torch.sigmoid(self.a(x)).mean((2, 3), keepdim=True)
        if self.form == "all":
            h = h.squeeze()
        elif self.form == "one by one":
            h = h.squeeze(3).squeeze(dim=-1).squeeze(1)
        else:
            h = torch.squeeze(h, (1, 2, 3))
        return self.c(torch.sigmoid(self.b(h)).squeeze(-1))


@pytest.mark.parametrize("form", ["all", "one by one", "several"])
def test_a_single_channel_that_is_left_is_not_squeezed(form):
    plan, small = check(Squeezed(form), images(), sparsity=0.75)
    assert small.a.out_channels == small.b.out_features == 1
    assert isinstance(plan.code[""], Patched)
    assert small(images(3)).shape == (3, 5)
    plan, small = check(Squeezed(form), images(), sparsity={"a": 0.5})
    assert small.a.out_channels == 2 and not plan.code


TABLE = {}


class Tabled(nn.Module):
    """A method that the code calls by another way than its name."""

    def __init__(self, how):
        super().__init__()
        self.a, self.b, self.how = nn.Linear(3, 8), nn.Linear(8, 2), how
        decode = self.decode
        self.table = {
            "dict": {"x": decode}, "list": [decode], "namespace": types.SimpleNamespace(f=decode),
            "partial": functools.partial(decode),
            "unbound": {"x": Tabled.decode}, "global": None,
        }[how]  # fmt: skip

    def decode(self, h):
        return self.b(h.view(-1, 8))

    def forward(self, x):
        h, table = torch.sigmoid(self.a(x)), self.table
        if self.how in ("unbound", "global"):
            return (TABLE if table is None else table)["x"](self, h)
        if self.how in ("dict", "list"):
            return table["x" if self.how == "dict" else 0](h)
        return (table.f if self.how == "namespace" else table)(h)


TABLE["x"] = Tabled.decode


@pytest.mark.parametrize("how", [
    "dict", "list", "namespace", "partial", "unbound", "global"])  # fmt: skip
def test_methods_that_the_module_keeps_in_a_table_are_not_patched_there(how):
    plan, small = check(Tabled(how), torch.randn(5, 3, dtype=torch.float64))
    assert small.a.out_features == 4 and isinstance(plan.code[""], Code)


REGISTERED = {}


class Registered(nn.Module):
    def __init_subclass__(cls, *, tag, **more):
        super().__init_subclass__(**more)
        assert tag not in REGISTERED
        REGISTERED[tag] = cls


class Noted(type):
    def __init__(cls, name, bases, space, **more):
        super().__init__(name, bases, space, **more)
        REGISTERED[name] = cls


class OfRegistry(Registered, tag="of registry"):
    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(3, 8), nn.Linear(8, 2)

    def forward(self, x):
        return self.b(torch.sigmoid(self.a(x)).view(-1, 8))


class OfMetaclass(nn.Module, metaclass=Noted):
    forward = OfRegistry.forward

    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(3, 8), nn.Linear(8, 2)


@pytest.mark.parametrize("cls", [OfRegistry, OfMetaclass])
def test_registries_of_classes_do_not_hear_of_new_code(cls):
    before = dict(REGISTERED)
    plan, small = check(cls(), torch.randn(5, 3, dtype=torch.float64))
    assert small.a.out_features == 4 and type(small) is not cls and isinstance(small, cls)
    assert before == REGISTERED
    assert type(copy.deepcopy(small)) is type(pickle.loads(pickle.dumps(small))) is type(small)


class OnItsInput(nn.Module):
    """Attention whose sizes are made of the input's width, which nothing can change."""

    def __init__(self, normed):
        super().__init__()
        self.heads, self.normed, self.norm = 4, normed, nn.LayerNorm(16)
        self.qkv, self.out = nn.Linear(16, 48), nn.Linear(16, 16)

    def forward(self, x):
        b, t, width = x.size()
        q, k, v = self.qkv(self.norm(x) if self.normed else x).split(width, dim=2)
        q = q.view(b, t, self.heads, width // self.heads).transpose(1, 2)
        k = k.view(b, t, self.heads, width // self.heads).transpose(1, 2)
        v = v.view(b, t, self.heads, width // self.heads).transpose(1, 2)
        mixed = ((q @ k.mT).softmax(-1) @ v).transpose(1, 2)
        return x + self.out(mixed.reshape(b, t, width))


@pytest.mark.parametrize("sparsity", [0.25, 0.5])
@pytest.mark.parametrize("normed", [False, True])
def test_a_size_of_the_input_that_a_weight_reads_is_a_width_and_no_length(sparsity, normed):
    net = awake(nn.Sequential(OnItsInput(normed), OnItsInput(normed)))
    x = torch.randn(2, 5, 16).double()
    plan = fxprune.plan(net, x, sparsity=sparsity, bias="drop")
    small = plan.apply(net)
    assert small[0].heads == small[1].heads == 4 * (1 - sparsity)
    assert small[1].qkv.out_features == 48 * (1 - sparsity)
    for shape in ((2, 5, 16), (3, 9, 16)):
        other = torch.randn(shape).double()
        assert difference(run(plan.mask(net), other), run(small, other)) < 1e-9
    zeroed_slices_equal_pruned(plan, net, x)
