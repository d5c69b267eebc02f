"""One node of the trace as a pattern sees it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, fx

from ..modules import tree
from ..modules.running import run_node
from .channels import Channels, remap
from .ops import op_name
from .spec import Spec

if TYPE_CHECKING:
    from ..relating.algebra import Algebra
    from .pattern_types import Pattern

# Arguments that PyTorch takes by names of NumPy's, too.
NUMPYS = {"dim": ("axis",), "keepdim": ("keepdims",), "input": ("x", "a", "x1"), "other": ("x2",)}

Roles = Mapping[str, tuple[int, ...]]  # role -> the dimensions of one axis


@dataclass(frozen=True)
class Named:
    """A parameter, buffer or constant as a value: it gets axes when an op says what it is."""

    name: str
    spec: Spec

    @property
    def shape(self) -> tuple[int, ...]:
        """When it was recorded."""
        return self.spec.shape

    def own_dims(self, dims: Iterable[int]) -> tuple[int, ...]:
        """Dimensions of the value as the parameter has them."""
        return tuple(dims)


@dataclass(frozen=True)
class Turned(Named):
    """A parameter whose dimensions the code has put in another ``order``, for products alone: these
    say what it is."""

    whole: Named
    order: tuple[int, ...]

    def seen(self, x: Channels) -> Channels:
        """What is known of the parameter, for the order in which the code has its dimensions."""
        shape = tuple(x.shape[d] for d in self.order)
        return remap(x, {d: i for i, d in enumerate(self.order)}, shape)

    def own_dims(self, dims: Iterable[int]) -> tuple[int, ...]:
        return tuple(sorted(self.order[d] for d in dims))


@dataclass
class Call:
    """One node of the trace as its pattern sees it; tensors among the arguments are Channels."""

    algebra: Algebra
    node: fx.Node
    pattern: Pattern | None
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    module: Any = None  # the leaf module of a call_module node
    path: str = ""
    inputs: list[Any] = field(default_factory=list)  # tensors among the arguments, in order
    # What the product with its weight is multiplied by, and its bias is not; 0 where no bias can
    # take what the product says.
    factor: float = 1.0

    @property
    def name(self) -> str:
        """How reports name the call: the module's path, or the function and its place."""
        return self.path or node_name(self.node)

    @property
    def word(self) -> str:
        """What is called: ``"softmax"``, ``"MaxPool2d"``, ``"T"`` for the property."""
        if self.module is not None:
            return type(self.module).__name__
        target = self.node.args[1] if self.node.target is getattr else self.node.target
        return op_name(target) or getattr(target, "__name__", str(target))

    @property
    def target(self) -> Any:
        """The function that is called; a method as the function that it is."""
        if self.node.op == "call_method":
            return getattr(torch.Tensor, str(self.node.target), None)
        return self.node.target

    @property
    def spec(self) -> Any:
        return self.node.meta["spec"]

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the result, at the widths of this pass."""
        return self.algebra.result_shape(self.node)

    @property
    def shapes(self) -> list[tuple[int, ...]]:
        """Shapes of a result that is a tuple of tensors."""
        return self.algebra.result_shapes(self.node)

    def literal_sizes(self) -> set[int]:
        """Dimensions of the result that the code sizes by a number written in it."""
        given = self.node.args[1:] or [v for k, v in self.node.kwargs.items() if k != "input"]
        if len(given) == 1 and isinstance(given[0], (tuple, list)):
            given = given[0]
        return {i for i, n in enumerate(given) if isinstance(n, int) and n >= 0}

    def view_of(self, value: Any, view: tuple[int, ...]) -> tuple[int, ...]:
        """A shape for a weight (a tensor name of the leaf module, or an argument), with -1 worked
        out."""
        if isinstance(value, str):
            value = self.algebra.member(self, value)
        assert value is not None
        size = torch.Size(self.algebra.tensor_shape(value)).numel()
        known = -torch.Size(view).numel()
        return tuple(size // known if n == -1 else n for n in view)

    def is_floating(self, *, flags: bool = False) -> bool:
        """Whether all tensors of the call hold real numbers: those constants can be followed. So
        can ``flags``, as 0 and 1."""
        specs = [node.meta.get("spec") for node in [self.node, *self.node.all_input_nodes]]
        kinds = [s.dtype for s in specs if isinstance(s, Spec)]
        return all(k.is_floating_point or (flags and k == torch.bool) for k in kinds)

    def arg(self, position: int, name: str, default: Any = None) -> Any:
        """An argument by position or name; a tensor as :class:`Channels`."""
        if position < len(self.args):
            return self.args[position]
        return _named(self.kwargs, name, default)

    def recorded(self, position: int, name: str, default: Any = None) -> Any:
        """An argument as it was when the run was recorded; tensors as their specs, or the number
        that the call took them for."""
        node = self.node
        given = position < len(node.args)
        value = node.args[position] if given else _named(node.kwargs, name, default)
        numbers = node.meta.get("numbers", {}) | node.meta.get("told", {})
        return fx.node.map_arg(value, lambda n: numbers.get(n, n.meta["spec"]))

    def channels(self, position: int = 0, name: str = "input") -> Channels:
        """A tensor argument, with the default axes where it is a parameter used bare."""
        return self.algebra.channels(self.arg(position, name))

    def tensor(
        self, value: Any, roles: Roles, view: tuple[int, ...] | None = None
    ) -> Channels | None:
        """A weight: a tensor name of the leaf module, or an argument; with axes by ``roles``.

        An argument that is not a parameter or buffer itself keeps the axes it has.
        """
        if isinstance(value, str):
            value = self.algebra.member(self, value)
        if isinstance(value, Turned) and view is None:
            own = {role: value.own_dims(dims) for role, dims in roles.items()}
            return value.seen(self.algebra.source(value.whole, own, None))
        if isinstance(value, Named):
            return self.algebra.source(value, roles, view)
        if value is not None and view is not None and view != value.shape:
            return self.algebra.view(self, value, view)
        return value

    def replay(self, replacements: Sequence[Tensor]) -> Tensor:
        """The call on other tensors in the place of its tensor arguments, in their order."""
        specs = [node.meta["spec"] for node in self.node.all_input_nodes]
        if any([isinstance(spec, Spec) and spec.dtype == torch.bool for spec in specs]):
            nodes = zip(replacements, tensor_nodes(self.node), strict=True)
            replacements = [t != 0 if n.meta["spec"].dtype == torch.bool else t for t, n in nodes]
        tensors = iter(replacements)
        return self.run(filled_in(self.args, tensors), filled_in(self.kwargs, tensors))

    def run(self, args: Any, kwargs: Any) -> Any:
        """The call on real arguments."""
        return run_node(self.node, self.module, args, kwargs)


def tensor_nodes(node: fx.Node) -> list[fx.Node]:
    """Tensor arguments in the order of the call; one that stands twice is there twice."""
    found: list[fx.Node] = []
    fx.node.map_arg((node.args, node.kwargs), found.append)
    return [source for source in found if isinstance(source.meta["spec"], Spec)]


def filled_in(value: Any, tensors: Iterator[Tensor]) -> Any:
    """Arguments of a call with the next of ``tensors`` in the place of each of theirs."""
    if isinstance(value, (Channels, Named)):
        return next(tensors)
    if isinstance(value, (tuple, list, dict, slice)):
        return tree.rebuild(value, lambda child: filled_in(child, tensors))
    return value


def _named(kwargs: Mapping[str, Any], name: str, default: Any) -> Any:
    if name not in kwargs:
        name = next((other for other in NUMPYS.get(name, ()) if other in kwargs), name)
    return kwargs.get(name, default)


def node_name(node: fx.Node) -> str:
    """How reports name a node: the module's path, or the function and its place."""
    if node.op == "call_module":
        return str(node.target)
    target = node.target
    word = target if isinstance(target, str) else getattr(target, "__name__", str(target))
    word = op_name(target) or word
    where = node.meta.get("where", "")
    return f"{word} ({where.rpartition('/')[2]})" if where else word


def leaves(value: Any):
    """Every tensor (as Channels or Named) inside a resolved argument."""
    if isinstance(value, (Channels, Named)):
        yield value
    elif isinstance(value, (dict, tuple, list, slice)):
        for item in tree.children(value):
            yield from leaves(item)


def rigid(spec: Any) -> Any:
    return Channels(spec.shape) if isinstance(spec, Spec) else spec


def map_specs(value: Any, function: Callable[[Any], Any]) -> Any:
    if isinstance(value, (tuple, list, dict)):
        return tree.rebuild(value, lambda item: map_specs(item, function))
    return function(value)
