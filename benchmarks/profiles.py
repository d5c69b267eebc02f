"""Where the time of pruning a model goes: by stage, and by function.

    python benchmarks/profiles.py --models mobilenet_v2 densenet121
    python benchmarks/profiles.py --models swin_t --repeat 40 --top 20

``fxprune.prune(..., verify=False)`` runs ``--repeat`` times, after one that is not counted, while a
timer of the process's CPU time looks at Python's stack again and again: unlike a profiler that
hears of each call, this slows nothing down. A stage is a function of the engine with all that it
calls. A function's own share includes the calls of PyTorch and numpy that it makes; that of
``the model's own run`` is what the forward pass takes inside the first stage.
"""

from __future__ import annotations

import gc
import signal
import sys
import warnings
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

import harness
import torch
from harness import arguments, described, each, grid, machine, save, seconds, show, terminal
from zoo import FAMILIES

import fxprune
import fxprune.patterns
from fxprune.modules.running import outputs

# What the functions of the engine do that have no other of these above them.
STAGES = {
    "record.record": "record the run", "fusions.find": "fusions",
    "discover.discover": "walk 1: labels, constants", "groups.groups": "groups",
    "planner._ask": "scores",
    "planner._stays": "choice", "planner._follow_constants": "folds",
    "mend._replay": "walk 2: new widths", "assembling.assemble": "plan",
    "rewrite.build": "new tensors", "copying.copy_model": "copy of the model",
}  # fmt: skip
OWN = (str(Path(fxprune.__file__).parent), str(Path(next(iter(fxprune.patterns.__path__)))))
MODEL = "the model's own run"
RUNS = ("recorder.__torch_function__",)  # which call what the model calls
# Which go on to the model's code.
TELLS = ("intercepting.__call__", "recorder.module", "recorder._record", "record._recorded")


class Samples:
    """What was at work, look by look."""

    def __init__(self) -> None:
        self.stages: Counter[str] = Counter()
        self.functions: Counter[str] = Counter()

    @contextmanager
    def taken(self) -> Iterator[None]:
        before = signal.signal(signal.SIGPROF, self._look)
        signal.setitimer(signal.ITIMER_PROF, 1e-3, 1e-3)
        try:
            yield
        finally:
            signal.setitimer(signal.ITIMER_PROF, 0)
            signal.signal(signal.SIGPROF, before)

    def _look(self, _: int, frame: FrameType | None) -> None:
        own: list[str] = []  # functions of fxprune on the stack, the innermost first
        inside = False  # whether the innermost function of all is another's
        while frame is not None:
            folder, _, file = frame.f_code.co_filename.rpartition("/")
            if folder.startswith(OWN):
                own.append(f"{file.removesuffix('.py')}.{frame.f_code.co_name}")
            inside = inside or not own
            frame = frame.f_back
        if not own:
            return  # the timer went on after the last run
        self.stages[next((STAGES[n] for n in reversed(own) if n in STAGES), "other")] += 1
        calls = own[0] in RUNS or (inside and own[0] in TELLS)
        self.functions[MODEL if calls else own[0]] += 1


def measure(name: str, repeat: int) -> dict[str, Any]:
    torch.manual_seed(0)
    zoo = FAMILIES["torchvision"]
    model, x = zoo.build(name).eval(), zoo.example(name)
    samples, took = Samples(), 0.0

    def prune() -> Any:
        return fxprune.prune(model, x, sparsity=0.5, verify=False)

    prune()
    forward = min(seconds(lambda: outputs(model, x))[0] for _ in range(5))
    for _ in range(repeat):
        gc.collect()
        with samples.taken():
            took += seconds(prune)[0]
    looks = max(1, samples.stages.total())
    return {
        "model": name, "forward": forward, "prune": took / repeat,
        "stages": {k: samples.stages[k] / looks for k in [*STAGES.values(), "other"]},
        "functions": {k: n / looks for k, n in samples.functions.most_common()},
    }  # fmt: skip


def main() -> int:
    parser = arguments(__doc__)
    parser.add_argument("--models", nargs="+", default=["mobilenet_v2"], metavar="NAME",
                        help="of torchvision (default: mobilenet_v2)")  # fmt: skip
    parser.add_argument("--repeat", type=int, default=20)
    parser.add_argument("--top", type=int, default=12, help="functions that are shown")
    given, console = parser.parse_args(), terminal()
    warnings.simplefilter("ignore")
    harness.use_cpu_time()
    where = machine("torchvision")
    rows = [measure(name, given.repeat) for name in each(given.models, console)]
    save(given.json, where, models=rows)

    table = grid("ms of CPU", *(row["model"] for row in rows))
    for key in ("forward", "prune"):
        table.add_row(key, *(show(1e3 * row[key], ".1f") for row in rows))
    table.add_section()
    for stage in rows[0]["stages"]:
        table.add_row(stage, *(show(1e3 * r["stages"][stage] * r["prune"], ".1f") for r in rows))
    console.print(table)
    for row in rows:
        table = grid(row["model"], "share", "ms")
        for function, share in list(row["functions"].items())[: given.top]:
            table.add_row(function, show(share, ".1%"), show(1e3 * share * row["prune"], ".1f"))
        console.print(table)
    console.print(f"CPU time, means of {given.repeat}. {described(where)}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
