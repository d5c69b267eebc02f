"""Options of the command line: those of every model, and the settings of a plan."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click
import torch
from torch import nn

import fxprune

from . import inputs, models
from .mistakes import Mistake

READ = click.Path(exists=True, dir_okay=False, path_type=Path)


class WritePath(click.Path):
    """A file to write, in a folder that is there. ``fits``: whether a suffix is one of what is
    written, and ``wanted`` the sentence where it is none."""

    def __init__(self, fits: Callable[[str], bool] = bool, wanted: str = "") -> None:
        super().__init__(dir_okay=False, writable=True)
        self._fits, self._wanted = fits, wanted

    def convert(self, value: Any, param: Any, ctx: Any) -> Path:
        path = Path(str(super().convert(value, param, ctx)))
        if not path.parent.is_dir():
            self.fail(f"the folder {str(path.parent)!r} does not exist", param, ctx)
        if self._wanted and not self._fits(path.suffix.lower()):
            self.fail(f"{str(path)!r}: {self._wanted}", param, ctx)
        return path


WRITE = WritePath()
# What torch.save is known to write is unpickled by others.
SAVE = WritePath(
    lambda suffix: suffix not in (".pt", ".pth", ".bin", ".ckpt", ".pkl"),
    "what is written is a safetensors file; let its name end in .safetensors",
)
PICTURE = WritePath(
    lambda suffix: suffix in (".svg", ".pdf", ".png"), "pictures end in .svg, .pdf or .png"
)

# -- the model ------------------------------------------------------------------------------------


@dataclass
class Job:
    """A model, an input for it, and what the user called it."""

    name: str
    model: nn.Module
    example: Any


_MODEL = [
    click.argument("model"),
    click.option("-i", "--input", "shapes", multiple=True, metavar=inputs.FORM, help=(
        "Shape of an input, as 1,3,224,224 or ids=1,16:int64:0-99; once for each. Floating-point "
        "numbers are random, integers from 0 to 9. Models of a library may have one of their own."
    )),
    click.option("--set", "arguments", multiple=True, metavar="KEY=VALUE", help=(
        "Give this to the factory or, for transformers, to the configuration."
    )),
    click.option("-w", "--weights", type=READ, metavar="FILE", help=(
        "A state dict: .safetensors, or of torch.save. Masks of torch.nn.utils.prune are applied."
    )),
    click.option("--device", metavar="DEVICE", help="Where to run: cpu, cuda, cuda:1."),
    click.option("--dtype", metavar="TYPE", help="Of weights and inputs, as float64 or bfloat16."),
    click.option("--json", "as_json", is_flag=True, help="Print JSON, and nothing else."),
    click.option("--debug", is_flag=True, help="Show the traceback of an error."),
]  # fmt: skip


def of_a_model(command: Callable[..., Any]) -> Callable[..., Any]:
    for option in reversed(_MODEL):
        command = option(command)
    return command


def job(
    model: str,
    shapes: Sequence[str],
    arguments: Sequence[str],
    weights: Path | None,
    device: str | None,
    dtype: str | None,
) -> Job:
    """The model that is meant, and its input."""
    torch.manual_seed(0)  # so that what it says is the same the next time
    where = None if device is None else inputs.device(device)
    kind = None if dtype is None else inputs.dtype(dtype)
    if kind is not None and not kind.is_floating_point:
        raise Mistake(f"--dtype {dtype}: weights are floating-point numbers")
    given = inputs.example(shapes) if shapes else None
    built = models.find(model, inputs.pairs(arguments, "--set"))
    if weights is not None:
        inputs.load_weights(built, weights)
    given = models.example(built) if given is None else given
    if given is None:
        raise Mistake(f"{model} needs --input, such as --input 1,3,224,224 or ids=1,16:int64")
    built = built.to(device=where, dtype=kind)
    parameter = next(built.parameters(), None)
    home = where or (parameter.device if parameter is not None else inputs.device("cpu"))
    return Job(model, built, inputs.moved(given, home, kind))


# -- settings -------------------------------------------------------------------------------------


def _several(texts: Sequence[str], option: str) -> Any:
    """One value, or a mapping from module names to values."""
    if any("=" in text for text in texts):
        return inputs.pairs(texts, option)
    if len(texts) > 1:
        raise Mistake(f"{option}: several values need names, as in 'layer1.*=0.5'")
    return inputs.value(texts[0])


def _importance(text: str, option: str) -> Any:
    module, colon, name = text.partition(":")
    return models.load(module, name) if colon else text


def _target(texts: Sequence[str], option: str) -> Any:
    given = inputs.pairs(texts, option)
    takes = inspect.signature(fxprune.Target).parameters
    if unknown := given.keys() - takes:
        raise Mistake(f"{option}: {min(unknown)!r} is none of {', '.join(takes)}")
    return fxprune.Target(**given)


def _same(value: Any, option: str) -> Any:
    return value


def _places(names: Sequence[str], option: str) -> Any:
    return [int(name) if name.isdecimal() else name for name in names]


def _value(text: str, option: str) -> Any:
    return inputs.value(text)


Parse = Callable[[Any, str], Any]
# Settings of fxprune.plan that can be said at a command line: how, and from what text.
_SETTINGS: dict[str, tuple[Parse, dict[str, Any]]] = {
    "sparsity": (_several, {"multiple": True, "metavar": "[NAME=]SHARE", "help": (
        "Share of the channels that each group loses; for some layers only: 'layer[34].*=0.5'.")}),
    "target": (_target, {"multiple": True, "metavar": "WHAT=HOW MUCH", "help": (
        "How much is to be left instead: params=0.5, macs=0.5 or latency=0.5.")}),
    "ignore": (_same, {"multiple": True, "metavar": "NAME", "help": (
        "Layer whose channels all stay; globs are allowed.")}),
    "importance": (_importance, {"metavar": "NAME", "help": (
        "Which channels go first, as l2, l1, fpgm or random; or package.module:function.")}),
    "scope": (_same, {"metavar": "SCOPE", "help": (
        "How groups share out what goes: local, global or isomorphic.")}),
    "min_width": (_several, {"multiple": True, "metavar": "[NAME=]UNITS", "help": (
        "Units that no group goes below.")}),
    "max_sparsity": (_several, {"multiple": True, "metavar": "[NAME=]SHARE", "help": (
        "Share that no group loses more than.")}),
    "round_to": (_value, {"metavar": "N", "help": "Widths that shrink become multiples of this."}),
    "bias": (_same, {"metavar": "expected|propagate|drop", "help": (
        "What becomes of the constants that removed channels emit.")}),
    "exact": (_same, {"is_flag": True, "default": None, "help": (
        "Keep a masked channel where zero padding needs one.")}),
    "attention": (_same, {"metavar": "heads|head_dim", "help": "How attention is cut."}),
    "outputs": (_places, {"multiple": True, "metavar": "NAME", "help": (
        "Name, or place, of what the model returns that has to stay, where that is several "
        "things.")}),
}  # fmt: skip


def of_a_plan(command: Callable[..., Any]) -> Callable[..., Any]:
    for name, (_, words) in reversed(_SETTINGS.items()):
        letters = ["-s"] if name == "sparsity" else []
        command = click.option(*letters, f"--{name.replace('_', '-')}", name, **words)(command)
    return command


def settings(given: dict[str, Any]) -> dict[str, Any]:
    """Those that were given, as :func:`fxprune.plan` takes them."""
    return {
        name: parse(given[name], f"--{name.replace('_', '-')}")
        for name, (parse, _) in _SETTINGS.items() if given[name] not in (None, ())
    }  # fmt: skip
