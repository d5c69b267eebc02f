"""Recording one run of a model as an fx graph.

The model runs once, for real, under a function mode that writes each torch call as a node. Module
classes with a pattern, and childless modules of ``torch.nn``, become one ``call_module`` node. No
activation is kept alive: tensors are known by weak reference.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import inspect
import operator
import sys
import threading
import weakref
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import fx, nn, overrides
from torch.nn.utils.rnn import PackedSequence
from torch.overrides import TorchFunctionMode

from . import sizes, tree
from .aten import AtenRecorder, followed
from .errors import InputError, ModelError, PruningError
from .flags import read_training, training_argument
from .ops import op_name
from .pattern_types import Pattern
from .probe import probe
from .recording import ModuleCall, Trace, after_write, set_item
from .registry import for_function, for_module, python_functions
from .running import (
    bind_inputs,
    describe,
    evaluating,
    modules_of,
    named_tensors,
    read_attribute,
    uncollected,
    wanted,
)
from .spec import BASIC, spec
from .told import module_calls, told

_SHAPE = torch.Tensor.shape.__get__  # type: ignore[attr-defined]
_SIZE = torch.Tensor.size
_READS_DATA = ("bool", "int", "float", "index", "item", "tolist", "numpy", "array", "equal",
               "allclose", "contains")  # fmt: skip
# Recording swaps the code of modules' calls and of registered functions: one at a time.
_LOCK = threading.RLock()
# Nothing in a frame of these folders is the user's own code.
_LIBRARY = (f"{Path(torch.__file__).parent}/", f"{Path(__file__).parent}/", "<")


def trace(model: nn.Module, example_input: Any) -> fx.GraphModule:
    """Record one run of ``model`` as a runnable, printable :class:`torch.fx.GraphModule`.

    The model runs once in eval mode without gradients, and is left as it was. Whatever Python the
    model runs (conditions, loops, helpers) is followed as it happens; the graph holds what this
    input made it do. Sizes that the model reads from its inputs stay expressions, so the graph
    is right for other batch sizes too. Like the model it shares tensors with, it can be told to
    train or to evaluate.

    Args:
        model: any module that runs.
        example_input: a tensor, a tuple of positional or a mapping of keyword arguments.

    Raises:
        InputError: the model does not run on ``example_input``; its own error is chained.
    """
    with uncollected():
        recorded = record(model, example_input)
        for node in list(recorded.graph.nodes):
            flag = training_argument(node)
            if flag is not None:
                read_training(node, flag)
        return recorded.graph_module()


def record(
    model: nn.Module,
    example_input: Any,
    only: Sequence[str] | None = None,
    *,
    training: bool = False,
) -> Trace:
    """Run ``model`` once and record it. See :func:`trace`.

    Args:
        only: names of the entries of its result that are its outputs; None for all.
        training: run it in training mode, to see what its code does there.
    """
    args, kwargs = bind_inputs(example_input)
    recorder = _Recorder(model)
    with (
        _LOCK,
        uncollected(),
        evaluating(model, training=training),
        sizes.traced_attributes(model),
        sizes.traced_lengths(),
        torch.no_grad(),
        module_calls(recorder.module),
        told(python_functions(), recorder.python_call),
    ):
        args, kwargs = recorder.placeholders(args, kwargs)
        try:
            with recorder, recorder.listening():
                output = model(*args, **kwargs)
        except PruningError:
            raise
        except Exception as error:
            raise InputError(
                f"{type(model).__name__} does not run on example_input "
                f"({describe(example_input)}): {type(error).__name__}: {error}. Pass what the "
                "model takes: a tensor, a tuple of positional arguments, or a mapping of "
                "keyword arguments."
            ) from error
        recorder.graph.output(recorder.argument(wanted(model, output, only)))
    return Trace(
        recorder.graph,
        model,
        recorder.calls,
        recorder.constants,
        recorder.called,
        recorder.named,
        recorder.escapes,
    )


class _Recorder(TorchFunctionMode):
    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model
        self.graph = fx.Graph()
        self.calls: list[ModuleCall] = []
        self.constants: dict[str, Any] = {}
        self.called: set[str] = set()
        modules = modules_of(model)
        self.named = {id(t): name for name, t in named_tensors(modules)}
        self.paths: dict[int, str] = {}
        for path, m in modules.items():
            self.paths.setdefault(id(m), path)
        self._leaf: dict[int, bool] = {}
        self._stack: list[int] = []
        self._thread = threading.get_ident()  # in which the model runs; others are none of its own
        self._suspended = False
        self._inside_torch = False
        self._handing = False
        self._count = 0
        # id of a live tensor -> (weak reference, node, path of keys into the node's result)
        self._known: dict[int, tuple[weakref.ref, fx.Node, tuple[Any, ...]]] = {}
        self._memo: dict[Any, fx.Node] = {}
        self._probes: dict[Any, Pattern | None] = {}
        self.escapes: list[tuple[fx.Node, str, str]] = []

    @contextlib.contextmanager
    def listening(self) -> Iterator[None]:
        """Note what the model's own code asks of sizes."""

        def note(function: Callable[..., Any], operands: tuple[Any, ...], answer: Any) -> None:
            if self._stack and not self._suspended and not self._inside_torch:
                question = sizes.Question(function, operands, answer, _where())
                self.calls[self._stack[-1]].questions.append(question)

        before, sizes.on_question = sizes.on_question, note
        try:
            yield
        finally:
            sizes.on_question = before

    # -- values -------------------------------------------------------------------------------

    def placeholders(
        self, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """A placeholder an argument; the inputs are shared, their tensors known by identity."""
        try:
            parameters = inspect.signature(self.model.forward).parameters
        except (TypeError, ValueError):
            parameters = {}  # type: ignore[assignment]
        positional = [
            n
            for n, p in parameters.items()
            if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)
        ]
        names = positional[: len(args)] + [f"arg{i}" for i in range(len(positional), len(args))]
        for name, value in [*zip(names, args, strict=True), *kwargs.items()]:
            node = self._add(self.graph.placeholder(name), value)
            self._learn(value, node, ())
        return args, kwargs

    def _add(self, node: fx.Node, value: Any) -> fx.Node:
        node.meta["spec"] = spec(value)
        node.meta["call"] = self._stack[-1] if self._stack else None
        node.meta["index"] = self._count
        self._count += 1
        return node

    def _learn(self, value: Any, node: fx.Node, path: tuple[Any, ...]) -> None:
        """From now on, the tensors in ``value`` are the result of ``node``."""
        if isinstance(value, torch.Tensor):
            self._known[id(value)] = (weakref.ref(value), node, path)
        elif isinstance(value, dict):
            for key, item in value.items():
                self._learn(item, node, (*path, key))
        elif isinstance(value, (tuple, list)):
            for i, item in enumerate(value):
                self._learn(item, node, (*path, i))

    def argument(self, value: Any) -> Any:
        """``value`` as an argument of a node: tensors and traced sizes become nodes."""
        if isinstance(value, torch.Tensor):
            return self._tensor(value)
        if isinstance(value, (sizes.TracedInt, sizes.TracedFloat)):
            return self._size(value)
        if isinstance(value, PackedSequence):  # whose constructor takes tensors only
            parts = tuple(self.argument(part) for part in value)
            return self._add(self.graph.call_function(type(value), parts), value)
        if dataclasses.is_dataclass(value) and not isinstance(value, type):
            fields = {
                f.name: self.argument(getattr(value, f.name)) for f in dataclasses.fields(value)
            }
            return self._add(self.graph.call_function(type(value), (), fields), value)
        if isinstance(value, (tuple, list, dict, slice)):
            return tree.rebuild(value, self.argument)
        if isinstance(value, bool) or type(value) in BASIC:
            return value
        if isinstance(value, range):
            return range(*(int(n) for n in (value.start, value.stop, value.step)))
        if isinstance(value, int):
            return int(value)
        if isinstance(value, np.generic):  # numpy's own numbers
            return value.item()
        # An object of the model's own. Where it is handed to code that is recorded too, its tensors
        # are known when they come back; elsewhere they go where no rule can follow.
        for inside in () if self._handing else tree.tensors(value):
            node = self._tensor(inside)
            self.escapes.append((node, f"a {type(value).__name__}", _where()))
        return self._constant(value, "object")

    def _handed(self, value: Any) -> Any:
        """``value`` from one module of the model to another."""
        self._handing = True
        try:
            return self.argument(value)
        finally:
            self._handing = False

    def _tensor(self, value: torch.Tensor) -> fx.Node:
        known = self._known.get(id(value))
        if known is None or known[0]() is not value:
            return self._unknown(value)
        _, node, path = known
        for i, key in enumerate(path):
            node = self._item(node, path[: i + 1], key)
        return node

    def _item(self, node: fx.Node, path: tuple[Any, ...], key: Any) -> fx.Node:
        memo = (node, key)
        if memo not in self._memo:
            item = node.meta["spec"][key]
            self._memo[memo] = self._add(
                self.graph.call_function(operator.getitem, (node, key)), item
            )
            self._memo[memo].meta["spec"] = item
        return self._memo[memo]

    def _unknown(self, value: torch.Tensor) -> fx.Node:
        """A tensor that no recorded call has returned: of the model, an alias, or a constant."""
        if torch._C._functorch.is_functorch_wrapped_tensor(value):
            raise ModelError(
                f"{type(self.model).__name__} transforms functions as it runs (torch.vmap, "
                f"torch.func), which cannot be recorded: {_where()}. Write it as ordinary calls"
            )
        if id(value) in self.named:
            name = self.named[id(value)]
            if ("get_attr", name) not in self._memo:
                self._memo["get_attr", name] = self._add(self._get_attr(name), value)
            return self._memo["get_attr", name]
        for reference, node, path in self._known.values():
            other = reference()
            if other is not None and _same_memory(other, value):
                self._learn(value, node, path)
                return self._tensor(value)
        return self._constant(value, "tensor")

    def _constant(self, value: Any, kind: str) -> fx.Node:
        key = ("constant", id(value))
        if key not in self._memo:
            name = f"_{kind}_constant{len(self.constants)}"
            self.constants[name] = value
            self._memo[key] = self._add(self._get_attr(name), value)
        return self._memo[key]

    def _get_attr(self, name: str) -> fx.Node:
        # Graph.get_attr warns about whatever is not a tensor of the model.
        return self.graph.create_node("get_attr", name)

    def _size(self, number: Any) -> Any:
        """The node that computes a traced number; a plain number as it is."""
        origin = getattr(number, "origin", None)
        if origin is None:
            return number
        key = sizes.expression(number)
        if key not in self._memo:
            self._memo[key] = self._add(self._size_node(origin), number)
        return self._memo[key]

    def _size_node(self, origin: sizes.Origin) -> fx.Node:
        if isinstance(origin, sizes.Dimension):
            return self.graph.call_method("size", (origin.source, origin.dim))
        if isinstance(origin, sizes.Operation):
            operands = tuple(self._size(operand) for operand in origin.operands)
            return self.graph.call_function(origin.function, operands)
        if origin.index is None:
            return self._get_attr(origin.name)
        key = ("attribute", origin.name)
        if key not in self._memo:
            value = read_attribute(self.model, origin.name)
            self._memo[key] = self._add(self._get_attr(origin.name), value)
        return self.graph.call_function(operator.getitem, (self._memo[key], origin.index))

    # -- calls --------------------------------------------------------------------------------

    def is_leaf(self, m: nn.Module) -> bool:
        if id(m) not in self._leaf:
            of_torch = type(m).__module__.startswith("torch.nn.") and not any(m.children())
            of_torch = of_torch and not isinstance(m, (nn.Sequential, nn.ModuleList, nn.ModuleDict))
            self._leaf[id(m)] = of_torch or for_module(m) is not None
        return self._leaf[id(m)]

    def module(self, original: Callable, m: nn.Module, args: Any, kwargs: Any) -> Any:
        path = self.paths.get(id(m))
        if path is None or self._not_the_models():
            return original(m, *args, **kwargs)
        self.called.add(path)
        if self.is_leaf(m) and m is not self.model:
            with self._paused():

                def run(*args: Any, **kwargs: Any) -> Any:
                    return original(m, *args, **kwargs)

                known = for_module(m) is not None
                return self._record("call_module", path, run, args, kwargs, known=known)
        with self._paused():
            handed = self._handed(args), self._handed(kwargs)
        parent = self._stack[-1] if self._stack else None
        call = ModuleCall(path, parent, self._count, args=handed[0], kwargs=handed[1])
        self._stack.append(len(self.calls))
        self.calls.append(call)
        try:
            output = original(m, *args, **kwargs)
        finally:
            self._stack.pop()
        if self._stack:  # the model's own output is the graph's
            with self._paused():
                call.output = self._handed(output)
        call.stop = self._count
        return output

    def _not_the_models(self) -> bool:
        """Whether a call is covered by a leaf's node, or made by another thread."""
        return self._suspended or threading.get_ident() != self._thread

    @contextlib.contextmanager
    def _paused(self) -> Iterator[None]:
        """Torch calls inside are not the model's, or are covered by a leaf's node: they need not
        come by here, unless the model has a mode of its own on top of this one."""
        own = overrides._get_current_function_mode() is self
        self._suspended = True
        try:
            with overrides._pop_mode_temporarily() if own else contextlib.nullcontext():
                yield
        finally:
            self._suspended = False

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if self._suspended:
            return func(*args, **kwargs)
        self._inside_torch = True
        try:
            return self._torch_call(func, args, kwargs)
        finally:
            self._inside_torch = False

    def python_call(self, function: Any, run: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """A call of a registered function that PyTorch does not tell of."""
        if self._not_the_models():
            return run(*args, **kwargs)
        known = for_function(function) is not None
        with self._paused():
            return self._record("call_function", function, run, args, kwargs, known=known)

    def _torch_call(self, func: Any, args: Any, kwargs: Any) -> Any:
        if func == _SHAPE or func is _SIZE:
            return self._read_size(func, args, kwargs)
        kind, target = "call_function", func
        name = getattr(func, "__name__", "")
        if name == "__len__":
            return self._read_length(func, args)
        if name in ("numel", "nelement"):
            shape = sizes.traced_size(self._tensor(args[0]), args[0].shape)
            return functools.reduce(operator.mul, shape, 1)
        if name == "__get__":
            return self._record_property(func, args)
        if name == "__getitem__":
            target = operator.getitem
        elif getattr(torch.Tensor, name, None) is func and not name.startswith("__"):
            kind, target = "call_method", name
        elif func in _OPERATORS:  # which go by the name of what they wrap
            kind, target = "call_method", _OPERATORS[func]
        return self._record(kind, target, func, args, kwargs, known=for_function(func) is not None)

    def _read_size(self, func: Any, args: Any, kwargs: Any) -> Any:
        value = func(*args, **kwargs)
        node = self._tensor(args[0])
        if isinstance(value, torch.Size):
            return sizes.traced_size(node, value)
        dim = kwargs.get("dim", args[1] if len(args) > 1 else 0)
        return sizes.traced(value, sizes.Dimension(node, int(dim) % args[0].dim()))

    def _read_length(self, func: Any, args: Any) -> int:
        """``len(x)``, which Python makes a plain number."""
        value = func(*args)
        if self._stack:
            size = sizes.traced(value, sizes.Dimension(self._tensor(args[0]), 0))
            question = sizes.Question(int, (size,), value, _where())
            self.calls[self._stack[-1]].questions.append(question)
        return value

    def _record_property(self, func: Any, args: Any) -> Any:
        value = func(*args)
        if not isinstance(value, torch.Tensor) or func.__self__.__name__ in ("grad", "_grad"):
            return value
        arguments = (self._tensor(args[0]), func.__self__.__name__)
        node = self._add(self.graph.call_function(getattr, arguments), value)
        node.meta["where"] = _where()
        self._learn(value, node, ())
        return value

    def _record(
        self, kind: str, target: Any, run: Callable, args: Any, kwargs: Any, *, known: bool
    ) -> Any:
        """Run one call and write it as a node; without a pattern, with the aten ops beneath it."""
        before = [(t, t._version) for t in tree.tensors((args, kwargs)) if not t.is_inference()]
        inputs = (self.argument(args), self.argument(kwargs))
        beneath = None
        if known:
            value = run(*args, **kwargs)
        else:
            beneath = AtenRecorder(self, before)
            with beneath:
                value = run(*args, **kwargs)
        changed = [t for t, version in before if t._version != version]
        setitem = op_name(target) == "setitem"
        if not changed and not any(True for _ in tree.tensors(value)):
            if op_name(target) in _READS_DATA:
                for i in self._stack:
                    self.calls[i].reads_data = True
                nodes = [self._tensor(t) for t, _ in before]
                self.escapes += [(node, op_name(target), _where()) for node in nodes]
            return value  # a number, a flag, nothing: not part of the data flow
        if setitem:
            target = set_item
        node = self._add(
            self.graph.create_node(kind, target, *inputs), args[0] if setitem else value
        )
        node.meta["where"] = _where()
        if beneath is not None:
            node.meta["aten"] = beneath.finish(value)
            if not changed and not followed(node.meta["aten"]):
                node.meta["pattern"] = self._probed(node, run, args, kwargs, value)
        result = args[0] if setitem else value
        self._learn(result, node, ())
        for t in changed:
            self._changed_in_place(t, node, result)
        return value

    def _probed(
        self, node: fx.Node, run: Callable, args: Any, kwargs: Any, value: Any
    ) -> Pattern | None:
        """What probing says of a call, once for all calls on tensors of the same shapes."""
        key = ("probed", node.op, node.target, repr(spec((args, kwargs))))
        if key not in self._probes:
            self._probes[key] = probe(
                op_name(node.target) or str(node.target), run, args, kwargs, value
            )
        return self._probes[key]

    def _changed_in_place(self, changed: torch.Tensor, node: fx.Node, result: Any) -> None:
        """Other live tensors on the memory that ``node`` wrote to are new values from here on."""
        storage = changed.untyped_storage()._cdata
        for key, (reference, before, path) in list(self._known.items()):
            other = reference()
            if other is None:
                del self._known[key]  # or the deeper the model, the longer this takes
                continue
            if other is result or other.untyped_storage()._cdata != storage:
                continue
            for i, item in enumerate(path):
                before = self._item(before, path[: i + 1], item)
            after = self._add(self.graph.call_function(after_write, (before, node)), other)
            self._learn(other, after, ())


# Operators of tensors that are written in Python, such as ``2 ** x``.
_OPERATORS = {
    function: name for name, function in vars(torch.Tensor).items()
    if name.startswith("__") and name != "__len__" and inspect.isfunction(function)
}  # fmt: skip


def _same_memory(a: torch.Tensor, b: torch.Tensor) -> bool:
    return (
        a.layout == b.layout == torch.strided
        and a.numel() > 0
        and a.data_ptr() == b.data_ptr()
        and a.shape == b.shape
        and a.stride() == b.stride()
    )


def _where() -> str:
    """File and line of the innermost frame that is neither PyTorch's nor ours."""
    frame: Any = sys._getframe(2)
    while frame is not None:
        if not frame.f_code.co_filename.startswith(_LIBRARY):
            return f"{frame.f_code.co_filename}:{frame.f_lineno}"
        frame = frame.f_back
    return ""
