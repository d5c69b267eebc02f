"""For the API pages: the roles and literal blocks that docstrings are written with, as Markdown."""

from __future__ import annotations

import re
from typing import Any

import griffe


class Roles(griffe.Extension):
    """``:func:`plan``` becomes a link where a page has it, and code elsewhere."""

    def on_instance(self, *, obj: griffe.Object, **kwargs: Any) -> None:
        if obj.docstring is not None:
            role = r":(?:func|class|meth|mod|attr):`([^`]+)`"
            text = re.sub(role, lambda found: _link(found[1], obj), obj.docstring.value)
            obj.docstring.value = re.sub(r"::$", ":", text, flags=re.M)


def _link(name: str, obj: griffe.Object) -> str:
    """A bare name is of the class or the module that speaks of it, or of fxprune."""
    here: Any = obj
    while "." not in name and here is not None and name not in here.members:
        here = here.parent
    where = name if "." in name or here is None else f"{here.path}.{name}"
    return f'<autoref identifier="{where}" optional><code>{name}</code></autoref>'
