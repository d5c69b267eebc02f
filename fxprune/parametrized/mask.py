"""The mask: a parametrization that holds some entries of a tensor at zero."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize

from ..errors import SettingError
from ..modules.deriving import derived
from ..modules.inspecting import parts_of
from .assigning import assign


class Mask(nn.Module):
    """Parametrization: zero where ``keep`` is False. Masked entries get no gradient."""

    keep: Tensor
    keeps_buffers = True  # no run writes to it, or need put it back
    was = ""  # "attribute" or "not persistent": what a tensor was that is a buffer beneath the mask
    order: Sequence[str] = ()  # of the module's parameters, before any of them was masked

    def __init__(self, keep: Tensor) -> None:
        super().__init__()
        self.register_buffer("keep", keep)

    def forward(self, tensor: Tensor) -> Tensor:
        return torch.where(
            self.keep, tensor, torch.zeros((), dtype=tensor.dtype, device=tensor.device)
        )

    def right_inverse(self, tensor: Tensor) -> Tensor:
        return tensor


def parametrizations(module: nn.Module) -> Any:
    """The module's parametrizations by tensor name; empty where it has none."""
    return module._modules.get("parametrizations", {})


def is_of_masks(module: nn.Module) -> bool:
    """Whether a module is the parametrizations of one tensor, and masks of ours are all of them."""
    return isinstance(module, parametrize.ParametrizationList) and all(
        isinstance(part, Mask) for part in module
    )


def unmasked(path: str) -> str:
    """``"a.parametrizations.weight"`` → ``"a.weight"``"""
    before, _, name = path.rpartition(".parametrizations.")
    return f"{before}.{name}" if before else path.removeprefix("parametrizations.")


def own_class(module: nn.Module) -> None:
    """Copies of a parametrized module share the class that holds its properties: give it its own,
    so that adding or removing one leaves the other copies alone."""
    if parametrize.is_parametrized(module):
        _made_again(module, type(module).__base__)


def _made_again(module: nn.Module, base: Any) -> None:
    """Give a module a class like its own that derives from ``base``."""
    cls = type(module)
    space = {k: v for k, v in vars(cls).items() if k not in ("__dict__", "__weakref__")}
    module.__class__ = derived(base, cls.__name__, space)


def parametrized_by(module: nn.Module, name: str, made: nn.Module) -> None:
    """Have ``made`` compute a tensor of a module. Its class does not hear of the one that PyTorch
    derives from it for that: it might ask for more than a name, or keep a list of such classes."""
    cls = type(module)
    if parametrize.is_parametrized(module):
        _register(module, name, made)
        return
    silent = classmethod(lambda cls, **given: None)
    module.__class__ = derived(cls, cls.__name__, {"__init_subclass__": silent})
    try:
        _register(module, name, made)
    except BaseException:
        module.__class__ = cls
        raise
    _made_again(module, cls)


def _register(module: nn.Module, name: str, made: nn.Module) -> None:
    """PyTorch keeps parametrizations in a ``ModuleDict``, which refuses the names of its methods;
    parameters may have them (``keys`` and ``values`` of a memory)."""
    if name in parametrizations(module) or not hasattr(nn.ModuleDict, name):
        parametrize.register_parametrization(module, name, made, unsafe=True)
        return
    chain = parametrize.ParametrizationList([made], getattr(module, name), unsafe=True)
    delattr(module, name)
    if not parametrize.is_parametrized(module):
        parametrize._inject_new_class(module)
        module.parametrizations = nn.ModuleDict()
    parametrize._inject_property(module, name)
    parametrizations(module)._modules[name] = chain


def bake(model: nn.Module, *, others: bool = False) -> None:
    """Take fxprune's own masks off, leaving what they make of their tensors (:func:`take_off`)."""
    for module in list(model.modules()):
        for name in masked_names(module):
            take_off(module, name, others=others)


def masked_names(module: nn.Module) -> list[str]:
    """Tensors of a module (not of its children) that one of our masks is on."""
    return [name for name in parametrizations(module) if masks_on(module, name)]


def masks_on(module: nn.Module, name: str) -> list[Mask]:
    """Our masks on a tensor."""
    chains = parametrizations(module)
    return [p for p in chains[name] if isinstance(p, Mask)] if name in chains else []


def beneath(module: nn.Module, name: str) -> Tensor:
    """A tensor as it is beneath our masks; where something else computes it, as it comes out."""
    chains = parametrizations(module)
    alone = name in chains and is_of_masks(chains[name])
    return chains[name].original if alone else getattr(module, name)


def take_off(module: nn.Module, name: str, *, others: bool = True) -> None:
    """Take the masks off one tensor, leaving what they make of it. ``others``: with the other
    parametrizations, if these cannot make it; else only slices that go come out wrong."""
    own_class(module)
    chain = parametrizations(module)[name]
    if is_of_masks(chain) or (others and not _can_make(module, name)):
        was, order = masks_on(module, name)[0].was, masks_on(module, name)[0].order
        parametrize.remove_parametrizations(module, name, leave_parametrized=True)
        own = module._parameters  # an optimizer's state goes by their order
        for key in [*(k for k in order if k in own), *(k for k in own if k not in order)]:
            own[key] = own.pop(key)
        if was == "attribute":
            vars(module)[name] = module._buffers.pop(name)
        elif was:
            module._non_persistent_buffers_set.add(name)
        return
    masked = getattr(module, name).detach()
    for i in reversed(range(len(chain))):
        if isinstance(chain[i], Mask):
            del chain[i]
    assign(chain, masked)


def _can_make(module: nn.Module, name: str) -> bool:
    """Whether the other parametrizations of a tensor can make what the masks leave of it: a weight
    norm divides by the norm of a row."""
    others = copy.deepcopy(parametrizations(module)[name])
    masked = getattr(module, name).detach()
    for i in reversed(range(len(others))):
        if isinstance(others[i], Mask):
            del others[i]
    with torch.no_grad():
        assign(others, masked.clone())
        return torch.allclose(others(), masked, rtol=1e-4, atol=1e-6)


def put_on(module: nn.Module, name: str, keep: Tensor) -> None:
    """Mask a tensor; one that is masked already by both masks together."""
    own_class(module)
    known = masks_on(module, name)
    if known:
        known[0].keep = known[0].keep & keep.to(known[0].keep.device)
        return
    mask = Mask(keep)
    others = [each for other in masked_names(module) for each in masks_on(module, other)]
    mask.order = others[0].order if others else list(module._parameters)
    if name in vars(module):  # PyTorch takes parameters and buffers only
        mask.was = "attribute"
        module.register_buffer(name, vars(module).pop(name).contiguous())
    elif name in module._non_persistent_buffers_set:
        mask.was = "not persistent"
    # A mask changes neither shape nor type: PyTorch need not run it to see.
    parametrized_by(module, name, mask)
    _complete_class(module)


def _complete_class(module: nn.Module) -> None:
    """What PyTorch's class for a parametrized module lacks. It refuses to be pickled: it is made
    anew on loading."""
    use_masked_weights(module)
    type(module).__reduce_ex__ = _reduce  # type: ignore[method-assign,assignment]


def _reduce(self: Any, protocol: Any) -> Any:
    base = type(self).__bases__[0]
    own = getattr(base, "__getstate__", None)  # as a class of its own may have it
    state = self.__dict__ if own in (None, getattr(object, "__getstate__", None)) else own(self)
    return _load, (base, state)


def _load(base: type, state: dict[str, Any]) -> Any:
    module: Any = object.__new__(base)
    module.__dict__.update(state)
    parametrize._inject_new_class(module)
    for name in module.parametrizations:
        parametrize._inject_property(module, name)
    _complete_class(module)
    base.__setstate__(module, state)  # type: ignore[attr-defined]
    return module


def mask_of(module: nn.Module, name: str) -> Tensor:
    """True where a tensor is not masked: bool, of its shape."""
    value = getattr(module, name, None)
    if not isinstance(value, Tensor):
        raise SettingError(f"{type(module).__name__} has no tensor {name!r}")
    keep = torch.ones(value.shape, dtype=torch.bool, device=value.device)
    for mask in masks_on(module, name):
        keep = keep & mask.keep
    return keep


def is_masked(model: nn.Module) -> bool:
    return any(isinstance(m, Mask) for m in parts_of(model))


def use_masked_weights(module: nn.Module) -> None:
    """nn.RNNBase reads a list of its weights that parametrizations do not reach."""
    if isinstance(module, nn.RNNBase) and not isinstance(
        vars(type(module)).get("_flat_weights"), property
    ):

        def get(self: Any) -> list[Any]:
            return [getattr(self, name) for name in self._flat_weights_names]

        type(module)._flat_weights = property(get, lambda self, value: None)  # type: ignore[assignment]
