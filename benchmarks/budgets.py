"""How near plans come to a target, counted on the pruned models.

    pip install -e ".[bench]"
    python benchmarks/budgets.py
    python benchmarks/budgets.py --fraction 0.3 0.5 0.7 --json budgets.json --plot budgets.png
    python benchmarks/budgets.py --latency --fraction 0.5 --cpu-time

"asked" and "got" are relative to the model as it is. What is got is counted on the pruned model:
parameters by PyTorch, multiply-accumulates by ``torch.utils.flop_counter``. "search" is how many
seconds of CPU planning takes with the target above what it takes with a sparsity. With
``--latency``, "predicted" is what the plan says and "got" what ``fxprune.benchmark`` measures on
this machine, both models in turns; layers are timed first, where their times are not known yet.
On a machine that others use, ``--cpu-time`` counts the seconds of one core, in all of it.
"""

from __future__ import annotations

import sys
import time
import warnings
from dataclasses import asdict, dataclass
from typing import Any

import torch
from harness import arguments, described, each, figure, grid, machine, save, show, terminal
from judge import short
from rich.markup import escape
from rich.table import Table
from zoo import FAMILIES

import fxprune
from fxprune.benchmarking import macs

MODELS = ("resnet18", "mobilenet_v2", "vgg11", "densenet121", "efficientnet_b0", "vit_b_16",
          "swin_t", "convnext_tiny", "regnet_y_400mf", "shufflenet_v2_x1_0")  # fmt: skip
TIMED = ("resnet18", "mobilenet_v2", "vit_b_16")


@dataclass
class Row:
    """One plan; numbers are relative to the model as it is."""

    model: str
    measure: str
    asked: float
    predicted: float | None = None
    got: float | None = None
    search: float | None = None
    failure: str = ""

    @property
    def error(self) -> float | None:
        """How far off, relative to what was asked for."""
        return None if self.got is None else self.got / self.asked - 1


def measure(setting: tuple[str, str, float], given: Any) -> Row:
    name, what, fraction = setting
    table = (
        fxprune.LatencyTable(timer=cpu_seconds) if what == "latency" and given.cpu_time else None
    )
    row = Row(name, what, fraction)
    try:
        torch.manual_seed(0)
        zoo = FAMILIES["torchvision"]
        model, x = zoo.build(name).eval(), zoo.example(name)
        start = time.process_time()
        fxprune.plan(model, x)
        plain = time.process_time() - start
        start = time.process_time()
        plan = fxprune.plan(model, x, target=fxprune.Target(**{what: fraction}, table=table))
        row.search = time.process_time() - start - plain
        row.predicted = plan.target.got / plan.target.original
        small = plan.apply(model)
        if what == "latency":
            row.got = ratio(model, small, x, given)
        else:
            count = parameters if what == "params" else lambda m: macs(m, x)
            row.got = count(small) / count(model)
    except Exception as error:
        row.failure = short(error)
    return row


def ratio(model: torch.nn.Module, small: torch.nn.Module, x: Any, given: Any) -> float:
    """The pruned model's time over the model's."""
    if not given.cpu_time:
        found = fxprune.benchmark(model, small, x, seconds=given.seconds)
        return found.after.median / found.before.median
    times = [[cpu_seconds(m, (x,), {}) for m in (model, small)] for _ in range(4)]
    before, after = map(min, zip(*times, strict=True))
    return after / before


def cpu_seconds(module: torch.nn.Module, args: Any, kwargs: Any) -> float:
    """The least seconds of one core that a call takes."""

    def run(number: int) -> float:
        start = time.process_time()
        for _ in range(number):
            module(*args, **kwargs)
        return (time.process_time() - start) / number

    with torch.no_grad():
        number = max(1, round(0.002 / max(min(run(1) for _ in range(3)), 1e-6)))
        return min(run(number) for _ in range(8))


def parameters(model: torch.nn.Module) -> int:
    return sum(p.numel() for p in model.parameters())


def table(rows: list[Row]) -> Table:
    result = grid("model", "target", "asked", "predicted", "got", "off by", "search", left=2)
    for i, row in enumerate(rows):
        if i and rows[i - 1].model != row.model:
            result.add_section()
        result.add_row(
            row.model, row.measure, f"{row.asked:.1%}", show(row.predicted, ".2%"),
            show(row.got, ".2%") or "[red]fails[/]", show(row.error, "+.2%"),
            show(row.search, ".2f", " s"),
        )  # fmt: skip
    return result


def summary(rows: list[Row], latency: bool) -> list[str]:
    done = [abs(row.error) for row in rows if row.error is not None]
    near = sum(error <= 0.01 for error in done)
    worst = max(done, default=0.0)
    word = "measured latencies" if latency else "targets"
    return [f"{near} of {len(rows)} {word} within 1 %; the worst is off by {worst:.2%}."]


def plot(path: Any, rows: list[Row]) -> None:
    """Asked beside got; on the line, they are the same."""
    done = [row for row in rows if row.got is not None]
    with figure(path, 5, 4.5) as axes:
        if not axes or not done:
            return
        (ax,) = axes
        for i, what in enumerate(dict.fromkeys(row.measure for row in done)):
            at = [(row.asked, row.got) for row in done if row.measure == what]
            ax.plot(*zip(*at, strict=True), "osD"[i % 3], alpha=0.6, label=what)
        ax.plot([0, 1], [0, 1], "k--", lw=1)
        ax.set_xlabel("asked, of the original")
        ax.set_ylabel("got")
        ax.legend()
        ax.grid(alpha=0.3)


def options() -> Any:
    parser = arguments(__doc__)
    parser.add_argument("--models", nargs="+", metavar="NAME", help="of torchvision")
    parser.add_argument("--fraction", nargs="+", type=float, default=[0.5], metavar="F")
    parser.add_argument("--latency", action="store_true", help="times, of three models by default")
    parser.add_argument("--seconds", type=float, default=1.0, help="to time each model for")
    parser.add_argument("--cpu-time", action="store_true", help="not the clock's; one thread")
    given = parser.parse_args()
    if not all(0 < fraction < 1 for fraction in given.fraction):
        parser.error("--fraction: above 0 and below 1")
    if given.cpu_time:
        given.threads = 1
    if given.threads:
        torch.set_num_threads(given.threads)
    return given


def main() -> int:
    given, console = options(), terminal()
    warnings.simplefilter("ignore")
    where = machine("torchvision")
    models = given.models or (TIMED if given.latency else MODELS)
    kinds = ("latency",) if given.latency else ("params", "macs")
    settings = [(m, kind, f) for m in models for kind in kinds for f in given.fraction]
    rows: list[Row] = []
    for setting in each(settings, console, lambda s: f"{s[0]}, {s[1]} {s[2]:g}"):
        rows.append(measure(setting, given))
        save(given.json, where, rows=[asdict(row) for row in rows],
             summary=summary(rows, given.latency))  # fmt: skip
    console.print(table(rows))
    for line in summary(rows, given.latency):
        console.print(line)
    for row in rows:
        if row.failure:
            console.print(escape(f"{row.model}, {row.measure}: {row.failure}"))
    console.print(described(where))
    plot(given.plot, rows)
    return 0 if all(row.got is not None for row in rows) else 1


if __name__ == "__main__":
    sys.exit(main())
