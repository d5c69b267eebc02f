"""Patterns: what fxprune knows about one kind of node, or about a run of nodes.

Built-in patterns and those of users are made here alike, and checked as they are made.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import nn

from ..errors import PatternError
from .declared import Declared
from .targets import check_target, is_run, label, run_of

# A rule reads a call and states, through the algebra, how its channels hang together; it returns
# the channels of the call's result. See fxprune.relating.algebra for the words it can use.
Rule = Callable[[Any, Any], Any]


@dataclass(frozen=True)
class Pattern:
    """What is known about one kind of node, or, with ``steps``, about a run of them.

    Made by :func:`pattern`, which says what the fields mean.
    """

    name: str
    targets: tuple[Any, ...]
    rule: Rule | None = None
    kind: str = ""
    attributes: Callable[..., dict[str, Any]] | None = None
    resize: Callable[..., Any] | None = None
    absorb: str | None = None
    bias: Any = None
    refresh: Callable[[nn.Module], None] | None = None
    forward: Callable[..., Any] | None = None
    reads: Callable[..., Any] | None = None
    product: bool | str = False
    steps: Mapping[int, Pattern] | None = None
    shared: bool = False
    source: str = ""

    @property
    def is_builtin(self) -> bool:
        return self.source.startswith("fxprune.patterns.")

    @property
    def summary(self) -> str:
        """What it says, in a line: its layout, or the first line of its rule's docstring."""
        if isinstance(self.rule, Declared):
            return str(self.rule)
        text = inspect.getdoc(self.rule) or "" if self.rule is not None else ""
        return text.partition("\n")[0]

    def __repr__(self) -> str:
        return f"Pattern({self.name!r}, {self.summary!r}, from {self.source})"


def pattern(
    *targets: Any,
    layout: Mapping[str, str | Sequence[str]] | None = None,
    rule: Rule | None = None,
    steps: Mapping[int, Pattern | Mapping[str, str] | Rule] | None = None,
    name: str = "",
    kind: str = "",
    sizes: Mapping[str, int | str | Callable[[Any], int]] | None = None,
    biases: Sequence[str] = (),
    folds: Mapping[str, str] | None = None,
    border: str | Callable[[Any], str] = "",
    emits: Callable[[dict[str, Any]], Any] | None = None,
    only: Callable[[Any], bool] | None = None,
    attributes: Mapping[str, str] | Callable[..., dict[str, Any]] | None = None,
    resize: Callable[..., Any] | None = None,
    absorb: str | None = None,
    bias: Any = None,
    refresh: Callable[[nn.Module], None] | None = None,
    forward: Callable[..., Any] | None = None,
    reads: Callable[..., Any] | None = None,
    product: bool | str = False,
    shared: bool = False,
) -> Any:
    """What fxprune is to know about ``targets``; :func:`fxprune.register` takes the same.

    With neither ``layout`` nor ``rule`` nor ``steps`` it is a decorator of a rule. docs/patterns.md
    has worked examples.

    Args:
        targets: module classes, functions, custom ops, :class:`torch.autograd.Function` classes,
            names of PyTorch's own ops (``"relu"``) or of custom ones (``"mylib::op"``); or runs of
            nodes, as a tuple of these and of kinds (``("conv", MyGate, "conv")``) or a name
            (``"conv-act-conv"``).
        layout: the channel map, in the manner of einsum: the dimensions of each argument, parameter
            and of the ``"return"`` by name. Names in the return pass through or are made by the
            parameters that have them; others are summed over. ``"(c k)"`` is one dimension that is
            cut in two. A list of layouts as ``"return"`` is for a tuple of tensors.
        rule: ``rule(a, call)`` states the same in the words of :mod:`fxprune.relating.algebra`.
        steps: for a run, the patterns (or layouts, or rules) of the nodes, by position, that mean
            something else there than elsewhere.
        name: in reports; by default that of the target.
        kind: the word for this node in the names of runs (``"conv"``, ``"act"``, …); ``"unseen"``
            for a call that a graph does without.
        sizes: numbers behind names in ``layout`` that are never cut (the ``k`` of ``"(c k)"``): a
            number, the name of an attribute of the module, or a function of the module.
        biases: parameters that a removed unit goes on saying, unless its constants are dropped.
        folds: for each weight, the parameter of the same layer that takes what a constant input
            adds (``{"weight": "bias"}``).
        border: ``"padding"`` where the layer reads zeros around its input; ``"pattern"`` where what
            a constant input adds differs by position; or a function of the module.
        emits: what a unit says whose weights are 0, from the parameters (by name) that stay:
            a tensor over the units. By default the layer is run to see.
        only: for which modules (or nodes) the pattern holds; others stay whole.
        attributes: attributes of the module after shrinking: ``{"out_channels": "out"}`` by names
            of the layout, or ``attributes(module, new)`` with the new widths in ``new``, a
            :class:`fxprune.replaying.new_sizes.NewSizes`.
        resize: arguments that hold sizes, as they have to be:
            ``resize(call, new) -> {(position, name): value}``; under None, the name of the method
            that takes these, where that is another.
        absorb: name of the buffer that a constant added to the input can be subtracted from.
        bias: for a rule, where a constant added to the output can go: True for the module's bias
            beside its weight, ``(position, name)`` of the argument for a function, or
            ``bias(node, weight)``, the node of it, for one of several weights.
        refresh: called on a module after its tensors have changed.
        forward: a forward for widths that the class's own cannot express, which ``attributes``
            then gives as ``"forward"``; modules that have it follow the same rule.
        reads: ``reads(module, name, args, kwargs)`` gives what a weight of the module, by name,
            reads in a call, where that is no argument of it: (…, channels), or None.
        product: the result is 0 wherever an operand is; ``"first"``: wherever the first one is.
        shared: whether the nodes inside a run may be read by others too.

    Raises:
        PatternError: it cannot be what it says: an unknown argument, a rule of another signature …
    """
    source = _source()
    for target in () if source.startswith("fxprune.") else targets:
        check_target(target)

    functions = {"emits": emits, "only": only, "resize": resize, "refresh": refresh,
                 "forward": forward, "reads": reads}  # fmt: skip
    wrong = next((k for k, v in functions.items() if not (v is None or callable(v))), None)
    if wrong:
        raise PatternError(f"{wrong}={functions[wrong]!r} is no function")

    def make(rule: Rule | None) -> Pattern:
        if not targets:
            raise PatternError("a pattern needs a target: a module class, a function, an op …")
        called = name or label(targets[0])
        if isinstance(rule, Declared):
            called = rule.name = called
        elif rule is not None:
            _check_rule(rule, called)
        _check_steps(targets, steps, called)
        inner = {
            i: _step(called, i, given, run_of(targets[0])[i]) for i, given in (steps or {}).items()
        } or None  # fmt: skip
        told = _attributes(called, rule, attributes)
        sink = bias if folds is None else _sink(called, rule, folds, targets)
        return Pattern(
            called, targets, rule, kind, told, resize, absorb, sink, refresh, forward,  # type: ignore[arg-type]
            reads, product, inner, shared, source,
        )  # fmt: skip

    if layout is not None:
        if any(map(is_run, targets)):
            raise PatternError("a layout is for one node; give it to a node of the run by steps=")
        if rule is not None:
            raise PatternError("give a layout or a rule, not both")
        return make(Declared(layout, targets, sizes, biases, border, emits, only))
    stray = {"sizes": sizes, "biases": biases, "border": border, "emits": emits, "only": only}
    if any(stray.values()):
        raise PatternError(f"{', '.join(k for k, v in stray.items() if v)}: only with a layout")
    if rule is not None or steps is not None or (targets and all(map(is_run, targets))):
        return make(rule)
    return make


def _attributes(label: str, rule: Any, given: Any) -> Callable[..., dict[str, Any]] | None:
    if isinstance(given, Mapping):
        if not isinstance(rule, Declared):
            raise PatternError(f"{label}: attributes={given!r} needs a layout")
        return rule.attributes(given)
    if given is not None and not callable(given):
        raise PatternError(f"{label}: attributes={given!r} is no mapping and no function")
    return given


def _sink(label: str, rule: Any, folds: Any, targets: tuple[Any, ...]) -> Any:
    if not isinstance(folds, Mapping):
        raise PatternError(f"{label}: folds={folds!r} is no mapping from weight to bias")
    if not isinstance(rule, Declared):
        raise PatternError(f"{label}: folds={folds!r} needs a layout; a rule has bias=")
    return rule.sink(folds, targets)


def _step(label: str, position: int, given: Any, target: Any) -> Pattern:
    if isinstance(given, Pattern):
        return given
    name = f"{label}, step {position}"
    if isinstance(given, Mapping):
        return pattern(target, layout=given, name=name)
    return pattern(target, rule=given, name=name)


def _check_steps(targets: tuple[Any, ...], steps: Any, label: str) -> None:
    for target in targets:
        length = len(run_of(target)) if is_run(target) else 0
        if steps and not length:
            raise PatternError(f"{label}: steps= needs a run of nodes as its target")
        outside = [i for i in steps or () if not (isinstance(i, int) and 0 <= i < length)]
        if outside:
            raise PatternError(f"{label}: steps names {outside[0]!r} of a run of {length} nodes")
        if length == 1:
            raise PatternError(f"{label}: a run has two nodes at least")


def _check_rule(rule: Any, label: str) -> None:
    if not callable(rule):
        raise PatternError(f"{label}: {rule!r} is no rule; a rule is called as rule(a, call)")
    try:
        inspect.signature(rule).bind(None, None)
    except TypeError as error:
        raise PatternError(
            f"{label}: a rule is called as rule(a, call), with the algebra and the call; "
            f"{getattr(rule, '__name__', rule)} takes {inspect.signature(rule)} ({error})"
        ) from error


def _source() -> str:
    """Where a pattern is written: a module of fxprune.patterns, or file and line."""
    frame: Any = sys._getframe(1)
    while frame is not None and frame.f_globals.get("__name__") in (
        __name__,
        "fxprune.rules.registry",
    ):
        frame = frame.f_back
    module = frame.f_globals.get("__name__", "") if frame is not None else ""
    if module.startswith("fxprune.patterns."):
        return module
    return f"{frame.f_code.co_filename}:{frame.f_lineno}" if frame is not None else ""
