"""The constructs of ``test_constructs``, each as the kind it stands for: hypothesis varies which
axis, how many parts, which sizes and in which order."""

from __future__ import annotations

import math

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.nn import functional as F

from .oracle import check
from .test_constructs import Net, shuffle_by_view

few = settings(max_examples=settings.default.max_examples // 25)
widths = st.integers(2, 9)
conv = {1: nn.Conv1d, 2: nn.Conv2d, 3: nn.Conv3d}


def feature_map(*shape):
    return torch.randn(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(1))


def sizes_of(c, parts, draw):
    """``parts`` positive sizes that add up to ``c``."""
    cuts = sorted(draw(st.sets(st.integers(1, c - 1), min_size=parts - 1, max_size=parts - 1)))
    return [b - a for a, b in zip([0, *cuts], [*cuts, c], strict=True)]


@few
@given(st.data(), st.integers(1, 3), widths, st.sampled_from(["flatten", "reshape", "view"]))
def test_01_to_03_channels_are_flattened_in_any_order_of_dimensions(data, rank, c, how):
    order = data.draw(st.permutations(range(1, rank + 2)))

    def forward(s, x):
        y = F.softplus(s.a(x)).permute(0, *order).contiguous()
        flat = {"flatten": lambda: y.flatten(1), "reshape": lambda: y.reshape(y.shape[0], -1),
                "view": lambda: y.view(y.size(0), math.prod(y.shape[1:]))}[how]()  # fmt: skip
        return s.b(flat)

    net = Net(forward, a=conv[rank](2, c, 2), b=nn.Linear(c * 2**rank, 3))
    _, small = check(net, feature_map(2, 2, *[3] * rank))
    assert small.b.in_features % 2**rank == 0


@few
@given(
    widths, st.integers(1, 3), st.integers(1, 3),
    st.sampled_from(["literal", "minus", "attribute", "layer", "unflatten", "module"]),
)  # fmt: skip
def test_04_and_05_rows_become_maps(c, h, w, how):
    def forward(s, x):
        y = torch.cos(s.a(x))
        return s.b({
            "literal": lambda: y.view(-1, c, h, w), "minus": lambda: y.view(y.shape[0], -1, h, w),
            "attribute": lambda: y.view(-1, s.width, h, w),
            "layer": lambda: y.view(-1, s.b.in_channels, h, w),
            "unflatten": lambda: y.unflatten(1, (c, h, w)), "module": lambda: s.cut(y),
        }[how]())  # fmt: skip

    net = Net(forward, a=nn.Linear(5, c * h * w), b=nn.ConvTranspose2d(c, 3, 2),
              cut=nn.Unflatten(1, (c, h, w)))  # fmt: skip
    net.width = c
    plan, small = check(net, feature_map(2, 5))
    assert small.a.out_features == small.b.in_channels * h * w
    assert ("" in plan.code) == (how in ("literal", "unflatten"))
    assert list(plan.attributes) == (["width"] if how == "attribute" else [])


@few
@given(st.integers(2, 3), st.integers(2, 4), st.booleans(), st.sampled_from(["view", "function"]))
def test_06_shuffles_of_any_number_of_groups(groups, each, twice, how):
    c = groups * each

    def shuffle(y):
        return shuffle_by_view(y, groups) if how == "view" else F.channel_shuffle(y, groups)

    def forward(s, x):
        y = shuffle(torch.sigmoid(s.a(x)))
        return s.b(shuffle(y + s.c(y)) if twice else y)

    check(Net(forward, a=nn.Conv2d(2, c, 1), c=nn.Conv2d(c, c, 1, groups=groups),
              b=nn.Conv2d(c, 3, 3, padding=1)), feature_map(2, 2, 4, 4))  # fmt: skip


@few
@given(st.integers(2, 4), st.integers(2, 3), st.booleans())
def test_08_pixels_and_channels_change_places(c, r, down):
    def forward(s, x):
        y = torch.sigmoid(s.a(x))
        return s.b(F.pixel_unshuffle(y, r) if down else F.pixel_shuffle(y, r))

    a, b = (c, c * r * r) if down else (c * r * r, c)
    net = Net(forward, a=nn.Conv2d(2, a, 1), b=nn.Conv2d(b, 3, 1))
    check(net, feature_map(2, 2, r, 2 * r))


@few
@given(st.data(), st.lists(st.integers(0, 2), min_size=2, max_size=4))
def test_09_and_10_any_parts_are_joined_in_any_order(data, picks):
    """0 is the input, 1 and 2 are layers; one may stand there several times."""
    sizes = [3, data.draw(widths), data.draw(widths)]

    def forward(s, x):
        parts = [x, torch.sigmoid(s.a(x)), F.elu(s.b(x))]
        return s.c(torch.cat([parts[i] for i in picks], dim=1))

    check(
        Net(forward, a=nn.Conv2d(3, sizes[1], 3, padding=1), b=nn.Conv2d(3, sizes[2], 1),
            c=nn.Conv2d(sum(sizes[i] for i in picks), 4, 3, padding=1)),
        feature_map(2, 3, 4, 4), shrinks=any(picks),
    )  # fmt: skip


@few
@given(st.data(), widths, st.sampled_from(["index_select", "getitem", "list", "flip", "take"]))
def test_11_fixed_permutations(data, c, how):
    order = data.draw(st.permutations(range(c)))

    def forward(s, x):
        y = torch.sigmoid(s.a(x))
        return s.b({
            "index_select": lambda: y.index_select(1, s.order), "getitem": lambda: y[:, s.order],
            "list": lambda: y[:, list(order)], "flip": lambda: y.flip(1).flip(2),
            "take": lambda: y.transpose(0, 1)[s.order].transpose(0, 1),
        }[how]())  # fmt: skip

    net = Net(forward, a=nn.Conv2d(3, c, 1), b=nn.Conv2d(c, 4, 3, padding=1),
              order=torch.tensor(order))  # fmt: skip
    check(net, feature_map(2, 3, 4, 4))


@few
@given(st.integers(1, 3), st.integers(2, 4), widths)
def test_12_stacks_that_are_flattened(dim, count, c):
    def forward(s, x):
        parts = [torch.sigmoid(layer(x)) for layer in s.layers]
        y = torch.stack(parts, dim)
        return s.b(y.flatten(1, 2) if dim < 3 else y.flatten(2, 3))

    layers = nn.ModuleList([nn.Conv2d(2, c, 1) for _ in range(count)])
    wide = c if dim == 3 else c * count
    check(Net(forward, layers=layers, b=nn.Conv2d(wide, 3, 1)), feature_map(2, 2, 3, 3))


@few
@given(st.integers(2, 3), widths, st.sampled_from(["repeat", "interleave", "tile", "expand"]))
def test_13_channels_are_repeated(times, c, how):
    def forward(s, x):
        y = torch.sigmoid(s.a(x))
        b, n, h, w = y.shape
        return s.b({
            "repeat": lambda: y.repeat(1, times, 1, 1), "tile": lambda: y.tile(1, times, 1, 1),
            "interleave": lambda: y.repeat_interleave(times, 1),
            "expand": lambda: y[:, :, None].expand(b, n, times, h, w).reshape(b, n * times, h, w),
        }[how]())  # fmt: skip

    check(Net(forward, a=nn.Conv2d(2, c, 1), b=nn.Conv2d(times * c, 3, 1)), feature_map(2, 2, 3, 3))


@few
@given(st.integers(3, 9), st.integers(2, 9), st.booleans(),
       st.sampled_from(["expand", "repeat", "interleave", "tile"]))  # fmt: skip
def test_13_channels_are_repeated_as_often_as_others_are_wide(c, d, by_number, how):
    """A state of every channel: (…, c, d), from one of all channels."""

    def forward(s, x):
        y, z = torch.sigmoid(s.a(x)), torch.tanh(s.b(x))
        one, n = z.unsqueeze(2), s.n if by_number else y.shape[-1]
        z = {
            "expand": lambda: one.expand(-1, -1, n, -1), "repeat": lambda: one.repeat(1, 1, n, 1),
            "interleave": lambda: one.repeat_interleave(n, 2), "tile": lambda: one.tile(1, 1, n, 1),
        }[how]()  # fmt: skip
        return s.c((y.unsqueeze(-1) * z * torch.exp(s.decay)).sum(-1))

    net = Net(forward, a=nn.Linear(5, c), b=nn.Linear(5, d), c=nn.Linear(c, 3))
    net.decay, net.n = nn.Parameter(torch.randn(c, d)), c
    plan, small = check(net, feature_map(2, 4, 5))
    kept = [g.kept for g in plan.groups if g.name in ("a", "b")]
    assert kept == [small.a.out_features, small.b.out_features] == [(c + 1) // 2, (d + 1) // 2]


@few
@given(st.integers(2, 4), st.integers(2, 5), st.booleans())
def test_13_values_repeated_one_by_one_meet_as_many_channels_each(n, times, by_channels):
    """Of the slices that a value stands before, each loses equally many."""

    def forward(s, x):
        y = torch.sigmoid(s.a(x))
        scale = (
            x[:, :n].mean((2, 3)).repeat_interleave(y.shape[1] // n if by_channels else times, 1)
        )
        return s.b(y * scale[..., None, None])

    net = Net(forward, a=nn.Conv2d(4, n * times, 1), b=nn.Conv2d(n * times, 3, 1))
    plan, small = check(net, feature_map(2, 4, 3, 3))
    removed = next(g.removed.tolist() for g in plan.groups if g.name == "a")
    gone = [sum(i // times == part for i in removed) for part in range(n)]
    assert len(set(gone)) == 1 and gone[0] == times // 2


@few
@given(widths, st.integers(0, 3), st.integers(0, 3))
def test_14_shortcuts_are_padded_in_channels(c, before, after):
    def forward(s, x):
        y = torch.sigmoid(s.a(x))
        return s.c(s.b(y) + F.pad(y, (0, 0, 0, 0, before, after)))

    n = c + before + after
    check(Net(forward, a=nn.Conv2d(2, c, 1), b=nn.Conv2d(c, n, 1), c=nn.Conv2d(n, 3, 1)),
          feature_map(2, 2, 3, 3))  # fmt: skip


@few
@given(st.data(), widths)
def test_15_patches_are_merged_in_any_order(data, c):
    corners = data.draw(st.permutations([(0, 0), (0, 1), (1, 0), (1, 1)]))

    def forward(s, x):
        y = torch.sigmoid(s.a(x)).permute(0, 2, 3, 1)
        y = torch.cat([y[:, i::2, j::2] for i, j in corners], -1)
        return s.b(s.norm(y))

    net = Net(forward, a=nn.Conv2d(2, c, 1), norm=nn.LayerNorm(4 * c), b=nn.Linear(4 * c, 3))
    check(net, feature_map(2, 2, 4, 4))


@few
@given(st.lists(st.integers(1, 4), min_size=1, max_size=3), widths)
def test_16_words_are_convolved_and_pooled(kernels, c):
    def forward(s, x):
        y = s.embed(x).transpose(1, 2)
        return s.b(torch.cat([F.silu(layer(y)).amax(2) for layer in s.layers], 1))

    layers = nn.ModuleList([nn.Conv1d(6, c, k, padding=k // 2) for k in kernels])
    net = Net(forward, embed=nn.Embedding(9, 6), layers=layers, b=nn.Linear(c * len(kernels), 3))
    check(net, torch.arange(10).reshape(2, 5) % 9)


class C2f(nn.Module):
    """Parts that are worked on one after the other, and all of them joined."""

    def __init__(self, c, depth, residual, how):
        super().__init__()
        self.a = nn.Conv2d(2, 2 * c, 1)
        self.layers = nn.ModuleList([nn.Conv2d(c, c, 3, padding=1) for _ in range(depth)])
        self.b = nn.Conv2d((2 + depth) * c, 3, 1)
        self.residual, self.how = residual, how

    def forward(self, x):
        y = F.silu(self.a(x))
        parts = list(y.chunk(2, 1) if self.how == "chunk" else y.split(y.shape[1] // 2, 1))
        for layer in self.layers:
            z = torch.sigmoid(layer(parts[-1]))
            parts.append(parts[-1] + z if self.residual else z)
        return self.b(torch.cat(parts, 1))


@few
@given(st.integers(2, 5), st.integers(1, 3), st.booleans(), st.sampled_from(["chunk", "split"]))
def test_17_chunk_bottlenecks_and_cat_of_all(c, depth, residual, how):
    check(C2f(c, depth, residual, how), feature_map(2, 2, 4, 4))


@few
@given(
    st.data(), st.integers(3, 8), st.integers(2, 3),
    st.sampled_from(["split", "tensor_split", "slices", "narrow", "method", "attribute"]),
)  # fmt: skip
def test_18_parts_of_stated_sizes(data, c, parts, how):
    sizes = sizes_of(c, parts, data.draw)
    at = data.draw(st.integers(0, parts - 1))
    bounds = [sum(sizes[: i + 1]) for i in range(parts)]
    starts = [0, *bounds[:-1]]

    def forward(s, x):
        y = F.silu(s.a(x))
        pieces = {
            "split": lambda: torch.split(y, sizes, 1), "method": lambda: y.split(sizes, dim=1),
            "attribute": lambda: y.split(s.sizes, 1),
            "tensor_split": lambda: y.tensor_split(bounds[:-1], 1),
            "slices": lambda: [y[:, i:j] for i, j in zip(starts, bounds, strict=True)],
            "narrow": lambda: [y.narrow(1, i, n) for i, n in zip(starts, sizes, strict=True)],
        }[how]()  # fmt: skip
        pieces = list(pieces)
        pieces[at] = torch.sigmoid(s.b(pieces[at]))
        return s.c(torch.cat(pieces, 1))

    n = sizes[at]
    net = Net(forward, a=nn.Conv2d(2, c, 1), b=nn.Conv2d(n, n, 3, padding=1), c=nn.Conv2d(c, 3, 1))
    net.sizes = sizes
    check(net, feature_map(2, 2, 4, 4), shrinks=max(sizes) > 1)


@few
@given(st.data(), st.integers(3, 8), st.booleans())
def test_19_a_part_is_written_over(data, c, read_before):
    start = data.draw(st.integers(0, c - 2))
    stop = data.draw(st.integers(start + 1, c))

    def forward(s, x):
        y = F.silu(s.a(x))
        z = y * 0.5 if read_before else 0.0
        y[:, start:stop] = torch.sigmoid(s.b(y[:, start:stop]))
        return s.c(y + z)

    n = stop - start
    net = Net(forward, a=nn.Conv2d(2, c, 1), b=nn.Conv2d(n, n, 1), c=nn.Conv2d(c, 3, 1))
    check(net, feature_map(2, 2, 4, 4))


@few
@given(st.data(), st.integers(3, 8), st.integers(2, 3))
def test_20_parts_go_to_layers_of_their_own(data, c, parts):
    sizes = sizes_of(c, parts, data.draw)

    def forward(s, x):
        y, start, total = F.silu(s.a(x)), 0, 0.0
        for n, layer in zip(sizes, s.layers, strict=True):
            total = total + layer(y[:, start : start + n])
            start += n
        return total

    layers = nn.ModuleList([nn.Conv2d(n, 3, 3, padding=1) for n in sizes])
    net = Net(forward, a=nn.Conv2d(2, c, 1), layers=layers)
    check(net, feature_map(2, 2, 4, 4), shrinks=max(sizes) > 1)  # a slice that is read alone stays


@few
@given(st.integers(2, 5), st.booleans(), st.sampled_from(["glu", "chunk", "slices", "swapped"]))
def test_21_and_22_gates_pair_their_parts(c, depthwise, how):
    def forward(s, x):
        y = s.a(x)
        y = s.deep(y) if depthwise else y
        if how == "glu":
            return s.b(F.glu(y, 1))
        one, two = y.chunk(2, 1) if how != "slices" else (y[:, :c], y[:, c:])
        return s.b(two * F.gelu(one) if how == "swapped" else F.gelu(one) * two)

    net = Net(forward, a=nn.Conv2d(2, 2 * c, 1), b=nn.Conv2d(c, 3, 1),
              deep=nn.Conv2d(2 * c, 2 * c, 3, padding=1, groups=2 * c))  # fmt: skip
    _, small = check(net, feature_map(2, 2, 4, 4))
    assert small.a.out_channels == 2 * small.b.in_channels


@few
@given(widths, st.integers(1, 3), st.sampled_from(["one", "all", "space"]))
def test_23_to_25_gates_of_any_width(c, rank, how):
    def forward(s, x):
        y = F.silu(s.a(x))
        space = tuple(range(2, 2 + rank))
        if how == "one":
            return s.b(y * torch.sigmoid(s.one(x)))
        if how == "space":
            stats = torch.cat([y.mean(1, keepdim=True), y.amax(1, keepdim=True)], 1)
            return s.b(y * torch.sigmoid(s.two(stats)))
        g = torch.sigmoid(s.up(F.relu(s.down(y.mean(space)))))
        return s.b(y * g[(..., *[None] * rank)])

    kind = conv[rank]
    net = Net(forward, a=kind(2, c, 1), one=kind(2, 1, 1), two=kind(2, 1, 1),
              down=nn.Linear(c, 4), up=nn.Linear(4, c), b=kind(c, 3, 1))  # fmt: skip
    check(net, feature_map(2, 2, *[3] * rank))


@few
@given(st.integers(2, 6), st.integers(2, 5), widths, widths)
def test_32_tokens_are_no_channels(tokens, c, hidden_tokens, hidden):
    def forward(s, x):
        y = F.silu(s.a(x))
        y = y + s.t2(F.gelu(s.t1(y.transpose(1, 2)))).transpose(1, 2)
        return s.b(y + s.c2(F.gelu(s.c1(y))))

    net = Net(forward, a=nn.Linear(3, c), t1=nn.Linear(tokens, hidden_tokens),
              t2=nn.Linear(hidden_tokens, tokens), c1=nn.Linear(c, hidden),
              c2=nn.Linear(hidden, c), b=nn.Linear(c, 2))  # fmt: skip
    _, small = check(net, feature_map(2, tokens, 3))
    assert small.t1.in_features == small.t2.out_features == tokens


@few
@given(
    st.integers(2, 3), st.integers(1, 3), st.integers(1, 3), st.integers(1, 3), st.booleans()
)  # fmt: skip
def test_33_grouped_convolutions_of_any_ratio(groups, reads, makes, rank, transposed):
    kinds = {1: nn.ConvTranspose1d, 2: nn.ConvTranspose2d, 3: nn.ConvTranspose3d}
    kind = kinds[rank] if transposed else conv[rank]
    middle = kind(groups * reads, groups * makes, 2, groups=groups)
    net = nn.Sequential(conv[rank](2, groups * reads, 1), nn.Sigmoid(), middle, nn.Sigmoid(),
                        conv[rank](groups * makes, 3, 1))  # fmt: skip
    check(net, feature_map(2, 2, *[3] * rank))


@few
@given(st.integers(1, 4), st.integers(1, 4), st.integers(1, 3))
def test_34_group_norms_of_any_groups(groups, each, rank):
    c = groups * each
    net = nn.Sequential(conv[rank](2, c, 1), nn.GroupNorm(groups, c), nn.Sigmoid(),
                        conv[rank](c, 3, 1))  # fmt: skip
    check(net, feature_map(2, 2, *[3] * rank), shrinks=c > 1 and (each > 1 or groups > 1))
