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
