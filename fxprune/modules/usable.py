"""Models and inputs that cannot be pruned are told apart before anything runs."""

from __future__ import annotations

import sys
from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from ..errors import InputError, ModelError
from . import tree
from .inspecting import modules_of, named_tensors
from .running import bind_inputs


def check_bare(model: nn.Module) -> None:
    """Raise for a wrapper of a model."""
    if isinstance(model, (nn.DataParallel, nn.parallel.DistributedDataParallel)):
        raise ModelError(f"model is wrapped in {type(model).__name__}; pass model.module")
    if isinstance(model, torch._dynamo.OptimizedModule):
        raise ModelError("model is compiled; pass model._orig_mod")


def check_is_model(model: Any) -> None:
    """Raise for what is no module, but a class of these, say, or a wrapper of one."""
    if isinstance(model, type) and issubclass(model, nn.Module):
        raise ModelError(
            f"model is the class {model.__name__}; pass an instance: {model.__name__}(…)"
        )
    if not isinstance(model, nn.Module):
        raise ModelError(f"model is a {type(model).__name__}, not a torch.nn.Module")
    check_bare(model)


def check_model(model: Any, example_input: Any) -> None:
    """Raise for models that no run can be recorded of, with what to do instead."""
    check_is_model(model)
    modules = modules_of(model)
    sharding = sys.modules.get("torch.distributed.fsdp")  # its import takes seconds
    first: dict[type, tuple[str, nn.Module]] = {}  # of each class
    for path, module in modules.items():
        first.setdefault(type(module), (path, module))
    for path, module in first.values():
        where = f"{path!r}" if path else "the model"
        if sharding is not None and isinstance(module, sharding.FullyShardedDataParallel):
            raise ModelError(
                f"{where} is wrapped in {type(module).__name__}, which keeps weights in flat "
                "tensors; prune first, then wrap it"
            )
        if isinstance(module, (torch.jit.ScriptModule, torch.jit.ScriptFunction)):
            raise ModelError(f"{where} is scripted; prune the module it was scripted from")
        if "quantized" in type(module).__module__.split("."):
            raise ModelError(
                f"{where} ({type(module).__name__}) is quantized; prune first, then quantize"
            )
        if isinstance(module, torch._dynamo.OptimizedModule):
            own = ".".join(filter(None, ("model", path, "_orig_mod")))
            place = f"put {own} in its place, prune" if path else f"prune {own}"
            raise ModelError(f"{where} is compiled; {place}, then compile the result")
    tensors = list(named_tensors(modules))
    for name, tensor in tensors:
        plain = type(tensor) in (nn.Parameter, torch.Tensor)
        if not plain and nn.parameter.is_lazy(tensor):
            raise ModelError(f"{name} is lazy and has no shape yet; run the model once first")
        if tensor.is_meta:
            raise ModelError(
                f"{name} is on the meta device and has no values; load weights first (where hooks "
                "load them as the model runs, for it is offloaded, take the hooks off first)"
            )
        if not plain and isinstance(tensor, FakeTensor):
            raise ModelError(
                f"{name} is a fake tensor and has no values; make the model, and prune it, outside "
                "of the FakeTensorMode"
            )
        if tensor.is_quantized:
            raise ModelError(f"{name} is quantized; prune first, then quantize")
        if not plain and is_traceable_wrapper_subclass(tensor):
            raise ModelError(
                f"{name} is a {type(tensor).__name__}, which holds its values in tensors of its "
                "own; prune first, then quantize, shard or convert"
            )
    devices = {tensor.device for _, tensor in tensors}
    if len(devices) > 1:
        names = ", ".join(sorted(map(str, devices)))
        raise ModelError(f"the model is spread over devices ({names}); move it to one first")
    args, kwargs = bind_inputs(example_input)
    for tensor in tree.tensors((args, kwargs)):
        if devices and tensor.device not in devices:
            raise InputError(
                f"example_input is on {tensor.device}, the model on {next(iter(devices))}; "
                "move one of them"
            )
