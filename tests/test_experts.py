"""Mixtures of experts: the inner width of each goes, and the stream; which experts, data decide."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from .oracle import check
from .test_trace import Net

EXPERTS = 3


class Mixture(nn.Module):
    def __init__(self, how):
        super().__init__()
        self.how, self.inp, self.out = how, nn.Linear(6, 8), nn.Linear(8, 3)
        self.router = nn.Linear(8, EXPERTS)
        self.up = nn.ModuleList([nn.Linear(8, 12) for _ in range(EXPERTS)])
        self.down = nn.ModuleList([nn.Linear(12, 8) for _ in range(EXPERTS)])
        self.w1, self.b1, self.w2 = (
            nn.Parameter(torch.randn(EXPERTS, *shape)) for shape in ((8, 12), (1, 12), (12, 8))
        )

    def expert(self, e, y):
        return self.down[e](F.silu(self.up[e](y)))

    def forward(self, x):
        y = torch.sigmoid(self.inp(x)).flatten(0, 1)
        p = self.router(y).softmax(-1)
        weight, chosen = p.topk(2, -1)
        z = torch.zeros_like(y)
        if self.how == "all":
            z = sum(p[:, e : e + 1] * self.expert(e, y) for e in range(EXPERTS))
        elif self.how == "bmm":
            h = F.silu(torch.einsum("nd,edh->enh", y, self.w1) + self.b1)
            z = (torch.einsum("enh,ehd->end", h, self.w2) * p.t()[..., None]).sum(0)
        for e in range(EXPERTS):
            if self.how == "index_add":
                token, k = torch.where(chosen == e)
                z.index_add_(0, token, self.expert(e, y[token]) * weight[token, k, None])
            elif self.how == "index":
                token, k = torch.where(chosen == e)
                z[token] = z[token] + self.expert(e, y[token]) * weight[token, k, None]
            elif self.how == "mask":
                mask = (chosen == e).any(-1)
                z[mask] += self.expert(e, y[mask]) * p[mask][:, e : e + 1]
        return self.out(y + z)


@pytest.mark.parametrize("how", ["all", "bmm", "index_add", "index", "mask"])
def test_experts_and_their_stream_shrink(how):
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(2, 5, 6, dtype=torch.float64, generator=generator)
    _, small = check(Mixture(how), x)
    assert small.inp.out_features == 4 and small.router.out_features == EXPERTS
    if how == "bmm":
        assert small.w1.shape == (EXPERTS, 4, 6) and small.w2.shape == (EXPERTS, 6, 4)
    else:
        assert all(up.out_features == 6 for up in small.up)


def test_an_expert_that_is_sent_nothing_is_cut_like_the_others():
    def forward(s, x):
        y = s.a(x)
        parts = y.split([4, 0, 2])
        return s.out(torch.cat([F.linear(t, w) for t, w in zip(parts, s.experts, strict=True)]))

    torch.manual_seed(0)
    experts = nn.Parameter(torch.randn(3, 10, 8))
    net = Net(forward, a=nn.Linear(5, 8), experts=experts, out=nn.Linear(10, 3))
    _, small = check(net, torch.randn(6, 5, dtype=torch.float64))
    assert small.experts.shape == (3, 5, 4)
