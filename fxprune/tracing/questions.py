"""What the model's own code asks as it is recorded: sizes, comparisons of them, values of tensors.

Sizes come back as numbers that know where they are from; of what Python goes by, the call that asks
keeps a :class:`fxprune.rules.sizes.Question`.
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from dataclasses import replace
from types import FrameType
from typing import Any

import torch
from torch import fx

from ..modules.bytecode import takes_by
from ..modules.frames import (
    code_of,
    codes_of,
    frame_of_model,
    frame_that_asks,
    is_in_torchs_layer,
    line_of,
    site_of,
)
from ..rules import sizes
from ..rules.ops import op_name
from .assertions import is_check
from .nodes import Nodes
from .trace import ModuleCall

_SHAPE = torch.Tensor.shape.__get__  # type: ignore[attr-defined]
_SIZE = torch.Tensor.size
_READS_DATA = ("bool", "int", "float", "complex", "index", "item", "local_scalar_dense", "tolist",
               "numpy", "array", "dlpack", "equal", "allclose", "contains",
               "is_nonzero")  # fmt: skip


class Questions:
    def __init__(self, nodes: Nodes, calls: list[ModuleCall]) -> None:
        self._nodes, self._calls = nodes, calls
        self._taken = set[Any]()

    def ask(self, function: Callable[..., Any], operands: tuple[Any, ...], answer: Any) -> None:
        """The code of the module that runs goes by what it was told of these numbers."""
        for i in self._nodes.running[-1:]:
            question = self._question(frame_of_model(), function, operands, answer)
            self._calls[i].questions.append(question)

    def made(self, number: Any, repeats: bool = False, nth: int | None = None) -> None:
        """Code has made a number of sizes. Lists and tuples give it an item for it, or a part, and
        do not tell: nor would one that it ``repeats`` so often."""
        frame = frame_of_model()
        if frame is None or not sizes.dimensions([number]):
            return
        code, here = code_of(frame), frame.f_lasti
        for i in self._nodes.running[-1:]:
            for place in (here,) if repeats else takes_by(code, here, nth):
                once = (i, code, place, sizes.expression(number))
                if once not in self._taken:
                    self._taken.add(once)
                    question = self._question(frame, operator.getitem, (number,), None)
                    site = (code, place)
                    self._calls[i].taken.append(replace(question, site=site, asked_at=site))

    def goes_by(self, number: Any) -> None:
        """A size of which somebody makes a plain number unseen."""
        self.ask(int, (number,), int(number))

    def reads_data(self, target: Any, args: Any, given: list[torch.Tensor], value: Any) -> None:
        """A call that gives a number, a flag or nothing: what Python goes by from then on."""
        if op_name(target) in _READS_DATA:
            # What a check asked, new code need not ask.
            frame = frame_of_model()
            running = () if is_check(frame, value) else self._nodes.running
            for i in running:
                self._calls[i].reads_data = True
            for i in () if is_in_torchs_layer(frame_that_asks()) else running[-1:]:
                self._calls[i].read_in.append(self._question(frame, bool, (), value))
            for t in given:
                self._nodes.escapes(t, op_name(target))
        elif target == "type":
            self._nodes.tells(args[0], "type", value)

    def _question(
        self, frame: FrameType | None, function: Any, operands: tuple[Any, ...], answer: Any
    ) -> sizes.Question:
        return sizes.Question(
            function, operands, answer, line_of(frame), site_of(frame), site_of(frame_that_asks()),
            is_check(frame, answer), self._nodes.count, codes_of(frame),
        )  # fmt: skip

    # -- sizes ----------------------------------------------------------------------------------

    def size(self, func: Any, args: Any, kwargs: Any) -> Any:
        """``x.shape``, ``x.size()``, ``x.size(dim)``."""
        value = func(*args, **kwargs)
        node = self._sized(args[0])
        if isinstance(value, torch.Size):
            frame = frame_of_model()
            size = sizes.traced_size(node, value, frame and frame.f_code)
            for i, number in enumerate(tuple(size)):
                self.made(number, nth=i)
            return size
        dim = kwargs.get("dim", args[1] if len(args) > 1 else 0)
        number = sizes.traced(value, sizes.Dimension(node, int(dim) % args[0].dim()))
        self.made(number)
        return number

    def length(self, func: Any, args: Any) -> int:
        """``len(x)``, which Python makes a plain number."""
        value = func(*args)
        if self._nodes.running:
            self.goes_by(sizes.traced(value, sizes.Dimension(self._sized(args[0]), 0)))
        return value

    def numel(self, x: torch.Tensor) -> Any:
        return sizes.traced_size(self._sized(x), x.shape).numel()

    def _sized(self, x: torch.Tensor) -> fx.Node:
        node = self._nodes.tensor(x)
        if node.op != "get_attr":
            self._nodes.reads_sizes = True
        return node


def asks_size(func: Any) -> bool:
    return func == _SHAPE or func is _SIZE
