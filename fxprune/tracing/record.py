"""Making the run that is recorded: the model under all that listens to it, and what is said where
it does not run."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from ..errors import InputError, ModelError, PruningError
from ..modules.filled import empty_attributes, filled_since
from ..modules.running import LOCK, bind_inputs, describe, evaluating, uncollected, wanted
from ..rules.registry import python_functions
from . import caches
from .asking import asking_literals, traced_attributes, traced_builtins
from .intercepting import autograd_functions, calls_of, told, uncompiled, variables
from .old_types import recorded_types
from .recorder import Recorder
from .told import tell_apart
from .trace import Trace
from .transforms import TRANSFORMS


def record(model: nn.Module, example_input: Any, only: Sequence[str | int] | None = None) -> Trace:
    """Run ``model`` once and record it. See :func:`.as_graph.trace`.

    Args:
        only: names of the entries of its result that are its outputs; None for all.
    """
    try:
        return _recorded(model, example_input, only)
    except _Failed as failed:
        error: Any = failed.__cause__
        kind, given = type(model).__name__, describe(example_input)
        own = _own_error(model, example_input)
        if own is None:
            words = _in_a_line(error)
            raise ModelError(f"{kind} runs on {given}, but cannot be recorded: {words}") from error
        raise InputError(
            f"{kind} does not run on example_input ({given}): {_in_a_line(own)}. Pass what the "
            "model takes: a tensor, a tuple of positional arguments, or a mapping of keyword "
            "arguments."
        ) from error


def record_another(
    model: nn.Module, example_input: Any, only: Any = None, *, training: bool = False
) -> Trace | None:
    """A further run of a model, on another input or in ``training`` mode; None where it does not
    run so."""
    try:
        return _recorded(model, example_input, only, training=training)
    except (_Failed, PruningError):  # code of an earlier pruning refuses other lengths by this one
        return None


def _in_a_line(error: BaseException) -> str:
    """What an error says; of PyTorch's lists of what a call takes, that it does not take this."""
    first = str(error).partition("\n")[0].removesuffix(", but expected one of:")
    return f"{type(error).__name__}: {first.removesuffix('.')}"


class _Failed(Exception):
    """A run that was recorded ended with an error."""


def _own_error(model: nn.Module, example_input: Any) -> Exception | None:
    """What it raises where nobody records it."""
    args, kwargs = bind_inputs(example_input)
    with evaluating(model), torch.no_grad():
        try:
            model(*args, **kwargs)
        except Exception as error:  # whatever the model's own code raises
            return error
    return None


def _recorded(model: nn.Module, example_input: Any, only: Any, *, training: bool = False) -> Trace:
    recorder = Recorder(model)
    with (
        LOCK,
        torch.inference_mode(False),  # or nothing would tell of writes in place
        uncollected(),
        evaluating(model, training=training),
        traced_attributes(recorder.modules) as set_anew,
        traced_builtins(),
        asking_literals(recorder.modules) as rebound,
        recorded_types(),
        caches.passed_by(),
        torch.no_grad(),
        calls_of(nn.Module, recorder.module),
        calls_of(torch.jit.ScriptFunction, recorder.scripted),  # whose calls PyTorch does not tell
        variables(recorder.wrapped),
        uncompiled(),
        told((*python_functions(), *autograd_functions()), recorder.python_call),
        told(TRANSFORMS, recorder.transform),
    ):
        args, kwargs = bind_inputs(example_input)
        recorder.nodes.placeholders(args, kwargs)
        empty = empty_attributes(recorder.modules)
        try:
            with recorder, recorder.listening():
                output = model(*args, **kwargs)
        except PruningError:
            raise
        except Exception as error:
            raise _Failed from error
        recorder.nodes.close()
        nodes = recorder.nodes
        if only is not None:  # a new forward returns the rest, too
            recorder.calls[0].output = nodes.handed(output)
        nodes.graph.output(nodes.returned(wanted(model, output, only, training=training)))
        recorder.nodes.let_go()
        filled = filled_since(recorder.modules, empty)
        changed = recorder.changed | set_anew() | rebound()
    nodes = recorder.nodes
    tell_apart(recorder.told, nodes.written)
    return Trace(
        nodes.graph,
        model,
        recorder.calls,
        nodes.constants,
        recorder.called,
        nodes.named,
        nodes.kept_whole,
        nodes.written,
        nodes.reads_sizes,
        filled,
        recorder.within,
        changed=changed,
    )
