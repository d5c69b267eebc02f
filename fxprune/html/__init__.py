"""The plan as a page of HTML that needs nothing but itself, and as a table for notebooks."""

from __future__ import annotations

import html
import json
import os
from importlib import resources
from pathlib import Path
from string import Template
from typing import Any

from torch import nn

from ..records.container import speaking_of
from ..reporting.describing import describe


def page(plan: Any, model: nn.Module | None = None, small: nn.Module | None = None) -> str:
    """The whole page; see :meth:`fxprune.PruningPlan.to_html`."""
    from .. import __version__

    about = describe(plan, model, small)
    data = json.dumps(about, separators=(",", ":"), allow_nan=False)
    parts = {kind: _part(f"page.{kind}") for kind in ("html", "css", "js")}
    return Template(parts["html"]).substitute(
        title=html.escape(about["model"]),
        version=__version__,
        style=parts["css"],
        script=parts["js"],
        data=data.replace("<", "\\u003c"),  # no text of the model's can end the script
    )


def write(plan: Any, path: str | os.PathLike[str], model: nn.Module | None = None) -> None:
    text = page(plan, model)
    with speaking_of(path):
        Path(path).write_text(text, encoding="utf-8")


def _part(name: str) -> str:
    return resources.files(__package__).joinpath(name).read_text(encoding="utf-8")
