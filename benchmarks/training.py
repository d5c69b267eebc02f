"""Pruning in the middle of training: what becomes of the loss, with and without the optimizer's
state.

    apt-get install dataset-fashion-mnist
    pip install matplotlib
    python benchmarks/training.py --json training.json --plot training.png

The network "clothes" of real.py learns Fashion-MNIST from its beginning, with AdamW and with SGD
with momentum, at a learning rate that falls to 0 from step to step: while it is high, the accuracy
jumps by ten points within ten steps. After ``--at`` steps half of the channels go: all at once, or
with ``--prunings 10`` a tenth of them at a time, ten steps apart. There are three ways from there,
with the same weights and the same batches:

* not pruned;
* state cut: ``fxprune.Pruner`` cuts the optimizer's state as it cuts the parameters;
* state new: the same pruned network, and each time a new optimizer.

"before" is the mean training loss of the last 20 steps before pruning, "after" that of the first
20 behind it, "end" that of the last 20; "accuracy" is on the 10,000 test images. Each is the mean
of the seeds, with the lowest and the highest.
"""

from __future__ import annotations

import copy
import statistics
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from itertools import islice
from pathlib import Path

import torch
from digits import Data
from harness import arguments, described, each, figure, grid, machine, save, show, terminal
from real import ConvNet, cache_folder, load_clothes
from torch import Tensor, nn
from torch.nn import functional as F

import fxprune

NEAR, APART = 20, 10  # steps
Optimizer = torch.optim.Optimizer
OPTIMIZERS: dict[str, Callable[[nn.Module], Optimizer]] = {
    "AdamW": lambda m: torch.optim.AdamW(m.parameters(), lr=2e-3),
    "SGD": lambda m: torch.optim.SGD(m.parameters(), lr=0.05, momentum=0.9, weight_decay=5e-4),
}
WAYS = ("not pruned", "state cut", "state new")


@dataclass
class Run:
    """One network, trained to the end in one way; ``losses`` has one of each step."""

    optimizer: str
    way: str
    seed: int
    parameters: int
    accuracy: float
    losses: list[float]


def train(
    model: nn.Module,
    optimizer: Optimizer,
    batches: Iterator[tuple[int, tuple[Tensor, Tensor]]],
    steps: int,
) -> list[float]:
    model.train()
    losses = []
    for step, (images, labels) in batches:
        for group in optimizer.param_groups:
            group["lr"] = optimizer.defaults["lr"] * (1 - step / steps)
        loss = F.cross_entropy(model(images), labels)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def runs(
    data: Data, name: str, seed: int, at: int, steps: int, sparsity: float, prunings: int
) -> list[Run]:
    """Train to step ``at``, and from there in each way."""
    torch.manual_seed(seed)
    model = ConvNet()
    optimizer = OPTIMIZERS[name](model)
    first = train(model, optimizer, islice(enumerate(data.batches(seed)), at), steps)
    found = []
    for way in WAYS:
        net, its = copy.deepcopy((model, optimizer))
        batches, losses = islice(enumerate(data.batches(seed)), at, steps), list(first)
        if way != "not pruned":
            pruner = fxprune.Pruner(
                net, data.test[0][:2], optimizer=its, sparsity=sparsity, schedule="linear",
                steps=prunings,
            )  # fmt: skip
            for i in range(prunings):
                pruner.step()
                if way == "state new":
                    pruner.optimizers = [its := OPTIMIZERS[name](net)]
                if i < prunings - 1:
                    losses += train(net, its, islice(batches, APART), steps)
        losses += train(net, its, batches, steps)
        size = sum(p.numel() for p in net.parameters())
        found.append(Run(name, way, seed, size, data.accuracy(net), losses))
    return found


def places(at: int) -> dict[str, slice]:
    """Which steps a column is about."""
    return {
        "before": slice(at - NEAR, at),
        "after": slice(at, at + NEAR),
        "end": slice(-NEAR, None),
    }


def spread(values: list[float], shape: str) -> str:
    mean, low, high = statistics.fmean(values), min(values), max(values)
    return f"{show(mean, shape)} ({show(low, shape)}–{show(high, shape)})"


def curve(found: list[Run], window: int = 10) -> Tensor:
    """The mean over seeds of the running mean of the loss."""
    losses = torch.tensor([run.losses for run in found])
    return losses.unfold(1, window, 1).mean((0, 2))


def draw(found: list[Run], path: Path | None, at: int) -> None:
    with figure(path, 9, 3.2, len(OPTIMIZERS)) as panels:
        for panel, name in zip(panels, OPTIMIZERS, strict=bool(panels)):
            for way in WAYS:
                y = curve([r for r in found if (r.optimizer, r.way) == (name, way)])
                panel.plot(range(10, len(y) + 10), y, label=way, lw=1.2)
            panel.axvline(at, color="gray", lw=0.8, ls=":")
            panel.set(title=name, xlabel="step", ylabel="training loss", yscale="log")
            panel.set_xlim(left=at // 2)
            panel.legend()


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("--at", type=int, default=200, help="the step after which to prune")
    parser.add_argument("--steps", type=int, default=400, help="in all")
    parser.add_argument("--sparsity", type=float, default=0.5)
    parser.add_argument("--prunings", type=int, default=1, help="to get there")
    parser.add_argument("--seeds", type=int, default=3)
    args = parser.parse_args()
    if args.threads:
        torch.set_num_threads(args.threads)
    console = terminal()
    data = load_clothes(cache_folder())
    jobs = [(name, seed) for name in OPTIMIZERS for seed in range(args.seeds)]
    found = [
        run for name, seed in each(jobs, console, lambda job: f"{job[0]}, seed {job[1]}")
        for run in runs(data, name, seed, args.at, args.steps, args.sparsity, args.prunings)
    ]  # fmt: skip
    table = grid("optimizer", "way", "parameters", *places(args.at), "accuracy", left=2)
    for name in OPTIMIZERS:
        for way in WAYS:
            rows = [r for r in found if (r.optimizer, r.way) == (name, way)]
            losses = [
                spread([statistics.fmean(r.losses[place]) for r in rows], ".2f")
                for place in places(args.at).values()
            ]
            accuracy = spread([r.accuracy for r in rows], ".1f")
            table.add_row(name, way, f"{rows[0].parameters:,}", *losses, accuracy)
    console.print(table)
    where = machine()
    console.print(described(where))
    asked = {key: vars(args)[key] for key in ("at", "steps", "sparsity", "prunings")}
    save(args.json, where, **asked, runs=[asdict(run) for run in found])
    draw(found, args.plot, args.at)


if __name__ == "__main__":
    main()
