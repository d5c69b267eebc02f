"""Losses and distances inside of models: a codebook's, most of all."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import fxprune

from .oracle import awake, check

X = torch.linspace(-2, 3, 60, dtype=torch.float64).cos().reshape(2, 5, 6)
EACH = torch.tensor([1.5], dtype=torch.float64)

COMPARED = {
    "mse": F.mse_loss,
    "a sum": lambda h, k: F.mse_loss(h, k, reduction="sum"),
    "each": lambda h, k: F.mse_loss(h, k, reduction="none").sum(-1),
    "each along positions": lambda h, k: F.l1_loss(h, k, reduction="none").sum(1).mean(-1),
    "l1": F.l1_loss,
    "smooth l1": F.smooth_l1_loss,
    "huber": lambda h, k: F.huber_loss(h, k, delta=0.3),
    "soft margin": F.soft_margin_loss,
    "cross entropy": F.binary_cross_entropy,
    "cross entropy with a weight": lambda h, k: F.binary_cross_entropy_with_logits(
        h, k, pos_weight=EACH, reduction="sum"),
    "a module": nn.MSELoss(),
    "another module": nn.SmoothL1Loss(beta=0.2),
    "distance": F.pairwise_distance,
    "distance, a module": nn.PairwiseDistance(keepdim=True),
    "distances": torch.cdist,
    "distances to one batch": lambda h, k: torch.cdist(h[:, :3], k[0], p=1),
}  # fmt: skip


class Two(nn.Module):
    def __init__(self, compare):
        super().__init__()
        self.a, self.b, self.c = nn.Linear(6, 8), nn.Linear(6, 8), nn.Linear(8, 3)
        self.compare = compare

    def forward(self, x):
        h, k = self.a(x).sigmoid(), self.b(x).sigmoid()
        return self.c(h + k), self.compare(h, k)


@pytest.mark.parametrize("compare", COMPARED.values(), ids=COMPARED.keys())
def test_what_is_compared_is_pruned_alike(compare):
    plan, small = check(Two(compare), X)
    assert small.a.out_features == 4
    assert torch.equal(plan.kept["a.weight"][0], plan.kept["b.weight"][0])


def test_rows_that_are_compared_across_channels_stay():
    _, small = check(Two(lambda h, k: torch.cdist(h.mT, k.mT)), X, shrinks=False)
    assert small.a.out_features == 8


class Quantised(nn.Module):
    """Picks the nearest row of a codebook, which it is drawn to in training mode."""

    def __init__(self):
        super().__init__()
        self.a, self.b, self.c = nn.Linear(6, 16), nn.Linear(16, 16), nn.Linear(16, 3)
        self.book = nn.Embedding(12, 16)

    def forward(self, x):
        z = self.a(x)
        book = self.book.weight
        q = self.book(torch.cdist(z, book.expand(len(z), *book.shape)).argmin(-1))
        if self.training:
            self.loss = F.mse_loss(q, z.detach()) + 0.25 * F.mse_loss(z, q.detach())
        return self.c(self.b(z + (q - z).detach()).sigmoid())


def test_a_codebook_shrinks_with_what_is_looked_up_in_it():
    model = awake(Quantised())
    small = fxprune.prune(model, X)
    assert small.book.weight.shape == (12, 8)
    small.train()
    small(X)
    small.loss.backward()
