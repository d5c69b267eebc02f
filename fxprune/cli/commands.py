"""The commands."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import click

import fxprune as library

from .. import benchmarking
from ..modules.inspecting import count_parameters
from ..proving import proof
from ..reporting.describing import describe
from . import known, telling
from .mistakes import Mistake
from .options import PICTURE, SAVE, WRITE, Job, job, of_a_model, of_a_plan, settings
from .telling import Steps, told

_EXAMPLES = """
\b
Examples:
  fxprune inspect resnet18
  fxprune inspect timm:vit_tiny_patch16_224 -s 0.3 --html plan.html
  fxprune prune torchvision:resnet50 -s 0.5 --round-to 8 --output small.safetensors
  fxprune prune mypackage.models:build --input 1,3,32,32 --weights trained.pt --ignore head
  fxprune inspect transformers:LlamaForCausalLM --set num_hidden_layers=2 --set hidden_size=256
  fxprune compact mymodel:Net --input 8,16 --weights sparse.pt --output small.safetensors
  fxprune bench resnet18 --device cuda --dtype bfloat16 --mode compile

\b
A MODEL is
  package.module:factory       called without arguments, or a torch.nn.Module that is there;
                               the current folder is importable
  torchvision:NAME, timm:NAME  without pretrained weights; --weights loads them
  transformers:NAME            the class of a model or of a configuration
  NAME                         in the first of these libraries that has it
"""
_CONTEXT = {"help_option_names": ["-h", "--help"], "max_content_width": 100}


@click.group(context_settings=_CONTEXT, epilog=_EXAMPLES)
@click.version_option(library.__version__)
def fxprune() -> None:
    """Structured pruning for PyTorch: removes whole channels, and checks the result.

    Exit status: 0, all is well; 1, pruning is refused or its proof fails; 2, something given cannot
    be used.
    """


@fxprune.command()
@of_a_model
@of_a_plan
@click.option("--groups", is_flag=True, help="List each group's axes, and what couples them.")
@click.option("--skipped", is_flag=True, help="List each layer that stays whole, and why.")
@click.option("--code", is_flag=True, help="Show attributes and code that change.")
@click.option("--html", type=WRITE, metavar="FILE", help="Write the plan as a page.")
@click.option("--draw", type=PICTURE, metavar="FILE", help="Draw the groups (.svg, .pdf, .png).")
@told
def inspect(
    as_json: bool, groups: bool, skipped: bool, code: bool, html: Path, draw: Path, **given: Any
) -> None:
    """Plan, and show what would go and what stays."""
    with Steps("build", "plan", "count") as step:
        _, made = _planned(given, step)
        step("count")
        about = describe(made)
        _pictures(made, html, draw)
    if as_json:
        click.echo(json.dumps(about))
        return
    click.echo(str(made))
    click.echo(telling.sizes(about["parameters"], about["macs"]))
    for wanted, text in ((groups, telling.groups), (skipped, telling.skipped),
                         (code, telling.code)):  # fmt: skip
        if wanted:
            click.echo(f"\n{text(about)}")
    _say_where(None, html, draw)


@fxprune.command()
@of_a_model
@of_a_plan
@click.option("-o", "--output", type=SAVE, metavar="FILE", help=(
    "Save the pruned model there, for fxprune.load."))  # fmt: skip
@click.option(
    "--verify/--no-verify",
    default=True,
    help="Whether to compare the result with the masked model.",
)
@click.option("--html", type=WRITE, metavar="FILE", help="Write the plan as a page.")
@told
def prune(as_json: bool, output: Path | None, verify: bool, html: Path, **given: Any) -> None:
    """Prune, prove, save."""
    with Steps("build", "plan", "prune", "prove", "count") as step:
        task, made = _planned(given, step)
        step("prune")
        small = made.apply(task.model)
        step("prove")
        error = proof.prove(made, task.model, small, task.example) if verify else None
        step("count")
        about = describe(made, small=small) | {"proof": error, "output": _saved(small, output)}
        _pictures(made, html)
    if as_json:
        click.echo(json.dumps(about))
        return
    pruned = sum(len(group.removed) > 0 for group in made.groups)
    whole = telling.number(len(made.skipped), "layer", "layers")
    groups = telling.number(pruned, "group", "groups")
    click.echo(f"{groups} of {about['model']} pruned, {whole} with all outputs kept")
    click.echo(telling.sizes(about["parameters"], about["macs"]))
    if error is not None:
        click.echo(f"proof: differs from the masked model by {error:.1g}, relative")
    _say_where(output, html)


@fxprune.command()
@of_a_model
@click.option("--ignore", multiple=True, metavar="NAME", help="Layer whose channels all stay.")
@click.option("-o", "--output", type=SAVE, metavar="FILE", help="Save the smaller model there.")
@told
def compact(as_json: bool, output: Path | None, ignore: tuple[str, ...], **given: Any) -> None:
    """Take out channels that are zero already."""
    with Steps("build", "compact", "count") as step:
        task = _built(given)
        step("compact")
        small = library.compact(task.model, task.example, ignore=ignore)
        step("count")
        models = (task.model, small)
        parameters = [count_parameters(m) for m in models]
        macs = [benchmarking.macs(m, task.example) for m in models]
        saved = _saved(small, output)
    if as_json:
        kind = type(task.model).__name__
        about = {"model": kind, "parameters": parameters, "macs": macs, "output": saved}
        click.echo(json.dumps(about))
        return
    if parameters[0] == parameters[1]:
        click.echo("no channel is dead: nothing goes")
    click.echo(telling.sizes(parameters, macs))
    _say_where(output)


@fxprune.command()
@of_a_model
@of_a_plan
@click.option("--mode", type=click.Choice(benchmarking.MODES), default="eager", show_default=True)
@click.option("--threads", type=int, help="Of the CPU.")
@click.option("--seconds", type=float, default=1.0, show_default=True, help="For each model.")
@click.option("--channels-last", is_flag=True, help="Lay out images so.")
@told
def bench(
    as_json: bool, mode: str, threads: int, seconds: float, channels_last: bool, **given: Any
) -> None:
    """Prune, and time the model before and after."""
    with Steps("build", "plan", "prune", "time") as step:
        task, made = _planned(given, step)
        step("prune")
        small = made.apply(task.model)
        proof.prove(made, task.model, small, task.example)
        step("time")
        result = library.benchmark(
            task.model, small, task.example,
            mode=mode, threads=threads, seconds=seconds, channels_last=channels_last,
        )  # fmt: skip
    if as_json:
        click.echo(json.dumps(dataclasses.asdict(result) | {"speed_up": result.speed_up}))
    else:
        click.echo(str(result))


@fxprune.command()
@click.argument("word", default="")
@click.option("--json", "as_json", is_flag=True, help="Print JSON, and nothing else.")
def patterns(word: str, as_json: bool) -> None:
    """Show what is known about ops.

    With WORD, only the lines that have it.
    """
    rows = known.rows(word)
    if not rows:
        raise Mistake(f"no pattern has {word!r} in its line; without a word all are shown")
    if as_json:
        click.echo(json.dumps([dict(zip(known.HEADINGS, row, strict=True)) for row in rows]))
    else:
        telling.show(known.table(rows))


def _built(given: dict[str, Any]) -> Job:
    names = ("model", "shapes", "arguments", "weights", "device", "dtype")
    return job(*(given[name] for name in names))


def _planned(given: dict[str, Any], step: Steps) -> tuple[Job, library.PruningPlan]:
    chosen = settings(given)
    task = _built(given)
    step("plan")
    return task, library.plan(task.model, task.example, **chosen)


def _saved(small: Any, output: Path | None) -> str | None:
    if output is None:
        return None
    library.save(small, output)
    return str(output)


def _pictures(made: library.PruningPlan, html: Path | None, draw: Path | None = None) -> None:
    if html is not None:
        made.to_html(html)
    if draw is not None:
        made.draw(draw)


def _say_where(output: Path | None, *pages: Path | None) -> None:
    if output is not None:
        click.echo(f"saved in {output}")
    for page in pages:
        if page is not None:
            click.echo(f"written to {page}")
