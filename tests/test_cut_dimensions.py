"""A channel dimension cut in parts of which code treats positions each by itself: what is left has
to stand where it stood, or the group stays whole, and nothing crashes."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import fxprune

from .oracle import awake, check, difference, run
from .test_trace import Net

pytestmark = pytest.mark.filterwarnings("ignore::fxprune.PruningWarning")

X = torch.linspace(-3, 3, 10, dtype=torch.float64).cos().reshape(2, 5)
FACTORS = torch.linspace(1, 6, 6, dtype=torch.float64)
PLACES = torch.tensor([5, 3, 1, 0, 2, 4])


def net(forward, seed, heads=4):
    torch.manual_seed(seed)

    def run_it(s, x):
        return s.o(forward(s.q(x).view(x.shape[0], -1, 24 // heads)).flatten(1))

    return Net(run_it, q=nn.Linear(5, 24), o=nn.Linear(24, 5))


def louder(parts, dim):
    return torch.cat([part * (i + 1) for i, part in enumerate(parts)], dim)


def halves(t):
    a, b = t.chunk(2, -1)
    return torch.cat([-b, a], -1)


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("forward", [
    lambda v: v * FACTORS,
    lambda v: v.masked_fill(torch.arange(6) > 2, 0.0),
    lambda v: torch.where(torch.arange(6) > 2, v, 2 * v),
])  # fmt: skip
def test_slices_that_meet_a_fixed_tensor_are_made_in_an_order_that_fits(forward, seed):
    _, small = check(net(forward, seed), X)
    assert small.q.out_features == 12


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize(("forward", "heads"), [
    (halves, 6), (lambda v: louder(v.split(2, -1), -1), 6),
    (lambda v: torch.cat([v[..., :2] * 2, v[..., 2:]], -1), 6),
    (lambda v: louder(v.chunk(2, 2), 2), 4), (lambda v: louder(v.split(3, 2), 2), 4),
    (lambda v: louder(v.tensor_split(2, 2), 2), 4), (lambda v: louder(v.split(2, 1), 1), 4),
    (lambda v: louder(v.split([2, 2, 2], 1), 1), 6),
    (lambda v: torch.stack([v[:, :, ::2], v[:, :, 1::2]], 3).flatten(2), 4),
    (lambda v: v[:, :, PLACES], 4), (lambda v: v.index_select(2, PLACES), 4),
    (lambda v: v[..., [0, 2, 3, 5]].repeat(1, 1, 2)[..., :6], 4),
    (lambda v: F.pad(v[..., :4], (1, 1)), 4),
])  # fmt: skip
def test_parts_of_every_slice_are_what_is_left_of_these_parts(forward, heads, seed):
    check(net(forward, seed, heads), X, shrinks=False)


@pytest.mark.parametrize("turn", [
    lambda t: t[..., :4], lambda t: t.narrow(-1, 1, 4), lambda t: t[..., [0, 2, 3, 5]],
    lambda t: torch.stack([-t[..., 1::2], t[..., ::2]], -1).flatten(-2),
    lambda t: louder(t.split([2, 4], -1), -1), lambda t: louder(t.chunk(4, -1), -1),
])  # fmt: skip
def test_parts_of_heads_that_keep_other_slices_each(turn):
    torch.manual_seed(0)

    def forward(s, x):
        q, k, v = (t(x).unflatten(-1, (4, 6)).transpose(1, 2) for t in (s.q, s.k, s.v))
        y = (turn(q) @ turn(k).transpose(-1, -2)).softmax(-1) @ v
        return s.o(y.transpose(1, 2).flatten(2))

    layers = {name: nn.Linear(5, 24) for name in "qkv"}
    x = torch.randn(2, 3, 5, dtype=torch.float64)
    check(Net(forward, o=nn.Linear(24, 5), **layers), x, attention="head_dim", shrinks=False)


def test_a_scale_that_is_made_of_a_width_stays_what_it_was():
    torch.manual_seed(0)

    def forward(s, x):
        q, k, v = (t(x).unflatten(-1, (4, -1)).transpose(1, 2) for t in (s.q, s.k, s.v))
        y = F.scaled_dot_product_attention(q, k, v, scale=q.shape[-1] ** -0.5)
        return s.o(y.transpose(1, 2).flatten(2))

    layers = {name: nn.Linear(5, 16) for name in "qkv"}
    x = 3 * torch.randn(2, 3, 5, dtype=torch.float64)
    _, small = check(Net(forward, o=nn.Linear(16, 5), **layers), x, attention="head_dim")
    assert small.q.out_features == 8


@pytest.mark.parametrize("merge", [
    lambda t, b, n: t.view(b, n, 4, 4).transpose(1, 2).reshape(b * 4, n, 4),
    lambda t, b, n: t.unflatten(-1, (4, 4)).transpose(1, 2).reshape(4 * b, n, 4),
])  # fmt: skip
@pytest.mark.parametrize("part", [
    lambda y, b, n: y.view(b, 4, n, 4), lambda y, b, n: y.view(y.shape[0] // 4, 4, n, 4),
])  # fmt: skip
def test_heads_beside_the_batch_are_right_for_other_batches(merge, part):
    torch.manual_seed(0)

    def forward(s, x):
        b, n, _ = x.shape
        q, k, v = (merge(t(x), b, n) for t in (s.q, s.k, s.v))
        y = (q @ k.transpose(-1, -2)).softmax(-1) @ v
        return s.o(part(y, b, n).transpose(1, 2).reshape(b, n, 16))

    layers = {name: nn.Linear(5, 16) for name in "qkv"}
    net = Net(forward, o=nn.Linear(16, 5), **layers)
    plan, small = check(net, torch.randn(2, 3, 5, dtype=torch.float64))
    assert small.q.out_features == 8
    for batch in (1, 3, 7):
        x = torch.randn(batch, 4, 5, dtype=torch.float64)
        assert difference(run(plan.mask(net), x), run(small, x)) < 1e-9


def test_padding_by_a_number_made_of_widths_is_explained():
    torch.manual_seed(0)

    def forward(s, x):
        x = s.a(x).relu()
        more = s.b.out_channels - s.a.out_channels
        return s.c(s.b(x).relu() + F.pad(x, (0, 0, 0, 0, more // 2, more // 2)))

    net = Net(forward, a=nn.Conv2d(3, 8, 1), b=nn.Conv2d(8, 16, 1), c=nn.Conv2d(16, 4, 1))
    check(net, torch.randn(2, 3, 4, 4, dtype=torch.float64), shrinks=False)


def test_a_norm_without_tensors_serves_two_widths():
    torch.manual_seed(0)
    norm = nn.InstanceNorm2d(8)
    net = nn.Sequential(nn.Conv2d(3, 8, 1), norm, nn.Conv2d(8, 6, 1), norm, nn.Conv2d(6, 4, 1))
    with pytest.warns(UserWarning):
        check(awake(net), torch.randn(2, 3, 4, 4, dtype=torch.float64), shrinks=False)


def empty(v):
    return torch.zeros(len(v), 4, 6, dtype=v.dtype)


def at(v):
    return torch.tensor([1, 0, 1])[: len(v), None, None]


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("forward", [
    lambda v: empty(v).scatter_add_(0, at(v).expand_as(v), v),
    lambda v: torch.zeros_like(v).scatter_add(0, at(v).expand(-1, v.shape[1], v.shape[2]), v),
    lambda v: empty(v).scatter_reduce(0, at(v).expand(v.shape), v, "amax"),
    lambda v: empty(v).index_add_(0, at(v)[:, 0, 0], v),
    lambda v: empty(v) + v,
    lambda v: torch.ones(4, 1, dtype=v.dtype) * v,
    lambda v: v + v.new_zeros(1, 6),
    lambda v: v * FACTORS[:2, None, None].repeat(1, v.shape[1], v.shape[2]),
])  # fmt: skip
def test_what_is_the_same_everywhere_is_as_large_as_what_is_left(forward, seed):
    plan, small = check(net(forward, seed), X)
    assert small.q.out_features == 12


@pytest.mark.parametrize("kind", ["parameter", "buffer", "attribute"])
@pytest.mark.parametrize("outer", [False, True])
def test_of_two_dimensions_that_a_flatten_joins_the_one_that_layers_make_shrinks(kind, outer):
    """Fourier features: frequencies are a table's, the channels that meet them a layer's."""

    def forward(s, x):
        y = torch.sigmoid(s.a(x))
        y = y[..., None] * s.rates
        y = y.transpose(-1, -2) if outer else y
        return s.b(torch.cos(y).flatten(1))

    torch.manual_seed(0)
    rates = torch.rand(5, dtype=torch.float64) + 0.5
    net = Net(forward, a=nn.Linear(6, 8), b=nn.Linear(40, 3))
    if kind == "buffer":
        net.register_buffer("rates", rates)
    else:
        net.rates = nn.Parameter(rates) if kind == "parameter" else rates
    plan, small = check(net, torch.randn(4, 6, dtype=torch.float64))
    assert (small.a.out_features, len(small.rates)) == (4, 5), plan


@pytest.mark.parametrize("attention, left", [("heads", (2, 3)), ("head_dim", (4, 2))])
def test_heads_of_their_own_weights_are_flattened(attention, left):
    def forward(s, x):
        q, k, v = (torch.einsum("bnd,hdk->bhnk", x, w) for w in (s.q, s.k, s.v))
        y = (q @ k.transpose(-1, -2)).softmax(-1) @ v
        return s.out(y.transpose(1, 2).flatten(2))

    torch.manual_seed(0)
    weights = {name: nn.Parameter(torch.randn(4, 6, 3) * 0.5) for name in "qkv"}
    net = Net(forward, out=nn.Linear(12, 2), **weights)
    _, small = check(net, torch.randn(2, 5, 6, dtype=torch.float64), attention=attention)
    assert (small.v.shape[0], small.v.shape[2]) == left


@pytest.mark.parametrize("bias", [False, True])
def test_of_two_dimensions_that_are_one_behind_a_view_that_shrinks_which_a_layer_makes(bias):
    def forward(s, x):
        y = torch.zeros(len(x), 4, 8, dtype=x.dtype) + torch.sigmoid(s.a(x)).mean(2)[:, None]
        return s.o(y.flatten(1))

    torch.manual_seed(0)
    x = torch.randn(2, 3, 6, dtype=torch.float64)
    _, small = check(Net(forward, a=nn.Conv1d(3, 8, 1, bias=bias), o=nn.Linear(32, 5)), x)
    assert small.a.out_channels == 4


def test_one_slice_that_is_left_of_two_is_not_repeated_beside_itself():
    def forward(s, x):
        y = s.a(x)
        b, heads = y.shape
        return s.o(y[:, :, None].expand(b, heads, 3).reshape(b, heads * 3))

    torch.manual_seed(0)
    _, small = check(Net(forward, a=nn.Linear(5, 2), o=nn.Linear(6, 5)), X)
    assert (small.a.out_features, small.o.in_features) == (1, 3)


def test_what_a_channel_says_beside_parts_that_the_unknown_call_s_other_argument_lacks():
    def forward(s, x):
        b, n, _ = x.shape
        y, k = (f(x).view(b, n, 4, 3).transpose(1, 2) for f in (s.a, s.b))
        scores = (k @ k.mT).tril(-1)  # of a head that is gone 0: no slices of heads are there
        solved = torch.linalg.solve_triangular(scores, y, upper=False, unitriangular=True)
        return s.o(solved.transpose(1, 2).flatten(2))

    torch.manual_seed(0)
    b = nn.Linear(5, 12, bias=False)
    net = Net(forward, a=nn.Linear(5, 12), b=b, o=nn.Linear(12, 5))
    _, small = check(net, torch.randn(2, 6, 5, dtype=torch.float64))
    assert (small.a.out_features, small.b.out_features, small.o.in_features) == (6, 6, 6)


@pytest.mark.parametrize("parts", [1, 2, 4])
def test_the_size_that_repeated_slices_come_to_is_a_width(parts):
    def forward(s, x):
        heads = s.heads(x).unflatten(1, (-1, 3))
        keys = s.keys(x).unflatten(1, (-1, 2))
        n = heads.shape[1]
        keys = keys.repeat_interleave(n // keys.shape[1], dim=1, output_size=n)
        return s.o((heads * keys.sum(2, keepdim=True)).flatten(1))

    torch.manual_seed(0)
    net = Net(forward, heads=nn.Linear(5, 24), keys=nn.Linear(5, 2 * parts), o=nn.Linear(24, 5))
    plan, small = check(net, X)
    assert small.o.in_features == (16 if parts == 1 else 12) and (parts == 1 or not plan.code)


GROUPS = {
    "einsum": lambda x, w: torch.einsum("...gi,gio->...go", x, w),
    "einsum, the weight first": lambda x, w: torch.einsum("gio,btgi->btgo", w, x),
    "bmm": lambda x, w: torch.bmm(x.flatten(0, 1).transpose(0, 1), w).transpose(0, 1)
    .unflatten(0, x.shape[:2]),
    "matmul": lambda x, w: (x.unsqueeze(-2) @ w).squeeze(-2),
}  # fmt: skip


@pytest.mark.parametrize("attention", ["heads", "head_dim"])
@pytest.mark.parametrize("how", GROUPS)
def test_layers_of_groups_written_as_stacks_of_matrices_are_cut_as_grouped_convolutions_are(
    how, attention
):
    def forward(s, x):
        y = s.a(x).sigmoid().unflatten(-1, (4, -1))
        y = (GROUPS[how](y, s.w1) + s.b1).flatten(-2).sigmoid()
        y = (GROUPS[how](y.unflatten(-1, (4, -1)), s.w2) + s.b2).flatten(-2)
        return s.c(y)

    torch.manual_seed(0)
    weights = [nn.Parameter(torch.randn(4, *shape)) for shape in ((8, 6), (6,), (6, 10), (10,))]
    layers = dict(zip(("w1", "b1", "w2", "b2"), weights, strict=True))
    model = Net(forward, a=nn.Linear(5, 32), c=nn.Linear(40, 3), **layers)
    x = torch.randn(2, 7, 5, dtype=torch.float64)
    plan, small = check(model, x, attention=attention)
    assert small.a.out_features == 16 and small.w2.shape == (4, 3, 5)
    assert small(x[:1, :3]).shape == (1, 3, 3)
    again = fxprune.prune(small, x, sparsity=0.5, attention=attention)
    assert again.a.out_features == 8


TURNS = {
    "transpose": lambda w: w.transpose(1, 2), "mT": lambda w: w.mT,
    "permute": lambda w: w.permute(0, 2, 1), "movedim": lambda w: w.movedim(2, 1),
}  # fmt: skip


@pytest.mark.parametrize("turn", TURNS)
@pytest.mark.parametrize("how", GROUPS)
def test_so_are_those_whose_matrices_the_code_turns(how, turn):
    def forward(s, x):
        y = s.a(x).sigmoid().unflatten(-1, (4, -1))
        return s.c((GROUPS[how](y, TURNS[turn](s.w)) + s.b).flatten(-2).sigmoid())

    torch.manual_seed(0)
    w, b = nn.Parameter(torch.randn(4, 6, 8)), nn.Parameter(torch.randn(4, 6))
    model = Net(forward, a=nn.Linear(5, 32), w=w, b=b, c=nn.Linear(24, 3))
    x = torch.randn(2, 7, 5, dtype=torch.float64)
    plan, small = check(model, x)
    assert small.a.out_features == 16 and small.w.shape == (4, 3, 4)
    assert fxprune.prune(small, x, sparsity=0.5).a.out_features == 8


SCORED = {
    "sum": lambda x, w: (x * w).sum(-1, keepdim=True),
    "einsum": lambda x, w: torch.einsum("nhc,hc->nh", x, w)[..., None],
}


@pytest.mark.parametrize("attention", ["heads", "head_dim"])
@pytest.mark.parametrize("how", SCORED)
def test_where_heads_are_averaged_the_slices_that_their_scores_sum_over_go(how, attention):
    """A graph attention's last layer: what heads score their slices by, they sum over them."""

    def forward(s, x):
        y = s.a(x).view(-1, 4, s.a.out_features // 4)
        scores = F.leaky_relu(SCORED[how](y, s.one) + SCORED[how](y, s.other).mean(0), 0.2)
        return s.b((y * scores.sigmoid()).mean(1) + s.bias)

    torch.manual_seed(0)
    one, other = (nn.Parameter(torch.randn(4, 6)) for _ in range(2))
    model = Net(forward, a=nn.Linear(5, 24, bias=False), one=one, other=other,
                bias=nn.Parameter(torch.randn(6)), b=nn.Linear(6, 3))  # fmt: skip
    _, small = check(model, X, attention=attention)
    assert small.a.out_features == 12 and small.one.shape == (4, 3) and small.b.in_features == 3


def test_whole_heads_go_where_they_are_joined_behind_scores_that_sum_over_slices():
    def forward(s, x):
        y = s.a(x).view(len(x), -1, 6)
        return s.b((y * (y * s.one).sum(-1, keepdim=True).sigmoid()).flatten(1))

    torch.manual_seed(0)
    one = nn.Parameter(torch.randn(4, 6))
    model = Net(forward, a=nn.Linear(5, 24), one=one, b=nn.Linear(24, 3))
    _, small = check(model, X)
    assert small.one.shape == (2, 6)


@pytest.mark.parametrize("picked_first", [False, True])
def test_a_codebook_of_each_head_goes_with_it_whichever_way_it_is_read_first(picked_first):
    """Vector quantisation: distances meet it along heads and slices, products read it by heads."""

    def forward(s, x):
        z = s.a(x).view(len(x), -1, 6).transpose(0, 1)
        begin = torch.einsum("hbk,hkd->bhd", torch.ones_like(z[..., :1]), s.codes[:, :1])
        begin = begin.flatten(1) if picked_first else 0
        place = torch.cdist(z, s.codes).argmin(-1)
        found = torch.einsum("hbk,hkd->bhd", F.one_hot(place, 8).to(z), s.codes)
        return s.b(found.flatten(1) + begin)

    torch.manual_seed(0)
    codes = nn.Parameter(torch.randn(4, 8, 6))
    model = Net(forward, a=nn.Linear(5, 24), codes=codes, b=nn.Linear(24, 3))
    _, small = check(model, X)
    assert small.codes.shape == (2, 8, 6) and small.a.out_features == 12
