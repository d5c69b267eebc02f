"""How much faster pruned models run, and how much of the saved work is saved time.

    pip install -e ".[bench]"
    python benchmarks/latency.py
    python benchmarks/latency.py --models resnet50 --batch 1 64 --dtype float32 bfloat16
    python benchmarks/latency.py --mode eager compile cuda_graph --device cuda --plot latency.png

Every combination of the flags is one line: the model before and after pruning at the sparsity, with
widths rounded to multiples of ``round``, run in turns by ``fxprune.benchmark`` after a warm-up
(blocks timed by ``torch.utils.benchmark`` on the CPU, by CUDA events on a GPU). Latency is the
median in ms of a whole batch, "±" half of the interquartile range relative to it. "MACs" says how
many times fewer there are, as ``torch.utils.flop_counter`` counts, and "of ideal" is the speed-up
over that: 1 where all saved work is saved time. Torch-Pruning prunes the same model at the same
sparsity; it rounds widths down, fxprune up.
"""

from __future__ import annotations

import copy
import itertools
import sys
import warnings
from dataclasses import asdict, dataclass
from typing import Any

import torch
from harness import (
    arguments,
    described,
    each,
    figure,
    geometric_mean,
    grid,
    machine,
    save,
    show,
    terminal,
)
from judge import short
from pruners import PEERS, pruner
from rich.markup import escape
from rich.table import Table
from torch import nn
from zoo import family_of

import fxprune
from fxprune.benchmarking import MODES
from fxprune.modules import tree
from fxprune.modules.running import outputs

DTYPES = ("float32", "bfloat16", "float16")
LAYOUTS = ("contiguous", "channels_last")


@dataclass(frozen=True)
class Setting:
    """One combination of the flags."""

    model: str
    pruner: str
    round_to: int
    mode: str
    dtype: str
    layout: str
    batch: int

    def __str__(self) -> str:
        words = (self.model, self.pruner, f"round to {self.round_to}", self.mode, self.dtype,
                 self.layout, f"batch {self.batch}")  # fmt: skip
        return ", ".join(words)


@dataclass
class Row:
    setting: Setting
    result: fxprune.BenchmarkResult | None = None
    failure: str = ""

    def numbers(self) -> dict[str, Any]:
        found = asdict(self)
        if self.result is not None:
            found |= {name: getattr(self.result, name)
                      for name in ("speed_up", "reduction", "efficiency")}  # fmt: skip
        return found


class Models:
    """Models as they are and pruned; the last is kept, since neighbours in the table share it."""

    def __init__(self, sparsity: float) -> None:
        self.sparsity = sparsity
        self._made: tuple[Any, Any] = (None, None)

    def input(self, name: str, batch: int) -> Any:
        return tree.map_tensors(
            family_of(name).example(name), lambda t: t.expand(batch, *t.shape[1:]).contiguous()
        )

    def pair(self, name: str, by: str, round_to: int) -> tuple[nn.Module, nn.Module]:
        key = name, by, round_to
        if self._made[0] != key:
            self._made = key, self._make(*key)
        return self._made[1]

    def _make(self, name: str, by: str, round_to: int) -> tuple[nn.Module, nn.Module]:
        torch.manual_seed(0)
        zoo = family_of(name)
        model, x = zoo.build(name).eval(), zoo.example(name)
        small = pruner(by)(copy.deepcopy(model), x, sparsity=self.sparsity, round_to=round_to)
        outputs(small, x)  # raises where the pruned model does not run
        return model, small


def measure(models: Models, setting: Setting, given: Any) -> Row:
    row = Row(setting)
    try:
        before, after = models.pair(setting.model, setting.pruner, setting.round_to)
        torch._dynamo.reset()  # else the compiler gives up on code that it has seen too often
        row.result = fxprune.benchmark(
            before, after, models.input(setting.model, setting.batch), mode=setting.mode,
            device=given.device, dtype=getattr(torch, setting.dtype),
            channels_last=setting.layout == "channels_last", seconds=given.seconds,
        )  # fmt: skip
    except Exception as error:
        row.failure = short(error)
    return row


# -- report ---------------------------------------------------------------------------------------


def table(rows: list[Row]) -> Table:
    """The flags that vary are columns; the others stand below the table."""
    varied = [
        f for f in vars(rows[0].setting) if f in ("model", "pruner") or len(values(rows, f)) > 1
    ]
    headings = [f.removesuffix("_to") for f in varied]
    result = grid(*headings, "before", "±", "after", "±", "speed-up", "MACs", "of ideal", left=2)
    for i, row in enumerate(rows):
        found = row.result
        cells = [str(getattr(row.setting, f)) for f in varied]
        if found is None:
            cells += ["[red]fails[/]"]
        else:
            for one in (found.before, found.after):
                cells += [f"{one.median * 1e3:.2f}", f"{one.spread / 2:.0%}"]
            cells += [f"{found.speed_up:.2f}x", show(found.reduction, ".2f", "x"),
                      show(found.efficiency)]  # fmt: skip
        if i and rows[i - 1].setting.model != row.setting.model:
            result.add_section()
        result.add_row(*cells)
    return result


def values(rows: list[Row], flag: str) -> list[str]:
    return list(dict.fromkeys(str(getattr(row.setting, flag)) for row in rows))


def fixed(rows: list[Row]) -> str:
    """The flags that do not vary."""
    same = {f: values(rows, f) for f in ("round_to", "mode", "dtype", "layout", "batch")}
    return ", ".join(f"{f} {v[0]}" for f, v in same.items() if len(v) == 1)


def summary(rows: list[Row]) -> list[str]:
    """Geometric means by pruner and rounding, over the settings in which all were measured."""
    by: dict[tuple[str, int], dict[Any, fxprune.BenchmarkResult]] = {}
    for row in rows:
        s = row.setting
        found = by.setdefault((s.pruner, s.round_to), {})
        if row.result is not None:
            found[s.model, s.mode, s.dtype, s.layout, s.batch] = row.result
    common = set.intersection(*(set(found) for found in by.values())) if by else set()
    if not common:
        return ["No setting was measured with every pruner and rounding."]
    lines = [f"Geometric means over the {len(common)} settings that all were measured in:"]
    for (name, round_to), found in by.items():
        speed = geometric_mean([found[key].speed_up for key in common])
        work = [found[key].reduction or 1.0 for key in common]
        lines.append(f"  {name}, widths rounded to {round_to}: {speed:.2f}x as fast with "
                     f"{geometric_mean(work):.2f}x less work.")  # fmt: skip
    return lines


def plot(path: Any, rows: list[Row]) -> None:
    """Speed-up beside the reduction in work; on the line, all saved work is saved time."""
    done = [r for r in rows if r.result is not None and r.result.reduction]
    with figure(path, 6, 5) as axes:
        if not axes or not done:
            return
        (ax,) = axes
        names = list(dict.fromkeys(r.setting.pruner for r in done))
        rounds = list(dict.fromkeys(r.setting.round_to for r in done))
        for name, round_to in itertools.product(names, rounds):
            at = [(r.result.reduction, r.result.speed_up) for r in done
                  if (r.setting.pruner, r.setting.round_to) == (name, round_to)]  # fmt: skip
            if at:
                ax.plot(*zip(*at, strict=True), "osD^v"[rounds.index(round_to) % 5], alpha=0.7,
                        color=f"C{names.index(name)}",
                        label=f"{name}, rounded to {round_to}")  # fmt: skip
        most = max(r.result.reduction for r in done)
        ax.plot([1, most], [1, most], "k--", lw=1, label="ideal")
        ax.axhline(1, color="gray", lw=0.5)
        ax.set_xlabel("times fewer multiply-accumulates")
        ax.set_ylabel("times faster")
        ax.grid(alpha=0.3)
        ax.legend(fontsize=7)


# -- command line ---------------------------------------------------------------------------------


def options() -> Any:
    parser = arguments(__doc__)
    many = {"nargs": "+"}
    parser.add_argument("--models", **many, default=["resnet18", "mobilenet_v3_large"],
                        metavar="NAME", help="of any library of zoo.py")  # fmt: skip
    parser.add_argument("--mode", **many, default=["eager"], choices=MODES)
    parser.add_argument("--dtype", **many, default=["float32"], choices=DTYPES)
    parser.add_argument("--layout", **many, default=["contiguous"], choices=LAYOUTS)
    parser.add_argument("--batch", **many, type=int, default=[1], metavar="N")
    parser.add_argument("--round-to", **many, type=int, default=[1, 8, 32], metavar="N")
    parser.add_argument("--peer", nargs="*", default=["torch-pruning"], choices=PEERS)
    parser.add_argument("--full", action="store_true",
                        help="all modes and layouts, float32 and bfloat16, batches of 1 and 64, "
                             "rounded to 1, 8, 16, 32, 64: 80 lines a pruner")  # fmt: skip
    parser.add_argument("--device", choices=("cpu", "cuda"),
                        default="cuda" if torch.cuda.is_available() else "cpu")  # fmt: skip
    parser.add_argument("--sparsity", type=float, default=0.5)
    parser.add_argument("--seconds", type=float, default=1.0, help="to time each model for")
    given = parser.parse_args()
    if given.device == "cuda" and not torch.cuda.is_available():
        parser.error("--device cuda: PyTorch sees no GPU here")
    if given.full:
        given.mode = [m for m in MODES if given.device == "cuda" or m != "cuda_graph"]
        given.dtype, given.layout = DTYPES[:2], LAYOUTS
        given.batch, given.round_to = [1, 64], [1, 8, 16, 32, 64]
    if given.threads:
        torch.set_num_threads(given.threads)
    return given


def main() -> int:
    given, console = options(), terminal()
    warnings.simplefilter("ignore")
    where = machine("torchvision", "transformers", *given.peer)
    models = Models(given.sparsity)
    settings = [
        Setting(*one) for one in itertools.product(
            given.models, ("fxprune", *given.peer), given.round_to, given.mode, given.dtype,
            given.layout, given.batch)
    ]  # fmt: skip
    rows: list[Row] = []
    for setting in each(settings, console):
        rows.append(measure(models, setting, given))
        save(given.json, where, device=given.device, sparsity=given.sparsity,
             rows=[r.numbers() for r in rows], summary=summary(rows))  # fmt: skip
    console.print(table(rows))
    for line in summary(rows):
        console.print(line)
    for row in rows:
        if row.failure:
            console.print(escape(f"{row.setting}: {row.failure}"))
    console.print(f"On {given.device}, sparsity {given.sparsity:g}, {fixed(rows)}.")
    console.print(described(where))
    plot(given.plot, rows)
    return 0 if all(r.result for r in rows if r.setting.pruner == "fxprune") else 1


if __name__ == "__main__":
    sys.exit(main())
