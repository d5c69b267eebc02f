"""What calibration needs: inputs, time and memory.

    python benchmarks/calibration.py inputs --plot calibration.png
    python benchmarks/calibration.py cost

"inputs": half of the units of the networks trained on digits and clothes (``real.py``) go by
``importance="reconstruction"``, with 16 to 4,096 inputs to calibrate on: of the kind that is
scored; noise with the mean and spread of each pixel; or shifted ones, which are the real ones
mirrored, brighter, and with less contrast.

"cost": seconds, and memory at most beyond what the model and its inputs take, for models with
random weights: ResNet-50 and ViT-B/16 on images of 224 x 224, and blocks of the size of Llama 3.2
1B (width 2,048, 32 heads, 8 of keys, 8,192 inside) on 128 tokens each; beside planning without
calibration and one forward pass on the same inputs.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from harness import (
    arguments,
    described,
    each,
    figure,
    grid,
    machine,
    peak_memory,
    save,
    seconds,
    show,
    terminal,
)
from real import load
from torch import Tensor, nn

import fxprune

COUNTS = (16, 64, 256, 1024, 4096)


def mirrored(images: Tensor) -> Tensor:
    return 0.3 + 0.5 * images.flip(3)


def noise(images: Tensor) -> Tensor:
    generator = torch.Generator().manual_seed(0)
    drawn = torch.randn(images.shape, generator=generator)
    return images.mean(0) + images.std(0) * drawn


KINDS: dict[str, Callable[[Tensor], Tensor]] = {
    "real": lambda images: images, "noise": noise, "shifted": mirrored,
}  # fmt: skip


def training_images(name: str, cache: Path) -> Tensor:
    """In the order in which ``real.py`` takes them."""
    import real
    from digits import load_digits

    data = load_digits(torch.device("cpu")) if name == "digits" else real.load_clothes(cache)
    images = data.train[0]
    return images[torch.randperm(len(images), generator=torch.Generator().manual_seed(0))]


def inputs(args: Any) -> list[dict[str, Any]]:
    from real import cache_folder

    console, rows = terminal(), []
    jobs = [(name, kind, n) for name in ("digits", "clothes") for kind in KINDS for n in COUNTS]
    networks = {name: load(name, 0, cache_folder()) for name in ("digits", "clothes")}
    images = {name: training_images(name, cache_folder()) for name in networks}
    for name, kind, count in each(jobs, console, lambda job: f"{job[0]}, {job[2]} {job[1]}"):
        network, taken = networks[name], images[name][:count]
        small = fxprune.prune(
            network.model, network.example_input, importance="reconstruction",
            calibration=KINDS[kind](taken).split(64),
        )  # fmt: skip
        with torch.no_grad():
            score = network.score(small)
        rows.append({"network": name, "inputs": kind, "count": len(taken), "score": score})
    table = grid("network", "inputs", *map(str, COUNTS), left=2)
    for name, network in networks.items():
        table.add_row(f"{name} (as it was {100 * network.score(network.model):.1f} %)", "")
        for kind in KINDS:
            found = [r for r in rows if r["network"] == name and r["inputs"] == kind]
            cells = [f"{show(100 * r['score'], '.1f')} ({r['count']})" if r["count"] not in COUNTS
                     else show(100 * r["score"], ".1f") for r in found]  # fmt: skip
            table.add_row("", kind, *cells)
    console.print(table)
    with figure(args.plot, 8, 3.2, 2) as panels:
        for panel, name in zip(panels, networks, strict=False):
            for kind in KINDS:
                found = [r for r in rows if r["network"] == name and r["inputs"] == kind]
                panel.plot([r["count"] for r in found], [100 * r["score"] for r in found],
                           marker=".", label=kind)  # fmt: skip
            panel.set(xscale="log", xlabel="inputs to calibrate on", ylabel="right answers, %",
                      title=name)  # fmt: skip
            panel.grid(alpha=0.3)
            panel.legend()
    return rows


class Llama(nn.Module):
    def __init__(self, layers: int) -> None:
        from transformers import LlamaConfig, LlamaModel

        super().__init__()
        config = LlamaConfig(
            vocab_size=1000, hidden_size=2048, intermediate_size=8192, num_hidden_layers=layers,
            num_attention_heads=32, num_key_value_heads=8, use_cache=False,
        )  # fmt: skip
        self.body, self.head = LlamaModel(config), nn.Linear(2048, 1000, bias=False)

    def forward(self, input_ids: Tensor) -> Tensor:
        return self.head(self.body(input_ids=input_ids).last_hidden_state)


def models(args: Any) -> dict[str, tuple[Callable[[], nn.Module], Tensor]]:
    import torchvision.models as tv

    images = torch.randn(args.count, 3, 224, 224)
    tokens = torch.randint(0, 1000, (args.count, 128))
    return {
        "resnet50": (lambda: tv.resnet50(weights=None), images),
        "vit_b_16": (lambda: tv.vit_b_16(weights=None), images),
        f"{args.layers} Llama blocks": (lambda: Llama(args.layers), tokens),
    }


def cost(args: Any) -> list[dict[str, Any]]:
    console, rows = terminal(), []
    ways = {"no calibration": None, "parallel": "parallel", "sequential": "sequential"}
    chosen = models(args)
    jobs = [(name, way) for name in chosen for way in ways]
    built: dict[str, nn.Module] = {}
    for name, way in each(jobs, console, lambda job: f"{job[0]}, {job[1]}"):
        build, batch = chosen[name]
        built = {name: built[name]} if name in built else {name: build().eval()}
        model = built[name]
        settings: dict[str, Any] = {}
        if ways[way]:
            batches = list(batch.split(args.batch))
            settings = {"calibration": batches, "calibration_mode": ways[way]}
        with torch.no_grad():
            forward = sum(seconds(lambda b=b: model(b))[0] for b in batch.split(args.batch))
        found: list[float] = []

        def run() -> None:
            found.append(seconds(lambda: fxprune.plan(model, batch[:1], **settings))[0])

        memory = peak_memory(run)
        size = sum(p.numel() * p.element_size() for p in model.parameters())
        rows.append({"model": name, "way": way, "seconds": found[0], "forward": forward,
                     "memory": memory, "model_bytes": size})  # fmt: skip
    table = grid("model", "calibration", "seconds", "forward passes", "memory", "the model", left=2)
    for r in rows:
        table.add_row(
            r["model"], r["way"], show(r["seconds"], ".1f"),
            show(r["seconds"] / r["forward"], ".1f"),
            show(r["memory"] and r["memory"] / 2**30, ".2f", " GiB"),
            show(r["model_bytes"] / 2**30, ".2f", " GiB"),
        )  # fmt: skip
    console.print(table)
    return rows


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("what", choices=["inputs", "cost"])
    parser.add_argument("--count", type=int, default=32, help="inputs, for cost (default: 32)")
    parser.add_argument("--batch", type=int, default=8, help="of these at a time (default: 8)")
    parser.add_argument("--layers", type=int, default=2, help="Llama blocks (default: 2)")
    args = parser.parse_args()
    if args.threads:
        torch.set_num_threads(args.threads)
    rows = inputs(args) if args.what == "inputs" else cost(args)
    where = machine()
    terminal().print(described(where))
    save(args.json, where, what=args.what, rows=rows)


if __name__ == "__main__":
    sys.exit(main())
