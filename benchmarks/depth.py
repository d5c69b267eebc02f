"""How the time to plan grows with depth: one block stacked 4, 16 and 64 times.

    python benchmarks/depth.py

"plan" is without the trace; the exponent is that of the last step (1 is linear).
"""

from __future__ import annotations

import argparse
import gc
import math
import statistics
import time
from collections.abc import Callable
from unittest.mock import patch

import torch
from rich.console import Console
from rich.table import Table
from torch import nn

import fxprune
from fxprune.recorder import record

DEPTHS = (4, 16, 64)


class Convolutions(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Conv2d(32, 64, 1), nn.BatchNorm2d(64), nn.SiLU(),
                                  nn.Conv2d(64, 32, 3, padding=1), nn.BatchNorm2d(32))  # fmt: skip

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.relu(x + self.body(x))


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.qkv, self.proj = nn.LayerNorm(64), nn.Linear(64, 192), nn.Linear(64, 64)
        self.mlp = nn.Sequential(nn.LayerNorm(64), nn.Linear(64, 128), nn.GELU(),
                                 nn.Linear(128, 64))  # fmt: skip

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        b, n, _ = x.shape
        q, k, v = self.qkv(self.norm(x)).view(b, n, 3, 4, -1).permute(2, 0, 3, 1, 4).unbind(0)
        y = nn.functional.scaled_dot_product_attention(q, k, v).transpose(1, 2)
        x = x + self.proj(y.reshape(b, n, -1))
        return x + self.mlp(x)


BLOCKS: dict[str, tuple[Callable[[], nn.Module], nn.Module, nn.Module, torch.Tensor]] = {
    "residual convolutions": (
        Convolutions, nn.Conv2d(3, 32, 1), nn.Conv2d(32, 4, 1), torch.randn(1, 3, 8, 8)
    ),
    "attention and MLP": (
        Attention, nn.Linear(3, 64), nn.Linear(64, 4), torch.randn(1, 8, 3)
    ),
}  # fmt: skip


def seconds(call: Callable[[], object], repeat: int) -> float:
    call()  # imports, the first time
    found = []
    for _ in range(repeat):
        gc.collect()
        start = time.perf_counter()
        call()
        found.append(time.perf_counter() - start)
    return statistics.median(found)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--repeat", type=int, default=7)
    args = parser.parse_args()
    table = Table()
    for heading in ("block", "depth", "trace", "plan", "per block", "exponent"):
        table.add_column(heading, justify="left" if heading == "block" else "right")
    for name, (block, first, last, x) in BLOCKS.items():
        before = None
        for depth in DEPTHS:
            model = nn.Sequential(first, *(block() for _ in range(depth)), last)
            trace = seconds(lambda m=model: record(m, x), args.repeat)
            recorded = record(model, x)
            with patch.object(fxprune.planner, "record", lambda *_, t=recorded, **__: t):
                plan = seconds(lambda m=model: fxprune.plan(m, x), args.repeat)
            grown = "" if before is None else f"{math.log(plan / before, 4):.2f}"
            table.add_row(name, str(depth), f"{trace * 1e3:.0f} ms", f"{plan * 1e3:.0f} ms",
                          f"{plan / depth * 1e3:.1f} ms", grown)  # fmt: skip
            before = plan
    Console().print(table)


if __name__ == "__main__":
    main()
