"""How long masking a large weight takes, beside PyTorch's own methods in the same run."""

from __future__ import annotations

import argparse
import copy
import json
import statistics
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.progress import Progress
from rich.table import Table
from torch import nn
from torch.nn.utils import prune

from fxprune import masks
from fxprune.mask import mask_of

Method = Callable[[nn.Module], Any]


def sparsifier(name: str, **settings: Any) -> Method:
    """One step of a sparsifier of torch.ao.pruning."""

    def run(module: nn.Module) -> Any:
        import torch.ao.pruning as ao

        made = getattr(ao, name)(**settings)
        made.prepare(nn.Sequential(module), [{"tensor_fqn": "0.weight"}])
        made.step()

    return run


# name: (sparsity asked, ours, PyTorch's)
METHODS: dict[str, tuple[float, Method, Method]] = {
    "random_unstructured": (0.5, lambda m: masks.random_unstructured(m, "weight", 0.5),
                            lambda m: prune.random_unstructured(m, "weight", 0.5)),
    "l1_unstructured": (0.5, lambda m: masks.l1_unstructured(m, "weight", 0.5),
                        lambda m: prune.l1_unstructured(m, "weight", 0.5)),
    "random_structured": (0.5, lambda m: masks.random_structured(m, "weight", 0.5, 0),
                          lambda m: prune.random_structured(m, "weight", 0.5, 0)),
    "ln_structured, L2": (0.5, lambda m: masks.ln_structured(m, "weight", 0.5, 2, 0),
                          lambda m: prune.ln_structured(m, "weight", 0.5, 2, 0)),
    "global_unstructured": (
        0.5, lambda m: masks.global_unstructured([(m, "weight"), (m, "bias")], 0.5),
        lambda m: prune.global_unstructured([(m, "weight"), (m, "bias")], prune.L1Unstructured,
                                            amount=0.5)),
    "block_norm 1x4": (0.5, lambda m: masks.block_norm(m, "weight", 0.5, (1, 4)),
                       sparsifier("WeightNormSparsifier", sparsity_level=0.5)),
    "block_norm 16x16": (
        0.5, lambda m: masks.block_norm(m, "weight", 0.5, (16, 16)),
        sparsifier("WeightNormSparsifier", sparsity_level=0.5, sparse_block_shape=(16, 16))),
    "2:4": (0.5, lambda m: masks.block_norm(m, "weight", 1.0, (1, 4), 2),
            sparsifier("WeightNormSparsifier", sparsity_level=1.0, zeros_per_block=2)),
    "nearly_diagonal": (1 - 101 / 4096, lambda m: masks.nearly_diagonal(m, "weight", 101),
                        sparsifier("NearlyDiagonalSparsifier", nearliness=101)),
}  # fmt: skip


def seconds(method: Method, module: nn.Module, times: int) -> tuple[float, nn.Module]:
    """The median over fresh copies, and the last one, masked."""
    found = []
    for _ in range(times):
        fresh = copy.deepcopy(module)
        start = time.perf_counter()
        method(fresh)
        found.append(time.perf_counter() - start)
    return statistics.median(found), fresh


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--size", type=int, default=4096, help="rows and columns of the weight")
    parser.add_argument("--times", type=int, default=5)
    parser.add_argument("--json", type=Path, metavar="FILE")
    given = parser.parse_args()
    warnings.simplefilter("ignore")
    torch.manual_seed(0)
    module = nn.Linear(given.size, given.size)
    table = Table(title=f"masking a {given.size} x {given.size} weight, {torch.get_num_threads()} "
                        f"threads, median of {given.times}")  # fmt: skip
    for column in ("method", "asked", "got", "fxprune", "PyTorch", "ratio"):
        table.add_column(column, justify="left" if column == "method" else "right")
    rows = []
    with Progress(transient=True) as bar:
        for name, (asked, ours, theirs) in bar.track(METHODS.items()):
            mine, masked = seconds(ours, module, given.times)
            other, _ = seconds(theirs, module, given.times)
            got = float((~mask_of(masked, "weight")).double().mean())
            rows.append({"method": name, "asked": asked, "got": got, "fxprune": mine,
                         "pytorch": other})  # fmt: skip
            table.add_row(name, f"{asked:.3f}", f"{got:.3f}", f"{mine * 1e3:.0f} ms",
                          f"{other * 1e3:.0f} ms", f"{mine / other:.2f}")  # fmt: skip
    Console().print(table)
    if given.json:
        given.json.write_text(json.dumps(rows, indent=1) + "\n")


if __name__ == "__main__":
    main()
