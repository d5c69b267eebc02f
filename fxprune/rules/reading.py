"""One call of a layer whose layout is known: from names of dimensions to words of the algebra."""

from __future__ import annotations

from collections.abc import Container, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, fx

from ..modules import tree
from ..modules.inspecting import tensors_of
from ..modules.running import run_node
from .call import Call, Named
from .channels import Channels, remap
from .spec import Spec

# For each tensor (by name) and result (by number) the names it is cut into, with their sizes.
Parts = dict[Any, list[tuple[str, int]]]


_SAME = {torch.float64: 1e-12, torch.float32: 1e-5, torch.float16: 1e-2}


class Reading:
    """Args:
    rule: the :class:`fxprune.rules.declared.Declared` that speaks.
    values: arguments and parameters by name.
    parts: how these and the results are cut.
    known: sizes of names that are never cut.
    """

    def __init__(
        self, rule: Any, a: Any, call: Call, values: dict[str, Any], parts: Parts,
        known: dict[str, int],
    ) -> None:  # fmt: skip
        self.rule, self.a, self.call, self.values, self.known = rule, a, call, values, known
        self.shapes = {key: tuple(n for _, n in part) for key, part in parts.items()}
        self.names = {key: [n for n, _ in part] for key, part in parts.items()}
        self.numbers = [key for key in parts if isinstance(key, int)]  # of results
        self.inputs = [k for k, v in values.items() if isinstance(v, Channels)]
        self.parameters = [k for k in values if k not in self.inputs]
        self.returned = {n for i in self.numbers for n in self.names[i]}
        self.given = {n for k in self.inputs for n in self.names[k]}
        self.read = {
            n for k in self.inputs for n in self.names[k]
            if n not in self.returned and any(n in self.names[o] for o in values if o != k)
        }  # fmt: skip
        self.weights = [k for k in self.parameters if self.read & set(self.names[k])]

    def results(self) -> dict[int, Channels]:
        inputs = {key: self._input(key) for key in self.inputs}
        self._consume(inputs)
        return {i: self._result(i, inputs) for i in self.numbers}

    def _result(self, i: int, inputs: dict[str, Channels]) -> Channels:
        """Arguments that pass and parameters that make or scale meet in the space of a result."""
        a, call, space, names = self.a, self.call, self.shapes[i], self.names[i]
        operands = [self._laid(x, self.names[key], i) for key, x in inputs.items()]
        for key in self.parameters:
            for name in self.names[key]:
                if name in names and name not in self.known:
                    vector = self._axis(key, name, self._role(key, name))
                    operands.append(self._laid(vector, self.names[key], i, only=name))
        function = None if self.read else partial(self._constants, i, list(inputs))
        y = a.meet(call, operands, function, space, together=False)
        dims = tuple(d for d, n in enumerate(names) if self._is_made(n))
        if dims and self.weights:
            y = a.emitted(call, y, dims, partial(self._emission, i, dims))
        shape = call.shape if isinstance(call.spec, Spec) else a.result_shapes(call.node)[i]
        return y if space == shape else a.view(call, y, shape)

    def _is_made(self, name: str) -> bool:
        return (
            name in self.returned and name not in self.given and name not in self.known
            and any(name in self.names[k] for k in self.parameters)
        )  # fmt: skip

    def _input(self, key: str) -> Channels:
        """An argument in the space of its names; along names that the layout mixes it stays."""
        a, call, names, x = self.a, self.call, self.names[key], self.values[key]
        if self.shapes[key] != x.shape:
            x = a.view(call, x, self.shapes[key])
        mixed = [
            d for d, n in enumerate(names)
            if (n not in self.returned and n not in self.read) or n in self.known
        ]  # fmt: skip
        x = a.freeze_dims(x, mixed, f"{self.rule.mixes} {call.name}", call)
        read = [d for d, n in enumerate(names) if n in self.read]
        axes = []
        for axis in x.axes:
            own = [d for d in axis.dims if d in read]
            axes.append(a.tie(call, axis, own) if own and len(own) < len(axis.dims) else axis)
        return Channels(x.shape, tuple(axes), x.scalar)

    def _axis(self, key: str, name: str, role: str) -> Channels:
        """A parameter with channels along one of its names."""
        roles = {role: (self.names[key].index(name),)}
        return self.call.tensor(self.values[key], roles, self.shapes[key])  # type: ignore[return-value]

    def _role(self, key: str, name: str) -> str:
        if key in self.rule.biases:
            return "shift"
        makes = key in self.weights or (self._is_made(name) and not self.weights)
        return "out" if makes else "stat"

    def _consume(self, inputs: dict[str, Channels]) -> None:
        """What is summed over: weights read it, or two arguments meet in it."""
        a, call, border = self.a, self.call, self.rule.border
        border = border(call.module) if callable(border) else border
        for key, x in inputs.items():
            others = [k for k in self.inputs if k != key and self.read & set(self.names[k])]
            for weight in self.weights:
                pairs = self._pairs(key, weight)
                if pairs:
                    roles = {"in": tuple(d for _, d in pairs)}
                    w = call.tensor(self.values[weight], roles, self.shapes[weight])
                    # In a product of arguments a constant in one adds what the other makes of it.
                    a.consume(call, x, w, pairs, "pattern" if others else border)
            for other in others:
                pairs = self._pairs(key, other)
                if pairs:
                    a.consume(call, x, inputs[other], pairs)

    def _pairs(self, key: str, other: str) -> list[tuple[int, int]]:
        mine, theirs = self.names[key], self.names[other]
        return [(mine.index(n), theirs.index(n)) for n in mine if n in self.read and n in theirs]

    def _laid(self, x: Channels, names: list[str], i: int, only: str = "") -> Channels:
        """``x`` in the space of a result, where its names are."""
        there = self.names[i]
        where = {
            d: there.index(n) for d, n in enumerate(names) if n in there and (not only or n == only)
        }
        shape = [1] * len(there)
        for d, to in where.items():
            shape[to] = x.shape[d]
        return remap(x, where, tuple(shape))

    # -- numbers --------------------------------------------------------------------------------

    def _constants(self, i: int, keys: list[str], tensors: Sequence[Tensor]) -> Tensor:
        """A result of the call on constants, laid out in its space: NaN where it is not the same
        all along the dimensions that the constants do not have, whatever else goes in."""
        names = self.names[i]
        carried = tuple(d for d in range(len(names)) if any(t.shape[d] > 1 for t in tensors))
        given = {}
        for key, t in zip(keys, tensors, strict=False):  # parameters are the layer's own
            mine = self.names[key]
            order = [names.index(n) for n in mine if n in names]
            rest = [d for d in range(t.dim()) if d not in order]
            for d in rest:  # along which it is the same: it is laid out beside what has them
                t = t.narrow(d, 0, 1)
            t = t.permute([*order, *rest])
            sizes = iter(t.shape)
            given[key] = t.reshape([next(sizes) if n in names else 1 for n in mine])
        one = self._one_number(i, carried, {}, given)
        shape = [n if d in carried else 1 for d, n in enumerate(self.shapes[i])]
        return one.reshape(shape).expand(self.shapes[i])

    def _emission(self, i: int, dims: tuple[int, ...], silent: bool) -> Tensor:
        """What units say whose weights are 0, over ``dims`` of a result: NaN where it is not one
        number. ``silent``: their biases are 0 too."""
        sizes = [self.shapes[i][d] for d in dims]
        read = {key: self.a.read(self.values[key].name) for key in self.parameters}
        zeroed = {
            key: torch.zeros_like(t) for key, t in read.items()
            if key in self.weights or (silent and key in self.rule.biases)
        }  # fmt: skip
        if self.rule.emits is not None:
            kept = {k: zeroed.get(k, t) for k, t in read.items() if k not in self.weights}
            return torch.as_tensor(self.rule.emits(kept)).double().cpu().reshape(sizes)
        if self.call.module is not None and any(
            "parametrizations" in dict(m.named_children()) for m in self.call.module.modules()
        ):  # a weight that is computed cannot be set to 0
            return torch.full(sizes, torch.nan, dtype=torch.float64)
        return self._one_number(i, dims, zeroed, {}).reshape(sizes)

    def _one_number(
        self, i: int, dims: tuple[int, ...], replaced: dict[str, Tensor], given: dict[str, Tensor]
    ) -> Tensor:
        """A result over ``dims``: NaN where it varies along the others, with the other arguments,
        or with the sizes that the example happens to have."""
        kept = {self.names[i][d] for d in dims} | self.read
        of_parameters = {n for k in self.parameters for n in self.names[k]}
        parts = {n for k in self.inputs if len(self.names[k]) != len(self.values[k].shape)
                 for n in self.names[k]}  # fmt: skip
        fewer = self.given - kept - of_parameters - parts
        result: Tensor | None = None
        for seed, names in ((0, set()), (1, set()), (2, fewer)):
            y = self._run(i, replaced, given, seed, names)
            for d in range(y.dim()):
                if d not in dims:
                    first = y.narrow(d, 0, 1)
                    y = torch.where((y == first).all(d, keepdim=True), first, torch.nan)
            # Of more or fewer numbers sums are rounded otherwise.
            same = result is None or torch.isclose(y, result, rtol=_SAME[self._dtype()], atol=0)
            result = torch.where(torch.as_tensor(same), y if result is None else result, torch.nan)
        assert result is not None
        return result

    def _dtype(self) -> torch.dtype:
        spec = self.call.spec if isinstance(self.call.spec, Spec) else self.call.spec[0]
        return spec.dtype if spec.dtype in _SAME else torch.float16

    def _run(
        self,
        i: int,
        replaced: dict[str, Tensor],
        given: dict[str, Tensor],
        seed: int,
        fewer: set[str],
    ) -> Tensor:
        """A result of the call with other parameters, on ``given`` arguments or made-up ones, with
        one slice less along the names in ``fewer``; NaN where it does not run on them."""
        call, a = self.call, self.a
        keys = {id(v): k for k, v in self.values.items()}
        generator = torch.Generator().manual_seed(seed)
        device = self._device()

        def argument(node: fx.Node) -> Any:
            value, spec = a.values[node], node.meta["spec"]
            key = keys.get(id(value), "")
            if isinstance(value, Named):
                return replaced.get(key, a.read(value.name))
            if not isinstance(spec, Spec):
                return value
            names = self.names.get(key, [])
            shape = self._shortened(key, fewer) if key else spec.shape
            if key in given:
                t = given[key].expand(shape).clone()
            elif spec.dtype.is_floating_point:
                t = torch.randn(shape, generator=generator)
            else:  # an index or a mask: none, all
                t = torch.full(shape, seed % 2)
            whole = len(names) == len(spec.shape) or not key
            return (t if whole else t.reshape(spec.shape)).to(spec.dtype).to(device)

        args, kwargs = fx.node.map_arg((call.node.args, call.node.kwargs), argument)
        shape = self._shortened(i, fewer)
        with torch.random.fork_rng(devices=[]), torch.no_grad():
            torch.manual_seed(0)
            try:
                y = self._call(args, kwargs, replaced)
            except Exception:  # whatever it raises on made-up values: nothing is known then
                return torch.full(self.shapes[i], torch.nan, dtype=torch.float64)
        y = y if isinstance(y, Tensor) else list(tree.tensors(y))[self.numbers.index(i)]
        y = y.double().cpu()
        return y if y.dim() == len(shape) else y.reshape(shape)

    def _shortened(self, key: Any, fewer: Container[str]) -> tuple[int, ...]:
        """A shape with a slice less of the dimensions that are called so."""
        pairs = zip(self.shapes[key], self.names[key], strict=True)
        return tuple(n - 1 if name in fewer and n > 1 else n for n, name in pairs)

    def _call(self, args: Any, kwargs: Any, replaced: dict[str, Tensor]) -> Any:
        call, a = self.call, self.a
        stored = {} if call.module is None else tensors_of(call.module)
        members = {key: a.member(call, key) for key in stored}
        own = {key: a.read(named.name) for key, named in members.items() if named is not None}
        return run_node(call.node, call.module, args, kwargs, own | replaced)

    def _device(self) -> torch.device:
        named = [v for v in self.values.values() if isinstance(v, Named)]
        if named:
            return self.a.read(named[0].name).device
        return next((p.device for p in self.a.trace.model.parameters()), torch.device("cpu"))
