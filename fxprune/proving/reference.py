"""What the pruned model has to compute, got from the masked model.

Where a call counts channels (a layer norm over them, a mean), no mask can make the full-width call
equal the narrow one. There the reference is the masked model with these calls seeing the kept
channels only: the model itself, where they are all calls of modules, else its trace.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, fx, nn

from ..masking.plan_masks import mask
from ..modules import tree
from ..modules.inspecting import read_attribute
from ..modules.running import bind_inputs, evaluating, outputs, run_node
from ..rules.call import filled_in, tensor_nodes
from ..rules.channels import Channels


def reference(plan: Any, model: nn.Module, small: nn.Module, example_input: Any) -> list[Tensor]:
    """Outputs of the masked model, with calls that count channels counting the kept ones.

    Args:
        small: the pruned model, whose narrow norms these calls run.
    """
    masked = mask(plan, model, shared=True)
    if not plan.approximate:
        return outputs(masked, example_input, plan.settings.outputs)
    counting = Counting(plan, model, small)
    if all(node.op == "call_module" for node in counting.nodes):
        counting.install(masked)
        return outputs(masked, example_input, plan.settings.outputs)
    args, kwargs = bind_inputs(example_input)
    with evaluating(masked), torch.no_grad():
        result = KeptOnly(plan, masked, counting).run(*args, *kwargs.values())
        return [t.detach().clone() for t in tree.tensors(result)]


class Counting:
    """The calls that count channels of which some go, run on the kept ones."""

    def __init__(self, plan: Any, model: nn.Module, small: nn.Module) -> None:
        self._replay = plan._replay
        found = {
            note.node for note in plan._relations.approximate
            if bool((~self._replay.kept(note.units)).any())
        }  # fmt: skip
        self.nodes = [node for node in plan._trace.graph.nodes if node in found]
        self._small = small
        self._constants = plan.constants(model)

    def install(self, masked: nn.Module) -> None:
        """Have the modules of ``masked`` run so. The k-th call of one is its k-th in the trace."""
        by_path: dict[str, list[fx.Node]] = {}
        for node in self.nodes:
            by_path.setdefault(str(node.target), []).append(node)
        for path, nodes in by_path.items():
            module = masked.get_submodule(path)
            vars(module)["forward"] = self._forward(nodes)

    def _forward(self, nodes: list[fx.Node]) -> Callable[..., Any]:
        calls = iter(nodes)

        def forward(*args: Any, **kwargs: Any) -> Any:
            node = next(calls, nodes[-1])
            return self.run(node, list(tree.tensors((args, kwargs))))

        return forward

    def run(self, node: fx.Node, tensors: Sequence[Tensor]) -> Any:
        """The call on the kept channels of its ``tensors``, in a result of full width."""
        narrow = iter(
            [self._narrow(n, t) for n, t in zip(tensor_nodes(node), tensors, strict=True)]
        )

        args, kwargs = (filled_in(v, narrow) for v in self._replay.calls[node])
        module = self._small.get_submodule(str(node.target)) if node.op == "call_module" else None
        result = run_node(node, module, args, kwargs)
        said, new = self._constants.at(node), self._replay.values[node]
        if isinstance(result, Tensor):
            return self._widen(result, new, *next(said))
        return tuple(self._widen(r, n, *s) for r, n, s in zip(result, new, said, strict=True))

    def _narrow(self, node: fx.Node, value: Tensor) -> Tensor:
        """Kept slices of an argument."""
        old, new = self._constants.values[node], self._replay.values[node]
        if not isinstance(old, Channels):  # a parameter: take the pruned model's own
            return read_attribute(self._small, str(node.target))
        for dim, order in self._replay.positions_kept(old, new):
            value = _laid_like(value.index_select(dim, order.to(value.device)), value)
        return value

    def _widen(
        self, result: Tensor, new: Channels, full: Channels, said: Sequence[Tensor]
    ) -> Tensor:
        """The narrow result in a full-width tensor; removed slices hold their constant."""
        for axis, constant in zip(full.axes, said, strict=True):
            if len(axis.dims) != 1:
                continue
            (dim,) = axis.dims
            kept = self._replay.kept(axis.units)
            if bool(kept.all()):
                continue
            shape = [1] * result.dim()
            shape[dim] = len(kept)
            wide = torch.nan_to_num(constant).to(result).reshape(shape)
            wide = wide.expand([len(kept) if d == dim else n for d, n in enumerate(result.shape)])
            positions = dict(self._replay.positions_kept(full, new))[dim]
            result = _laid_like(wide, result).index_copy_(dim, positions.to(result.device), result)
        return result


def _laid_like(value: Tensor, other: Tensor) -> Tensor:
    """A copy whose dimensions lie in memory in the order of those of ``other``: what calls return
    lies as what they take, and code behind may ``view`` it only so."""
    order = sorted(range(other.dim()), key=other.stride, reverse=True)
    back = sorted(range(other.dim()), key=order.__getitem__)
    return value.permute(order).clone(memory_format=torch.contiguous_format).permute(back)


class KeptOnly(fx.Interpreter):
    """Runs the trace with a masked model's tensors; counting calls see kept channels only."""

    def __init__(self, plan: Any, masked: nn.Module, counting: Counting) -> None:
        super().__init__(plan._trace.on(masked).graph_module())
        self._counting = counting
        self._nodes = set(counting.nodes)

    def run_node(self, n: fx.Node) -> Any:
        with torch.set_grad_enabled(n.meta.get("grad", False)):  # which torch.autograd.grad needs
            if n not in self._nodes:
                return super().run_node(n)
            return self._counting.run(n, [self.env[node] for node in tensor_nodes(n)])
