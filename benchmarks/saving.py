"""Pruned models, saved and loaded in another process: are their outputs the same, bit for bit?

    python benchmarks/saving.py --json saving.json

Each model is built with random weights, pruned by half, and saved with fxprune.save and, beside
it, with torch.save of the whole module (a pickle). One other process builds each again, loads the
file, and runs it. "said" is what the file holds beside the tensors; a forward that pruning has
written anew is written again while loading, for which the model is recorded.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import warnings
from pathlib import Path
from typing import Any

import torch
from harness import (
    arguments,
    described,
    each,
    grid,
    installed,
    machine,
    progress,
    seconds,
    terminal,
)
from harness import save as save_numbers
from zoo import FAMILIES

import fxprune
from fxprune.modules import tree
from fxprune.modules.running import bind_inputs
from fxprune.records.history import steps

CHOSEN = {
    "torchvision": ("resnet18", "mobilenet_v3_small", "shufflenet_v2_x1_0", "densenet121",
                    "squeezenet1_1", "googlenet", "swin_t"),
    "timm": ("ghostnet_050", "levit_384_s8", "vit_tiny_r_s16_p8_224", "res2next50",
             "pit_ti_224", "hardcorenas_b"),
    "transformers": ("bert", "gpt2", "llama", "t5", "swin", "clip", "whisper"),
}  # fmt: skip


def outputs(model: torch.nn.Module, example: Any) -> list[torch.Tensor]:
    args, kwargs = bind_inputs(example)
    with torch.no_grad():
        return list(tree.tensors(model(*args, **kwargs)))


def build(family: str, name: str) -> torch.nn.Module:
    torch.manual_seed(0)
    return FAMILIES[family].build(name).eval()


def write(family: str, name: str, folder: Path) -> dict[str, Any]:
    """Prune and save one model, with its outputs for the other process."""
    zoo = FAMILIES[family]
    example = zoo.example(name)
    small = fxprune.prune(build(family, name), example, outputs=zoo.outputs(name), verify=False)
    file, pickle = folder / f"{name}.safetensors", folder / f"{name}.pickle"
    took, _ = seconds(lambda: fxprune.save(small, file))
    torch.save(small, pickle)
    torch.save(outputs(small, example), folder / f"{name}.out")
    bytes_said = int.from_bytes(file.read_bytes()[:8], "little")
    return {
        "family": family, "model": name, "parameters": sum(p.numel() for p in small.parameters()),
        "rewritten": sum(len(step.code) for step in steps(small)), "save": took,
        "file": file.stat().st_size, "pickle": pickle.stat().st_size, "said": bytes_said,
    }  # fmt: skip


def read(family: str, name: str, folder: Path) -> dict[str, Any]:
    """Load one model in this process; whether it computes what it did in the other one."""
    model = build(family, name)
    with torch.no_grad():
        for p in model.parameters():  # nothing of the original's is to be left
            p.fill_(0.01)
    took, _ = seconds(lambda: fxprune.load(model, folder / f"{name}.safetensors"))
    found = outputs(model, FAMILIES[family].example(name))
    wanted = torch.load(folder / f"{name}.out")
    same = len(found) == len(wanted) and all(map(torch.equal, found, wanted))
    return {"load": took, "same": same}


def attempt(function: Any, *given: Any) -> dict[str, Any]:
    try:
        return function(*given)
    except Exception as error:  # a model that fails is a row of the table
        return {"error": f"{type(error).__name__}: {str(error)[:200]}"}


def child(folder: Path) -> None:
    """The other process: a line of JSON a model."""
    for line in sys.stdin:
        family, name = line.split()
        print(json.dumps(attempt(read, family, name, folder)), flush=True)


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("--models", nargs="*", help="names, of any family")
    parser.add_argument("--read", type=Path, help=argparse.SUPPRESS)
    given = parser.parse_args()
    torch.set_num_threads(given.threads or 1)
    warnings.simplefilter("ignore")
    if given.read:
        child(given.read)
        return
    console = terminal()
    where = machine("torchvision", "timm", "transformers", "safetensors")
    chosen = [
        (family, name) for family, names in CHOSEN.items() if installed(family)
        for name in names if not given.models or name in given.models
    ]  # fmt: skip
    table = grid("model", "parameters", "file", "pickle", "said", "forwards", "save", "load",
                 "outputs")  # fmt: skip
    rows = []
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        for family, model in each(chosen, console, lambda item: item[1]):
            rows.append({"family": family, "model": model} | attempt(write, family, model, folder))
        run = [sys.executable, __file__, "--read", name, "--threads", str(given.threads or 1)]
        asked = "".join(f"{r['family']} {r['model']}\n" for r in rows if "error" not in r)
        with progress(console) as bar:
            bar.add_task("loading in another process", total=None)
            done = subprocess.run(run, input=asked, text=True, stdout=subprocess.PIPE, check=True)
        found = iter(map(json.loads, done.stdout.splitlines()))
        for row in rows:
            if "error" not in row:
                row |= next(found)
    for row in rows:
        if "error" in row:
            table.add_row(row["model"], *[""] * 7, row["error"])
            continue
        table.add_row(
            row["model"], f"{row['parameters']:,}", f"{row['file'] / 1e6:.2f} MB",
            f"{row['pickle'] / 1e6:.2f} MB", f"{row['said'] / 1e3:.0f} kB",
            str(row["rewritten"] or ""), f"{row['save'] * 1e3:.0f} ms",
            f"{row['load'] * 1e3:.0f} ms", "the same" if row["same"] else "DIFFER",
        )  # fmt: skip
    console.print(table)
    same = sum(row.get("same", False) for row in rows)
    console.print(f"{same} of {len(rows)} models compute the same bit for bit in another process.")
    console.print(described(where))
    save_numbers(given.json, where, models=rows)


if __name__ == "__main__":
    main()
