"""torchvision's own ops: regions of an image, and convolutions that are told where to look."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from .oracle import check
from .test_trace import Net

ops = pytest.importorskip("torchvision.ops")
pytestmark = pytest.mark.filterwarnings("ignore::fxprune.PruningWarning")

BOXES = torch.tensor(
    [[0, 0.5, 1.0, 6.0, 7.0], [1, -2.0, -1.0, 4.0, 12.0], [0, 3.0, 2.0, 3.5, 8.0]],
    dtype=torch.float64,
)
X = torch.linspace(-2, 2, 2 * 3 * 9 * 9, dtype=torch.float64).sin().reshape(2, 3, 9, 9) * 2


@pytest.mark.parametrize("op", ["roi_align", "roi_pool"])
def test_channels_pass_through_regions(op):
    torch.manual_seed(0)

    def forward(s, x):
        return s.b(getattr(ops, op)(s.a(x).sigmoid(), BOXES, 3))

    net = Net(forward, a=nn.Conv2d(3, 8, 3, padding=1), b=nn.Conv2d(8, 4, 3)).double()
    _, small = check(net, X)
    assert small.a.out_channels == small.b.in_channels == 4


class Deformed(nn.Module):
    def __init__(self, *, mask: bool, groups: int, parts: int, padding: int) -> None:
        super().__init__()
        self.a = nn.Conv2d(3, 8, 3, padding=1)
        self.offset = nn.Conv2d(8, 2 * 9 * parts, 3, padding=padding)
        self.mask = nn.Conv2d(8, 9 * parts, 3, padding=padding) if mask else None
        self.b = ops.DeformConv2d(8, 12, 3, padding=padding, groups=groups)
        self.norm, self.c = nn.BatchNorm2d(12), nn.Conv2d(12, 4, 1)

    def forward(self, x):
        y = self.a(x).sigmoid()
        mask = None if self.mask is None else self.mask(y).sigmoid()
        return self.c(self.norm(self.b(y, self.offset(y), mask)).sigmoid())


@pytest.mark.parametrize("padding", [0, 1])
@pytest.mark.parametrize("mask", [False, True])
@pytest.mark.parametrize(("groups", "parts"), [(1, 1), (2, 1), (4, 1), (1, 2)])
def test_deformable_convolutions_shrink_and_say_where_not_to_look(groups, parts, mask, padding):
    torch.manual_seed(0)
    net = Deformed(mask=mask, groups=groups, parts=parts, padding=padding).double()
    plan, small = check(net, X)
    assert "where to look" in dict(plan.skipped)["offset"]
    assert small.a.out_channels == small.b.in_channels == (8 if parts > 1 else 4)
    assert small.b.out_channels == (8 if groups == 4 else 6)
