"""Small networks, each around one construct of people's code that pruners stumble over.

Every network is a function over named layers; all layers but the last may lose half of their
channels.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

Forward = Callable[..., Any]
C = 16  # channels of most layers


class Net(nn.Module):
    """A network of named layers and a forward function over them."""

    def __init__(self, forward: Forward, **layers: Any) -> None:
        super().__init__()
        self.run = forward
        for name, layer in layers.items():
            if isinstance(layer, Tensor) and not isinstance(layer, nn.Parameter):
                self.register_buffer(name, layer)
            else:
                setattr(self, name, layer)

    def forward(self, x: Tensor) -> Any:  # of one argument, as symbolic tracers want it
        return self.run(self, x)


IMAGE, TOKENS, VECTOR, WORDS = "image", "tokens", "vector", "words"
# Name: (what it reads, how it is made).
CONSTRUCTS: dict[str, tuple[str, Callable[[], nn.Module]]] = {}


def construct(name: str, reads: str, **layers: Callable[[], Any]) -> Callable[[Forward], Forward]:
    """Note a forward function as a construct; layers are made anew for every network."""

    def note(forward: Forward) -> Forward:
        CONSTRUCTS[name] = (
            reads, lambda: Net(forward, **{key: layer() for key, layer in layers.items()})
        )  # fmt: skip
        return forward

    return note


def conv(a: int, b: int, size: int = 3, **more: Any) -> Callable[[], nn.Module]:
    return lambda: nn.Conv2d(a, b, size, padding=size // 2, **more)


def linear(a: int, b: int, **more: Any) -> Callable[[], nn.Module]:
    return lambda: nn.Linear(a, b, **more)


def example(name: str, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    shape = {IMAGE: (2, 3, 8, 8), TOKENS: (2, 6, 32), VECTOR: (4, 12), WORDS: (2, 12)}
    reads = CONSTRUCTS[name][0]
    if reads == WORDS:
        return torch.randint(0, 50, shape[reads], generator=generator)
    return torch.randn(shape[reads], generator=generator)


# -- index maps -----------------------------------------------------------------------------------


@construct("flatten", IMAGE, a=conv(3, C), out=linear(C * 64, 5))
def _(s, x):
    return s.out(F.silu(s.a(x)).flatten(1))


@construct("permuted flatten", IMAGE, a=conv(3, C), out=linear(C * 64, 5))
def _(s, x):
    return s.out(F.silu(s.a(x)).permute(0, 2, 3, 1).reshape(x.shape[0], -1))


@construct(
    "literal unflatten", VECTOR, a=linear(12, 8 * 16), out=lambda: nn.ConvTranspose2d(8, 3, 2)
)
def _(s, x):
    return s.out(torch.sigmoid(s.a(x)).view(-1, 8, 4, 4))


@construct("literal flatten", IMAGE, a=conv(3, 8), out=linear(8 * 64, 5))
def _(s, x):
    return s.out(F.elu(s.a(x)).view(-1, 8 * 64))


def shuffled(x: Tensor, groups: int) -> Tensor:
    b, c, h, w = x.shape
    return x.view(b, groups, c // groups, h, w).transpose(1, 2).contiguous().view(b, c, h, w)


@construct("channel shuffle", IMAGE, a=conv(3, C), b=conv(C, C, groups=2), out=conv(C, 4))
def _(s, x):
    return s.out(F.gelu(s.b(shuffled(torch.sigmoid(s.a(x)), 2))))


@construct("shuffle unit", IMAGE, a=conv(3, C), b=conv(C // 2, C // 2), out=conv(C, 4))
def _(s, x):
    left, right = torch.sigmoid(s.a(x)).chunk(2, 1)
    return s.out(shuffled(torch.cat([left, F.silu(s.b(right))], 1), 2))


@construct("pixel shuffle", IMAGE, a=conv(3, 4 * C), out=conv(C, 4))
def _(s, x):
    return s.out(F.pixel_shuffle(torch.sigmoid(s.a(x)), 2))


@construct("pixel unshuffle", IMAGE, a=conv(3, C), out=conv(4 * C, 4))
def _(s, x):
    return s.out(F.pixel_unshuffle(torch.sigmoid(s.a(x)), 2))


@construct("cat with the input", IMAGE, a=conv(3, C), out=conv(C + 3, 4))
def _(s, x):
    return s.out(torch.cat([x, torch.sigmoid(s.a(x))], 1))


@construct("cat with itself", IMAGE, a=conv(3, C), out=conv(2 * C, 4))
def _(s, x):
    y = torch.sigmoid(s.a(x))
    return s.out(torch.cat([y, y], 1))


@construct("dense block", IMAGE, a=conv(3, C), b=conv(C, C), c=conv(2 * C, C), out=conv(3 * C, 4))
def _(s, x):
    y = F.silu(s.a(x))
    y = torch.cat([y, F.silu(s.b(y))], 1)
    return s.out(torch.cat([y, F.silu(s.c(y))], 1))


@construct("fixed permutation", IMAGE, a=conv(3, C), order=lambda: torch.arange(C).roll(3),
           out=conv(C, 4))  # fmt: skip
def _(s, x):
    return s.out(torch.sigmoid(s.a(x)).index_select(1, s.order))


@construct("flip", IMAGE, a=conv(3, C), out=conv(C, 4))
def _(s, x):
    return s.out(torch.sigmoid(s.a(x)).flip(1))


@construct("stack and flatten", IMAGE, a=conv(3, C), b=conv(3, C), out=conv(2 * C, 4))
def _(s, x):
    return s.out(torch.stack([torch.sigmoid(s.a(x)), F.silu(s.b(x))], 1).flatten(1, 2))


@construct("repeat", IMAGE, a=conv(3, C), out=conv(2 * C, 4))
def _(s, x):
    return s.out(torch.sigmoid(s.a(x)).repeat(1, 2, 1, 1))


@construct("padded shortcut", IMAGE, a=conv(3, C), b=conv(C, C + 4), out=conv(C + 4, 4))
def _(s, x):
    y = F.silu(s.a(x))
    return s.out(F.silu(s.b(y)) + F.pad(y, (0, 0, 0, 0, 2, 2)))


@construct("patch merging", IMAGE, a=conv(3, C), norm=lambda: nn.LayerNorm(4 * C),
           b=linear(4 * C, 2 * C), out=linear(2 * C, 4))  # fmt: skip
def _(s, x):
    y = F.silu(s.a(x)).permute(0, 2, 3, 1)
    parts = [y[:, i::2, j::2] for j in (0, 1) for i in (0, 1)]
    return s.out(F.gelu(s.b(s.norm(torch.cat(parts, -1)))))


@construct("text convolutions", WORDS, words=lambda: nn.Embedding(50, 32), out=linear(3 * C, 4),
           **{f"conv{k}": (lambda k=k: nn.Conv1d(32, C, k)) for k in (2, 3, 4)})  # fmt: skip
def _(s, x):
    y = s.words(x).transpose(1, 2)
    found = [F.relu(getattr(s, f"conv{k}")(y)).max(2)[0] for k in (2, 3, 4)]
    return s.out(torch.cat(found, 1))


# -- splits and gates -----------------------------------------------------------------------------


@construct("split bottleneck", IMAGE, a=conv(3, C), b=conv(C // 2, C // 2), out=conv(C + C // 2, 4))
def _(s, x):
    left, right = F.silu(s.a(x)).chunk(2, 1)
    return s.out(torch.cat([left, right, right + F.silu(s.b(right))], 1))


@construct("literal split", IMAGE, a=conv(3, C), b=conv(4, 4), out=conv(C, 4))
def _(s, x):
    first, rest = F.silu(s.a(x)).split([4, 12], 1)
    return s.out(torch.cat([F.silu(s.b(first)), rest], 1))


@construct("slice assignment", IMAGE, a=conv(3, C), b=conv(4, 4), out=conv(C, 4))
def _(s, x):
    y = F.silu(s.a(x))
    y[:, :4] = s.b(y[:, :4])
    return s.out(y)


@construct("literal slices", IMAGE, a=conv(3, C), b=conv(4, C), c=conv(12, C), out=conv(C, 4))
def _(s, x):
    y = F.silu(s.a(x))
    return s.out(F.silu(s.b(y[:, :4]) + s.c(y[:, 4:])))


@construct(
    "gated halves", IMAGE, a=conv(3, 2 * C), b=conv(2 * C, 2 * C, groups=2 * C), out=conv(C, 4)
)
def _(s, x):
    left, right = s.b(F.silu(s.a(x))).chunk(2, 1)
    return s.out(F.gelu(left) * right)


@construct("glu", IMAGE, a=conv(3, 2 * C), out=conv(C, 4))
def _(s, x):
    return s.out(F.glu(s.a(x), 1))


@construct("fused swiglu", TOKENS, a=linear(32, 64), out=linear(32, 5))
def _(s, x):
    gate, up = s.a(x).chunk(2, -1)
    return s.out(F.silu(gate) * up)


@construct("one-channel gate", IMAGE, a=conv(3, C), gate=conv(C, 1), out=conv(C, 4))
def _(s, x):
    y = F.silu(s.a(x))
    return s.out(y * torch.sigmoid(s.gate(y)))


@construct("spatial attention", IMAGE, a=conv(3, C), gate=conv(2, 1), out=conv(C, 4))
def _(s, x):
    y = F.silu(s.a(x))
    seen = torch.cat([y.mean(1, keepdim=True), y.amax(1, keepdim=True)], 1)
    return s.out(y * torch.sigmoid(s.gate(seen)))


@construct("squeeze and excite", IMAGE, a=conv(3, C), down=linear(C, 8), up=linear(8, C),
           out=conv(C, 4))  # fmt: skip
def _(s, x):
    y = F.silu(s.a(x))
    g = torch.sigmoid(s.up(F.relu(s.down(y.mean((2, 3))))))
    return s.out(y * g[:, :, None, None])


# -- attention ------------------------------------------------------------------------------------


@construct("fused qkv", TOKENS, qkv=linear(32, 96), out=linear(32, 5))
def _(s, x):
    b, n, c = x.shape
    q, k, v = s.qkv(x).reshape(b, n, 3, 4, c // 4).permute(2, 0, 3, 1, 4).unbind(0)
    y = F.scaled_dot_product_attention(q, k, v)
    return s.out(y.transpose(1, 2).reshape(b, n, c))


@construct("separate qkv", TOKENS, q=linear(32, 32), k=linear(32, 32), v=linear(32, 32),
           out=linear(32, 5))  # fmt: skip
def _(s, x):
    b, n, _ = x.shape
    q, k, v = (m(x).view(b, n, 4, -1).transpose(1, 2) for m in (s.q, s.k, s.v))
    y = (q @ k.transpose(2, 3) / q.shape[-1] ** 0.5).softmax(-1) @ v
    return s.out(y.transpose(1, 2).reshape(b, n, -1))


@construct("grouped queries", TOKENS, q=linear(32, 32), k=linear(32, 16), v=linear(32, 16),
           out=linear(32, 5))  # fmt: skip
def _(s, x):
    b, n, _ = x.shape
    q = s.q(x).view(b, n, -1, 8).transpose(1, 2)
    k, v = (
        m(x).view(b, n, -1, 8).transpose(1, 2)[:, :, None].expand(-1, -1, 2, -1, -1).flatten(1, 2)
        for m in (s.k, s.v)
    )
    return s.out(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).reshape(b, n, -1))


@construct("multi-head module", TOKENS, a=linear(32, 32),
           attend=lambda: nn.MultiheadAttention(32, 4, batch_first=True),
           out=linear(32, 5))  # fmt: skip
def _(s, x):
    y = F.silu(s.a(x))
    return s.out(F.silu(s.attend(y, y, y, need_weights=False)[0]))


@construct("encoder layer", TOKENS, a=linear(32, 32),
           block=lambda: nn.TransformerEncoderLayer(32, 4, 64, batch_first=True),
           out=linear(32, 5))  # fmt: skip
def _(s, x):
    return s.out(s.block(s.a(x)))


@construct("vision transformer", IMAGE, patches=lambda: nn.Conv2d(3, 32, 2, 2),
           cls=lambda: nn.Parameter(torch.randn(1, 1, 32)),
           position=lambda: nn.Parameter(torch.randn(1, 17, 32)), norm=lambda: nn.LayerNorm(32),
           qkv=linear(32, 96), project=linear(32, 32), up=linear(32, 64), down=linear(64, 32),
           out=linear(32, 5))  # fmt: skip
def _(s, x):
    y = s.patches(x).flatten(2).transpose(1, 2)
    y = torch.cat([s.cls.expand(len(y), -1, -1), y], 1) + s.position
    b, n, _ = y.shape
    q, k, v = s.qkv(s.norm(y)).reshape(b, n, 3, 4, -1).permute(2, 0, 3, 1, 4)
    y = y + s.project(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))
    y = y + s.down(F.gelu(s.up(y)))
    return s.out(y[:, 0])


@construct("token mixer", TOKENS, mix=linear(6, C), back=linear(C, 6), up=linear(32, 64),
           out=linear(64, 5))  # fmt: skip
def _(s, x):
    x = x + s.back(F.gelu(s.mix(x.transpose(1, 2)))).transpose(1, 2)
    return s.out(F.gelu(s.up(x)))


# -- parameters, norms, ties ----------------------------------------------------------------------


@construct("depthwise", IMAGE, a=conv(3, C), b=conv(C, 2 * C, groups=C), out=conv(2 * C, 4))
def _(s, x):
    return s.out(F.silu(s.b(torch.sigmoid(s.a(x)))))


@construct("group norm", IMAGE, a=conv(3, C), norm=lambda: nn.GroupNorm(4, C), out=conv(C, 4))
def _(s, x):
    return s.out(F.silu(s.norm(s.a(x))))


@construct("layer scale", IMAGE, a=conv(3, C), scale=lambda: nn.Parameter(torch.randn(C, 1, 1)),
           b=conv(C, C), out=conv(C, 4))  # fmt: skip
def _(s, x):
    y = F.silu(s.a(x))
    return s.out(y + s.scale * F.silu(s.b(y)))


@construct("frozen batch norm", IMAGE, a=conv(3, C), scale=lambda: torch.rand(C) + 0.5,
           shift=lambda: torch.randn(C), out=conv(C, 4))  # fmt: skip
def _(s, x):
    y = s.a(x) * s.scale.reshape(1, -1, 1, 1) + s.shift.reshape(1, -1, 1, 1)
    return s.out(F.silu(y))


@construct("fusion weights", IMAGE, w=lambda: nn.Parameter(torch.rand(2)), a=conv(3, C),
           b=conv(3, C), out=conv(C, 4))  # fmt: skip
def _(s, x):
    return s.out(F.silu(s.w[0] * s.a(x) + s.w[1] * s.b(x)))


@construct("one layer twice", IMAGE, a=conv(3, C), b=conv(C, C), out=conv(C, 4))
def _(s, x):
    return s.out(F.silu(s.b(F.silu(s.b(F.silu(s.a(x)))))))


@construct("tied weights", IMAGE, a=conv(3, C), w=lambda: nn.Parameter(torch.randn(C, C, 3, 3)),
           out=conv(C, 4))  # fmt: skip
def _(s, x):
    y = F.silu(F.conv2d(F.silu(s.a(x)), s.w, padding=1))
    return s.out(F.silu(F.conv2d(y, s.w, padding=1)))


@construct("tied embedding", WORDS, words=lambda: nn.Embedding(50, 32), up=linear(32, 64),
           down=linear(64, 32))  # fmt: skip
def _(s, x):
    y = s.words(x)
    return F.linear(y + s.down(F.gelu(s.up(y))), s.words.weight)


@construct("bare weights", TOKENS, w=lambda: nn.Parameter(torch.randn(32, 48)),
           b=lambda: nn.Parameter(torch.randn(48)), out=linear(48, 5))  # fmt: skip
def _(s, x):
    return s.out(F.silu(torch.einsum("bnc,cd->bnd", x, s.w) + s.b))


@construct("weight norm", IMAGE,
           a=lambda: nn.utils.parametrizations.weight_norm(nn.Conv2d(3, C, 3, padding=1)),
           out=conv(C, 4))  # fmt: skip
def _(s, x):
    return s.out(F.silu(s.a(x)))


@construct("residual on the input", IMAGE, a=conv(3, C), b=conv(C, 3), out=conv(3, 4))
def _(s, x):
    return s.out(x + s.b(F.silu(s.a(x))))


# -- recurrent ------------------------------------------------------------------------------------


@construct("lstm", TOKENS, a=linear(32, C), lstm=lambda: nn.LSTM(C, C, 2, batch_first=True),
           out=linear(C, 5))  # fmt: skip
def _(s, x):
    return s.out(s.lstm(F.silu(s.a(x)))[0])


@construct("bidirectional gru", TOKENS, out=linear(2 * C, 5),
           gru=lambda: nn.GRU(32, C, bidirectional=True, batch_first=True))  # fmt: skip
def _(s, x):
    return s.out(s.gru(x)[0][:, -1])


@construct("lstm cell in a loop", TOKENS, cell=lambda: nn.LSTMCell(32, C), out=linear(C, 5))
def _(s, x):
    h = c = x.new_zeros(len(x), s.cell.hidden_size)
    for t in range(x.shape[1]):
        h, c = s.cell(x[:, t], (h, c))
    return s.out(h)


# -- models as people write them ------------------------------------------------------------------


@construct("branch on values", IMAGE, a=conv(3, C), b=conv(C, C), out=conv(C, 4))
def _(s, x):
    y = F.silu(s.a(x))
    if y.sum() > -1e9:
        y = F.silu(s.b(y))
    return {"found": s.out(y), "nothing": None}


@construct("detection head", IMAGE, a=conv(3, C), out=conv(C, 3 * 7))
def _(s, x):
    y = s.out(F.silu(s.a(x)))
    return y.view(len(x), 3, 7, *y.shape[2:]).permute(0, 1, 3, 4, 2)


@construct("softmax over channels", IMAGE, a=conv(3, C), b=conv(C, C), out=conv(C, 4))
def _(s, x):
    return s.out(s.b(F.silu(s.a(x))).softmax(1))
