"""Which models fxprune prunes, how small they get and how long it takes.

    python benchmarks/coverage.py torchvision
    python benchmarks/coverage.py timm
    python benchmarks/coverage.py transformers
    python benchmarks/coverage.py packages
    python benchmarks/coverage.py constructs --peer fxprune torch-pruning
    python benchmarks/coverage.py torchvision --models 'resnet*' vit_b_16 --json coverage.json
    python benchmarks/coverage.py torchvision --peer torch-pruning fxprune --plot coverage.png

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

``--peer`` has other pruners prune the same models, through their plain interfaces (``pruners.py``),
and judges all by one oracle (``judge.py``), in float64 and on an input they have not seen. It says
"wrong" where the result differs from the original with the removed slices set to zero, "refuses"
where the pruner raises by its own ``raise`` or ``assert``, "crashes" where anything else raises or
the result does not run, and "hangs" where ``--limit`` is over. ``--peer fxprune`` puts fxprune with
``bias="drop"`` before the same judge.
"""

from __future__ import annotations

import functools
import gc
import statistics
import sys
import traceback
import warnings
from collections import Counter
from dataclasses import asdict, dataclass, field
from typing import Any

import harness
import torch
from harness import arguments, described, each, figure, grid, machine, save, seconds, show, terminal
from judge import STATUSES, Verdict, count, judge
from pruners import PRUNERS
from rich.console import Console
from rich.markup import escape
from rich.table import Table
from torch import Tensor, nn
from zoo import FAMILIES, Zoo

import fxprune
from fxprune.modules.running import bind_inputs, outputs
from fxprune.proving.proof import largest_error, prove, tolerance

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
    peers: dict[str, Verdict] = field(default_factory=dict)

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
        args, kwargs = bind_inputs(x)
        model(*args, **kwargs)  # not ``outputs``, which would put the statistics back
    for hook in hooks:
        hook.remove()
    return model


# -- one model ------------------------------------------------------------------------------------


def measure(zoo: Zoo, name: str, given: Any) -> Row:
    """Plan, prune and prove one model; whatever goes wrong is in the row."""
    row = Row(name)
    try:
        torch.manual_seed(0)
        x, other = (examples(zoo, name, given.batch, seed) for seed in (0, 1))
        model, only = wake(zoo.build(name), x), zoo.outputs(name)
        for peer in given.peer:
            row.peers[peer] = judge(peer, model, x, other, given.sparsity, given.limit, only)
            gc.collect()
        _measure(row, zoo, model, x, other, given.sparsity)
    except Exception as error:
        row.status = type(error).__name__
        frames = traceback.format_exception(error, limit=-4)
        row.details = "".join(frames).strip()
    return row


def _measure(row: Row, zoo: Zoo, model: nn.Module, x: Any, different: Any, sparsity: float) -> None:
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
    row.body = count_body(small) / count_body(model)
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
    other = outputs(model, different, only)
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


def examples(zoo: Zoo, name: str, count: int, seed: int) -> Any:
    """``count`` inputs as one batch."""
    return functools.reduce(twice, (zoo.example(name, seed + i) for i in range(count)))


def twice(x: Any, y: Any) -> Any:
    """Two inputs as one batch."""
    if isinstance(x, tuple):
        return tuple(twice(a, b) for a, b in zip(x, y, strict=True))
    if isinstance(x, dict):
        return {key: twice(x[key], y[key]) for key in x}
    return x + y if isinstance(x, list) else torch.cat([x, y])


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


def count_body(model: nn.Module) -> int:
    """Parameters outside embeddings."""
    tables = {id(m.weight) for m in model.modules() if isinstance(m, nn.Embedding)}
    return sum(p.numel() for p in model.parameters() if id(p) not in tables)


# -- report ---------------------------------------------------------------------------------------


def table(rows: list[Row]) -> Table:
    result = grid("model", "kept", "body", "groups", *STEPS, "error", "graph", "approx.", "intact",
                  "status")  # fmt: skip

    def intact(row: Row) -> str:
        flags = (row.same_class, row.untouched)
        return "[red]no[/]" if False in flags else "" if None in flags else "yes"

    for row in rows:
        groups = "" if row.pruned is None else f"{row.pruned}/{row.frozen}"
        result.add_row(
            row.model, show(row.kept, ".0%"), show(row.body, ".0%"), groups, show(row.forward),
            show(row.trace), show(row.plan), show(row.apply), show(row.error, ".0e"),
            show(row.graph, ".0e"), show(row.approximate, "d"), intact(row),
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


def peer_table(rows: list[Row], peers: list[str]) -> Table:
    """What the others make of the same models: what is kept, seconds in float64, the verdict."""
    result = grid("model", *(h for p in peers for h in (p, "s", "")))
    for row in rows:
        cells = []
        for peer in peers:
            found = row.peers.get(peer, Verdict("not run"))
            color = COLORS.get(found.status, "red")
            shown = f"[{color}]{found.status}[/]"
            cells += [show(found.kept, ".0%"), show(found.seconds, ".1f"), shown]
        result.add_row(row.model, *cells)
    return result


def peer_summary(rows: list[Row], peers: list[str]) -> list[str]:
    lines = []
    for peer in peers:
        found = Counter(row.peers[peer].status for row in rows if peer in row.peers)
        counts = ", ".join(f"{found[s]} {s}" for s in STATUSES if found[s])
        lines.append(f"{peer}: {counts} (of {len(rows)}).")
    return lines


COLORS = {"prunes": "green", "not checked": "yellow", "not run": "dim"}


def plot(path: Any, rows: list[Row], peers: list[str], sparsity: float) -> None:
    """What is kept of each model, and how the pruners fare."""
    shown = sorted((r for r in rows if r.kept is not None), key=lambda r: r.kept or 0)
    with figure(path, 11 if peers else 6, max(3.0, 0.16 * len(shown) + 1), 1 + bool(peers)) as axes:
        if not axes:
            return
        for good, color in ((True, "tab:blue"), (False, "tab:red")):
            at = [(r.kept, i) for i, r in enumerate(shown) if r.passes == good]
            axes[0].plot(*zip(*at, strict=True) if at else ((), ()), "o", ms=4, color=color,
                         label="passes" if good else "fails")  # fmt: skip
        axes[0].set_yticks(range(len(shown)), [r.model for r in shown], fontsize=6)
        axes[0].set_xlim(0, 1)
        axes[0].set_xlabel(f"share of the parameters that fxprune keeps at sparsity {sparsity:g}")
        axes[0].grid(alpha=0.3)
        axes[0].legend(loc="lower right")
        for ax in axes[1:]:
            _plot_peers(ax, rows, peers)


def _plot_peers(ax: Any, rows: list[Row], peers: list[str]) -> None:
    hues = dict(zip(STATUSES, ("tab:green", "gold", "lightgray", "white", "silver", "tab:purple",
                               "tab:orange", "tab:red"), strict=True))  # fmt: skip
    start = [0] * len(peers)
    for status in STATUSES:
        found = [sum(r.peers[p].status == status for r in rows if p in r.peers) for p in peers]
        if any(found):
            ax.barh(peers, found, left=start, color=hues[status], label=status, height=0.5)
            start = [a + b for a, b in zip(start, found, strict=True)]
    ax.set_xlabel("models")
    ax.xaxis.get_major_locator().set_params(integer=True)
    ax.legend(loc="lower center", bbox_to_anchor=(0.5, 1), ncols=4, frameon=False)


def main() -> int:
    parser = arguments(__doc__)
    parser.add_argument("family", choices=list(FAMILIES))
    parser.add_argument("--all", action="store_true", help="detection, flow and video too")
    parser.add_argument("--models", nargs="+", metavar="GLOB", help="only these, of any size")
    parser.add_argument("--sparsity", type=float, default=0.5)
    parser.add_argument("--batch", type=int, default=1, metavar="N", help="inputs (default: 1)")
    parser.add_argument("--cpu-time", action="store_true", help="time one core, not the clock")
    parser.add_argument("--peer", nargs="+", default=[], choices=list(PRUNERS), metavar="NAME",
                        help=f"judge these too: {', '.join(PRUNERS)}")  # fmt: skip
    parser.add_argument("--limit", type=float, default=120, metavar="SECONDS",
                        help="how long a peer may take for one model (default: 120)")  # fmt: skip
    args = parser.parse_args()
    if args.threads:
        torch.set_num_threads(args.threads)
    if args.cpu_time:
        harness.use_cpu_time()
    zoo = FAMILIES[args.family]
    names, left_out = zoo.names(args.all), zoo.left_out()
    if args.models:
        names, left_out = [n for n in zoo.every() if zoo.is_one(n, tuple(args.models))], []
        if not names:
            parser.error(f"--models: nothing of {args.family} is called so")
    if not names:
        sys.exit(f"none of these is installed: {', '.join(left_out)} (see {args.family}.py)")
    console, where = terminal(), machine(args.family, *args.peer)
    warnings.simplefilter("ignore")
    rows: list[Row] = []

    def working(name: str) -> str:
        return f"{name} ({sum(not r.passes for r in rows)} failed so far)"

    for name in each(names, console, working):
        rows.append(measure(zoo, name, args))
        gc.collect()
        lines = summary(zoo, rows, args.sparsity) + peer_summary(rows, args.peer)
        save(args.json, where, time="CPU" if args.cpu_time else "wall", sparsity=args.sparsity,
             batch=args.batch, left_out=left_out, summary=lines,
             models=[{**asdict(r), "cost": r.cost} for r in rows])  # fmt: skip
    plot(args.plot, rows, args.peer, args.sparsity)

    console.print(table(rows))
    if args.peer:
        console.print(peer_table(rows, args.peer))
    for line in lines:
        console.print(line)
    if left_out:
        console.print(f"Left out, {zoo.why}: {', '.join(left_out)}.")
    print_failures(console, rows)
    console.print(described(where))
    return 0 if all(r.passes for r in rows) else 1


def print_failures(console: Console, rows: list[Row]) -> None:
    for row in rows:
        for peer, found in row.peers.items():
            if found.details:
                console.print(f"{row.model}, {peer}: {escape(found.details)}")
    for row in rows:
        if not row.passes:
            console.print(f"\n[bold]{row.model}[/]: {escape(row.status)}")
            console.print(escape(row.details))


if __name__ == "__main__":
    sys.exit(main())
