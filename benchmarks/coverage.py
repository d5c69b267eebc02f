"""Which models fxprune prunes, how small they get and how long it takes.

    python benchmarks/coverage.py torchvision
    python benchmarks/coverage.py timm
    python benchmarks/coverage.py transformers
    python benchmarks/coverage.py torchvision --models 'resnet*' vit_b_16 --json coverage.json

Each model is built without weights and put in a state that says something: nothing is 0 by chance,
and the output depends on the input. It is planned, pruned and proved in float32 on the CPU. A model
passes if

* nothing raises, and the pruned model computes what the masked model computes;
* the pruned model has the class and the output shapes of the original, which is untouched;
* at least 0.8 x sparsity of the parameters are gone, or are in layers that ``plan.skipped`` names.

"groups" are those pruned / frozen, "approx." of the pruned those that some norm counts, "intact"
means class kept and input untouched. Times are seconds; "forward" is the median of three, "plan"
includes the trace. On a busy machine, ``--cpu-time`` measures seconds of one core instead.
"body" is what is kept of the parameters outside embeddings. ``zoo.py`` builds the models.
"""

from __future__ import annotations

import argparse
import gc
import json
import statistics
import sys
import time
import traceback
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import torchvision
from machine import machine
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.markup import escape
from rich.progress import MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table
from torch import Tensor, nn
from zoo import FAMILIES, Zoo

import fxprune
from fxprune.proof import largest_error, prove, tolerance
from fxprune.running import outputs

STEPS = ("forward", "trace", "plan", "apply")
ASLEEP = 1e-3  # relative change of the output with another input, below which the model is no test
WIDE = 0.35  # a CNN that keeps more than this share of its parameters at sparsity 0.5 is listed


@dataclass
class Row:
    """What happened to one model. Fields stay None from the step that failed on."""

    model: str
    parameters: int | None = None
    kept: float | None = None
    body: float | None = None
    halved: float | None = None  # what is left when every hidden width is halved exactly
    pruned: int | None = None
    frozen: int | None = None
    forward: float | None = None
    trace: float | None = None
    plan: float | None = None
    apply: float | None = None
    prune: float | None = None  # trace, plan and apply in one call
    graph: float | None = None  # error of the graph form on two inputs at once
    error: float | None = None
    approximate: int | None = None
    same_class: bool | None = None
    untouched: bool | None = None
    idle: int | None = None
    skipped: dict[str, int] | None = None
    notes: dict[str, int] | None = None
    status: str = "pass"
    details: str = ""

    @property
    def passes(self) -> bool:
        return self.status == "pass"

    @property
    def cost(self) -> float | None:
        """Seconds of trace, plan and apply, in forward passes."""
        return self.prune / self.forward if self.prune and self.forward else None


# -- models ---------------------------------------------------------------------------------------


def wake(model: nn.Module, x: Any, seed: int = 0) -> nn.Module:
    """``model`` in eval mode, in a state that says something.

    Biases, norms, layer scales and tokens are random, a head that starts at 0 is not 0, and one run
    on ``x`` sets the scales of weights and the statistics of batch norms so that what comes from
    the input neither dies out nor drowns in the biases before it reaches the output.
    """
    generator = torch.Generator().manual_seed(seed)

    def noise(tensor: Tensor) -> Tensor:
        return torch.randn(tensor.shape, generator=generator)

    def measure_input(module: nn.Module, args: tuple[Tensor, ...]) -> None:
        rows = args[0].movedim(1, 0).flatten(1)
        if rows.shape[1] > 1:
            mean, var = rows.mean(1), rows.var(1) + 1e-3
            module.running_mean.copy_(mean + 0.5 * var.sqrt() * noise(mean))
            module.running_var.copy_(var * (1 + 0.5 * noise(var).abs()))

    def scale_output(module: nn.Module, args: tuple[Tensor, ...], y: Tensor) -> Tensor:
        bias: Any = 0.0 if module.bias is None else module.bias
        if not isinstance(module, nn.Linear) and module.bias is not None:
            bias = bias.reshape(-1, *[1] * (y.dim() - 2))
        std = float((y - bias).std())
        if not std > 1e-6:
            return y
        module.weight.div_(std)
        return (y - bias) / std + bias

    hooks = []
    for module in model.eval().modules():
        if isinstance(module, nn.modules.batchnorm._BatchNorm):
            hooks.append(module.register_forward_pre_hook(measure_input))
        elif isinstance(module, (nn.Linear, nn.modules.conv._ConvNd)):
            hooks.append(module.register_forward_hook(scale_output))
    with torch.no_grad():
        for p in model.parameters():
            if p.numel() == max(p.shape, default=1):  # biases, norms, layer scales, tokens
                p.add_(0.5 * noise(p))
            elif p.min() == p.max():
                p.copy_(noise(p) / p[0].numel() ** 0.5)
        outputs(model, x)
    for hook in hooks:
        hook.remove()
    return model


# -- one model ------------------------------------------------------------------------------------


def measure(zoo: Zoo, name: str, sparsity: float) -> Row:
    """Plan, prune and prove one model; whatever goes wrong is in the row."""
    row = Row(name)
    try:
        torch.manual_seed(0)
        x = zoo.example(name)
        _measure(row, zoo, wake(zoo.build(name), x), x, sparsity)
    except Exception as error:
        row.status = type(error).__name__
        frames = traceback.format_exception(error, limit=-4)
        row.details = "".join(frames).strip()
    return row


def _measure(row: Row, zoo: Zoo, model: nn.Module, x: Any, sparsity: float) -> None:
    by_values = zoo.is_one(row.model, zoo.by_values)
    only = zoo.outputs(row.model)
    expected = outputs(model, x, only)
    before = {k: v.clone() for k, v in model.state_dict().items()}
    shown = repr(model)
    row.parameters = count(model)
    row.forward = statistics.median(seconds(lambda: outputs(model, x))[0] for _ in range(3))
    row.trace, _ = seconds(lambda: fxprune.trace(model, x))
    row.plan, plan = seconds(lambda: fxprune.plan(model, x, sparsity=sparsity, outputs=only))
    row.pruned = sum(len(g.removed) > 0 for g in plan.groups)
    row.frozen = sum(g.frozen is not None for g in plan.groups)
    row.approximate = len(plan.approximate)
    row.idle = sum(
        g.frozen is None and not len(g.removed) and int(g.width * sparsity) > 0 for g in plan.groups
    )
    row.skipped = dict(Counter(why for _, why in plan.skipped))
    row.notes = dict(Counter(what for _, what in plan.notes))
    row.apply, small = seconds(lambda: plan.apply(model))
    row.kept = count(small) / row.parameters
    row.body = count(small, body=True) / count(model, body=True)
    row.halved = halved(model, plan, sparsity)
    # A forward written anew makes a subclass under the same name.
    row.same_class = isinstance(small, type(model)) and type(small).__name__ == type(model).__name__
    row.error = prove(plan, model, small, x)
    row.prune, _ = seconds(
        lambda: fxprune.prune(model, x, sparsity=sparsity, outputs=only, verify=False)
    )
    if not by_values:
        both = twice(x, zoo.example(row.model, seed=2))
        row.graph = largest_error(
            outputs(small, both, only), outputs(fxprune.trace(small, x), both, only)
        )
    after = model.state_dict()
    row.untouched = (
        list(before) == list(after)
        and all(torch.equal(v, after[k]) for k, v in before.items())
        and repr(model) == shown
        and not any(m.training for m in model.modules())
    )
    # How many boxes are detected depends on the values; the proof compares them with the masked's.
    shapes = [[t.shape for t in ts] for ts in (expected, outputs(small, x, only))]
    same_shapes = by_values or shapes[0] == shapes[1]
    other = outputs(model, zoo.example(row.model, seed=1), only)
    named = {what for what, _ in plan.skipped}
    skipped = sum(count(m) for path, m in model.named_modules() if path in named)
    explained = 1 - row.kept + skipped / row.parameters
    if not row.same_class:
        row.status = "class changed"
        row.details = f"{type(model).__name__} became {type(small).__name__}"
    elif not row.untouched:
        row.status = "input changed"
    elif row.graph is not None and not row.graph < tolerance(model):
        row.status = "graph differs"
        row.details = f"the graph form differs by {row.graph:.1g} on a batch of two"
    elif not same_shapes:
        row.status = "output shapes"
        row.details = f"{shapes[0]} became {shapes[1]}"
    elif len(other) == len(expected) and largest_error(expected, other) < ASLEEP:
        row.status = "asleep"
        row.details = "the output hardly depends on the input: the proof says nothing"
    elif explained < 0.8 * sparsity:
        row.status = "not smaller"
        row.details = f"keeps {row.kept:.0%}; plan.skipped names {skipped / row.parameters:.0%}"


def twice(x: Any, y: Any) -> Any:
    """Two inputs as one batch."""
    if isinstance(x, tuple):
        return tuple(twice(a, b) for a, b in zip(x, y, strict=True))
    if isinstance(x, dict):
        return {key: twice(x[key], y[key]) for key in x}
    return torch.cat([x, y])


def halved(model: nn.Module, plan: fxprune.PruningPlan, sparsity: float) -> float:
    """Share of the parameters left when every width but those of inputs and outputs shrinks."""
    given = ("it is an output", "no layer makes")
    dims = {
        member for group in plan.groups for member in group.members
        if not (group.frozen or "").startswith(given)
    }  # fmt: skip
    left = 0.0
    for name, p in model.named_parameters():
        left += p.numel() * (1 - sparsity) ** sum((name, d) in dims for d in range(p.dim()))
    return left / count(model)


def count(model: nn.Module, body: bool = False) -> int:
    """Parameters; of the ``body``, without those of embeddings."""
    tables = {id(m.weight) for m in model.modules() if isinstance(m, nn.Embedding)}
    return sum(p.numel() for p in model.parameters() if not body or id(p) not in tables)


clock = time.perf_counter


def seconds(call: Callable[[], Any]) -> tuple[float, Any]:
    start = clock()
    result = call()
    return clock() - start, result


# -- report ---------------------------------------------------------------------------------------


def table(rows: list[Row]) -> Table:
    result = Table(box=SIMPLE_HEAD, padding=(0, 1, 0, 0), pad_edge=False)
    result.add_column("model", no_wrap=True)
    for heading in ("kept", "body", "groups", *STEPS, "error", "graph", "approx."):
        result.add_column(heading, justify="right", no_wrap=True)
    for heading in ("intact", "status"):
        result.add_column(heading, no_wrap=True)

    def number(value: float | None, shape: str) -> str:
        return "" if value is None else format(value, shape)

    def intact(row: Row) -> str:
        flags = (row.same_class, row.untouched)
        return "[red]no[/]" if False in flags else "" if None in flags else "yes"

    for row in rows:
        groups = "" if row.pruned is None else f"{row.pruned}/{row.frozen}"
        result.add_row(
            row.model, number(row.kept, ".0%"), number(row.body, ".0%"), groups,
            number(row.forward, ".2f"), number(row.trace, ".2f"), number(row.plan, ".2f"),
            number(row.apply, ".2f"), number(row.error, ".0e"), number(row.graph, ".0e"),
            number(row.approximate, "d"), intact(row),
            "pass" if row.passes else f"[red]{escape(row.status)}[/]",
        )  # fmt: skip
    return result


def summary(zoo: Zoo, rows: list[Row], sparsity: float) -> list[str]:
    lines = [f"{sum(r.passes for r in rows)} of {len(rows)} models pass at sparsity {sparsity:g}."]
    wide = [
        f"{r.model} {r.kept:.0%} (all widths at {1 - sparsity:g}: {r.halved:.1%})" for r in rows
        if r.kept is not None and r.kept > WIDE
        and not zoo.is_one(r.model, zoo.transformers)
    ]  # fmt: skip
    if zoo.transformers != ("*",):
        lines.append(f"CNNs that keep more than {WIDE:.0%}: {', '.join(wide) or 'none'}.")
    idle = [f"{r.model} {r.idle}" for r in rows if r.idle]
    if idle:
        lines.append(f"Groups that stay whole and no reason is given: {', '.join(idle)}.")
    gaps = {r.model for r in rows for why in r.skipped or () if "no pattern" in why}
    if gaps:
        lines.append(f"Models with a call that has no pattern: {', '.join(sorted(gaps))}.")
    costs = [r.cost for r in rows if r.cost is not None]
    if costs:
        lines.append(
            f"Trace, plan and apply take {statistics.median(costs):.1f} forward passes (median; "
            f"from {min(costs):.1f} to {max(costs):.1f})."
        )
    return lines


@contextmanager
def progress(console: Console) -> Iterator[Progress]:
    columns = [
        TextColumn("{task.description}"), *Progress.get_default_columns()[1:2],
        MofNCompleteColumn(), TimeElapsedColumn(),
    ]  # fmt: skip
    with Progress(*columns, console=console, transient=True) as bar:
        yield bar


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("family", choices=list(FAMILIES))
    parser.add_argument("--all", action="store_true", help="detection, flow and video too")
    parser.add_argument("--models", nargs="+", metavar="GLOB", help="only these, of any size")
    parser.add_argument("--sparsity", type=float, default=0.5)
    parser.add_argument("--cpu-time", action="store_true", help="time one core, not the clock")
    parser.add_argument("--json", type=Path, metavar="FILE", help="written after each model")
    args = parser.parse_args()
    if args.cpu_time:
        global clock
        clock = time.process_time
        torch.set_num_threads(1)
    zoo = FAMILIES[args.family]
    names, left_out = zoo.names(args.all), zoo.left_out()
    if args.models:
        names, left_out = [n for n in zoo.every() if zoo.is_one(n, tuple(args.models))], []
        if not names:
            parser.error(f"--models: nothing of {args.family} is called so")
    console = Console(width=None if sys.stdout.isatty() else 120)
    warnings.simplefilter("ignore")
    rows: list[Row] = []

    def save() -> None:
        if args.json:
            result = {
                **machine(),
                "torchvision": torchvision.__version__,
                "time": "CPU" if args.cpu_time else "wall",
                "sparsity": args.sparsity,
                "left_out": left_out,
                "summary": summary(zoo, rows, args.sparsity),
                "models": [{**asdict(r), "cost": r.cost} for r in rows],
            }
            args.json.write_text(json.dumps(result, indent=1) + "\n")

    with progress(console) as bar:
        task = bar.add_task("", total=len(names))
        for name in names:
            failed = sum(not r.passes for r in rows)
            bar.update(task, description=f"{name} ({failed} failed so far)")
            rows.append(measure(zoo, name, args.sparsity))
            gc.collect()
            save()
            bar.advance(task)

    console.print(table(rows))
    for line in summary(zoo, rows, args.sparsity):
        console.print(line, highlight=False)
    if left_out:
        console.print(f"Left out for their size: {', '.join(left_out)}.", highlight=False)
    for row in rows:
        if not row.passes:
            console.print(f"\n[bold]{row.model}[/]: {escape(row.status)}", highlight=False)
            console.print(escape(row.details), highlight=False)
    return 0 if all(r.passes for r in rows) else 1


if __name__ == "__main__":
    sys.exit(main())
