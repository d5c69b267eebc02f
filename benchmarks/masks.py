"""How long masking a large weight takes, beside PyTorch's own methods in the same run.

    python benchmarks/masks.py --size 4096 --plot masks.png

Medians over fresh copies of one linear layer; "got" is the share that fxprune's mask takes out.
"""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable
from statistics import median
from typing import Any

import torch
from harness import arguments, described, each, figure, grid, in_turn, machine, save, terminal
from torch import nn
from torch.nn.utils import prune

from fxprune import masks
from fxprune.parametrized.mask import mask_of

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


def measure(name: str, module: nn.Module, times: int) -> dict[str, Any]:
    """Seconds of one method, ours and PyTorch's in turn, each on a fresh copy."""
    asked, ours, theirs = METHODS[name]

    def fresh() -> nn.Module:
        return copy.deepcopy(module)

    found = in_turn({"fxprune": (fresh, ours), "pytorch": (fresh, theirs)}, times)
    masked = fresh()
    ours(masked)
    got = float((~mask_of(masked, "weight")).double().mean())
    return {"method": name, "asked": asked, "got": got, **{n: median(t) for n, t in found.items()}}


def plot(path: Any, rows: list[dict[str, Any]]) -> None:
    with figure(path, 6, 3.5) as axes:
        for ax in axes:
            for i, who in enumerate(("fxprune", "pytorch")):
                at = [n + 0.4 * i for n in range(len(rows))]
                ax.barh(at, [r[who] for r in rows], height=0.4, label=who)
            ax.set_yticks([n + 0.2 for n in range(len(rows))], [r["method"] for r in rows])
            ax.set_xscale("log")
            ax.set_xlabel("seconds")
            ax.grid(alpha=0.3)
            ax.legend()


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("--size", type=int, default=4096, help="rows and columns of the weight")
    parser.add_argument("--times", type=int, default=5)
    given = parser.parse_args()
    if given.threads:
        torch.set_num_threads(given.threads)
    warnings.simplefilter("ignore")
    torch.manual_seed(0)
    console, where = terminal(), machine()
    module = nn.Linear(given.size, given.size)
    table = grid("method", "asked", "got", "fxprune", "PyTorch", "ratio")
    rows = []
    for name in each(METHODS, console):
        row = measure(name, module, given.times)
        rows.append(row)
        table.add_row(name, f"{row['asked']:.3f}", f"{row['got']:.3f}",
                      f"{row['fxprune'] * 1e3:.0f} ms", f"{row['pytorch'] * 1e3:.0f} ms",
                      f"{row['fxprune'] / row['pytorch']:.2f}")  # fmt: skip
    console.print(table)
    console.print(f"Masking a {given.size} x {given.size} weight, median of {given.times}.")
    console.print(described(where))
    save(given.json, where, size=given.size, methods=rows)
    plot(given.plot, rows)


if __name__ == "__main__":
    main()
