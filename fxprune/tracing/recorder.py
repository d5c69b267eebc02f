"""Listening to one run of a model, and writing it as an fx graph.

A function mode writes each torch call as a node. Module classes with a pattern, and childless
modules of ``torch.nn``, become one ``call_module`` node. :mod:`.nodes` knows which node each
value is, :mod:`.record` makes the run.
"""

from __future__ import annotations

import contextlib
import operator
import sys
import threading
from collections.abc import Callable, Iterator
from functools import partial, reduce
from typing import Any

import numpy as np
import torch
from torch import fx, nn, overrides
from torch.nn.utils.parametrize import ParametrizationList
from torch.overrides import TorchFunctionMode

from ..errors import ModelError
from ..modules import tree
from ..modules.frames import (
    codes_of,
    frame_of_model,
    is_model_code,
    line_of,
    site_of,
    where,
)
from ..modules.hooks import HooksAct, call_hooked, call_watched
from ..modules.inspecting import is_torchs_layer, modules_of
from ..modules.source import is_message
from ..parametrized.computed import goes_by_its_name
from ..parametrized.mask import unmasked
from ..rules import sizes
from ..rules.ops import OPERATORS, Applied, op_name
from ..rules.pattern_types import Pattern
from ..rules.probe import probe
from ..rules.registry import for_function, for_module
from ..rules.spec import TOLD, spec
from .aten import AtenRecorder, counts, followed, says_all
from .intercepting import entered, is_python_of_torch, scripted_from
from .nodes import Nodes
from .questions import Questions, asks_size
from .told import NumbersRead, may_be_a_number
from .trace import ModuleCall, set_item
from .transforms import RUNS_A_FUNCTION, VJP, Inside, Transform
from .unrecorded import HAS_HOOKS, OWN_CONTEXT, READ_PAST_SIZES, Kept, contexts, odd_container

_NOTHING: Any = contextlib.nullcontext()
_CASTS = ("to", "type", "type_as", "float", "double", "half", "bfloat16", "cpu", "cuda")


class Recorder(TorchFunctionMode):
    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model
        self.modules = modules_of(model)
        self.nodes = Nodes(model, self.modules)
        self._kept = Kept(self.modules.values())
        self.calls: list[ModuleCall] = []
        self._questions = Questions(self.nodes, self.calls)
        self._contexts: list[tuple[Any, ...]] = []  # those that each call began under
        self.called: set[str] = set()
        self.changed: set[str] = set()  # names of containers that it has put something in
        self.within: dict[str, fx.Node] = {}  # modules that run beneath a call that is one node
        self._covered: list[str] = []  # those of the call at work
        self.told: list[fx.Node] = []  # calls to which tensors tell numbers
        self.paths = {id(m): path for path, m in reversed(self.modules.items())}  # the first ones
        self._own = {id(m): _tensors(m) for m in self.modules.values()}
        self._leaf: dict[int, bool] = {}
        self._known: dict[int, bool] = {}  # modules by id: whether they have a pattern
        self._by_name: dict[int, bool] = {}
        self._thread = threading.get_ident()  # in which the model runs; others are none of its own
        self._suspended = False
        self._inside_torch = False
        self._transforming = False
        self._probes: dict[Any, Pattern | None] = {}

    @contextlib.contextmanager
    def listening(self) -> Iterator[None]:
        """Note what the model's own code asks of sizes."""

        def note(function: Callable[..., Any], operands: tuple[Any, ...], answer: Any) -> None:
            if function in (str, repr, format) and is_message(frame_of_model()):
                return
            if function is hash and not is_model_code(sys._getframe(2)):
                return
            if self._is_models_own():
                self._questions.ask(function, tuple(map(self.nodes.own, operands)), answer)

        def made(number: Any, repeats: bool) -> None:
            if self._is_models_own():
                self._questions.made(self.nodes.own(number), repeats)

        before = sizes.on_question, sizes.on_number
        sizes.on_question, sizes.on_number = note, made
        try:
            yield
        finally:
            sizes.on_question, sizes.on_number = before

    def _is_models_own(self) -> bool:
        """Whether it is the model's code that is at work, not PyTorch's, nor a leaf's."""
        covered = self._suspended and not self._transforming
        return bool(self.nodes.running) and not covered and not self._inside_torch

    # -- calls --------------------------------------------------------------------------------

    def is_leaf(self, m: nn.Module) -> bool:
        if id(m) not in self._leaf:
            plain = "forward" not in vars(m)  # nobody has replaced it
            plain = plain and not isinstance(m, (nn.Sequential, nn.ModuleList, nn.ModuleDict))
            self._leaf[id(m)] = (plain and is_torchs_layer(m)) or self._is_known(m)
        return self._leaf[id(m)]

    def _is_known(self, m: nn.Module) -> bool:
        if id(m) not in self._known:
            self._known[id(m)] = for_module(m) is not None
        return self._known[id(m)]

    def module(self, original: Callable, m: nn.Module, args: Any, kwargs: Any) -> Any:
        path = self.paths.get(id(m))
        if path is None or self._not_the_models():
            if path is not None and self._suspended:
                self._covered.append(path)
            return original(m, *args, **kwargs)
        self.called.add(path)
        if self._goes_by_its_name(m):
            with _Paused(self):
                value = original(m, *args, **kwargs)
                self.nodes.learn(value, self.nodes.named_node(unmasked(path), value), ())
            return value
        leaf = self.is_leaf(m) and m is not self.model
        lent = self._is_lent(m)
        if leaf and not lent:
            hooked = m._forward_pre_hooks or m._forward_hooks
            known = self._is_known(m)
            run = partial(call_hooked, original, m) if hooked else partial(original, m)
            with _Paused(self), contextlib.suppress(HooksAct):
                return self._record("call_module", path, run, args, kwargs, known=known)
        with _Paused(self):
            handed = self.nodes.handed(args), self.nodes.handed(kwargs)
        parent = self.nodes.running[-1] if self.nodes.running else None
        self._notice_contexts()
        self._notice_changes()
        call = ModuleCall(
            path,
            parent,
            self.nodes.count,
            args=handed[0],
            kwargs=handed[1],
            lent=lent,
            depth=len(codes_of(frame_of_model())) if self.nodes.running else 0,
        )
        self._contexts.append(contexts())
        self.nodes.running.append(len(self.calls))
        self.calls.append(call)
        try:
            if m._forward_pre_hooks or m._forward_hooks:
                output, acted = call_watched(original, m, *args, **kwargs)
                call.unsaid = call.unsaid or (HAS_HOOKS if acted else "")
            else:
                output = original(m, *args, **kwargs)
            self._notice_changes()
        finally:
            self.nodes.running.pop()
        call.unsaid = call.unsaid or odd_container(output)
        if self.nodes.running:  # the model's own output is the graph's
            with _Paused(self):
                call.output = self.nodes.handed(output)
        call.stop = self.nodes.count
        return output

    def _goes_by_its_name(self, m: nn.Module) -> bool:
        if not isinstance(m, ParametrizationList):
            return False
        if id(m) not in self._by_name:
            with _Paused(self):
                self._by_name[id(m)] = goes_by_its_name(m)
        return self._by_name[id(m)]

    def _is_lent(self, m: nn.Module) -> bool:
        """Whether a module runs on other tensors than its own (``torch.func.functional_call``)."""
        parts = m.modules() if self.is_leaf(m) and m._modules else [m]
        for part in parts:
            now, own = _tensors(part), self._own.get(id(part), [])
            if len(now) != len(own) or not all(map(operator.is_, now, own)):
                return True
        return False

    def _not_the_models(self) -> bool:
        """Whether a call is covered by a leaf's node, or made by another thread."""
        return self._suspended or threading.get_ident() != self._thread

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if self._suspended:
            return func(*args, **kwargs)
        self._inside_torch = True
        try:
            return self._torch_call(func, args, kwargs)
        except Exception:
            self._unsaid("goes on after a call that failed")  # if it does
            raise
        finally:
            self._inside_torch = False

    def python_call(self, function: Any, run: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """A call of a registered function that PyTorch does not tell of."""
        if self._not_the_models():
            return run(*args, **kwargs)
        known = for_function(function) is not None
        with _Paused(self):
            if known or not isinstance(function, Applied) or not self._is_plain(run, args):
                return self._record("call_function", function, run, args, kwargs, known=known)
        # A graph of what it does would lose its backward pass; the model's own code has it.
        self._unsaid("runs a torch.autograd.Function of its own")
        return run(*args, **kwargs)

    def _is_plain(self, run: Callable[..., Any], args: Any) -> bool:
        """Whether an autograd function does no more than ops that are known, and is better followed
        inside: it takes means, which beneath a call nobody could check, or runs layers."""
        before = [(t, t._version) for t in tree.tensors(args)]
        self._covered = []
        with AtenRecorder(self.nodes, before) as beneath:
            value = run(*args)
        ops = beneath.finish(value)
        inside = bool(self._covered) or counts(ops)
        return inside and says_all(ops) and all(t._version == v for t, v in before)

    def transform(self, function: Any, run: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """``torch.vmap`` and the like, which PyTorch does not tell of as a whole."""
        if self._not_the_models():
            return run(*args, **kwargs)
        value = self._transformed(Transform(function, function), run, args, kwargs)
        if function is not VJP:
            return value
        for t in tree.tensors(args[1:]):  # jacrev calls what is returned where no graph shows it
            self.nodes.kept_whole.append(
                (self.nodes.tensor(t), "torch.func.vjp takes derivatives by it", where())
            )

        def pull(*cotangents: Any, **settings: Any) -> Any:
            """What ``vjp`` returns."""
            if self._not_the_models():
                return value[1](*cotangents, **settings)
            called = Transform(function, value[1])
            return self._transformed(called, called, cotangents, settings | {"besides": args[1:]})

        return value[0], pull, *value[2:]

    def _transformed(self, called: Transform, run: Any, args: Any, kwargs: Any) -> Any:
        self._unsaid(RUNS_A_FUNCTION)
        inside = Inside()
        self._transforming = True
        try:
            with _Paused(self):
                value = self._record("call_function", called, run, args, kwargs, inside=inside)
        finally:
            self._transforming = False
        for number in inside.numbers:
            self._questions.goes_by(self.nodes.own(number))
        return value

    def wrapped(self, value: torch.Tensor, variable: torch.Tensor) -> None:
        """What a variable wraps is what it is."""
        if not self._not_the_models():
            self.nodes.learn(variable, self.nodes.tensor(value), ())

    def scripted(self, original: Callable[..., Any], function: Any, args: Any, kwargs: Any) -> Any:
        """A compiled function does what the function does that it was compiled from."""
        if self._not_the_models():
            return original(function, *args, **kwargs)
        source = scripted_from(function)
        if source is None:
            raise ModelError(
                f"{type(self.model).__name__} calls a function that torch.jit.trace made: "
                f"{where()}. Call the function that it was made from"
            )
        return source(*args, **kwargs)

    def _notice_contexts(self) -> None:
        """What a graph does not hold: under which contexts a module's code makes its calls."""
        if self.nodes.running and contexts() != self._contexts[self.nodes.running[-1]]:
            self._unsaid(OWN_CONTEXT)

    def _notice_changes(self) -> None:
        changed = self._kept.changed()
        if changed:
            self.changed.add(changed)
            self._unsaid(f"changes what is in {changed} as it runs")

    def _unsaid(self, what: str) -> None:
        for i in self.nodes.running[-1:]:
            self.calls[i].unsaid = self.calls[i].unsaid or what

    def _torch_call(self, func: Any, args: Any, kwargs: Any) -> Any:
        if func is torch._C._set_grad_enabled:
            self._unsaid("switches the recording of gradients on or off")
        if asks_size(func):
            return self._questions.size(func, args, kwargs)
        kind, target = "call_function", func
        name = getattr(func, "__name__", "")
        if name == "new" and len(args) > 1 and isinstance(args[1], torch.Size):
            args = (args[0], *args[1])  # it would take a tuple for data
        if name == "__len__":
            return self._questions.length(func, args)
        if name == "__set__":  # of ``.data``
            self.nodes.given_data.add(id(args[0]))
        if name in ("numel", "nelement"):
            return self._questions.numel(args[0] if args else kwargs["input"])
        if name == "item" and self.nodes.number(args[0]) is not args[0]:
            return self.nodes.number(args[0])
        if name in READ_PAST_SIZES:
            self._unsaid(f"goes by the {name} of a tensor")
        if name == "__get__":
            return self._record_property(func, args)
        if name in ("__getitem__", "__setitem__"):
            args = (args[0], _index_of_tensors(args[1]), *args[2:])
        if name == "__getitem__":
            target = operator.getitem
        elif getattr(torch.Tensor, name, None) is func and not name.startswith("__"):
            kind, target = "call_method", name
        elif func in OPERATORS:  # which go by the name of what they wrap
            kind, target = "call_method", OPERATORS[func]
        pattern = for_function(func)
        if pattern is not None and pattern.kind == "unseen":
            return func(*args, **kwargs)
        if pattern is None and is_python_of_torch(func):
            self._inside_torch = False  # what it asks of sizes has to hold at new ones, too
            with self:
                return entered(func)(*args, **kwargs)
        value = self._record(kind, target, func, args, kwargs, known=pattern is not None)
        self._follow_numbers(name, args, value)
        return value

    def _follow_numbers(self, name: str, args: Any, value: Any) -> None:
        """Sizes that a tensor holds: ``torch.tensor([width])[0]``."""
        if name in ("tensor", "as_tensor"):
            self.nodes.holds(value, args[0] if args else None)
        elif name == "__getitem__":
            held, index = self.nodes.numbers(args[0]), args[1]
            places = index if isinstance(index, tuple) else (index,)
            if held is not None and all(type(place) in (int, sizes.LiteralInt) for place in places):
                self.nodes.holds(value, reduce(operator.getitem, places, held))

    def _record_property(self, func: Any, args: Any) -> Any:
        value = func(*args)
        if func.__self__.__name__ in READ_PAST_SIZES:
            self._unsaid(f"goes by the {func.__self__.__name__} of a tensor")
        if isinstance(value, TOLD):
            self.nodes.tells(args[0], func.__self__.__name__, value)
        if not isinstance(value, torch.Tensor) or func.__self__.__name__ in ("grad", "_grad"):
            return value
        arguments = (self.nodes.tensor(args[0]), func.__self__.__name__)
        node = self.nodes.add(self.nodes.graph.call_function(getattr, arguments), value)
        node.meta["where"] = where()
        self.nodes.learn(value, node, ())
        return value

    def _record(
        self, kind: str, target: Any, run: Callable, args: Any, kwargs: Any,
        *, known: bool = False, inside: Inside | None = None,
    ) -> Any:  # fmt: skip
        """Run one call and write it as a node; without a pattern, with the aten ops beneath it."""
        self._notice_contexts()
        setitem = op_name(target) == "setitem"
        if setitem:
            target, known = set_item, for_function(set_item) is not None
        before = [
            (t, t._version) for t in tree.tensors((*args, *kwargs.values())) if not t.is_inference()
        ]
        given: list[float] = []
        self.nodes.given = given
        inputs = (self.nodes.argument(args), self.nodes.argument(kwargs))
        if given:  # PyTorch's own Python may want Python's own
            args = tuple(map(_without_holder, args))
            kwargs = {key: _without_holder(value) for key, value in kwargs.items()}
        self._covered = []
        numbers = NumbersRead() if known and any(may_be_a_number(t) for t, _ in before) else None
        beneath = None if known else AtenRecorder(self.nodes, before, asks_more=inside is not None)
        with beneath or numbers or _NOTHING, inside or _NOTHING:
            value = run(*args, **kwargs)
        if beneath is not None and beneath.besides:
            inputs[1]["besides"] = (*inputs[1].get("besides", ()), *beneath.besides)
        if args and value is args[0] and op_name(target) in _CASTS:
            value = self._as_another(value)
        changed = [t for t, version in before if t._version != version]
        if not changed and not tree.tensors(value):
            self._questions.reads_data(target, args, [t for t, _ in before], value)
            return value
        node = self.nodes.add(self.nodes.call(kind, target, *inputs), args[0] if setitem else value)
        self._describe(node, given, numbers.read if numbers else ())
        if beneath is not None:
            self.within = dict.fromkeys(self._covered, node) | self.within
            ops = beneath.finish(value)
            if inside is None or not inside.reads_sizes:
                node.meta["aten"] = ops
            if not changed and not beneath.besides and not followed(ops):
                node.meta["pattern"] = self._probed(node, run, args, kwargs, value)
        result = args[0] if setitem else value
        self.nodes.learn(result, node, ())
        for t in changed:
            self.nodes.changed_in_place(t, node, result)
        return value

    def _as_another(self, value: Any) -> Any:
        """What a cast gives back that had nothing to do: of inputs of another type it would be
        another tensor."""
        strided = isinstance(value, torch.Tensor) and value.layout == torch.strided
        if not strided or id(value) in self.nodes.named or torch.is_grad_enabled():
            return value
        return torch.ops.aten.alias(value)

    def _describe(self, node: fx.Node, given: list[float], numbers: Any) -> None:
        """Note where and how the call was made that a node stands for."""
        frame = frame_of_model()
        node.meta["where"] = line_of(frame)
        node.meta["site"] = site_of(frame)
        node.meta["codes"] = codes_of(frame)
        node.meta["given"] = given
        if torch.is_grad_enabled():  # the model's own code has seen to it: nobody else has
            node.meta["grad"] = True
        if numbers:
            node.meta["told"] = {self.nodes.tensor(t): n for t, n in numbers}
            self.told.append(node)

    def _probed(
        self, node: fx.Node, run: Callable, args: Any, kwargs: Any, value: Any
    ) -> Pattern | None:
        """What probing says of a call, once for all calls on tensors of the same shapes."""
        target = node.target
        name = op_name(target) or getattr(target, "__name__", str(target))
        said = spec((args, kwargs))
        if _has_objects((args, kwargs), said):  # which may be others at the next call
            return probe(name, run, args, kwargs, value)
        key = ("probed", node.op, target, repr(said))
        if key not in self._probes:
            self._probes[key] = probe(name, run, args, kwargs, value)
        return self._probes[key]


def _index_of_tensors(index: Any) -> Any:
    """An index with tensors in the place of NumPy's arrays, which PyTorch takes for such."""
    if isinstance(index, np.ndarray):
        return torch.from_numpy(index)
    return tree.rebuild(index, _index_of_tensors) if isinstance(index, tuple) else index


def _without_holder(value: Any) -> Any:
    return sizes.plain(value) if isinstance(value, sizes.LITERALS) else value


def _has_objects(value: Any, said: Any) -> bool:
    """Whether anything is in a value that its spec does not tell apart."""
    if isinstance(value, dict):
        return any(_has_objects(item, said[key]) for key, item in value.items())
    if isinstance(value, (tuple, list)):
        return any(map(_has_objects, value, said))
    return said is None and value is not None


def _tensors(m: nn.Module) -> list[Any]:
    return [*m._parameters.values(), *m._buffers.values()]


class _Paused:
    """Torch calls inside are not the model's, or are covered by a leaf's node: they need not come
    by the recorder, unless the model has a mode of its own on top of it. No generator, which would
    take longer at every call."""

    __slots__ = ("_mode", "_recorder")

    def __init__(self, recorder: Recorder) -> None:
        self._recorder = recorder

    def __enter__(self) -> None:
        own = overrides._get_current_function_mode() is self._recorder
        self._mode = overrides._pop_mode() if own else None
        self._recorder._suspended = True

    def __exit__(self, *_: object) -> None:
        self._recorder._suspended = False
        if self._mode is not None:
            overrides._push_mode(self._mode)
