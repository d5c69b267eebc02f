"""What three pruners make of five small networks that need care.

    pip install torch-pruning==1.6.1
    python benchmarks/peers.py

Every network is in float64, its biases, norms and statistics are random, and each pruner is asked,
through its own interface, to remove half of the 8 channels that stand before the last layer:

* torch.ao.pruning: ``SaliencyPruner`` on the layers that make the channels, with
  ``prune_bias=False``, its setting for biases that move on; ``prepare``, ``step``, ``prune``;
* Torch-Pruning: ``BasePruner(..., pruning_ratio=0.5, ignored_layers=[last])``, L2 magnitude,
  ``step(interactive=True)``;
* fxprune: ``fxprune.plan(model, x, sparsity=0.5, bias="propagate")``, whose reference is the masked
  network below, and the same with ``exact=True``.

Which channels went is asked of the pruner: the masks of torch.ao, the groups of Torch-Pruning, the
plan of fxprune. Equality is measured against the original network, on an input the pruner did not
see, with two references that share no code with any of them:

* masked: in the layers that make a removed channel, its weights are 0 (the scale, for a norm) and
  its biases stay. A pruned network should compute this: then the masked network that somebody
  trained and measured is the one that is deployed;
* dropped: the weights that read a removed channel are 0. This is what a pruner gets that deletes
  channels and forgets what they still emit.

The number in a cell is the largest absolute difference from the masked network, over the largest
absolute value of its output; up to 1e-9 is called exact. "wrong at the border" is exact but for the
outermost pixels; "constant dropped" is not the masked network but exactly the dropped one. A
percentage is the share of parameters left, where it is not about half. "refuses" is a pruner that
raises, "crashes" a pruned network that does not run.
"""

from __future__ import annotations

import re
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from harness import arguments, described, each, figure, machine, save, terminal
from torch import Tensor, nn

import fxprune

EXACT = 1e-9
CHANNELS = 8
Removed = dict[str, set[int]]  # for each layer that makes channels, the rows that went


class PaddedConv(nn.Sequential):
    def __init__(self) -> None:
        super().__init__(
            nn.Conv2d(3, CHANNELS, 3), nn.Sigmoid(), nn.Conv2d(CHANNELS, 4, 3, padding=1)
        )


class BatchNorm(nn.Sequential):
    def __init__(self) -> None:
        super().__init__(
            nn.Conv2d(3, CHANNELS, 3), nn.BatchNorm2d(CHANNELS), nn.Sigmoid(),
            nn.Conv2d(CHANNELS, 4, 3),
        )  # fmt: skip


class Residual(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Conv2d(3, CHANNELS, 3)
        self.b = nn.Conv2d(CHANNELS, CHANNELS, 1)
        self.last = nn.Conv2d(CHANNELS, 4, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = self.a(x)
        x = x + self.b(x)
        return self.last(x)


class LiteralFlatten(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, CHANNELS, 3)
        self.pool = nn.AdaptiveAvgPool2d(4)
        self.last = nn.Linear(8 * 16, 5)

    def forward(self, x: Tensor) -> Tensor:
        y = self.pool(torch.sigmoid(self.conv(x)))
        return self.last(y.view(-1, 8 * 16))


class LiteralUnflatten(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(10, 8 * 16)
        self.last = nn.ConvTranspose2d(CHANNELS, 4, 2, stride=2)

    def forward(self, x: Tensor) -> Tensor:
        y = torch.sigmoid(self.linear(x))
        return self.last(y.view(-1, 8, 4, 4))


@dataclass
class Case:
    """A network, and who makes and reads its 8 channels: rows and columns of each channel."""

    title: str
    network: type[nn.Module]
    shape: tuple[int, ...]
    makers: dict[str, int]
    readers: dict[str, int]
    norms: tuple[str, ...] = ()
    last: str = "last"

    def model(self) -> nn.Module:
        generator = torch.Generator().manual_seed(0)
        model = self.network().double().eval()
        with torch.no_grad():
            for name, tensor in model.state_dict().items():
                if tensor.is_floating_point():
                    noise = torch.randn(tensor.shape, generator=generator, dtype=tensor.dtype)
                    tensor.copy_(0.5 + noise.abs() if name.endswith("var") else 0.5 * noise)
        return model

    def input(self, seed: int) -> Tensor:
        generator = torch.Generator().manual_seed(seed)
        return torch.randn(self.shape, generator=generator, dtype=torch.float64)


IMAGE = (2, 3, 10, 10)
CASES = [
    Case(
        "conv, sigmoid, conv with padding",
        PaddedConv, IMAGE, {"0": 1}, {"2": 1}, last="2",
    ),
    Case(
        "conv, batch norm, sigmoid, conv",
        BatchNorm, IMAGE, {"0": 1}, {"3": 1}, norms=("1",), last="3",
    ),
    Case(
        "`x = a(x); x + b(x)`, conv",
        Residual, IMAGE, {"a": 1, "b": 1}, {"b": 1, "last": 1},
    ),
    Case(
        "conv, `view(-1, 8 * 16)`, linear",
        LiteralFlatten, IMAGE, {"conv": 1}, {"last": 16},
    ),
    Case(
        "linear, `view(-1, 8, 4, 4)`, conv-transpose",
        LiteralUnflatten, (2, 10), {"linear": 16}, {"last": 1},
    ),
]  # fmt: skip


# -- the two references ---------------------------------------------------------------------------


def masked(case: Case, removed: Removed) -> nn.Module:
    model = case.model()
    with torch.no_grad():
        for name, rows in removed.items():
            model.get_submodule(name).weight[sorted(rows)] = 0
        for name in case.norms:
            model.get_submodule(name).weight[sorted(channels(case, removed) or ())] = 0
    return model


def dropped(case: Case, removed: Removed) -> nn.Module | None:
    gone = channels(case, removed)
    if gone is None:
        return None
    model = case.model()
    with torch.no_grad():
        for name, width in case.readers.items():
            layer = model.get_submodule(name)
            weight = layer.weight if isinstance(layer, nn.ConvTranspose2d) else layer.weight.mT
            if isinstance(layer, nn.Conv2d):
                weight = layer.weight.transpose(0, 1)
            for channel in gone:
                weight[channel * width : (channel + 1) * width] = 0
    return model


def channels(case: Case, removed: Removed) -> set[int] | None:
    """The removed channels; None where the layers that make them disagree or cut through them."""
    found = []
    for name, width in case.makers.items():
        rows = removed.get(name, set())
        whole = {row // width for row in rows}
        if len(rows) != len(whole) * width:
            return None
        found.append(whole)
    return found[0] if all(f == found[0] for f in found) else None


# -- the pruners ----------------------------------------------------------------------------------


def torch_ao(case: Case, model: nn.Module, x: Tensor) -> tuple[nn.Module, Removed]:
    from torch.ao.pruning._experimental.pruner import SaliencyPruner

    pruner = SaliencyPruner({})
    config = [
        {"tensor_fqn": f"{name}.weight", "sparsity_level": 0.5, "prune_bias": False}
        for name in case.makers
    ]
    pruner.prepare(model, config)
    pruner.enable_mask_update = True
    pruner.step()
    removed = {}
    for name in case.makers:
        mask = model.get_submodule(name).parametrizations.weight[0].mask
        removed[name] = set((~mask).nonzero().flatten().tolist())
    return pruner.prune(), removed


def torch_pruning(case: Case, model: nn.Module, x: Tensor) -> tuple[nn.Module, Removed]:
    import torch_pruning as tp

    pruner = tp.pruner.BasePruner(
        model, x, importance=tp.importance.GroupMagnitudeImportance(p=2), pruning_ratio=0.5,
        ignored_layers=[model.get_submodule(case.last)],
    )  # fmt: skip
    names = {module: name for name, module in model.named_modules()}
    removed: Removed = {}
    for group in pruner.step(interactive=True):
        for dep, rows in group:
            name = names.get(dep.target.module)
            if name in case.makers and pruner.DG.is_out_channel_pruning_fn(dep.handler):
                removed.setdefault(name, set()).update(rows)
        group.prune()
    return model, removed


def fxprune_default(
    case: Case, model: nn.Module, x: Tensor, **settings: Any
) -> tuple[nn.Module, Removed]:
    plan = fxprune.plan(model, x, sparsity=0.5, bias="propagate", **settings)
    removed = {}
    for name, width in case.makers.items():
        rows = range(len(model.get_submodule(name).weight))
        kept = plan.kept.get(f"{name}.weight", {}).get(0, torch.tensor(rows))
        removed[name] = set(rows) - set(kept.tolist())
        for group in plan.groups:  # carriers are masked, but stay
            if (f"{name}.weight", 0) in group.members:
                removed[name] |= {
                    c * width + i for c in group.carriers.tolist() for i in range(width)
                }
    return plan.apply(model), removed


def fxprune_exact(case: Case, model: nn.Module, x: Tensor) -> tuple[nn.Module, Removed]:
    return fxprune_default(case, model, x, exact=True)


PRUNERS: dict[str, Callable[..., tuple[nn.Module, Removed]]] = {
    "torch.ao.pruning": torch_ao,
    "Torch-Pruning": torch_pruning,
    'fxprune, bias="propagate"': fxprune_default,
    "fxprune, exact=True": fxprune_exact,
}


# -- measuring ------------------------------------------------------------------------------------


def judge(case: Case, pruner: Callable[..., tuple[nn.Module, Removed]]) -> str:
    """One cell of the table."""
    model = case.model()
    total = count(model)
    try:
        small, removed = pruner(case, model, case.input(1))
    except ImportError as error:
        return f"not installed: {error.name}"
    except Exception as error:
        return f"refuses: {short(error)}"
    x = case.input(2)
    with torch.no_grad():
        try:
            found = small(x)
        except Exception as error:
            return f"crashes: {short(error)}"
        wanted = masked(case, removed)(x)
        plain = dropped(case, removed)
        without = None if plain is None else plain(x)
    if not any(removed.values()):
        return "removes nothing"
    left = "" if 0.4 <= count(small) / total <= 0.6 else f", keeps {count(small) / total:.0%}"
    if found.shape != wanted.shape:
        return f"wrong shape: {tuple(found.shape)} for {tuple(wanted.shape)}{left}"
    off = difference(wanted, found)
    if off <= EXACT:
        return f"exact ({off:.0e}){left}" if off else f"exact (0){left}"
    if without is not None and difference(without, found) <= EXACT:
        return f"constant dropped ({off:.2g}){left}"
    inner = (..., slice(1, -1), slice(1, -1))
    if wanted.dim() == 4 and difference(wanted[inner], found[inner]) <= EXACT:
        return f"wrong at the border ({off:.2g}){left}"
    return f"wrong ({off:.2g}){left}"


def count(model: nn.Module) -> int:
    return sum(p.numel() for p in model.parameters())


def difference(wanted: Tensor, found: Tensor) -> float:
    return float((wanted - found).abs().max() / wanted.abs().max())


def short(error: Exception) -> str:
    text = " ".join(str(error).split())
    while len(text) > 90 and re.search(r"\([^()]*\)", text):
        text = re.sub(r"\([^()]*\)", "", text)  # printed modules
    return f"{type(error).__name__}: {text if len(text) <= 90 else text[:87] + '...'}"


COLORS = {"exact": "tab:green", "constant": "gold", "wrong": "tab:red", "crashes": "tab:orange",
          "refuses": "silver", "removes": "lightgray", "not": "white"}  # fmt: skip


def plot(path: Any, rows: list[list[str]]) -> None:
    """The table as a grid; the first word of a cell is its colour."""
    with figure(path, 10, 3.5) as axes:
        for ax in axes:
            for y, (title, *cells) in enumerate(rows[1:]):
                for x, cell in enumerate(cells):
                    ax.barh(
                        y,
                        1,
                        left=x,
                        height=0.95,
                        color=COLORS[re.split(r"[: ]", cell)[0]],
                        alpha=0.6,
                    )
                    ax.text(x + 0.5, y, re.split(r"[:(]", cell)[0], ha="center", va="center")
                ax.text(-0.03, y, title.replace("`", ""), ha="right", va="center")
            ax.set_xticks([x + 0.5 for x in range(len(PRUNERS))], list(PRUNERS))
            ax.xaxis.tick_top()
            ax.set_yticks([])
            ax.invert_yaxis()
            ax.spines[:].set_visible(False)


def main() -> None:
    given = arguments(__doc__).parse_args()
    if given.threads:
        torch.set_num_threads(given.threads)
    warnings.simplefilter("ignore")
    torch.manual_seed(0)
    console, where = terminal(), machine("torch-pruning")
    rows = [["network", *PRUNERS]]
    for case in each(CASES, console, lambda case: case.title):
        rows.append([case.title, *(judge(case, pruner) for pruner in PRUNERS.values())])
    for i, row in enumerate(rows):
        print("| " + " | ".join(cell.replace("|", "\\|") for cell in row) + " |")
        if i == 0:
            print("|" + "---|" * len(row))
    console.print(f"\n{described(where)}")
    save(given.json, where, table=[dict(zip(rows[0], row, strict=True)) for row in rows[1:]])
    plot(given.plot, rows)


if __name__ == "__main__":
    main()
