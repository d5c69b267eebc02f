"""How long pruning takes and how much memory, beside the peers on the same models.

    pip install -e ".[bench]"
    python benchmarks/speed.py --plot speed.png --json speed.json
    python benchmarks/speed.py --models resnet18 --peer torch-pruning torch-kirigami --limit 1200
    python benchmarks/speed.py --growth only --repeat 7

The first table has a line a model: seconds of one forward pass; of fxprune's trace, plan (with its
own trace), apply and proof; of the whole, ``fxprune.prune(..., verify=False)``; of the same by each
peer through its plain interface (``pruners.py``); how many times longer the peer takes (ratio); and
how many forward passes that is (passes): whoever runs the model once cannot be faster than the peer
by more. Medians of ``--repeat`` runs, in which the pruners take turns, after one that is not
counted; garbage is collected before each. The peers prune a copy in place, and making the copy is
not timed; fxprune makes the pruned model beside the given one, which is. ``profiles.py`` tells
where the time goes.

MB is the most that the process held during one more run above what it held before: the high-water
mark of its resident memory, which Linux can reset, so tensors and Python's objects both count.

A peer that raises is shown as such and one that is slower than ``--limit`` hangs. What takes longer
than a twentieth of the limit is run once, and its memory is not measured.

The second table is growth: networks of one family, one block stacked, one network widened, and the
exponent of the power law that fits best (1 is linear). ``size`` is the number of convolutions and
linear layers, of blocks, or the factor of the width.
"""

from __future__ import annotations

import copy
import gc
import statistics
import sys
import warnings
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field
from typing import Any

import harness
import torch
from harness import (
    TimeUp,
    arguments,
    described,
    each,
    exponent,
    figure,
    geometric_mean,
    grid,
    in_turn,
    limit,
    machine,
    peak_memory,
    save,
    seconds,
    show,
    terminal,
)
from judge import count, short
from pruners import PEERS, NotInstalled, output_layers, pruner
from rich.markup import escape
from rich.table import Table
from torch import Tensor, nn
from zoo import FAMILIES

import fxprune
from fxprune.modules.running import outputs
from fxprune.proving.proof import prove

MODELS = (
    "alexnet", "convnext_tiny", "densenet121", "efficientnet_b0", "efficientnet_v2_s", "googlenet",
    "inception_v3", "maxvit_t", "mnasnet1_0", "mobilenet_v2", "mobilenet_v3_large",
    "mobilenet_v3_small", "regnet_x_400mf", "regnet_y_800mf", "resnet18", "resnet50",
    "resnext50_32x4d", "shufflenet_v2_x1_0", "squeezenet1_1", "swin_t", "vgg11_bn", "vit_b_16",
    "wide_resnet50_2", "deeplabv3_mobilenet_v3_large", "fcn_resnet50",
)  # fmt: skip
STEPS = ("forward", "trace", "plan", "apply", "proof")


@dataclass
class Taken:
    """What one pruner took for one model: seconds, bytes, or why there are none."""

    seconds: float | None = None
    spread: float | None = None  # interquartile range of the runs, relative to the median
    runs: int = 0
    memory: int | None = None
    kept: float | None = None
    failure: str = ""
    details: str = ""


@dataclass
class Row:
    model: str
    parameters: int
    steps: dict[str, float] = field(default_factory=dict)
    pruners: dict[str, Taken] = field(default_factory=dict)

    def ratio(self, peer: str) -> float | None:
        """How many times longer the peer takes."""
        ours, theirs = self.pruners["fxprune"].seconds, self.pruners[peer].seconds
        return theirs / ours if ours and theirs else None

    def passes(self, peer: str) -> float | None:
        """How many forward passes the peer takes."""
        theirs = self.pruners[peer].seconds
        return theirs / self.steps["forward"] if theirs and self.steps else None


# -- one model ------------------------------------------------------------------------------------


def measure(name: str, model: nn.Module, x: Any, given: Any) -> Row:
    """Every pruner on one model, in turn; ours also step by step."""
    row = Row(name, count(model))
    row.pruners = {n: first_run(n, model, x, given.limit) for n in ("fxprune", *given.peer)}
    quick = {
        n: run_of(n, model, x) for n, taken in row.pruners.items()
        if not taken.failure and taken.seconds < given.limit / 20
    }  # fmt: skip
    for n, call in quick.items():
        row.pruners[n].memory = memory_of(call)
    for n, found in in_turn(quick, given.repeat).items():
        taken = row.pruners[n]
        taken.seconds, taken.runs = statistics.median(found), len(found)
        low, _, high = statistics.quantiles(found, n=4) if len(found) > 1 else found * 3
        taken.spread = (high - low) / taken.seconds
    if given.steps and not row.pruners["fxprune"].failure:
        row.steps = steps(model, x, given.repeat)
    return row


def first_run(name: str, model: nn.Module, x: Any, longest: float) -> Taken:
    """Warm up, and see whether it works at all."""
    taken = Taken()
    try:
        prepare, run = run_of(name, model, x)
        made = prepare()
        with limit(longest):
            taken.seconds, small = seconds(lambda: run(made))
        taken.runs, taken.kept = 1, count(small) / count(model)
        try:
            outputs(small, x)
        except Exception as error:
            taken.failure, taken.details = "result does not run", short(error)
    except TimeUp:
        taken.failure, taken.details = f"> {longest:.0f} s", "stopped at --limit"
    except NotInstalled as error:
        taken.failure, taken.details = "not installed", str(error)
    except Exception as error:
        taken.failure, taken.details = "raises", short(error)
    return taken


def run_of(name: str, model: nn.Module, x: Any) -> tuple[Callable[[], Any], Callable[[Any], Any]]:
    """(prepare, run) of one pruner; peers get a copy and the layers that they have to leave."""
    prune = pruner(name)

    def prepare() -> Any:
        fresh = model if name == "fxprune" else copy.deepcopy(model)
        return fresh, output_layers(fresh, x)

    return prepare, lambda made: prune(made[0], x, last=made[1])


def memory_of(call: tuple[Callable[[], Any], Callable[[Any], Any]]) -> int | None:
    prepare, run = call
    made = prepare()
    return peak_memory(lambda: run(made))


def steps(model: nn.Module, x: Any, repeat: int) -> dict[str, float]:
    """Median seconds of each step of fxprune."""
    plan = fxprune.plan(model, x)
    small = plan.apply(model)
    none = object

    calls = {
        "forward": (none, lambda _: outputs(model, x)),
        "trace": (none, lambda _: fxprune.trace(model, x)),
        "plan": (none, lambda _: fxprune.plan(model, x)),
        "apply": (none, lambda _: plan.apply(model)),
        "proof": (none, lambda _: prove(plan, model, small, x)),
    }
    return {name: statistics.median(found) for name, found in in_turn(calls, repeat).items()}


# -- growth ---------------------------------------------------------------------------------------


class Convolutions(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Conv2d(32, 64, 1), nn.BatchNorm2d(64), nn.SiLU(),
                                  nn.Conv2d(64, 32, 3, padding=1), nn.BatchNorm2d(32))  # fmt: skip

    def forward(self, x: Tensor) -> Tensor:
        return torch.relu(x + self.body(x))


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.qkv, self.proj = nn.LayerNorm(64), nn.Linear(64, 192), nn.Linear(64, 64)
        self.mlp = nn.Sequential(nn.LayerNorm(64), nn.Linear(64, 128), nn.GELU(),
                                 nn.Linear(128, 64))  # fmt: skip

    def forward(self, x: Tensor) -> Tensor:
        b, n, _ = x.shape
        q, k, v = self.qkv(self.norm(x)).view(b, n, 3, 4, -1).permute(2, 0, 3, 1, 4).unbind(0)
        y = nn.functional.scaled_dot_product_attention(q, k, v).transpose(1, 2)
        x = x + self.proj(y.reshape(b, n, -1))
        return x + self.mlp(x)


class Wide(nn.Sequential):
    """Four convolutions of so many times 32 channels."""

    def __init__(self, factor: int) -> None:
        n = 32 * factor
        layers: list[nn.Module] = [nn.Conv2d(3, n, 3)]
        for _ in range(3):
            layers += [nn.BatchNorm2d(n), nn.ReLU(), nn.Conv2d(n, n, 3)]
        super().__init__(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(n, 10))


def layers(model: nn.Module) -> int:
    return sum(isinstance(m, (nn.Linear, nn.modules.conv._ConvNd)) for m in model.modules())


Grown = tuple[str, int, nn.Module, Any]  # family, size, model, input


def growing() -> Iterator[Callable[[], Grown]]:
    """Makers of the models of each family, from small to large."""
    zoo = FAMILIES["torchvision"]
    families = {"ResNet": ("resnet18", "resnet34", "resnet50", "resnet101", "resnet152"),
                "DenseNet": ("densenet121", "densenet169", "densenet201")}  # fmt: skip

    def of_zoo(family: str, name: str) -> Grown:
        model = zoo.build(name).eval()
        return f"{family}, depth", layers(model), model, zoo.example(name)

    def stacked(block: type[nn.Module], depth: int) -> Grown:
        if block is Convolutions:
            ends, x = (nn.Conv2d(3, 32, 1), nn.Conv2d(32, 4, 1)), torch.randn(1, 3, 8, 8)
        else:
            ends, x = (nn.Linear(3, 64), nn.Linear(64, 4)), torch.randn(1, 8, 3)
        model = nn.Sequential(ends[0], *(block() for _ in range(depth)), ends[1]).eval()
        return f"{block.__name__.lower()}, stacked", depth, model, x

    for family, names in families.items():
        for name in names:
            yield lambda f=family, n=name: of_zoo(f, n)
    for block in (Convolutions, Attention):
        for depth in (4, 16, 64):
            yield lambda b=block, d=depth: stacked(b, d)
    for factor in (1, 2, 4, 8):
        yield lambda f=factor: ("convolutions, width", f, Wide(f).eval(), torch.randn(1, 3, 16, 16))


# -- report ---------------------------------------------------------------------------------------


def megabytes(memory: int | None) -> str:
    return "" if memory is None else f"{memory / 1e6:.0f}"


def table(rows: list[Row], peers: list[str]) -> Table:
    heads = [h for p in peers for h in (p, "kept", "MB", "ratio", "passes")]
    result = grid("model", "kept", *STEPS, "prune", "MB", *heads)
    for row in rows:
        ours = row.pruners["fxprune"]
        cells = [show(row.steps.get(s)) for s in STEPS]
        cells += [ours.failure or show(ours.seconds), megabytes(ours.memory)]
        for peer in peers:
            taken, ratio = row.pruners[peer], row.ratio(peer)
            if taken.failure:
                cells += [f"[red]{escape(taken.failure)}[/]", "", "", "", ""]
            else:
                cells += [show(taken.seconds), show(taken.kept, ".0%"), megabytes(taken.memory),
                          show(ratio), show(row.passes(peer))]  # fmt: skip
        result.add_row(row.model, show(ours.kept, ".0%"), *cells)
    return result


def growth_table(grown: dict[str, list[tuple[int, Row]]], names: list[str]) -> Table:
    result = grid("family", "size", *(h for n in names for h in (n, "exponent")))
    for family, members in grown.items():
        for i, (size, row) in enumerate(members):
            cells = []
            for name in names:
                taken = row.pruners[name]
                last = i == len(members) - 1
                fitted = exponent_of(members, name) if last else None
                cells += [escape(taken.failure) or show(taken.seconds, ".3f"), show(fitted)]
            result.add_row("" if i else family, str(size), *cells)
        result.add_section()
    return result


def exponent_of(members: list[tuple[int, Row]], name: str) -> float | None:
    points = [(s, r.pruners[name].seconds) for s, r in members if not r.pruners[name].failure]
    return exponent(*zip(*points, strict=True)) if len(points) > 1 else None  # type: ignore


def summary(rows: list[Row], peers: list[str]) -> list[str]:
    lines = []
    for peer in peers:
        good = [r for r in rows if not r.pruners[peer].failure]
        ratios = [r for r in (row.ratio(peer) for row in good) if r]
        if not ratios:
            lines.append(f"{peer} prunes none of the {len(rows)} models.")
            continue
        lines.append(
            f"{peer} takes {geometric_mean(ratios):.2f} times as long as fxprune (geometric mean "
            f"over the {len(ratios)} of {len(rows)} models that it prunes; from {min(ratios):.2f} "
            f"to {max(ratios):.2f}; longer on {sum(r > 1 for r in ratios)})."
        )
        passes = [r.passes(peer) for r in good if r.steps]
        if passes:
            lines.append(
                f"  It takes {geometric_mean(passes):.2f} forward passes (geometric mean): what "
                "runs the model once cannot be faster by more than that."
            )
        memory = [r.pruners[peer].memory / r.pruners["fxprune"].memory for r in good
                  if r.pruners[peer].memory and r.pruners["fxprune"].memory]  # fmt: skip
        if memory:
            lines.append(f"  Its memory is {geometric_mean(memory):.2f} times fxprune's.")
    costs = [r.pruners["fxprune"].seconds / r.steps["forward"] for r in rows if r.steps]
    if costs:
        lines.append(
            f"fxprune takes {statistics.median(costs):.1f} forward passes (median; from "
            f"{min(costs):.1f} to {max(costs):.1f})."
        )
    return lines


def plot(path: Any, rows: list[Row], grown: dict[str, Any], names: list[str]) -> None:
    """Ratios by model, and growth on two logarithmic axes."""
    panels = [p for p, there in ((_ratios, rows), (_growth, grown)) if there]
    with figure(path, 6 * len(panels), max(3.5, 0.2 * len(rows) + 1.2), len(panels)) as axes:
        for ax, draw in zip(axes, panels, strict=False):
            draw(ax, rows, grown, names)


def _ratios(ax: Any, rows: list[Row], grown: Any, names: list[str]) -> None:
    shown = sorted(rows, key=lambda r: r.pruners["fxprune"].seconds or 0)
    for name in names:
        at = [(r.pruners[name].seconds, i) for i, r in enumerate(shown)
              if not r.pruners[name].failure]  # fmt: skip
        ax.plot(*zip(*at, strict=True) if at else ((), ()), "o", ms=5, label=name, alpha=0.8)
        failed = [i for i, r in enumerate(shown) if r.pruners[name].failure]
        if failed:
            ax.plot([1.01] * len(failed), failed, "x", color=ax.lines[-1].get_color(),
                    transform=ax.get_yaxis_transform(), clip_on=False,
                    label=f"{name} fails")  # fmt: skip
    ax.set_yticks(range(len(shown)), [r.model for r in shown], fontsize=7)
    ax.set_xscale("log")
    ax.set_xlabel("seconds to prune")
    ax.grid(alpha=0.3)
    ax.legend(fontsize=7, loc="lower right")


def _growth(ax: Any, rows: Any, grown: dict[str, list[tuple[int, Row]]], names: list[str]) -> None:
    styles = dict(zip(names, ("-o", "--s", ":^"), strict=False))
    for i, (family, members) in enumerate(grown.items()):
        for name in names:
            fitted = exponent_of(members, name)
            if fitted is None:
                continue
            at = [(s, r.pruners[name].seconds) for s, r in members if not r.pruners[name].failure]
            ax.plot(*zip(*at, strict=True), styles[name], color=f"C{i}", ms=4,
                    label=f"{family}: {name}, {fitted:.2f}")  # fmt: skip
    ax.set_xscale("log")
    ax.set_yscale("log")
    ax.set_xlabel("layers, blocks, or factor of the width")
    ax.set_ylabel("seconds to prune")
    ax.grid(alpha=0.3, which="both")
    ax.legend(fontsize=6, title="exponent of", title_fontsize=7)


# -- command line ---------------------------------------------------------------------------------


def options() -> Any:
    parser = arguments(__doc__)
    parser.add_argument("--models", nargs="+", default=MODELS, metavar="GLOB",
                        help=f"of torchvision (default: {len(MODELS)} of them)")  # fmt: skip
    parser.add_argument("--peer", nargs="*", default=["torch-pruning"], choices=PEERS,
                        metavar="NAME", help=f"{', '.join(PEERS)}")  # fmt: skip
    parser.add_argument("--repeat", type=int, default=5)
    parser.add_argument("--limit", type=float, default=300, metavar="SECONDS",
                        help="how long a pruner may take for one model (default: 300)")  # fmt: skip
    parser.add_argument("--growth", choices=("yes", "no", "only"), default="yes")
    parser.add_argument("--cpu-time", action="store_true",
                        help="time one core, not the clock: for a busy machine")  # fmt: skip
    given = parser.parse_args()
    given.steps = True
    if given.threads:
        torch.set_num_threads(given.threads)
    if given.cpu_time:
        harness.use_cpu_time()
    return given


def main() -> int:
    given, console = options(), terminal()
    warnings.simplefilter("ignore")
    where = machine("torchvision", *given.peer)
    zoo, names = FAMILIES["torchvision"], ["fxprune", *given.peer]
    chosen = [n for n in zoo.every() if zoo.is_one(n, tuple(given.models))]
    rows: list[Row] = []
    grown: dict[str, list[tuple[int, Row]]] = {}

    def write() -> None:
        growth = {family: {"members": [{"size": s, **asdict(r)} for s, r in members],
                           "exponents": {n: exponent_of(members, n) for n in names}}
                  for family, members in grown.items()}  # fmt: skip
        save(given.json, where, time="CPU" if given.cpu_time else "wall", repeat=given.repeat,
             summary=summary(rows, given.peer), models=[asdict(r) for r in rows],
             growth=growth)  # fmt: skip

    for name in each(chosen if given.growth != "only" else (), console):
        torch.manual_seed(0)
        rows.append(measure(name, zoo.build(name).eval(), zoo.example(name), given))
        gc.collect()
        write()
    given.steps = False
    makers = list(growing()) if given.growth != "no" else []
    for make in each(makers, console, lambda _: "growth"):
        torch.manual_seed(0)
        family, size, model, x = make()
        row = measure(f"{family} {size}", model, x, given)
        grown.setdefault(family, []).append((size, row))
        write()

    if rows:
        console.print(table(rows, given.peer))
        for line in summary(rows, given.peer):
            console.print(line)
    if grown:
        console.print(growth_table(grown, names))
    for row in [*rows, *(r for members in grown.values() for _, r in members)]:
        for name, taken in row.pruners.items():
            if taken.failure:
                console.print(
                    f"{row.model}, {name}: {escape(taken.failure)}: {escape(taken.details)}"
                )
    kind = "CPU seconds" if given.cpu_time else "Seconds"
    console.print(f"{kind}, medians of {given.repeat}. {described(where)}")
    plot(given.plot, rows, grown, names)
    return 0 if all(not r.pruners["fxprune"].failure for r in rows) else 1


if __name__ == "__main__":
    sys.exit(main())
