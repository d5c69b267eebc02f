"""Rules made of a layout: what einsum-like names of dimensions say about channels.

``{"x": "n in", "weight": "out in", "bias": "out", "return": "n out"}`` is a linear layer: ``n`` is
in the input and in the return and passes through, ``in`` is summed over, ``out`` is made.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from torch import nn

from ..errors import PatternError
from .call import Call, Named
from .channels import Channels
from .notation import Layout, cut, parse, spread, written
from .ops import argument_names
from .reading import Parts, Reading
from .spec import Spec

RETURN = "return"


class Declared:
    """The rule of a layout. The arguments are those of :func:`fxprune.pattern`."""

    def __init__(
        self,
        layout: Mapping[str, str | Sequence[str]],
        targets: tuple[Any, ...],
        sizes: Mapping[str, int | str | Callable[[Any], int]] | None = None,
        biases: Sequence[str] = (),
        border: str | Callable[[Any], str] = "",
        emits: Callable[[dict[str, Any]], Any] | None = None,
        only: Callable[[Any], bool] | None = None,
        arguments: Sequence[str] | None = None,
    ) -> None:
        self.name = "layout"
        self.mixes = "by its pattern, slices are mixed there by"  # and then the call
        self.arguments = arguments  # their names, where the target itself does not tell
        if not isinstance(layout, Mapping):
            raise PatternError(f"a layout is a mapping from names to strings, not {layout!r}")
        if sizes is not None and not isinstance(sizes, Mapping):
            raise PatternError(f"sizes={sizes!r} is no mapping from names to numbers")
        stray = next((key for key in layout if not isinstance(key, str)), None)
        if stray is not None:
            raise PatternError(f"a layout goes by names of arguments and parameters, not {stray!r}")
        if not isinstance(biases, (str, Iterable)):
            raise PatternError(f"biases={biases!r} are no names of parameters")
        if RETURN not in layout:
            raise PatternError(f"the layout {layout!r} does not say what the 'return' is")
        said = layout[RETURN]
        self.results = [parse(t, RETURN) for t in ([said] if isinstance(said, str) else said)]
        self.layouts = {key: parse(text, key) for key, text in layout.items() if key != RETURN}
        self.sizes = dict(sizes or {})
        self.biases = frozenset((biases,) if isinstance(biases, str) else biases)
        self.border, self.emits, self.only = border, emits, only
        self._check(self.biases, "biases", self.layouts, "in the layout")
        self._check(self.sizes, "sizes", self._used(), "a name of one of its dimensions")
        if border and not callable(border) and border not in ("padding", "pattern"):
            raise PatternError(f"border={border!r} is neither 'padding' nor 'pattern'")
        for target in targets:
            names = argument_names(target)
            if names is not None and not _is_module_class(target):
                where = f"an argument of {target!r}, which takes {', '.join(names)}"
                self._check(self.layouts, "the layout", names, where)

    def _check(self, names: Any, what: str, known: Any, where: str) -> None:
        unknown = next((n for n in names if n not in known), None)
        if unknown is not None:
            raise PatternError(f"{what}: {unknown!r} is not {where}")

    def _used(self) -> set[str]:
        return {n for layout in (*self.layouts.values(), *self.results) for d in layout for n in d}

    def __str__(self) -> str:
        given = ", ".join(f"{key}[{written(layout)}]" for key, layout in self.layouts.items())
        return f"{given} -> {', '.join(f'[{written(layout)}]' for layout in self.results)}"

    # -- the rule -------------------------------------------------------------------------------

    def __call__(self, a: Any, call: Call) -> Any:
        if self.only is not None and not self.only(call.module or call):
            return a.unknown(call, f"the pattern {self.name} does not hold for it as it is")
        names = self._argument_names(call)
        stray = next((k for k in self.layouts if k not in names), None)
        if call.module is None and stray:
            return a.unknown(call, f"the pattern {self.name} names {stray}, which it does not take")
        single = isinstance(call.spec, Spec)
        specs = [call.spec] if single else call.spec
        if not isinstance(specs, (tuple, list)) or len(specs) != len(self.results):
            return a.unknown(call, f"{call.name} does not return what the pattern {self.name} says")
        values = self._values(a, call, names)
        named = {id(v) for v in values.values()}
        for value in call.inputs:
            if id(value) not in named:
                a.freeze_all(value, f"the pattern {self.name} does not name it", call)
        known = {n: number(n, size, call.module) for n, size in self.sizes.items()}
        given: dict[Any, tuple[Layout, tuple[int, ...]]] = {
            key: (self.layouts[key], v.shape if isinstance(v, Channels) else a.tensor_shape(v))
            for key, v in values.items()
        }
        shapes = [call.shape] if single else a.result_shapes(call.node)
        for i, shape in enumerate(shapes):
            if shape is not None:  # a result that is not asked for is None
                given[i] = self.results[i], shape
        parts, reason = _cut(given, known)
        if reason:
            return a.unknown(call, f"{reason} in {call.name}")
        made = Reading(self, a, call, values, parts, known).results()
        return made[0] if single else tuple(made.get(i) for i in range(len(specs)))

    def _argument_names(self, call: Call) -> list[str]:
        if self.arguments is not None:
            return [*self.arguments, *call.kwargs]
        target = call.target if call.module is None else type(call.module)
        return argument_names(target, len(call.args), call.kwargs) or []

    def _values(self, a: Any, call: Call, names: list[str]) -> dict[str, Any]:
        """The tensors that the layout names, as far as they are there."""
        given = {**dict(zip(names, call.args, strict=False)), **call.kwargs}
        found: dict[str, Any] = {}
        for key in self.layouts:
            value = given.get(key)
            if key not in names and call.module is not None:
                self._check_member(call, key, names)
                value = a.member(call, key)
            if isinstance(value, (Channels, Named)):
                found[key] = value
        return found

    def _check_member(self, call: Call, key: str, names: list[str]) -> None:
        owner = call.module
        for part in key.split("."):
            if not hasattr(owner, part):
                raise PatternError(
                    f"the pattern {self.name} names {key!r}, which {call.path} "
                    f"({type(call.module).__name__}) has not: it is neither an argument of its "
                    f"forward ({', '.join(names)}) nor a parameter or buffer"
                )
            owner = getattr(owner, part)

    # -- what else a pattern says ---------------------------------------------------------------

    def attributes(self, given: Mapping[str, str]) -> Callable[[Any, Any], dict[str, Any]]:
        """``attributes(module, new)`` from names of the layout."""
        wrong = next((text for text in given.values() if not isinstance(text, str)), None)
        if wrong is not None:
            raise PatternError(f"attributes: {wrong!r} is no name of a dimension")
        products = {
            key: text.replace("(", " ").replace(")", " ").split() for key, text in given.items()
        }
        for key, names in products.items():
            self._check(
                names, f"attributes: {key}", self._used(), "a name of one of its dimensions"
            )

        def attributes(module: nn.Module, new: Any) -> dict[str, Any]:
            known = {n: number(n, size, module) for n, size in self.sizes.items()}
            found = dict(known)
            tensors = {**new.views}
            for key in argument_names(type(module)) or ():
                if key in self.layouts:  # the first argument is the one whose shape is known
                    tensors[key] = new.input
                    break
            for key, shape in tensors.items():
                layout = self.layouts.get(key, ())
                flat = [n for names in layout for n in names]
                if len(flat) == len(shape) and "..." not in flat:  # cut as the rule cuts it
                    found |= dict(zip(flat, shape, strict=True))
                elif (wide := spread(layout, len(shape))) is not None:
                    found |= dict(cut(wide, shape, known) or [])
            return {
                key: math.prod(found[n] for n in names) for key, names in products.items()
                if all(n in found for n in names)
            }  # fmt: skip

        return attributes

    def sink(self, folds: Mapping[str, str], targets: tuple[Any, ...]) -> Any:
        """Where constants go, as :class:`fxprune.Pattern` says it in ``bias``."""
        self._check([*folds, *folds.values()], "folds", self.layouts, "in the layout")
        for weight, bias in folds.items():
            own = [n for names in self.layouts[weight] for n in names]
            theirs = tuple(n for names in self.layouts[bias] for n in names)
            self._check(theirs, f"folds: a name of {bias}", own, f"one of {weight}'s, which adds")
            if theirs not in self.layouts[weight]:
                raise PatternError(
                    f"folds: what {weight} adds lies along one of its dimensions; no dimension of "
                    f"[{written(self.layouts[weight])}] is cut as {bias} is: "
                    f"[{written(self.layouts[bias])}]"
                )
        names = argument_names(targets[0])
        if _is_module_class(targets[0]):
            own = [k for k in self.layouts if k not in (names or ())]
            self._check([*folds, *folds.values()], "folds", own, "a parameter but an argument")
        if _is_module_class(targets[0]) or names is None:
            return dict(folds)
        name = next(iter(folds.values()))
        return names.index(name), name


def _is_module_class(target: Any) -> bool:
    return isinstance(target, type) and issubclass(target, nn.Module)


def _cut(
    given: dict[Any, tuple[Layout, tuple[int, ...]]], known: dict[str, int]
) -> tuple[Parts, str]:
    """Names with sizes for each tensor and each result (by number), or why there are none."""
    parts: Parts = {}
    seen: dict[str, tuple[int, str]] = {}
    for key, (layout, shape) in given.items():
        called = "the return" if isinstance(key, int) else key
        wide = spread(layout, len(shape))
        found = None if wide is None else cut(wide, shape, known)
        if found is None:
            return {}, f"the layout {written(layout)!r} of {called} does not fit its shape {shape}"
        parts[key] = found
        for name, size in found:
            before, where = seen.setdefault(name, (size, called))
            if size != before and 1 not in (size, before):
                return {}, f"the layout has {name} of {before} in {where} and {size} in {called}"
    return parts, ""


def number(name: str, size: Any, module: Any) -> int:
    """The size behind a name: a number, an attribute of the module, or what a function says."""
    try:
        found = getattr(module, size) if isinstance(size, str) else size
        found = int(found(module) if callable(found) else found)
    except Exception as error:  # whatever a function of the user's raises
        raise PatternError(
            f"sizes: {name!r} is to be {size!r} of {type(module).__name__}, which fails with "
            f"{type(error).__name__}: {error}"
        ) from error
    if found < 1:
        raise PatternError(f"sizes: {name!r} is {found}; it has to be 1 at least")
    return found
