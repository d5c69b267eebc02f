"""The public interface as text: ``python -m tests.public_api`` prints it, ``make api`` keeps it.

Names, signatures, and what classes have, one thing a line, so that a change is a short diff.
"""

from __future__ import annotations

import dataclasses
import importlib
import inspect
import re
from collections.abc import Iterator
from functools import cached_property
from typing import Any

MODULES = ("fxprune", "fxprune.importance", "fxprune.masks", "fxprune.schedules")


def text() -> str:
    return "\n".join(line for name in MODULES for line in _module(name)) + "\n"


def names(module: Any) -> list[str]:
    """What is public in a module: ``__all__``, or what it defines under a plain name."""
    defined = [
        name
        for name, value in vars(module).items()
        if getattr(value, "__module__", "") == module.__name__ and name[0] != "_"
    ]
    return sorted(getattr(module, "__all__", defined))


def _module(path: str) -> Iterator[str]:
    module = importlib.import_module(path)
    yield f"\n{path}"
    for name in names(module):
        value = getattr(module, name)
        if inspect.ismodule(value):
            yield f"  {name}: module"
        elif inspect.isclass(value):
            bases = ", ".join(base.__name__ for base in value.__bases__ if base is not object)
            yield f"  class {name}" + (f"({bases})" if bases else "")
            yield from _class(value)
        elif inspect.isroutine(value):
            yield f"  {name}{signature(value, 2)}"
        else:
            yield f"  {name}: {type(value).__name__}"


def _class(kind: type) -> Iterator[str]:
    own = [k for k in kind.__mro__ if k.__module__.startswith("fxprune")]
    if dataclasses.is_dataclass(kind):
        for field in dataclasses.fields(kind):
            if field.name[0] != "_":
                yield f"    {field.name}: {field.type}"
    elif "__init__" in vars(kind):
        yield f"    __init__{signature(kind.__init__, 4)}"
    found = {name: value for k in reversed(own) for name, value in vars(k).items()}
    for name, value in sorted(found.items()):
        if name[0] == "_" or (dataclasses.is_dataclass(kind) and name in kind.__dataclass_fields__):
            continue
        if isinstance(value, (property, cached_property)):
            read: Any = value.fget if isinstance(value, property) else value.func
            yield f"    {name} -> {read.__annotations__.get('return')}"
        elif inspect.isroutine(value := getattr(kind, name)):
            yield f"    {name}{signature(value, 4)}"


def signature(function: Any, indent: int) -> str:
    """As it is written; one parameter a line where it is long."""
    found = inspect.signature(function)
    quoted = [re.sub(r": '(.*?)'( = |$)", r": \1\2", str(p)) for p in found.parameters.values()]
    quoted = [re.sub(r"<function (\S+) at \w+>", r"\1", p) for p in quoted]
    kinds = [p.kind for p in found.parameters.values()]
    if inspect.Parameter.KEYWORD_ONLY in kinds and inspect.Parameter.VAR_POSITIONAL not in kinds:
        quoted.insert(kinds.index(inspect.Parameter.KEYWORD_ONLY), "*")
    given = found.return_annotation
    end = "" if given is inspect.Signature.empty else f" -> {given}"
    line = f"({', '.join(quoted)}){end}"
    if len(line) < 80:
        return line
    space = " " * indent
    return "(\n" + "".join(f"{space}  {p},\n" for p in quoted) + f"{space}){end}"


if __name__ == "__main__":
    print(text(), end="")
