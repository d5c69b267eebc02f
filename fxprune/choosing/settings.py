"""The settings of a plan, checked before anything runs."""

from __future__ import annotations

import fnmatch
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from difflib import get_close_matches
from typing import Any

from torch import Tensor, nn

from .. import importance
from ..errors import SettingError
from ..modules.given import check_flag, is_number, is_whole
from ..modules.inspecting import modules_of, parts_of
from .rounding import preferred
from .scope import SCOPES
from .target import Target

BIASES = ("propagate", "drop", "expected")
ATTENTION = ("heads", "head_dim")
_SPARSITY = 0.5  # where neither it nor a target is given


@dataclass(frozen=True, kw_only=True)
class Settings:
    """What :func:`fxprune.plan` is told, by the same names and with the same defaults."""

    sparsity: Any = None
    target: Target | None = None
    ignore: Any = ()
    importance: Any = "l2"
    scope: str = "local"
    min_width: Any = None
    max_sparsity: Any = None
    round_to: Any = 1
    bias: str | None = None
    exact: bool = False
    attention: str = "heads"
    outputs: Any = None
    rounding: str | None = None  # what "auto" has come to, and why


def by_name(setting: Any, model: nn.Module) -> Any:
    """A setting with the names of modules in the place of these: a copy of the model has others."""
    names = {id(module): path for path, module in modules_of(model).items() if path}

    def name(key: Any) -> Any:
        return names.get(id(key), key) if isinstance(key, nn.Module) else key

    if isinstance(setting, Mapping):
        return {name(key): value for key, value in setting.items()}
    if isinstance(setting, (list, tuple, set, frozenset)):
        return [name(key) for key in setting]
    return name(setting)


def checked(given: Settings) -> Settings:
    """In one form: ``ignore`` and ``outputs`` as tuples, and a sparsity."""
    sparsity, target, ignore, outputs = given.sparsity, given.target, given.ignore, given.outputs
    if target is not None and not isinstance(target, Target):
        raise SettingError(f"target={target!r} is no fxprune.Target, such as Target(params=0.5)")
    if target is not None and sparsity is not None:
        raise SettingError(
            f"sparsity={sparsity!r} and target={target!r}: give one. A target finds the sparsity"
        )
    sparsity = _SPARSITY if sparsity is None else sparsity
    for value in _values(sparsity):
        if not is_number(value) or not 0 <= float(value) < 1:
            raise SettingError(
                f"sparsity={value!r} is not a fraction in [0, 1): it is the share of units that go"
            )
    importance.resolve(given.importance)
    if given.round_to != "auto" and not (is_whole(given.round_to) and given.round_to > 0):
        raise SettingError(f"round_to={given.round_to!r} is not a positive integer, nor 'auto'")
    if given.bias is None:  # a carrier emits what a masked channel does
        given = replace(given, bias="propagate" if given.exact is True else "expected")
    if given.bias not in BIASES:
        raise SettingError(f"bias={given.bias!r} is unknown; use 'propagate', 'drop' or 'expected'")
    check_flag("exact", given.exact)
    if given.exact and given.bias == "expected":
        raise SettingError(
            "exact=True keeps a masked channel that says what it emits when masked, not what it "
            "said in the mean; use bias='propagate' with it, or exact=False"
        )
    if given.attention not in ATTENTION:
        raise SettingError(f"attention={given.attention!r} is unknown; use 'heads' or 'head_dim'")
    if given.scope not in SCOPES:
        raise SettingError(f"scope={given.scope!r} is unknown; use one of {', '.join(SCOPES)}")
    for value in _values(given.min_width):
        good = is_number(value) and (0 < value <= 1 or (is_whole(value) and value > 0))
        if value is not None and not good:
            raise SettingError(
                f"min_width={value!r} is neither a positive integer (units that stay) nor a "
                "fraction in (0, 1]"
            )
    for value in _values(given.max_sparsity):
        if value is not None and not (is_number(value) and 0 <= value <= 1):
            raise SettingError(f"max_sparsity={value!r} is not a fraction in [0, 1]")
    if isinstance(ignore, (str, type, nn.Module)):
        ignore = (ignore,)
    elif not isinstance(ignore, Iterable) or isinstance(ignore, Mapping):
        raise SettingError(f"ignore={ignore!r} is not a name, a glob, a type, a module or several")
    if isinstance(outputs, str):
        outputs = (outputs,)
    elif outputs is not None:
        outputs = tuple(outputs) if isinstance(outputs, Iterable) else (outputs,)
        if not outputs or not all(type(name) in (str, int) for name in outputs):
            raise SettingError(
                f"outputs={outputs!r} are neither names nor places of what the model returns"
            )
    return replace(given, sparsity=sparsity, ignore=tuple(ignore), outputs=outputs)


def _values(setting: Any) -> list[Any]:
    return list(setting.values()) if isinstance(setting, Mapping) else [setting]


def for_model(settings: Settings, model: nn.Module) -> Settings:
    """With ``round_to="auto"`` as a number."""
    if settings.round_to != "auto":
        return settings
    number, why = preferred(model)
    return replace(settings, round_to=number, rounding=f"round_to='auto' is {number}: {why}")


def matches(key: Any, path: str, module: nn.Module) -> bool:
    """Whether a name, glob, type or module means the module at ``path``."""
    if isinstance(key, str):
        return key == path or fnmatch.fnmatchcase(path, key)
    if isinstance(key, type):
        return isinstance(module, key)
    return key is module


class Meaning:
    """Which modules the keys of settings mean: those that match by any of their names, and all that
    is inside of these."""

    def __init__(self, modules: Mapping[str, nn.Module]) -> None:
        self._modules = modules
        self._meant: dict[Any, set[int]] = {}

    def __call__(self, key: Any, module: nn.Module) -> bool:
        if key not in self._meant:
            found = {id(m): m for path, m in self._modules.items() if matches(key, path, m)}
            self._meant[key] = {id(part) for m in found.values() for part in parts_of(m)}
        return id(module) in self._meant[key]

    def first(self, setting: Mapping[Any, Any], module: nn.Module) -> Any:
        """What the first key says that means a module; None where none does."""
        return next((value for key, value in setting.items() if self(key, module)), None)


def check_names(model: nn.Module, settings: Settings) -> None:
    """Every key of ``ignore``, and of settings that are mappings, has to mean something."""
    keys = list(keys_of(settings))
    modules = modules_of(model) if keys else {}
    for setting, key in keys:
        if not isinstance(key, (str, type, nn.Module)):
            given = "a tensor" if isinstance(key, Tensor) else repr(key)
            raise SettingError(f"{setting}: {given} is not a name, a glob, a type or a module")
        if not any(matches(key, path, m) for path, m in modules.items()):
            near = get_close_matches(key, list(modules), 3) if isinstance(key, str) else []
            hint = f"; did you mean {', '.join(map(repr, near))}?" if near else ""
            raise SettingError(
                f"{setting}: {_shown(key)} matches no module of {type(model).__name__}{hint}. "
                "Names are those of model.named_modules()."
            )


def check_makers(
    settings: Settings, meaning: Meaning, makers: Sequence[nn.Module], others: Sequence[nn.Module]
) -> None:
    """Every key has to mean a module that makes channels, else it would do nothing.

    Args:
        makers: the modules that make channels, or might if they were called.
        others: which only ``ignore`` may mean: norms, that handle channels of others.
    """
    for setting, key in keys_of(settings):
        concerned = [*makers, *others] if setting == "ignore" else makers
        if makers and not any(meaning(key, module) for module in concerned):
            raise SettingError(
                f"{setting}: {_shown(key)} matches only modules that make no channels, and have "
                "none inside that does. Name the layer before, or one that contains it."
            )


def keys_of(settings: Settings) -> Iterator[tuple[str, Any]]:
    """Each setting that names modules, with each of its keys."""
    yield from (("ignore", key) for key in settings.ignore or ())
    for setting in ("sparsity", "min_width", "max_sparsity"):
        if isinstance(given := getattr(settings, setting), Mapping):
            yield from ((setting, key) for key in given)


def _shown(key: Any) -> str:
    return repr(key if isinstance(key, (str, type)) else type(key).__name__)
