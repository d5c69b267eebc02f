"""Networks of tests: drawn by hypothesis for the property tests, and one with a check."""

from __future__ import annotations

import torch
from hypothesis import strategies as st
from torch import nn
from torch.nn import functional as F

# Most are not 0 at 0: what a removed channel emits then depends on every step it goes through.
ACTIVATIONS = {
    "sigmoid": torch.sigmoid, "softplus": F.softplus, "gelu": F.gelu, "relu": torch.relu,
    "cos": torch.cos, "elu1": lambda t: F.elu(t) + 1, "hardswish": F.hardswish,
    "shifted": lambda t: torch.tanh(t - 0.5),
}  # fmt: skip


class Block(nn.Module):
    """One drawn step on a map of ``channels``."""

    out: int

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.channels = self.out = channels


class ConvAct(Block):
    def __init__(self, channels, out, kernel, padding, bias, act, groups=1):
        super().__init__(channels)
        self.conv = nn.Conv2d(channels, out, kernel, padding=padding, bias=bias, groups=groups)
        self.act, self.out = ACTIVATIONS[act], out

    def forward(self, x):
        return self.act(self.conv(x))


class Norm(Block):
    def __init__(self, channels, kind, act):
        super().__init__(channels)
        self.norm = {
            "batch": lambda: nn.BatchNorm2d(channels),
            "plain batch": lambda: nn.BatchNorm2d(channels, affine=False),
            "instance": lambda: nn.InstanceNorm2d(channels, affine=True),
            "group": lambda: nn.GroupNorm(2 if channels % 2 == 0 else 1, channels),
            "prelu": lambda: nn.PReLU(channels),
        }[kind]()
        self.act = ACTIVATIONS[act]

    def forward(self, x):
        return self.act(self.norm(x))


class LayerNorm(Block):
    def __init__(self, channels, affine):
        super().__init__(channels)
        self.norm = nn.LayerNorm(channels, elementwise_affine=affine)

    def forward(self, x):
        return self.norm(x.permute(0, 2, 3, 1)).permute(0, 3, 1, 2)


class Pool(Block):
    def __init__(self, channels, kind):
        super().__init__(channels)
        self.kind = kind

    def forward(self, x):
        if self.kind == "max":
            return F.max_pool2d(x, 2, 1, padding=1)
        if self.kind == "average":
            return F.avg_pool2d(x, 3, 1, padding=1)
        return F.interpolate(F.adaptive_avg_pool2d(x, 3), size=(4, 4))


class Residual(Block):
    def __init__(self, channels, inner, act):
        super().__init__(channels)
        self.a, self.b = nn.Conv2d(channels, inner, 3, padding=1), nn.Conv2d(inner, channels, 1)
        self.act = ACTIVATIONS[act]

    def forward(self, x):
        return self.act(x + self.b(self.act(self.a(x))))


class Branches(Block):
    """Two branches, put together again by cat or stack."""

    def __init__(self, channels, inner, act, how):
        super().__init__(channels)
        self.a, self.b = nn.Conv2d(channels, inner, 1), nn.Conv2d(channels, inner, 3, padding=1)
        self.act, self.how, self.out = ACTIVATIONS[act], how, 2 * inner

    def forward(self, x):
        a, b = self.act(self.a(x)), self.b(x)
        if self.how == "stack":
            return torch.stack([a, b], 1).flatten(1, 2)
        return torch.cat([a, b], 1)


class Halves(Block):
    """Chunk in two: one half goes through a convolution, or the halves gate each other."""

    def __init__(self, channels, act, how):
        super().__init__(channels)
        half = channels // 2
        self.conv = nn.Conv2d(half, half, 3, padding=1)
        self.act, self.how = ACTIVATIONS[act], how
        self.out = channels if how == "cat" else half

    def forward(self, x):
        a, b = x.chunk(2, 1)
        if self.how == "gate":
            return a * self.act(b)
        if self.how == "glu":
            return F.glu(x, 1)
        return torch.cat([a, self.act(self.conv(b))], 1)


class Shuffle(Block):
    def forward(self, x):
        b, c, h, w = x.shape
        return x.view(b, 2, c // 2, h, w).transpose(1, 2).reshape(b, c, h, w)


class Excite(Block):
    def __init__(self, channels, inner, act):
        super().__init__(channels)
        self.down, self.up = nn.Linear(channels, inner), nn.Conv2d(inner, channels, 1)
        self.act = ACTIVATIONS[act]

    def forward(self, x):
        s = self.act(self.down(x.mean((2, 3))))
        return x * torch.sigmoid(self.up(s[:, :, None, None]))


class Scale(Block):
    def __init__(self, channels):
        super().__init__(channels)
        self.gamma = nn.Parameter(torch.rand(channels, 1, 1) + 0.5)
        self.shift = nn.Parameter(torch.rand(1, channels, 1, 1))

    def forward(self, x):
        return x * self.gamma + self.shift


class Network(nn.Module):
    def __init__(self, stem, blocks, head, outputs):
        super().__init__()
        self.stem, self.blocks, self.head = stem, nn.ModuleList(blocks), head
        channels = blocks[-1].out if blocks else stem.out
        self.out = (
            nn.Linear(channels * (16 if head == "flatten" else 1), outputs)
            if head != "conv"
            else nn.Conv2d(channels, outputs, 3, padding=1)
        )

    def forward(self, x):
        x = self.stem(x)
        for block in self.blocks:
            x = block(x)
        x = F.adaptive_max_pool2d(x, 4)
        if self.head == "flatten":
            x = x.flatten(1)
        elif self.head == "mean":
            x = x.mean((2, 3))
        return self.out(x)


@st.composite
def networks(draw, norms_over_channels: bool = False):
    """A network; with ``norms_over_channels``, layer and group norms are among its blocks."""
    act = st.sampled_from(sorted(ACTIVATIONS))
    width = st.sampled_from([2, 4, 6, 8])
    torch.manual_seed(draw(st.integers(0, 2**16)))
    channels = draw(width)
    stem = ConvAct(3, channels, 3, 1, draw(st.booleans()), draw(act))
    blocks: list[Block] = []
    norms = ["batch", "plain batch", "instance", "prelu"]
    kinds = ["conv", "depthwise", "grouped", "norm", "pool", "residual", "branches", "halves",
             "shuffle", "excite", "scale"]  # fmt: skip
    if norms_over_channels:
        norms.append("group")
        kinds.append("layer norm")
    for _ in range(draw(st.integers(0, 5))):
        kind = draw(st.sampled_from(kinds))
        even = channels % 2 == 0
        if kind == "conv":
            kernel, padding = draw(st.sampled_from([(1, 0), (1, 1), (3, 1), (3, 2)]))
            block: Block = ConvAct(
                channels, draw(width), kernel, padding, draw(st.booleans()), draw(act)
            )
        elif kind == "depthwise":
            block = ConvAct(
                channels,
                channels * draw(st.integers(1, 2)),
                3,
                1,
                draw(st.booleans()),
                draw(act),
                channels,
            )
        elif kind == "grouped" and even:
            block = ConvAct(
                channels, draw(width), 3, draw(st.integers(1, 2)), draw(st.booleans()), draw(act), 2
            )
        elif kind == "norm":
            block = Norm(channels, draw(st.sampled_from(norms)), draw(act))
        elif kind == "layer norm":
            block = LayerNorm(channels, draw(st.booleans()))
        elif kind == "pool":
            block = Pool(channels, draw(st.sampled_from(["max", "average", "adaptive"])))
        elif kind == "residual":
            block = Residual(channels, draw(width), draw(act))
        elif kind == "branches":
            block = Branches(
                channels, draw(width), draw(act), draw(st.sampled_from(["cat", "stack"]))
            )
        elif kind == "halves" and even:
            block = Halves(channels, draw(act), draw(st.sampled_from(["cat", "gate", "glu"])))
        elif kind == "shuffle" and even:
            block = Shuffle(channels)
        elif kind == "excite":
            block = Excite(channels, draw(width), draw(act))
        else:
            block = Scale(channels)
        blocks.append(block)
        channels = block.out
    head = draw(st.sampled_from(["flatten", "mean", "conv"]))
    return Network(stem, blocks, head, draw(st.integers(1, 4)))


@st.composite
def settings_of_a_plan(draw):
    return {
        "sparsity": draw(st.sampled_from([0.1, 0.3, 0.5, 0.7, 0.9])),
        "importance": draw(st.sampled_from(["l1", "l2", "random", "fpgm", "lamp"])),
        "scope": draw(st.sampled_from(["local", "local", "global", "isomorphic"])),
        "round_to": draw(st.sampled_from([1, 1, 2])),
    }


class Conditioned(nn.Module):
    """A layer that the input leaves out, and code that only checks how long it is.

    It stands here and not in its test: pytest writes the assertions of test modules anew.
    """

    def __init__(self, how):
        super().__init__()
        self.a, self.given, self.b, self.how = (
            nn.Linear(4, 16),
            nn.Linear(4, 16),
            nn.Linear(16, 3),
            how,
        )

    def forward(self, x, more=None):
        if self.how == "assert":
            assert x.shape[1] <= 16
        elif self.how == "raise":
            if x.shape[1] > 16:
                raise ValueError("too long")
        else:
            x = x / int(x.shape[1] ** 0.5)
        h = self.a(x)
        if more is not None:
            h = h + self.given(more)
        return self.b(torch.sigmoid(h))
