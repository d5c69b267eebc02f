"""For the API pages: the roles and literal blocks that docstrings are written with, as Markdown."""

from __future__ import annotations

import re
from typing import Any

import griffe


class Roles(griffe.Extension):
    """``:func:`plan``` becomes a link where a page has it, and code elsewhere."""

    def on_instance(self, *, obj: griffe.Object, **kwargs: Any) -> None:
        if obj.docstring is not None:
            text = re.sub(r":(?:func|class|meth|mod):`([^`]+)`", _link, obj.docstring.value)
            obj.docstring.value = re.sub(r"::$", ":", text, flags=re.M)


def _link(found: re.Match[str]) -> str:
    name = found[1]
    where = name if "." in name else f"fxprune.{name}"
    return f'<autoref identifier="{where}" optional><code>{name}</code></autoref>'
