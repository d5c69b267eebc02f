"""check_pattern: what is right passes, and each planted mistake is found, with its channel."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import fxprune

from .test_user_patterns import (
    BILINEAR,
    BLOCKS,
    GATED,
    MAXOUT,
    Gated,
    Maxout,
    Squash,
    blocks_net,
    image,
    rows,
    scale_shift,
    space_to_depth,
)

LAYOUT = {
    "x": "n in h w", "kernels": "two in out a b", "gate_bias": "out", "value_bias": "out",
    "return": "n out h2 w2",
}  # fmt: skip
BIASES = ("gate_bias", "value_bias")


class Scaled(nn.Module):
    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.randn(8))

    def forward(self, x):
        return scale_shift(x, self.scale, 0.5)


class Squashed(Scaled):
    def forward(self, x):
        return Squash.apply(x, self.scale)


SCALE = {"x": "n c h w", "scale": "c", "return": "n c h w"}


@pytest.mark.parametrize("pattern, module, x", [
    (GATED, lambda: Gated(8, 12), image(8)),
    (MAXOUT, lambda: Maxout(8, 5, 3), rows(8)),
    (BILINEAR, lambda: nn.Bilinear(8, 4, 6), (rows(8), rows(4))),
    (BLOCKS, blocks_net, image()),
    (fxprune.pattern(scale_shift, layout=SCALE), Scaled, image(8)),
    (fxprune.pattern(Squash, layout={"x": "n c h w", "slope": "c", "return": "n c h w"}),
     Squashed, image(8)),
], ids=["module", "cut dimension", "two arguments", "run", "custom op", "autograd"])  # fmt: skip
def test_what_is_right_passes_with_every_claim(pattern, module, x):
    result = fxprune.check_pattern(pattern, module().double(), x)
    assert result and not result.wrong
    assert any("shrunk equals masked" in claim.text for claim in result.claims)


def mistakes(pattern, module, x):
    """The messages of the claims that are false."""
    with pytest.raises(fxprune.PatternError, match="is wrong"):
        fxprune.check_pattern(pattern, module.double(), x)
    result = fxprune.check_pattern(pattern, module.double(), x, raise_exception=False)
    assert not result and all(claim.error > 1e-3 for claim in result.wrong)
    return [claim.text for claim in result.wrong]


def test_a_wrong_dimension_is_found():
    layout = {**LAYOUT, "kernels": "two out in a b"}
    first = mistakes(fxprune.pattern(Gated, layout=layout, biases=BIASES), Gated(8, 8), image(8))[0]
    assert "kernels along what it makes (dimension 1): perturbing slice" in first
    assert "moved slice" in first and "by the pattern only slice" in first


def test_a_forgotten_bias_is_found_and_told_where_it_belongs():
    layout = {k: v for k, v in LAYOUT.items() if k != "value_bias"}
    first = mistakes(fxprune.pattern(Gated, layout=layout, biases=BIASES[:1]), Gated(8, 8),
                     image(8))[0]  # fmt: skip
    assert "value_bias is not in the pattern" in first
    assert "moves slice 1 of dimension 1 of the result only" in first


def test_a_wrong_index_map_is_found():
    def by_channel(a, call):
        x = call.channels()
        return a.reindex(call, x, 1, torch.arange(x.shape[1]).repeat_interleave(4))

    wrong = fxprune.pattern(("conv", space_to_depth, "conv"), steps={1: by_channel})
    found = mistakes(wrong, blocks_net(), image())
    assert "dimension 1 of x: perturbing slice" in found[0]
    assert any("channels inside cut by half: the shrunk layer differs" in text for text in found)


def test_a_wrong_constant_is_found():
    wrong = fxprune.pattern(Gated, layout=LAYOUT, biases=BIASES,
                            emits=lambda said: said["value_bias"])  # fmt: skip
    first = mistakes(wrong, Gated(8, 8), image(8))[0]
    assert "a removed channel" in first and "by the pattern it is" in first


def test_channels_that_are_read_by_other_slices_are_found():
    class Reversed(nn.Linear):
        def forward(self, input):
            return torch.from_numpy((input.flip(1) @ self.weight.T).detach().numpy()) + self.bias

    wrong = fxprune.pattern(
        Reversed, layout={"input": "n in", "weight": "out in", "bias": "out", "return": "n out"}
    )
    assert any("still moves the result" in text for text in mistakes(
        wrong, Reversed(8, 6), rows(8)))  # fmt: skip


def test_a_module_that_has_nothing_to_do_with_the_pattern_is_an_error():
    with pytest.raises(fxprune.PatternError, match="does not call what Gated is for"):
        fxprune.check_pattern(GATED, nn.Linear(3, 3), torch.ones(1, 3))
    with pytest.raises(fxprune.PatternError, match="is no Pattern"):
        fxprune.check_pattern(Gated, Gated(8, 8), image(8).float())


def test_the_module_is_left_as_it_was():
    layer = Gated(8, 8).double().train()
    before = {k: v.clone() for k, v in layer.state_dict().items()}
    fxprune.check_pattern(GATED, layer, image(8))
    assert layer.training and all(torch.equal(before[k], v) for k, v in layer.state_dict().items())


class Rolled(nn.Module):
    def __init__(self):
        super().__init__()
        self.gamma = nn.Parameter(torch.zeros(8))

    def forward(self, x):
        return x + self.gamma * x.roll(1, -1)


def test_a_scale_that_starts_at_zero_hides_nothing():
    wrong = fxprune.pattern(Rolled, layout={"x": "n c", "gamma": "c", "return": "n c"})
    assert "moved slice" in mistakes(wrong, Rolled(), rows(8))[0]


@pytest.mark.parametrize("layout, reason", [
    ({"input": "n t in", "weight": "out in", "return": "n t out"}, "does not fit its shape"),
    ({"input": "n in", "weight": "in out", "return": "n out"}, "the layout has in of 8"),
    ({"input": "n a", "weight": "b c", "return": "m d"}, "slices are mixed there"),
    ({"input": "n (in k)", "weight": "out in", "return": "n out"}, "does not fit its shape"),
], ids=["rank", "swapped", "nothing in common", "a cut without sizes"])  # fmt: skip
def test_a_pattern_by_which_nothing_can_go_is_no_right_one(layout, reason):
    layer = nn.Linear(8, 6, bias=False)
    made = fxprune.pattern(nn.Linear, layout=layout)
    assert any(reason in text for text in mistakes(made, layer, rows(8)))


def test_a_pattern_for_no_module_is_no_right_one():
    made = fxprune.pattern(Gated, layout=LAYOUT, only=lambda m: False)
    assert "does not hold for it as it is" in mistakes(made, Gated(8, 8), image(8))[0]


class Attending(nn.Module):
    def forward(self, q, k, v):
        scores = q @ k.transpose(1, 2) / q.shape[-1] ** 0.5
        return torch.from_numpy((scores.softmax(-1) @ v).detach().numpy())


def test_what_is_summed_over_by_two_arguments_is_cut_in_both():
    made = fxprune.pattern(
        Attending, layout={"q": "n t d", "k": "n s d", "v": "n s e", "return": "n t e"}
    )
    g = torch.Generator().manual_seed(0)
    q, k, v = torch.randn(3, 2, 5, 8, dtype=torch.float64, generator=g)
    found = mistakes(made, Attending(), (q, k, v))
    assert any("dimension 2 of q and dimension 2 of k" in text for text in found)


def test_attributes_that_are_not_so_before_anything_is_cut_are_found():
    wrong = fxprune.pattern(
        nn.Bilinear, biases=["bias"],
        layout={"input1": "n one", "input2": "n two", "weight": "out one two", "bias": "out",
                "return": "n out"},
        attributes={"in1_features": "two", "in2_features": "one"},
    )  # fmt: skip
    found = mistakes(wrong, nn.Bilinear(8, 4, 6), (rows(8), rows(4)))
    assert "in1_features is 8, by the pattern it is 4" in found[0]


class Dependent(nn.Module):
    """What a constant channel adds depends on another argument: no bias can add it."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(6, 8, 3, 3))
        self.bias = nn.Parameter(torch.randn(6))

    def forward(self, x, gate):
        return (
            torch.conv2d(torch.from_numpy((x * gate).detach().numpy()), self.weight)
            + (self.bias[:, None, None])
        )


@pytest.mark.parametrize("border", ["", "padding"])
def test_a_fold_that_is_none_is_found_whatever_the_border(border):
    wrong = fxprune.pattern(
        Dependent, border=border, biases=["bias"], folds={"weight": "bias"},
        layout={"x": "n in h w", "gate": "n one h3 w3", "weight": "out in a b", "bias": "out",
                "return": "n out h2 w2"},
    )  # fmt: skip
    found = mistakes(wrong, Dependent(), (image(8), image(1)))
    assert any(text.startswith("folds: what a constant in channel 0") for text in found)


def test_a_fold_that_is_right_away_from_the_border_is_right():
    class Padded(nn.Conv2d):
        def forward(self, input):
            return torch.conv2d(
                torch.from_numpy(input.detach().numpy()), self.weight, self.bias, padding=1
            )

    made = fxprune.pattern(
        Padded, border="padding", biases=["bias"], folds={"weight": "bias"},
        layout={"input": "n in h w", "weight": "out in a b", "bias": "out", "return": "n out h w2"},
    )  # fmt: skip
    wrong = fxprune.check_pattern(made, Padded(8, 6, 3).double(), image(8), raise_exception=False)
    assert not any("folds" in c.text for c in wrong.wrong)
    layout = {**{"input": "n in h w", "weight": "out in a b", "bias": "out"}, "return": "n out y x"}
    made = fxprune.pattern(
        Padded, border="padding", biases=["bias"], folds={"weight": "bias"}, layout=layout
    )
    assert fxprune.check_pattern(made, Padded(8, 6, 3).double(), image(8))


class Banded(nn.Module):
    """A grouped convolution of PyTorch through another library; ``twice`` with a second result."""

    def __init__(self, twice=False):
        super().__init__()
        self.weight, self.bias = nn.Parameter(torch.randn(6, 4, 3, 3)), nn.Parameter(torch.ones(6))
        self.twice = twice

    def forward(self, x):
        y = (
            torch.conv2d(
                torch.from_numpy(x.detach().numpy()), self.weight, None, padding=1, groups=2
            )
            + self.bias[:, None, None]
        )
        return (torch.arange(3), y.flip(3), y) if self.twice else y


BANDED = {"x": "n (g in) h w", "weight": "(g out) in a b", "bias": "(g out)"}


@pytest.mark.parametrize("size", [1, 3, 8], ids=["all border", "small", "large"])
def test_the_fold_of_a_grouped_layout_is_right_on_maps_of_any_size(size):
    made = fxprune.pattern(
        Banded, border="padding", biases=["bias"], folds={"weight": "bias"}, sizes={"g": 2},
        layout={**BANDED, "return": "n (g out) y x"},
    )  # fmt: skip
    x = torch.randn(2, 8, size, size, dtype=torch.float64)
    found = fxprune.check_pattern(made, Banded().double(), x)
    assert any("can go into bias" in c.text for c in found.claims)


def test_each_float_result_of_several_is_tried_and_no_other():
    layout = {**BANDED, "return": ["three", "n (g out) y x", "n (g out) y x"]}
    made = fxprune.pattern(Banded, border="padding", biases=["bias"], sizes={"g": 2}, layout=layout)
    x = torch.randn(2, 8, 5, 5, dtype=torch.float64)
    found = fxprune.check_pattern(made, Banded(twice=True).double(), x)
    for i in (0, 1):
        assert any(f"dimension 1 of result {i} cut by half" in c.text for c in found.claims)


def test_parametrized_layers_and_views_of_arguments_are_fine():
    class Viewing(nn.Linear):
        def forward(self, input):
            return (
                torch.from_numpy((input.view(-1, input.shape[1]) @ self.weight.T).detach().numpy())
                + self.bias
            )

    made = fxprune.pattern(
        Viewing, biases=["bias"],
        layout={"input": "n in", "weight": "out in", "bias": "out", "return": "n out"},
    )  # fmt: skip
    layer = nn.utils.parametrizations.weight_norm(Viewing(8, 6), "weight")
    assert fxprune.check_pattern(made, layer.double(), rows(8))


def test_empty_tensors_are_refused():
    with pytest.raises(fxprune.PatternError, match="an empty tensor"):
        fxprune.check_pattern(BILINEAR, nn.Bilinear(8, 4, 6).double(), (rows(8)[:0], rows(4)[:0]))


class LowRank(nn.Module):
    def __init__(self, bias=True):
        super().__init__()
        self.u, self.v = nn.Parameter(torch.randn(6, 3)), nn.Parameter(torch.randn(3, 8))
        self.bias = nn.Parameter(torch.randn(6)) if bias else None

    def forward(self, x):
        y = torch.from_numpy((x @ self.v.T @ self.u.T).detach().numpy())
        return y if self.bias is None else y + self.bias


LOW = {"x": "n in", "v": "r in", "u": "out r", "bias": "out", "return": "n out"}


def test_a_bias_that_another_weight_makes_takes_no_constants():
    made = fxprune.pattern(LowRank, layout=LOW, biases=["bias"])
    assert fxprune.check_pattern(made, LowRank().double(), rows(8))
    with pytest.raises(fxprune.PatternError, match="'out' is not one of v's"):
        fxprune.pattern(LowRank, layout=LOW, biases=["bias"], folds={"v": "bias"})


def test_a_bias_that_is_none_takes_nothing_and_is_no_mistake():
    class Plain(nn.Linear):
        def forward(self, input):
            y = torch.from_numpy((input @ self.weight.T).detach().numpy())
            return y if self.bias is None else y + self.bias

    made = fxprune.pattern(
        Plain, biases=["bias"], folds={"weight": "bias"},
        layout={"input": "n in", "weight": "out in", "bias": "out", "return": "n out"},
    )  # fmt: skip
    for bias in (True, False):
        assert fxprune.check_pattern(made, Plain(8, 6, bias=bias).double(), rows(8))
