"""What pruning costs trained networks: score against sparsity, for several ways to prune.

    pip install torch-pruning==1.6.1 matplotlib
    python benchmarks/accuracy.py --json accuracy.json --plot accuracy.png
    python benchmarks/accuracy.py --tune --models pitch "clothes*" --sparsity 0.5

    python benchmarks/accuracy.py --methods "taylor *" "l2* global" --sparsity 0.25 0.5

benchmarks/real.py says what the networks are and how to install them; those that are not installed
are left out. Nothing is trained after pruning, but for ``--tune``: then each pruned network gets
one short fine-tuning, the same for all ways, and is scored again. Scores are per cent of right
answers, the mean over seeds.

All ways but the last are settings of ``fxprune.plan``: "calibrated" and those after it get 256
inputs without labels, and "global" leaves as many multiply-accumulates as the others, which may be
more or fewer parameters than "kept" says. Torch-Pruning is asked through
``BasePruner`` with ``GroupMagnitudeImportance(p=2)``, the layers that make the output ignored and
the heads of attention declared. Its ratio is the one at which as many parameters are left as
fxprune leaves by default, for it does not count sparsity in the same channels.

``--methods`` compares criteria of importance and scopes instead, those that the globs name; each
network then has as many multiply-accumulates as if every group had lost that share of its units
("kept" is of the parameters, by default). With ``--calibrated`` they get the 256 inputs to fold
predictions with, too. Criteria with a loss take the labels of the same inputs.
"""

from __future__ import annotations

import argparse
import copy
import fnmatch
import json
import statistics
import sys
import time
import traceback
import warnings
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import torch
from harness import machine
from methods import NAMES, Methods
from peers import count, short
from real import REAL, Real, cache_folder, load
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table
from torch import nn

import fxprune

CLOSE = 0.02  # relative difference in parameters, above which Torch-Pruning's cell is named
FAR = 0.1  # and above which it is empty


def drawn(seed: int) -> Callable[[list[Any]], np.ndarray]:
    """Importance "random" draws the same numbers every time; this one does not."""
    rng = np.random.default_rng(seed)
    return lambda group: rng.random(group[0].count)


# name: what fxprune.plan is told; a new line is a new column.
VARIANTS: dict[str, Callable[[Real, int], dict[str, Any]]] = {
    "drop": lambda real, seed: {"bias": "drop"},
    "propagate": lambda real, seed: {"bias": "propagate"},
    "expected": lambda real, seed: {"bias": "expected"},
    "exact": lambda real, seed: {"exact": True},
    "l1": lambda real, seed: {"importance": "l1"},
    "fpgm": lambda real, seed: {"importance": "fpgm"},
    "random": lambda real, seed: {"importance": drawn(seed)},
    "calibrated": lambda real, seed: {"calibration": real.calibration},
    "reconstruction": lambda real, seed: {
        "calibration": real.calibration,
        "importance": "reconstruction",
    },
    "global": lambda real, seed: {
        "calibration": real.calibration,
        "importance": "reconstruction",
        "scope": "global",
    },
}
PEER = "Torch-Pruning"


@dataclass
class Result:
    """One network, pruned in one way; ``why`` it has no score, if it has none."""

    model: str
    kind: str
    seed: int
    sparsity: float
    variant: str
    unpruned: float
    wanted: float  # share of the parameters that fxprune keeps by default
    kept: float | None = None
    score: float | None = None
    tuned: float | None = None
    why: str | None = None


# -- pruning --------------------------------------------------------------------------------------


def prune(real: Real, sparsity: float, **settings: Any) -> nn.Module:
    plan = fxprune.plan(real.model, real.example_input, sparsity=sparsity, **settings)
    return plan.apply(real.model)


def torch_pruning(real: Real, wanted: int) -> nn.Module:
    """The network with about ``wanted`` parameters; it may not run."""
    import torch_pruning as tp

    def at(ratio: float) -> nn.Module:
        model = copy.deepcopy(real.model)
        attentions = [m for m in model.modules() if hasattr(m, "num_attention_heads")]
        attentions = [m for m in attentions if hasattr(m, "query")]
        heads = {
            layer: m.num_attention_heads for m in attentions for layer in (m.query, m.key, m.value)
        }
        pruner = tp.pruner.BasePruner(
            model, real.example_input, importance=tp.importance.GroupMagnitudeImportance(p=2),
            pruning_ratio=ratio, ignored_layers=[model.get_submodule(n) for n in real.last],
            num_heads=heads, prune_num_heads=True, prune_head_dims=False, head_pruning_ratio=ratio,
        )  # fmt: skip
        pruner.step()
        for m in attentions:  # as its example for BERT does
            m.num_attention_heads = pruner.num_heads[m.query]
            m.all_head_size = m.query.weight.shape[0]
        return model

    return bisect(at, wanted)


def bisect(at: Callable[[float], nn.Module], wanted: int, steps: int = 9) -> nn.Module:
    """Of the networks that ``at`` makes of ratios, the one with about ``wanted`` parameters."""
    low, high = 0.0, 1.0
    found: list[nn.Module] = []
    for _ in range(steps):
        middle = (low + high) / 2
        found.append(at(middle))
        left = count(found[-1])
        if abs(left - wanted) <= CLOSE / 4 * wanted:
            break
        low, high = (middle, high) if left > wanted else (low, middle)
    return min(found, key=lambda model: abs(count(model) - wanted))


# -- measuring ------------------------------------------------------------------------------------


def measure(real: Real, seed: int, args: argparse.Namespace) -> Iterator[Result]:
    """One result for each sparsity and way."""
    total, unpruned = count(real.model), score(real, real.model)
    # Constants as masks have them, which say nothing of what is removed.
    settings: dict[str, Any] = {"bias": "propagate"}
    if args.calibrated:
        settings["calibration"] = real.calibration
    methods = Methods(real, seed, **settings)
    for sparsity in args.sparsity:
        wanted = count(prune(real, sparsity))
        for name in args.variants:
            row = Result(
                real.name, real.kind, seed, sparsity, name, unpruned, wanted=wanted / total
            )
            try:
                if name == PEER:
                    small = torch_pruning(real, wanted)
                elif name in NAMES:
                    small = methods.prune(name, sparsity)
                else:
                    small = prune(real, sparsity, **VARIANTS[name](real, seed))
                row.kept = count(small) / total
                if name == PEER and abs(row.kept / row.wanted - 1) > FAR:
                    row.why = f"keeps {row.kept:.0%} of the parameters"
                else:
                    row.score = score(real, small)
                if args.tune and real.fit and not row.why:
                    real.fit(small)
                    row.tuned = score(real, small)
            except Exception as error:
                row.why = reason(error)
            yield row


def reason(error: Exception) -> str:
    """In short; where an error has no text, the code that raised it."""
    if str(error):
        return short(error)
    return f"{type(error).__name__}: {traceback.extract_tb(error.__traceback__)[-1].line}"


def score(real: Real, model: nn.Module) -> float:
    with torch.no_grad():
        return real.score(model.eval())


def measure_all(args: argparse.Namespace, console: Console) -> Iterator[Result]:
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn())
    each = len(args.sparsity) * len(args.variants)
    with Progress(*columns, TimeElapsedColumn(), console=console, transient=True) as bar:
        task = bar.add_task("", total=len(args.models) * args.seeds * each)
        for name in args.models:
            for seed in range(args.seeds):
                bar.update(task, description=f"{name}, seed {seed}: loading or training")
                try:
                    real = load(name, seed, args.cache)
                except (SystemExit, ImportError) as missing:
                    console.print(f"{name} is left out: {missing}", highlight=False)
                    bar.advance(task, (args.seeds - seed) * each)
                    break
                for row in measure(real, seed, args):
                    bar.update(task, description=f"{name}, seed {seed}: {row.variant}", advance=1)
                    yield row


# -- report ---------------------------------------------------------------------------------------


def mean(rows: list[Result], field: str, **where: Any) -> float | None:
    """Over the rows that ``where`` describes; None if there are none, or one has no value."""
    values = [getattr(r, field) for r in rows if all(getattr(r, k) == v for k, v in where.items())]
    return None if not values or None in values else statistics.mean(values)


def values(rows: list[Result], field: str) -> list[Any]:
    return list(dict.fromkeys(getattr(r, field) for r in rows))


def table(rows: list[Result], field: str) -> Table:
    variants = values(rows, "variant")
    result = Table(box=SIMPLE_HEAD, pad_edge=False)
    result.add_column("one-shot" if field == "score" else "fine-tuned", no_wrap=True)
    for heading in ("sparsity", "kept", "unpruned", *variants):
        result.add_column(heading, justify="right", no_wrap=True)

    def section(title: str, part: list[Result]) -> None:
        result.add_section()
        for i, sparsity in enumerate(values(part, "sparsity")):
            here = [r for r in part if r.sparsity == sparsity]
            cells = [percent(mean(here, field, variant=v)) for v in variants]
            best = max(cells, key=lambda c: float(c) if c != "–" else -1)
            result.add_row(
                "" if i else title, f"{percent(sparsity)} %", f"{percent(mean(here, 'wanted'))} %",
                percent(mean(here, "unpruned")),
                *(f"[bold]{c}[/]" if c == best else c for c in cells),
            )  # fmt: skip

    for model in values(rows, "model"):
        section(model, [r for r in rows if r.model == model])
    failed = {r.model for r in rows if getattr(r, field) is None}
    both = [r for r in rows if r.model not in failed]
    if len(values(rows, "model")) > 1:
        section("mean", rows)
    if failed and len(values(both, "model")) > 1:
        section(f"mean of {len(values(both, 'model'))}", both)
    return result


def by_method(rows: list[Result], field: str) -> Table:
    """A line a criterion, a column for each scope and network; the best of a column is bold."""
    result = Table(box=SIMPLE_HEAD, pad_edge=False)
    result.add_column("one-shot" if field == "score" else "fine-tuned", no_wrap=True)
    places = [(m, s) for m in values(rows, "model") for s in values(rows, "sparsity")]
    for model, sparsity in places:
        result.add_column(f"{model}\n{percent(sparsity)} %", justify="right")
    names = values(rows, "variant")
    means = [
        [mean(rows, field, model=m, sparsity=s, variant=name) for m, s in places] for name in names
    ]
    best = [
        max((v for v in column if v is not None), default=None)
        for column in zip(*means, strict=True)
    ]
    unpruned = [mean(rows, "unpruned", model=m, sparsity=s) for m, s in places]
    result.add_row("as it was", *map(percent, unpruned), end_section=True)
    for i, (name, line) in enumerate(zip(names, means, strict=True)):
        last = i + 1 == len(names) or names[i + 1].split()[0] != name.split()[0]
        cells = [
            f"[bold]{percent(v)}[/]" if v is not None and v == b else percent(v)
            for v, b in zip(line, best, strict=True)
        ]
        result.add_row(name, *cells, end_section=last)
    return result


def percent(share: float | None) -> str:
    return "–" if share is None else f"{100 * share:.1f}"


def remarks(rows: list[Result]) -> list[str]:
    """Why cells are empty, and where the parameters are not the same."""
    lines = []
    for model, variant in dict.fromkeys((r.model, r.variant) for r in rows if r.why):
        why = [r.why for r in rows if (r.model, r.variant) == (model, variant) and r.why]
        lines.append(f"{model}, {variant}: {why[-1]}")
    far = [
        r for r in rows if r.variant == PEER and not r.why and abs(r.kept / r.wanted - 1) > CLOSE
    ]
    for model in values(far, "model"):
        keeps = [f"{r.kept:.1%} for {r.wanted:.1%}" for r in far if r.model == model]
        lines.append(f"{PEER} keeps other shares of {model}: {', '.join(dict.fromkeys(keeps))}")
    return lines


def draw(rows: list[Result], field: str, path: Path) -> None:
    """Score against sparsity: a panel a network, a line a way."""
    from matplotlib import pyplot

    models, variants = values(rows, "model"), values(rows, "variant")
    across = min(3, len(models))
    down = -(-len(models) // across)
    figure, axes = pyplot.subplots(
        down, across, figsize=(4 * across, 3 * down + 0.8), squeeze=False, layout="constrained"
    )
    for axis in axes.flat[len(models) :]:
        axis.remove()
    for axis, model in zip(axes.flat, models, strict=False):
        here = [r for r in rows if r.model == model]
        sparsities = values(here, "sparsity")
        unpruned = mean(here, "unpruned")
        for i, variant in enumerate(variants):
            scores = [mean(here, field, variant=variant, sparsity=s) for s in sparsities]
            points = [(0.0, unpruned), *zip(sparsities, scores, strict=True)]
            known = [(100 * x, 100 * y) for x, y in points if y is not None]
            style = {"color": "black", "linestyle": "--"} if variant == PEER else {"color": f"C{i}"}
            width = 3.5 - 2.5 * i / len(variants)  # lines that lie on each other are all seen
            axis.plot(*zip(*known, strict=True), marker=".", lw=width, label=variant, **style)
        axis.set_title(model, fontsize=11)
        axis.grid(alpha=0.3)
    figure.supxlabel("channels removed, %", fontsize=10)
    figure.supylabel("right answers, %" + ", fine-tuned" * (field == "tuned"), fontsize=10)
    lines, labels = axes.flat[0].get_legend_handles_labels()
    figure.legend(lines, labels, loc="outside upper center", ncols=len(labels), frameon=False)
    figure.savefig(path, dpi=120)
    pyplot.close(figure)


def options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    ways = [*VARIANTS, PEER]
    parser.add_argument("--models", nargs="+", default=["*"], metavar="GLOB", help=", ".join(REAL))
    parser.add_argument(
        "--sparsity", nargs="+", type=float, default=[0.125, 0.25, 0.375, 0.5], metavar="SHARE"
    )
    parser.add_argument("--variants", nargs="+", default=ways, choices=ways)
    parser.add_argument(
        "--methods", nargs="+", metavar="GLOB", help="criterion and scope: " + ", ".join(NAMES)
    )
    parser.add_argument("--calibrated", action="store_true", help="the methods, too")
    parser.add_argument("--seeds", type=int, default=3, help="how many (default: 3)")
    parser.add_argument("--tune", action="store_true", help="fine-tune too, and score again")
    parser.add_argument("--threads", type=int, default=1, help="of the CPU (default: 1)")
    parser.add_argument("--cache", type=Path, default=cache_folder(), help="of trained networks")
    parser.add_argument("--json", type=Path, metavar="FILE", help="written after each network")
    parser.add_argument("--plot", type=Path, metavar="FILE", help="a picture, such as a PNG")
    args = parser.parse_args()
    args.models = [n for n in REAL if any(fnmatch.fnmatchcase(n, g) for g in args.models)]
    if not args.models:
        parser.error("--models: nothing is called so")
    if args.methods:
        args.variants = [n for n in NAMES if any(fnmatch.fnmatchcase(n, g) for g in args.methods)]
        if not args.variants:
            parser.error("--methods: nothing is called so")
    if args.plot and find_spec("matplotlib") is None:
        parser.error("--plot: matplotlib is not installed")
    return args


def main() -> None:
    args = options()
    torch.set_num_threads(args.threads)
    warnings.simplefilter("ignore")
    console = Console(width=None if sys.stdout.isatty() else 180, highlight=False)
    start, where, rows = time.perf_counter(), machine(), list[Result]()
    for row in measure_all(args, console):
        rows.append(row)
        if args.json and len(rows) % (len(args.sparsity) * len(args.variants)) == 0:
            result = {**where, "seconds": round(time.perf_counter() - start)}
            result["results"] = [asdict(r) for r in rows]
            args.json.write_text(json.dumps(result, indent=1) + "\n")
    if not rows:
        sys.exit("nothing was measured")
    for field in ("score", "tuned") if args.tune else ("score",):
        console.print((by_method if args.methods else table)(rows, field))
        if args.plot:
            suffix = "-tuned" if field == "tuned" else ""
            draw(rows, field, args.plot.with_stem(args.plot.stem + suffix))
    for line in remarks(rows):
        console.print(escape(line))
    console.print(
        f"Right answers in per cent, mean of {args.seeds} seeds; kept: of the parameters.\n"
        f"{where['processor']}, {args.threads} of {where['cores']} cores, PyTorch "
        f"{where['torch']}; took {time.perf_counter() - start:.0f} s."
    )


if __name__ == "__main__":
    main()
