"""Finding the model that a name means."""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
import inspect
import os
import sys
from collections.abc import Iterator, Mapping
from difflib import get_close_matches
from typing import Any

import torch
from torch import nn

from ..modules.inspecting import count_parameters
from .mistakes import Mistake

LIBRARIES = ("torchvision", "timm", "transformers")
_FORMS = "use package.module:factory, torchvision:name, timm:name or transformers:ClassName"


def find(name: str, arguments: Mapping[str, Any]) -> nn.Module:
    """The model that ``name`` means, built anew with ``arguments``, in eval mode.

    Raises:
        Mistake: there is none, or it cannot be built.
    """
    library, colon, rest = name.partition(":")
    if not colon:
        library, rest = _library_of(name), name
    if library not in LIBRARIES:
        return _own(library, rest, arguments).eval()
    if library not in _installed():
        raise Mistake(f"{library} is not installed: pip install {library}")
    build = {"torchvision": _torchvision, "timm": _timm, "transformers": _transformers}[library]
    if not _has(library, rest):
        raise Mistake(f"{library} has no model {rest!r}{_hint(rest, [library])}")
    with _building(name):
        return build(rest, dict(arguments)).eval()


def example(model: nn.Module) -> Any:
    """An input for models whose library says what they take; None for others."""
    about: Any = model
    if "input_size" in (getattr(about, "pretrained_cfg", None) or {}):  # timm
        return torch.randn(1, *about.pretrained_cfg["input_size"])
    if type(model).__module__.startswith("torchvision.models."):
        parts = type(model).__module__.split(".")
        return torch.randn(1, 3, 224, 224) if len(parts) == 3 else None
    main = getattr(about, "main_input_name", None)  # transformers
    if main == "input_ids":
        return {main: torch.arange(1, 9)[None]}
    size = getattr(about.config, "image_size", None) if main == "pixel_values" else None
    if isinstance(size, int):
        return {main: torch.randn(1, about.config.num_channels, size, size)}
    return None


def _installed() -> list[str]:
    return [name for name in LIBRARIES if importlib.util.find_spec(name) is not None]


def _library_of(name: str) -> str:
    """The first library with a model of that name."""
    for library in _installed():
        if _has(library, name):
            return library
    raise Mistake(f"no model is called {name!r}{_hint(name, _installed())}; otherwise {_FORMS}")


def _has(library: str, name: str) -> bool:
    if library == "transformers":
        made = getattr(importlib.import_module(library), name, None)
        return inspect.isclass(made) and (name.endswith("Config") or hasattr(made, "config_class"))
    return name in _names(library)


def _names(library: str) -> list[str]:
    if library == "torchvision":
        return importlib.import_module("torchvision.models").list_models()
    if library == "timm":
        return importlib.import_module("timm").list_models()
    kinds = ("Config", "Model", "LM", "Classification", "Generation")
    return [n for n in dir(importlib.import_module(library)) if n.endswith(kinds)]


def _hint(name: str, libraries: list[str]) -> str:
    known = {n: f"{library}:{n}" for library in reversed(libraries) for n in _names(library)}
    near = [known[n] for n in get_close_matches(name, known, 3)]
    return f"; did you mean {' or '.join(near)}" if near else ""


def _torchvision(name: str, arguments: dict[str, Any]) -> nn.Module:
    from torchvision.models import get_model, get_model_builder

    takes = inspect.signature(get_model_builder(name)).parameters
    without = {key: None for key in ("weights", "weights_backbone") if key in takes}
    return get_model(name, **without | arguments)


def _timm(name: str, arguments: dict[str, Any]) -> nn.Module:
    import timm

    return timm.create_model(name, **{"pretrained": False} | arguments)


def _transformers(name: str, arguments: dict[str, Any]) -> nn.Module:
    """A model of that class by its default configuration; for a configuration, the plain model."""
    import transformers

    made: Any = getattr(transformers, name)
    if name.endswith("Config"):
        config, build = made(**arguments), transformers.AutoModel.from_config
    else:
        if made.config_class is None:
            raise Mistake(f"{name} is not the class of one kind of model; name one that is")
        config, build = made.config_class(**arguments), made
    with torch.device("meta"):
        number = count_parameters(build(config))
    _check_memory(name, number)
    return build(config)


def _check_memory(name: str, number: int) -> None:
    """Default configurations are often those of the largest model of a family."""
    need, have = 4 * number / 2**30, _memory()
    if have is not None and need > have / 2:
        raise Mistake(
            f"{name} has {number:,} parameters by default: it and its pruned copy need "
            f"{2 * need:.0f} GiB, and this machine has {have:.0f}. Ask for a smaller one, as with "
            "--set num_hidden_layers=2"
        )


def _memory() -> float | None:
    """GiB of this machine, where it says so."""
    if not hasattr(os, "sysconf") or "SC_PHYS_PAGES" not in os.sysconf_names:
        return None
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") / 2**30


def _own(module: str, attribute: str, arguments: Mapping[str, Any]) -> nn.Module:
    """What ``module`` calls ``attribute``: a module, or what makes one."""
    found = load(module, attribute)
    if isinstance(found, nn.Module):
        if arguments:
            raise Mistake(f"{module}:{attribute} is a model already, so --set can set nothing")
        return found
    if not callable(found):
        raise Mistake(
            f"{module}:{attribute} is a {type(found).__name__}, neither model nor factory"
        )
    with _building(f"{module}:{attribute}"):
        made = found(**arguments)
    if not isinstance(made, nn.Module):
        raise Mistake(f"{module}:{attribute} makes {made!r:.60}, which is no torch.nn.Module")
    return made


def load(module: str, attribute: str) -> Any:
    """An object of an importable module; the current directory is importable."""
    if module.endswith(".py"):
        hint = module.removesuffix(".py").replace(os.sep, ".").lstrip(".")
        raise Mistake(f"{module} is a file; name it as a module, {hint}:{attribute}")
    if os.getcwd() not in sys.path and "" not in sys.path:
        sys.path.insert(0, os.getcwd())
    with _building(module):
        try:
            found: Any = importlib.import_module(module)
        except ModuleNotFoundError as error:
            if error.name is None or not f"{module}.".startswith(f"{error.name}."):
                raise
            raise Mistake(f"there is no module {error.name!r}; {_FORMS}") from error
    for part in attribute.split("."):
        if not hasattr(found, part):
            near = get_close_matches(part, dir(found), 1)
            hint = f"; did you mean {near[0]!r}" if near else ""
            raise Mistake(f"{module} has no {attribute!r}{hint}")
        found = getattr(found, part)
    return found


@contextlib.contextmanager
def _building(name: str) -> Iterator[None]:
    """What a user's code raises is told in a line."""
    try:
        yield
    except Mistake:
        raise
    except Exception as error:  # whatever it is
        raise Mistake(f"{name} cannot be made: {type(error).__name__}: {error}") from error
