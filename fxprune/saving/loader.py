"""Loading a pruned model: the original, freshly built, becomes it.

What a file says is checked before anything is made: every size against the model's own, every
attribute against the one it replaces. Where a forward has to be written anew, the model is recorded
again and the forward written from that; no code comes from the file.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn

from ..code import Borrowed, rewritten_class
from ..errors import ModelError
from ..modules.inspecting import dotted, modules_of, read_attribute, shape_of, tensors_of
from ..modules.running import on_cpu
from ..modules.usable import check_bare
from ..parametrized.assigning import assign
from ..parametrized.mask import is_masked, parametrizations, put_on
from ..parametrized.weight_norm import hooked_weights, parametrized, stored_names
from ..records import container
from ..records.chosen import Chosen, main_dtype
from ..records.container import Container
from ..records.history import STEPS, Step, as_texts, first_difference, steps
from ..records.indices import Malformed
from ..records.places import names_of, places
from ..relating.fold import Folds
from ..rewriting.rewrite import Journal, apply_with_journal
from ..rules import registry
from ..rules.pattern_types import Pattern
from .fitting import Description, Fitting, described
from .restoring import restore
from .saver import MASK, full


@on_cpu()
def load(
    model: nn.Module,
    path: str | os.PathLike[str],
    *,
    example_input: Any = None,
    patterns: Iterable[Pattern] = (),
) -> nn.Module:
    """Make ``model`` the pruned model that :func:`fxprune.save` has written.

    Nothing in the file is executed. Where pruning had to write a forward anew, ``model`` runs once,
    to be recorded as it was then.

    Args:
        model: the original, built as before pruning, on any device; its weights do not matter, and
            without such a run it may be on the meta device. It becomes the pruned model, with the
            types of the file and its own flags; an exception leaves it as it was.
        path: the file.
        example_input: what to run ``model`` on; by default an input like that of then, with random
            numbers in it.
        patterns: those that the plan was made with (:func:`fxprune.plan`).

    Returns:
        ``model``.

    Raises:
        FileError: the file is damaged, cut off, or none of :func:`fxprune.save`.
        PlanError: it is of another model; the message names the first tensor that differs.
    """
    if not isinstance(model, nn.Module):
        raise ModelError(
            f"model is {model!r}, not a torch.nn.Module; load takes the original, freshly built"
        )
    check_bare(model)
    if is_masked(model) or steps(model):
        raise ModelError(
            f"this {type(model).__name__} is pruned or masked already; load takes the original, "
            "freshly built"
        )
    with (
        container.speaking_of(path),
        registry.scope(*registry.as_patterns(patterns), override=True),
        container.reading(path, len(places(model))) as file,
    ):
        Loading(model, file, described(file)).run(example_input)
    return model


class Loading(Fitting):
    """The model becomes that of the file, or stays as it was."""

    def __init__(self, model: nn.Module, file: Container, about: Description) -> None:
        super().__init__(model, file, about)
        self.journals: list[Journal] = []

    def run(self, example_input: Any) -> None:
        self.check()
        rerun = any(step.code for step in self.steps)
        if rerun and any(place.tensor.is_meta for place in self.places.values()):
            raise self.misfit(
                "pruning had to write a forward anew, for which the model has to run once; build "
                "it on a device other than meta"
            )
        self.file.check()
        try:
            with torch.no_grad():
                for step in self.steps:
                    self._take(step, rerun, example_input)
                self._install()
        except BaseException:
            for journal in reversed(self.journals):
                journal.rollback()
            raise
        self._finish()

    def _journal(self) -> Journal:
        self.journals.append(Journal())
        return self.journals[-1]

    # -- steps ----------------------------------------------------------------------------------

    def _take(self, step: Step, rerun: bool, example_input: Any) -> None:
        part = self.modules[step.path]
        journal = self._journal()
        if step.code:
            self._again(part, step, journal, example_input)
            return
        for name, value in step.attributes.items():
            journal.attribute(*self.attribute(part, step, name, value))
        for path in step.lent:
            module = part.get_submodule(path)
            pattern = registry.for_module(module)
            if pattern is None or pattern.forward is None:
                raise self.misfit(
                    f"no pattern has a forward for {full(step, path)}; pass those that the plan "
                    "was made with as patterns="
                )
            journal.cls(module, rewritten_class(type(module), Borrowed(pattern.forward)))
        if rerun:
            self._make_biases(part, step, journal)
            self._shrink(part, step, journal)

    def _again(self, part: nn.Module, step: Step, journal: Journal, example_input: Any) -> None:
        """Plan and apply once more, for the forwards that have to be written."""
        if step.run is None:
            raise Malformed("it does not say how a forward was written")
        chosen = Chosen.from_json(step.run)
        chosen.check(part)
        if chosen.dtype is not None:
            main = getattr(torch, main_dtype(part), None)
            for tensor in {id(t): t for t in tensors_of(part).values()}.values():
                if tensor.dtype == main != chosen.dtype:
                    journal.data(tensor, tensor.to(chosen.dtype))
        plan = restore(part, chosen, example_input, folding=False)
        _, made = apply_with_journal(plan, part, inplace=True, folds=Folds())
        self.journals.append(made)
        self._make_biases(part, step, self._journal())
        found = steps(part)[-1]
        for what in ("kept", "resized", "attributes", "lent", "code"):
            mine, theirs = getattr(found, what), getattr(step, what)
            if mine != theirs:
                raise self.misfit(
                    f"recorded again, its {what} differ from those of then, first in "
                    f"{first_difference(mine, theirs)}; pass the example input of then as "
                    "example_input="
                )

    def _make_biases(self, part: nn.Module, step: Step, journal: Journal) -> None:
        """Those of a step, for later ones: they prune them, too."""
        for name, size in step.biases.items():
            space, key = self.slot(full(step, name))
            like = next(part.get_submodule(name.rpartition(".")[0]).parameters())
            journal.item(space, key, nn.Parameter(like.new_zeros(size), like.requires_grad))

    def _shrink(self, part: nn.Module, step: Step, journal: Journal) -> None:
        """Take the slices that were kept, for the model is to run."""
        with parametrized(part):
            self._shrink_weights(part, step, journal)

    def _shrink_weights(self, part: nn.Module, step: Step, journal: Journal) -> None:
        for name, dims in step.tensors().items():
            old = read_attribute(part, name).detach()
            new = old
            for dim, kept in dims.items():
                new = _taken(new, dim, kept.to(old.device))
            path, _, key = name.rpartition(".")
            module = part.get_submodule(path)
            if key not in parametrizations(module):
                journal.data(read_attribute(part, name), new)
                continue
            for original in tensors_of(parametrizations(module)[key]).values():
                journal.data(original, original.data)  # right_inverse writes into them
            assign(parametrizations(module)[key], new)
        beneath = {
            dotted(path, name) for path, module in modules_of(part).items()
            for key, chain in parametrizations(module).items() for name in stored_names(chain, key)
        }  # fmt: skip
        for name in step.resized:
            if name not in beneath:
                raise self.misfit(f"{name} is made of others, and the model cannot run on it")

    # -- the end --------------------------------------------------------------------------------

    def _install(self) -> None:
        """The tensors of the file in their places."""
        journal = self._journal()
        self._install_tensors(journal)
        self._change_types(journal)
        for module in self.model.modules():
            for key, weight in hooked_weights(module).items():
                journal.attribute(module, key, weight)
        self._check_computed()
        for module in self.model.modules():
            if STEPS in vars(module):
                journal.drop(vars(module), STEPS)
        for path, several in self.about.steps.items():
            journal.attribute(self.modules[path], STEPS, as_texts(several))

    def _install_tensors(self, journal: Journal) -> None:
        device = next((p.tensor.device for p in self.places.values()), torch.device("cpu"))
        here = {frozenset(names) for names in names_of(self.places)}
        for first, names in self.names.items():
            held = [self.places[name] for name in names if name in self.places]
            if not held:
                space, key = self.new[first]
                beside = next((p for p in space.values() if p is not None), None)
                new = self._tensor(first, device if beside is None else beside.device)
                grad = beside is None or beside.requires_grad
                journal.item(space, key, nn.Parameter(new, requires_grad=grad))
                continue
            old = held[0].tensor
            new = self._tensor(first, torch.device("cpu") if old.is_meta else old.device)
            if frozenset(names) in here and not old.is_meta:
                journal.data(old, new)
                continue
            if isinstance(old, nn.Parameter):
                new = nn.Parameter(new, requires_grad=old.requires_grad)
            for place in held:
                journal.item(place.space, place.key, new)

    def _change_types(self, journal: Journal) -> None:
        """Of buffers that the file does not hold."""
        for name, kind in self.about.others.items():
            dtype = getattr(torch, kind, None)
            buffer = self.places[name].tensor if name in self.places else None
            if buffer is not None and dtype != buffer.dtype:
                if not isinstance(dtype, torch.dtype) or not dtype.is_floating_point:
                    raise self.misfit(f"{name} is of type {kind[:40]}")
                journal.data(buffer, buffer.to(dtype))

    def _check_computed(self) -> None:
        """What parametrizations make of the tensors of the file."""
        for name, shape in self.computed.items():
            try:
                made = shape_of(self.model, name)
            except Exception as error:  # whatever a parametrization raises
                raise self.misfit(f"{name} cannot be computed: {error}") from error
            if made != shape:
                raise self.misfit(f"{name} comes out as {made}, and has to be {shape}")

    def _tensor(self, name: str, device: torch.device) -> Tensor:
        tensor = self.file.tensor(name)
        form = torch.contiguous_format
        if name in self.about.channels_last:
            form = torch.channels_last if tensor.dim() == 4 else torch.channels_last_3d
        return tensor.clone(memory_format=form).to(device)

    def _finish(self) -> None:
        """What cannot fail, and could not be taken back."""
        for module in self.modules.values():
            pattern = registry.for_module(module)
            if pattern is not None and pattern.refresh is not None:
                pattern.refresh(module)
        for name in self.about.masks:
            path, _, key = name.rpartition(".")
            keep = self.file.tensor(name + MASK).clone()
            put_on(self.modules[path], key, keep.to(getattr(self.modules[path], key).device))


def _taken(tensor: Tensor, dim: int, kept: Tensor) -> Tensor:
    """Slices of a tensor along ``dim``, in each row of it (the groups of a convolution) others."""
    if kept.dim() == 1:
        return tensor.index_select(dim, kept)
    rows = tensor.unflatten(0, (len(kept), -1))
    shape = [len(kept)] + [1] * (rows.dim() - 1)
    shape[dim + 1] = kept.shape[1]
    index = kept.reshape(shape).expand([kept.shape[1] if d == dim + 1 else n
                                        for d, n in enumerate(rows.shape)])  # fmt: skip
    return rows.gather(dim + 1, index).flatten(0, 1)
