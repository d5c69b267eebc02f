"""The flag that tells a call whether the model trains: off while recording, read when it runs."""

from __future__ import annotations

import inspect

from torch import fx, nn

from .near import names_near


def may_read_mode(module: nn.Module) -> bool:
    """Whether code of a module may ask whether it trains: what does not name the flag cannot."""
    return "training" in names_near(module)


def training_argument(node: fx.Node) -> int | str | None:
    """Where a call was told that the model does not train: a position, a keyword, or None."""
    if node.op != "call_function" or not inspect.isfunction(node.target):
        return None
    # Its own parameters: what a wrapper wraps may be a builtin, which has no signature.
    code = node.target.__code__
    names = code.co_varnames[: code.co_argcount + code.co_kwonlyargcount]
    if "training" not in names:
        return None
    if node.kwargs.get("training") is False:
        return "training"
    at = names.index("training")
    return at if at < len(node.args) and node.args[at] is False else None


def read_training(node: fx.Node, where: int | str) -> None:
    """Have ``node`` take ``self.training`` there."""
    with node.graph.inserting_before(node):
        training = node.graph.create_node("get_attr", "training")
    if isinstance(where, int):
        node.update_arg(where, training)
    else:
        node.update_kwarg(where, training)
