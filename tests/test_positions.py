"""Calls that mix, order or pick positions and leave each channel alone."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from .oracle import awake, check, difference, masked_equals_pruned, run
from .test_constructs import Net


def drawn(*shape):
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(1))


def rows_of(n, width):
    return torch.arange(2 * 6 * n).reshape(2, 6, n).remainder(width)


def ordered_kmax(h):
    return h.gather(1, h.topk(3, 1)[1].sort(1)[0])


def added(h, index):
    return h.new_zeros(2, 4, h.shape[2]).scatter_add(1, index, h)


TOKENS = {
    "sort": lambda h: h.sort(1)[0],
    "sort by name": lambda h: torch.sort(h, dim=1, descending=True).values,
    "topk": lambda h: h.topk(3, 1)[0],
    "k-max": ordered_kmax,
    "cummax": lambda h: h.cummax(1)[0],
    "kthvalue": lambda h: h.kthvalue(2, 1)[0],
    "mode": lambda h: h.mode(1)[0],
    "argmax": lambda h: h.gather(1, h.argmax(1, keepdim=True)),
    "argsort": lambda h: h.take_along_dim(h.argsort(1), 1),
    "scatter_add": lambda h: added(h, rows_of(1, 4).expand(-1, -1, h.shape[2])),
    "scatter_add as": lambda h: added(h, rows_of(1, 4).expand_as(h)),
    "scatter_reduce": lambda h: torch.zeros_like(h[:, :4]).scatter_reduce(
        1, rows_of(1, 4).expand_as(h), h, "amax"
    ),
    "renorm": lambda h: h.renorm(2, 2, 1.0),
    "hsplit": lambda h: torch.cat(h.hsplit(2)[::-1], 1),
    "dsplit": lambda h: torch.mul(*h.dsplit(2)).repeat(1, 1, 2),
    "dsplit at": lambda h: torch.cat(h.dsplit([3, 5])[::-1], 2),
    "rows in a stack": lambda h: torch.stack([row for row in h]),
    "means in a stack": lambda h: torch.stack([h[:1].mean(0), h[1:].mean(0)]),
    "new": lambda h: h + h.data.new(h.shape[1], h.shape[2]).fill_(1.0),
    "broadcast": lambda h: torch.mul(*torch.broadcast_tensors(h, h[:, :1] + 1)),
    "spectrum": lambda h: torch.fft.rfft(h, dim=1).abs(),
    "spectra": lambda h: torch.fft.irfft2(torch.fft.rfft2(h, dim=(0, 1)), dim=(0, 1)),
    "complex": lambda h: torch.view_as_real(torch.complex(h, h)).sum(-1),
    "pairs": lambda h: torch.view_as_complex(torch.stack([h, h * 2], -1)).abs(),
}  # fmt: skip


@pytest.mark.parametrize("case", TOKENS)
def test_rows_are_ordered_and_picked_in_each_channel(case):
    net = Net(lambda s, x: s.b(TOKENS[case](F.softplus(s.a(x)))), a=nn.Linear(5, 8),
              b=nn.Linear(8, 4))  # fmt: skip
    plan, small = check(net, drawn(2, 6, 5))
    assert small.a.out_features == 4


@pytest.mark.parametrize("call, word", [
    (lambda h: h.sort(2)[0], "sort"), (lambda h: h.topk(8)[0], "topk"),
    (lambda h: h.renorm(2, 0, 1.0), "renorm"), (lambda h: h.renorm(2, 1, 1.0), "renorm"),
])  # fmt: skip
def test_channels_that_are_ordered_or_measured_together_stay(call, word):
    net = Net(lambda s, x: s.b(call(F.softplus(s.a(x)))), a=nn.Linear(5, 8), b=nn.Linear(8, 4))
    plan, small = check(net, drawn(2, 6, 5), shrinks=False)
    assert small.a.out_features == 8 and word in dict(plan.skipped)["a"]


def pooled(h):
    return F.max_unpool2d(*F.max_pool2d(h, 2, return_indices=True), 2)


def looked_up(h):
    return F.grid_sample(h, drawn(2, 5, 5, 2).tanh(), align_corners=False)


BLUR = torch.full((1, 1, 3, 3), 1 / 9, dtype=torch.float64)
IMAGES = {
    "unpool": pooled,
    "grid_sample": looked_up,
    "unfold and fold": lambda h: F.fold(F.unfold(h, 3, padding=1), (6, 6), 3, padding=1),
    "one kernel for all": lambda h: F.conv2d(
        h, BLUR.expand(h.shape[1], 1, 3, 3), padding=1, groups=h.shape[1]
    ),
    "one kernel, repeated": lambda h: F.conv2d(
        h, BLUR.repeat(h.shape[1], 1, 1, 1), padding=1, groups=h.shape[1]
    ),
    "each by the other": lambda h: F.conv2d(
        h[:1], h[1, :, None, :3, :3], padding=1, groups=h.shape[1]
    ).expand(2, -1, -1, -1),
    "normalize": F.normalize,
    "normalize rows": lambda h: F.normalize(h, 1.0, 3),
    "cosine": lambda h: h * F.cosine_similarity(h, h.flip(2), 1)[:, None],
    "cosine of rows": lambda h: h * F.cosine_similarity(h, h.flip(2), dim=2)[:, :, None],
}  # fmt: skip


@pytest.mark.parametrize("case", IMAGES)
def test_places_of_images_are_mixed_in_each_channel(case):
    net = Net(lambda s, x: s.b(IMAGES[case](F.softplus(s.a(x)))), a=nn.Conv2d(3, 8, 3, padding=1),
              b=nn.Conv2d(8, 4, 1))  # fmt: skip
    plan, small = check(net, drawn(2, 3, 6, 6))
    assert small.a.out_channels == 4


@pytest.mark.parametrize("padding", [0, 1])
def test_patches_are_the_places_of_all_channels(padding):
    net = Net(
        lambda s, x: s.b(s.patches(F.softplus(s.a(x))).transpose(1, 2)),
        a=nn.Conv2d(3, 8, 3, padding=1), patches=nn.Unfold(2, stride=2, padding=padding),
        b=nn.Linear(32, 4),
    )  # fmt: skip
    plan, small = check(net, drawn(2, 3, 6, 6))
    assert small.a.out_channels == 4 and small.b.in_features == 16


def test_patches_that_are_put_together_make_channels_of_their_rows():
    net = Net(lambda s, x: s.b(s.fold(F.softplus(s.a(x)).transpose(1, 2))), a=nn.Linear(5, 32),
              fold=nn.Fold((4, 6), 2, stride=2), b=nn.Conv2d(8, 4, 3))  # fmt: skip
    plan, small = check(net, drawn(2, 6, 5))
    assert small.a.out_features == 16


def test_a_border_that_a_linear_layer_reads_place_by_place_is_carried_or_dropped():
    net = Net(lambda s, x: s.b(F.pad(F.softplus(s.a(x)), (1, 1, 1, 1)).flatten(1)),
              a=nn.Conv2d(3, 8, 3, padding=1), b=nn.Linear(8 * 64, 4))  # fmt: skip
    plan, small = check(net, drawn(2, 3, 6, 6))
    assert small.a.out_channels == 4


def test_heads_in_the_batch_of_a_grid_go_with_those_of_what_is_looked_up():
    def forward(s, x):
        b, n, _ = x.shape
        v = s.v(x).view(b, n, s.heads, 4).permute(0, 2, 3, 1).reshape(b * s.heads, 4, 2, 3)
        at = s.at(x).view(b, n, s.heads, 2).transpose(1, 2).reshape(b * s.heads, n, 1, 2).tanh()
        y = F.grid_sample(v, at, align_corners=False)  # (b · heads, 4, n, 1)
        return s.out(y.view(b, s.heads * 4, n).transpose(1, 2))

    net = Net(forward, v=nn.Linear(5, 16), at=nn.Linear(5, 8), out=nn.Linear(16, 3))
    net.heads = 4
    plan, small = check(net, drawn(2, 6, 5))
    assert (small.v.out_features, small.at.out_features, small.heads) == (8, 4, 2)


# -- sums of products ------------------------------------------------------------------------------

EINSUMS = {
    "three": lambda s, h, x: torch.einsum("bld,bln,bld->bld", h, s.c(x), h),
    "state space": lambda s, h, x: torch.einsum(
        "bldn,bln->bld", torch.einsum("bld,bln,bld->bldn", h, s.c(x), h), s.c(x)
    ),
    "ellipsis": lambda s, h, x: torch.einsum("...i,oi->...o", h, s.w.weight),
    "no arrow": lambda s, h, x: torch.einsum("bli,oi", h, s.w.weight),
    "attention": lambda s, h, x: torch.einsum(
        "...ij,...jd->...id", torch.einsum("...id,...jd->...ij", h, s.w(h)).softmax(-1), h
    ),
    "broadcast": lambda s, h, x: torch.einsum("...d,...d->...d", h, s.w.bias),
}  # fmt: skip


@pytest.mark.parametrize("case", EINSUMS)
def test_einsum_of_any_spelling(case):
    net = Net(lambda s, x: s.b(EINSUMS[case](s, F.softplus(s.a(x)), x)), a=nn.Linear(5, 8),
              c=nn.Linear(5, 3), w=nn.Linear(8, 8), b=nn.Linear(8, 4))  # fmt: skip
    plan, small = check(net, drawn(2, 6, 5))
    assert small.a.out_features < 8


@pytest.mark.parametrize("pick", [
    lambda t, i: t[i], lambda t, i: t.index_select(0, i.flatten()).unflatten(0, i.shape),
], ids=["index", "index_select"])  # fmt: skip
def test_rows_of_a_parameter_are_an_embeddings(pick):
    class Looked(nn.Module):
        def __init__(self):
            super().__init__()
            self.table, self.b = nn.Parameter(torch.randn(20, 8)), nn.Linear(8, 3)

        def forward(self, i):
            return self.b(F.softplus(pick(self.table, i)))

    plan, small = check(Looked(), torch.arange(12).reshape(3, 4))
    assert small.table.shape == (20, 4)


@pytest.mark.parametrize("halves", [
    lambda s: (s.both[: s.out], s.both[s.out :]), lambda s: s.both.split(s.out),
    lambda s: s.both.chunk(2),
], ids=["slices", "split", "chunk"])  # fmt: skip
def test_halves_of_a_parameter_by_a_width(halves):
    class Scores(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b = nn.Linear(5, 8), nn.Linear(8, 3)
            self.both = nn.Parameter(torch.randn(16, 1))
            self.out = 8

        def forward(self, x):
            h = self.a(x)
            left, right = halves(self)
            return self.b(((h @ left) + (h @ right).transpose(1, 2)).softmax(-1) @ h)

    plan, small = check(Scores(), drawn(2, 6, 5))
    assert small.a.out_features == 4 and small.both.shape == (8, 1)


@pytest.mark.parametrize("read", [
    lambda table, t: table[:, :t], lambda table, t: table[:, -t:],
    lambda table, t: table[:, 1 : t + 1], lambda table, t: table.narrow(1, 0, t),
], ids=["first", "last", "between", "narrow"])  # fmt: skip
def test_positions_that_the_example_does_not_reach_stay(read):
    def forward(s, x):
        return s.head(s.b(s.a(x) + s.c(read(s.table, x.shape[1]))).sigmoid())

    table = nn.Parameter(torch.randn(1, 17, 6, generator=torch.Generator().manual_seed(2)))
    net = Net(forward, table=table, a=nn.Linear(8, 6), c=nn.Linear(6, 6), b=nn.Linear(6, 6),
              head=nn.Linear(6, 3))  # fmt: skip
    x = torch.randn(2, 6, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    plan, small = check(net, x)
    assert small.table.shape[1] == 17
    longer = torch.cat([x, x.cos()], 1)
    assert difference(run(plan.mask(net), longer), run(small, longer)) < 1e-9


def test_positions_past_a_written_end_are_read_by_nobody():
    net = Net(lambda s, x: s.head(s.a(x)[:, :4].sigmoid()), a=nn.Linear(8, 16),
              head=nn.Linear(4, 3))  # fmt: skip
    check(net, torch.ones(2, 8, dtype=torch.float64))


def test_rows_that_are_picked_in_some_channels_only_leave_them_all():
    net = Net(lambda s, x: s.b(F.softplus(s.a(x)).gather(1, rows_of(4, 6))), a=nn.Linear(5, 8),
              b=nn.Linear(4, 4))  # fmt: skip
    plan, _ = check(net, drawn(2, 6, 5), shrinks=False)
    assert "positions that are data are read from it in gather" in dict(plan.skipped)["a"]


def test_weights_of_rows_and_masks_of_attention_stay_whole():
    def forward(s, x, index):
        weights = torch.sigmoid(s.a(x))
        rows = s.bag(index, per_sample_weights=weights)
        y = torch.sigmoid(s.b(x))[None]
        mask = s.mask(x).permute(1, 0)[:, :, None] * torch.ones(1, 1, len(x), dtype=x.dtype)
        y = s.attend(y, y, y, attn_mask=mask, need_weights=False)[0][0]
        return s.o(torch.cat([rows, y], 1))

    torch.manual_seed(0)
    net = Net(forward, a=nn.Linear(6, 5), b=nn.Linear(6, 8), mask=nn.Linear(6, 4),
              bag=nn.EmbeddingBag(20, 8, mode="sum"),
              attend=nn.MultiheadAttention(8, 4, batch_first=True), o=nn.Linear(16, 3))  # fmt: skip
    index = torch.arange(15).reshape(3, 5)
    plan, small = check(net, (drawn(3, 6), index))
    assert small.a.out_features == 5 and small.mask.out_features == 4
    assert "a mask" in dict(plan.skipped)["mask"]


def test_noise_of_the_shape_of_one_number_is_not_the_number():
    def forward(s, x):
        y = torch.relu(s.a(x)) + 0 * torch.randn_like(s.one) + s.one.clone().zero_()
        return s.b(y)

    net = Net(forward, a=nn.Linear(6, 8), b=nn.Linear(8, 4), 
              one=nn.Parameter(torch.full((1,), 3.0)))  # fmt: skip
    check(net, drawn(5, 6))


LOW = torch.tensor([5.0, 5, 0, 5, 5, 0, 0, 0, 0, 5, 5, 0])


@pytest.mark.parametrize("read", [
    lambda h: h[:, 1::2], lambda h: h[:, ::3].mul(2), lambda h: h[:, None, 1::2].flatten(1),
    lambda h: h.unflatten(0, (2, 3))[..., ::4].flatten(0, 1),
])  # fmt: skip
def test_what_is_left_of_a_stepped_slice_may_be_unevenly_spaced(read):
    """All steps of what is kept of 12, of which the scores leave no evenly spaced ones."""
    torch.manual_seed(0)
    width = read(torch.ones(6, 12)).shape[1]
    net = Net(lambda s, x: s.b(read(s.a(x))), a=nn.Linear(3, 12), b=nn.Linear(width, 4))
    _, small = check(net, drawn(6, 3), importance={"a": LOW})
    assert small.a.out_features == 6


def write_through(h):
    h = h * 1
    h[:, ::3].mul_(2)
    h[:, 1::3].zero_()
    return h


def write_through_a_view_of_a_view(h):
    h = h * 1
    h[:, 1::3].t().exp_()
    return h


def write_after(h):
    h = h * 1
    part = h[:, 1::3]
    h.mul_(3)
    return torch.cat([h, part], 1)


@pytest.mark.parametrize("written", [write_through, write_through_a_view_of_a_view, write_after],
    ids=lambda f: f.__name__)  # fmt: skip
@pytest.mark.parametrize("seed", range(3))
def test_a_stepped_slice_that_shares_memory_is_no_list(written, seed):
    torch.manual_seed(seed)
    width = written(torch.ones(6, 12)).shape[1]
    net = Net(lambda s, x: s.b(written(s.a(x))), a=nn.Linear(3, 12), b=nn.Linear(width, 4))
    check(net, drawn(6, 3), importance={"a": LOW}, shrinks=False)


def test_a_stepped_slice_beside_a_list_is_no_list():
    def forward(s, x):
        h = s.a(x) * 1
        h[:, ::2, [0, 2, 3]] = 0.5
        return s.b(h)

    torch.manual_seed(0)
    net = Net(forward, a=nn.Conv1d(3, 12, 1), b=nn.Conv1d(12, 4, 1))
    check(net, drawn(2, 3, 5), importance={"a": LOW}, shrinks=False)


@pytest.mark.parametrize("beside", [
    lambda s, x, i: s.e(i), lambda s, x, i: x[i], lambda s, x, i: i * x.new_ones(4),
    lambda s, x, i: i, lambda s, x, i: x.index_fill(0, i, 0.5),
])  # fmt: skip
def test_positions_that_are_used_otherwise_too_are_not_written_anew(beside):
    net = Net(lambda s, x: (beside(s, x, s.i), s.o(s.b(x)[:, s.i])), b=nn.Linear(3, 8),
              o=nn.Linear(4, 2), e=nn.Embedding(9, 4))  # fmt: skip
    net.register_buffer("i", torch.tensor([5, 0, 2, 7]))
    plan, _ = check(net, drawn(8, 3), shrinks=False)
    assert dict(plan.skipped)["b"] == "i is used for something else, too"


def scrambled(h):
    n, c, height, width = h.shape
    return h.flatten(2).transpose(1, 2).reshape(n, c, height, width)


def scrambled_for_an_open_size(h):
    n, c, height, width = h.shape
    return h.flatten(2).transpose(1, 2).reshape(n, c, -1).view(n, c, height, width)


def in_groups(h):
    n, c, height, width = h.shape
    return (h.view(n, 2, -1) * 2).view(n, c, height, width)


def in_pairs(h):
    n, c, height, width = h.shape
    h = h.permute(2, 3, 0, 1).reshape(height * width, n * (c // 4), -1) * 2
    return h.view(height, width, n, c).permute(2, 3, 0, 1)


@pytest.mark.parametrize("view, kept", [
    (scrambled, 8), (scrambled_for_an_open_size, 8), (in_groups, 4), (in_pairs, 4),
], ids=lambda v: getattr(v, "__name__", ""))  # fmt: skip
def test_channels_that_a_view_puts_elsewhere_in_another_image_stay(view, kept):
    def forward(s, x):
        h = torch.sigmoid(s.a(x))
        return s.b(h + view(h))

    net = Net(forward, a=nn.Conv2d(3, 8, 1), b=nn.Conv2d(8, 2, 1))
    x = drawn(2, 3, 2, 2)
    plan, small = check(net, x, shrinks=kept < 8)
    assert small.a.out_channels == kept, plan
    other = drawn(3, 3, 4, 3)
    assert difference(run(plan.mask(net), other), run(small, other)) < 1e-9
    if kept == 8:
        assert "by sizes of the input" in dict(plan.skipped)["a"]


@pytest.mark.parametrize(
    "read",
    [
        lambda h: h[..., -1],
        lambda h: h[..., 0],
        lambda h: h[:, :, 7],
        lambda h: h.select(-1, 7),
        lambda h: h.select(2, 3),
        lambda h: h[0, :, -1],
    ],
)
def test_a_slice_of_which_sizes_alone_are_read_may_go(read):
    class Sized(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b, self.c = nn.Linear(6, 8), nn.Linear(8, 8), nn.Linear(8, 3)
            self.places = nn.Embedding(9, 8)

        def forward(self, x):
            h = self.a(x)
            rows = read(h).shape[-1]  # as a table of positions is asked for
            h = torch.sigmoid(self.b(torch.sigmoid(h + self.places(torch.arange(rows)))))
            return self.c(h)

    model = awake(Sized())
    with torch.no_grad():
        model.a.weight[[0, 3, 7]] *= 1e-3  # the slices that are read are the first to go
        model.places.weight[:, [0, 3, 7]] *= 1e-3
    x = torch.linspace(-2, 3, 60, dtype=torch.float64).cos().reshape(2, 5, 6)
    plan, small = check(model, x)
    assert small.a.out_features == 4
    assert not {0, 3, 7} & set(plan.kept["a.weight"][0].tolist())
    masked_equals_pruned(plan, model, small, x[:, :3])
