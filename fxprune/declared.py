"""Rules made of a layout: what einsum-like names of dimensions say about channels.

``{"x": "n in", "weight": "out in", "bias": "out", "return": "n out"}`` is a linear layer: ``n`` is
in the input and in the return and passes through, ``in`` is summed over, ``out`` is made.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, fx, nn

from .call import Call, Named
from .channels import Channels, remap
from .errors import PatternError
from .notation import Layout, cut, parse, spread
from .ops import argument_names
from .spec import Spec

RETURN = "return"


class Declared:
    """The rule of a layout. The arguments are those of :func:`fxprune.pattern`."""

    def __init__(
        self,
        layout: dict[str, str],
        targets: tuple[Any, ...],
        sizes: Mapping[str, int | str | Callable[[Any], int]] | None = None,
        biases: Sequence[str] = (),
        border: str | Callable[[Any], str] = "",
        emits: Callable[[dict[str, Any]], Any] | None = None,
        only: Callable[[Any], bool] | None = None,
        arguments: Sequence[str] | None = None,
    ) -> None:
        self.name = "layout"
        self.word = "by its pattern"  # how it is known that dimensions are mixed
        self.arguments = arguments  # their names, where the target itself does not tell
        self.text = layout
        if RETURN not in layout:
            raise PatternError(f"the layout {layout!r} does not say what the 'return' is")
        self.layouts = {k: parse(v, k) for k, v in layout.items() if k != RETURN}
        self.result = parse(layout[RETURN], RETURN)
        self.sizes = dict(sizes or {})
        self.biases = _names(biases, "biases", self.layouts)
        self.border, self.emits, self.only = border, emits, only
        used = {n for names in [*self.layouts.values(), self.result] for d in names for n in d}
        unknown = next((n for n in self.sizes if n not in used), None)
        if unknown:
            raise PatternError(f"sizes: no dimension of the layout is called {unknown!r}")
        if border and not callable(border) and border not in ("padding", "pattern"):
            raise PatternError(f"border={border!r} is neither 'padding' nor 'pattern'")
        for target in targets:
            self._check_signature(target)

    def __str__(self) -> str:
        given = ", ".join(f"{k}[{v}]" for k, v in self.text.items() if k != RETURN)
        return f"{given} -> [{self.text[RETURN]}]"

    def _check_signature(self, target: Any) -> None:
        """Every name has to be an argument; of a module class it can be a parameter too."""
        names = argument_names(target)
        if names is None or (isinstance(target, type) and issubclass(target, nn.Module)):
            return
        unknown = next((k for k in self.layouts if k not in names), None)
        if unknown:
            raise PatternError(
                f"the layout names {unknown!r}, which is no argument of {target!r}; it takes "
                f"{', '.join(names)}"
            )

    # -- the rule -------------------------------------------------------------------------------

    def __call__(self, a: Any, call: Call) -> Channels:
        if self.only is not None and not self.only(call.module or call):
            return a.unknown(call, f"the pattern {self.name} does not hold for it as it is")
        names = self._argument_names(call)
        stray = next((k for k in self.layouts if k not in names), None)
        if call.module is None and stray:
            return a.unknown(call, f"the pattern {self.name} names {stray}, which it does not take")
        values = self._values(a, call, names)
        known = self._known(call)
        shapes = {k: _shape(a, v) for k, v in values.items()}
        parts, reason = self._cut(shapes, known, call)
        if reason:
            return a.unknown(call, f"{reason} in {call.name}")
        return _Reading(self, a, call, values, parts, known).result()

    def _argument_names(self, call: Call) -> list[str]:
        if self.arguments is not None:
            return [*self.arguments, *call.kwargs]
        return argument_names(call.target if call.module is None else type(call.module)) or []

    def _values(self, a: Any, call: Call, names: list[str]) -> dict[str, Any]:
        """The tensors that the layout names, as far as they are there."""
        given = {**dict(zip(names, call.args, strict=False)), **call.kwargs}
        found: dict[str, Any] = {}
        for key in self.layouts:
            value = given.get(key)
            if key not in names and call.module is not None:
                owner = call.module
                for part in key.split("."):
                    if not hasattr(owner, part):
                        raise PatternError(
                            f"the pattern {self.name} names {key!r}, which {call.path} "
                            f"({type(call.module).__name__}) has not: it is neither an argument of "
                            f"its forward ({', '.join(names)}) nor a parameter or buffer"
                        )
                    owner = getattr(owner, part)
                value = a.member(call, key)
            if isinstance(value, (Channels, Named)):
                found[key] = value
        return found

    def _known(self, call: Call) -> dict[str, int]:
        known = {}
        for name, size in self.sizes.items():
            if isinstance(size, str):
                size = getattr(call.module, size)
            known[name] = int(size(call.module) if callable(size) else size)
        return known

    def _cut(
        self, shapes: dict[str, tuple[int, ...]], known: dict[str, int], call: Call
    ) -> tuple[dict[str, list[tuple[str, int]]], str]:
        """Names with sizes for each tensor and the return, or why there are none."""
        parts: dict[str, list[tuple[str, int]]] = {}
        every = {**shapes, RETURN: call.shape}
        seen: dict[str, tuple[int, str]] = {}
        for key, shape in every.items():
            text = self.text[key]
            layout = spread(self.result if key == RETURN else self.layouts[key], len(shape))
            found = None if layout is None else cut(layout, shape, known)
            if found is None:
                return {}, f"the layout {text!r} of {key} does not fit its shape {shape}"
            parts[key] = found
            for name, size in found:
                before, where = seen.setdefault(name, (size, key))
                if size != before and 1 not in (size, before):
                    return {}, f"the layout has {name} of {before} in {where} and {size} in {key}"
        return parts, ""

    # -- what else a pattern says ---------------------------------------------------------------

    def attributes(self, given: Mapping[str, str]) -> Callable[[Any, Any], dict[str, Any]]:
        """``attributes(module, new)`` from names of the layout."""
        used = {n for names in [*self.layouts.values(), self.result] for d in names for n in d}
        products = {key: text.replace("(", " ").replace(")", " ").split() for key, text in
                    given.items()}  # fmt: skip
        for key, names in products.items():
            unknown = next((n for n in names if n not in used), None)
            if unknown:
                raise PatternError(f"attributes: {key} is {given[key]!r}, but no dimension of the "
                                   f"layout is called {unknown!r}")  # fmt: skip

        def attributes(module: nn.Module, new: Any) -> dict[str, Any]:
            known = {n: _number(size, module) for n, size in self.sizes.items()}
            found = dict(known)
            tensors = {**new.views}
            for key in argument_names(type(module)) or ():
                if key in self.layouts:  # the first argument is the one whose shape is known
                    tensors[key] = new.input
                    break
            for key, shape in tensors.items():
                layout = spread(self.layouts.get(key, ()), len(shape))
                flat = [n for names in self.layouts.get(key, ()) for n in names]
                if len(flat) == len(shape) and "..." not in flat:
                    found |= dict(zip(flat, shape, strict=True))
                elif layout is not None:
                    found |= dict(cut(layout, shape, known) or [])
            return {
                key: math.prod(found[n] for n in names) for key, names in products.items()
                if all(n in found for n in names)
            }  # fmt: skip

        return attributes

    def sink(self, folds: Mapping[str, str], targets: tuple[Any, ...]) -> Any:
        """Where constants go, as :class:`fxprune.pattern_types.Pattern` says it in ``bias``."""
        for key in [*folds, *folds.values()]:
            if key not in self.layouts:
                raise PatternError(f"folds: {key!r} is not in the layout")
        names = argument_names(targets[0])
        if (isinstance(targets[0], type) and issubclass(targets[0], nn.Module)) or names is None:
            return dict(folds)
        name = next(iter(folds.values()))
        return names.index(name), name


class _Reading:
    """One call of a declared layer, at the widths of one pass."""

    def __init__(
        self,
        rule: Declared,
        a: Any,
        call: Call,
        values: dict[str, Any],
        parts: dict[str, list[tuple[str, int]]],
        known: dict[str, int],
    ) -> None:
        self.rule, self.a, self.call, self.values, self.known = rule, a, call, values, known
        self.result_parts = parts.pop(RETURN)
        self.parts = parts
        self.names = {k: [n for n, _ in p] for k, p in parts.items()}
        self.returned = [n for n, _ in self.result_parts]
        self.inputs = [k for k, v in values.items() if isinstance(v, Channels)]
        self.parameters = [k for k in values if k not in self.inputs]
        self.read = {
            n for k in self.inputs for n in self.names[k]
            if n not in self.returned and any(n in self.names[o] for o in values if o != k)
        }  # fmt: skip
        self.weights = [k for k in self.parameters if self.read & set(self.names[k])]
        of_inputs = {n for k in self.inputs for n in self.names[k]}
        self.made = [
            n for n in self.returned
            if n not in of_inputs and n not in known and any(n in self.names[k] for k in values)
        ]  # fmt: skip

    def result(self) -> Channels:
        a, call = self.a, self.call
        inputs = {k: self._input(k) for k in self.inputs}
        self._consume(inputs)
        space = tuple(size for _, size in self.result_parts)
        operands = [self._laid(x, self.names[k], space) for k, x in inputs.items()]
        for key in self.parameters:
            for name in self.names[key]:
                if name in self.returned and name not in self.known:
                    vector = self._axis(key, name, self._role(key, name))
                    operands.append(self._laid(vector, self.names[key], space, only=name))
        function = None if self.read else partial(self._constants, list(inputs))
        y = a.meet(call, operands, function, space)
        dims = tuple(i for i, n in enumerate(self.returned) if n in self.made)
        if dims and self.weights:
            y = a.emitted(call, y, dims, partial(self._emission, dims, space))
        return y if space == call.shape else a.view(call, y, call.shape)

    def _input(self, key: str) -> Channels:
        """An argument in the space of its names; along names that the layout mixes it stays."""
        a, call, names = self.a, self.call, self.names[key]
        x = self.values[key]
        shape = tuple(size for _, size in self.parts[key])
        if shape != x.shape:
            x = a.view(call, x, shape)
        mixed = [
            d for d, n in enumerate(names)
            if (n not in self.returned and n not in self.read) or n in self.known
        ]  # fmt: skip
        x = a.freeze_dims(x, mixed, f"{self.rule.word} {call.name} mixes slices there", call)
        read = [d for d, n in enumerate(names) if n in self.read]
        axes = []
        for axis in x.axes:
            own = [d for d in axis.dims if d in read]
            axes.append(a.tie(call, axis, own) if own and len(own) < len(axis.dims) else axis)
        return Channels(x.shape, tuple(axes), x.scalar)

    def _axis(self, key: str, name: str, role: str) -> Channels:
        """A parameter with channels along one of its names."""
        view = tuple(size for _, size in self.parts[key])
        dim = self.names[key].index(name)
        return self.call.tensor(self.values[key], {role: (dim,)}, view)  # type: ignore[return-value]

    def _role(self, key: str, name: str) -> str:
        if key in self.rule.biases:
            return "shift"
        makes = name in self.made and (key in self.weights or not self.weights)
        return "out" if makes else "stat"

    def _consume(self, inputs: dict[str, Channels]) -> None:
        """What is summed over: weights read it, or two arguments meet in it."""
        a, call = self.a, self.call
        border = self.rule.border
        border = border(call.module) if callable(border) else border
        for key, x in inputs.items():
            others = [k for k in self.inputs if k != key and self.read & set(self.names[k])]
            for other in self.weights:
                pairs = self._pairs(key, other)
                if not pairs:
                    continue
                view = tuple(size for _, size in self.parts[other])
                roles = {"in": tuple(w for _, w in pairs)}
                w = call.tensor(self.values[other], roles, view)
                # In a product of arguments a constant in one adds what the other makes of it.
                a.consume(call, x, w, pairs, "pattern" if others else border)
            for other in others:
                pairs = self._pairs(key, other)
                if pairs:
                    a.consume(call, x, inputs[other], pairs)

    def _pairs(self, key: str, other: str) -> list[tuple[int, int]]:
        mine, theirs = self.names[key], self.names[other]
        return [(mine.index(n), theirs.index(n)) for n in mine if n in self.read and n in theirs]

    def _laid(
        self, x: Channels, names: list[str], space: tuple[int, ...], only: str = ""
    ) -> Channels:
        """``x`` in the space of the return, where its names are."""
        where = {
            d: self.returned.index(n) for d, n in enumerate(names)
            if n in self.returned and (not only or n == only)
        }  # fmt: skip
        shape = [1] * len(space)
        for d, to in where.items():
            shape[to] = x.shape[d]
        return remap(x, where, tuple(shape))

    # -- numbers --------------------------------------------------------------------------------

    def _constants(self, keys: list[str], tensors: Sequence[Tensor]) -> Tensor:
        """The call on constants, laid out in the space of the return: NaN where what comes out is
        not the same all along the dimensions without them."""
        given = {}
        for key, t in zip(keys, tensors, strict=False):  # parameters are the layer's own
            names = self.names[key]
            order = [self.returned.index(n) for n in names if n in self.returned]
            t = t.permute([*order, *(d for d in range(t.dim()) if d not in order)])
            lead = t.shape[: len(order)]
            sizes = iter(lead)
            t = t.reshape([next(sizes) if n in self.returned else 1 for n in names])
            full = t.expand([size for _, size in self.parts[key]])
            given[key] = full.reshape(self.values[key].shape)
        y = self._run({}, lambda key: given[key]).reshape([s for _, s in self.result_parts])
        varying = [i for i in range(y.dim()) if all(t.shape[i] == 1 for t in tensors)]
        for d in varying:
            first = y.narrow(d, 0, 1)
            y = torch.where((y == first).all(d, keepdim=True), first, torch.nan)
        return y.expand([s for _, s in self.result_parts])

    def _emission(self, dims: tuple[int, ...], space: tuple[int, ...], silent: bool) -> Tensor:
        """What units say whose weights are 0, over ``dims`` of the return: NaN where it is not one
        number. ``silent``: their biases are 0 too."""
        read = {k: self.a.read(self.values[k].name) for k in self.parameters}
        zeroed = {
            k: torch.zeros_like(t) for k, t in read.items()
            if k in self.weights or (silent and k in self.rule.biases)
        }  # fmt: skip
        if self.rule.emits is not None:
            kept = {k: zeroed.get(k, t) for k, t in read.items() if k not in self.weights}
            said = torch.as_tensor(self.rule.emits(kept)).double().cpu()
            return said.reshape([space[d] for d in dims])
        if any("parametrizations" in vars(m).get("_modules", {}) for m in self._owners()):
            return torch.full([space[d] for d in dims], torch.nan, dtype=torch.float64)
        runs = [self._run(zeroed, None, seed).reshape(space) for seed in (0, 1)]
        rest = [d for d in range(len(space)) if d not in dims]
        y = runs[0]
        same = y == runs[1]
        for d in rest:
            first = y.narrow(d, 0, 1)
            same = (same & (y == first)).all(d, keepdim=True)
            y = first
        y = torch.where(same, y, torch.nan)
        return y.reshape([space[d] for d in dims])

    def _owners(self) -> Iterable[nn.Module]:
        return [] if self.call.module is None else self.call.module.modules()

    def _run(
        self, replaced: dict[str, Tensor], given: Callable[[str], Tensor] | None, seed: int = 0
    ) -> Tensor:
        """The call with other parameters, on ``given`` arguments or random ones."""
        call, a = self.call, self.a
        keys = {id(v): k for k, v in self.values.items()}
        generator = torch.Generator().manual_seed(seed)
        device = _device(a, self.values)

        def argument(node: fx.Node) -> Any:
            value, spec = a.values[node], node.meta["spec"]
            key = keys.get(id(value), "")
            if isinstance(value, Named):
                return replaced.get(key, a.read(value.name))
            if not isinstance(spec, Spec):
                return value
            if given is not None and key:
                t = given(key)
            elif spec.dtype.is_floating_point:
                t = torch.randn(spec.shape, generator=generator)
            else:
                t = torch.zeros(spec.shape)
            return t.to(spec.dtype).to(device)

        args, kwargs = fx.node.map_arg((call.node.args, call.node.kwargs), argument)
        with torch.random.fork_rng(devices=[]), torch.no_grad():
            torch.manual_seed(0)
            if call.module is None:
                y = call.run(args, kwargs)
            else:
                own = {k: a.read(n.name) for k in _tensors_of(call.module)
                       if (n := a.member(call, k)) is not None}  # fmt: skip
                y = torch.func.functional_call(call.module, own | replaced, args, kwargs)
        return y.double().cpu()


def _tensors_of(module: nn.Module) -> list[str]:
    return [*dict(module.named_parameters()), *dict(module.named_buffers())]


def _device(a: Any, values: dict[str, Any]) -> torch.device:
    named = [v for v in values.values() if isinstance(v, Named)]
    if named:
        return a.read(named[0].name).device
    return next((p.device for p in a.trace.model.parameters()), torch.device("cpu"))


def _shape(a: Any, value: Any) -> tuple[int, ...]:
    return value.shape if isinstance(value, Channels) else a.tensor_shape(value)


def _number(size: Any, module: Any) -> int:
    size = getattr(module, size) if isinstance(size, str) else size
    return int(size(module) if callable(size) else size)


def _names(given: Sequence[str], what: str, layouts: Mapping[str, Layout]) -> frozenset[str]:
    given = (given,) if isinstance(given, str) else tuple(given)
    unknown = next((k for k in given if k not in layouts), None)
    if unknown:
        raise PatternError(f"{what}: {unknown!r} is not in the layout")
    return frozenset(given)
