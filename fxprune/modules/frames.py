"""Frames of Python: which code of the model runs."""

from __future__ import annotations

import contextlib
import functools
import sys
from pathlib import Path
from types import CodeType, FrameType

import torch

REWRITTEN = "<rewritten by fxprune"  # file of a forward that an earlier pruning has written
_OURS = f"{Path(__file__).parents[1]}/"
_LAYERS = f"{Path(torch.nn.modules.__file__).parent}/"
# Nothing in a frame of these folders is the user's own code.
_LIBRARY = (
    f"{Path(torch.__file__).parent}/",
    _OURS,
    contextlib.__file__,
    "<",
)


def where() -> str:
    """File and line of the model's code that runs."""
    return line_of(frame_of_model())


def line_of(frame: FrameType | None) -> str:
    return f"{frame.f_code.co_filename}:{frame.f_lineno}" if frame is not None else ""


WHERE_RUNS_BEGIN = "_recorded"  # the function of :mod:`fxprune.tracing.record`
# Codes that run while a run is recorded in the place of others, which have the same instructions.
stand_ins: dict[int, CodeType] = {}


def code_of(frame: FrameType) -> CodeType:
    """The code that runs, as it is when nobody records it."""
    return stand_ins.get(id(frame.f_code), frame.f_code)


def site_of(frame: FrameType | None) -> tuple[CodeType, int] | None:
    """The code that runs, and the place of its instruction."""
    return None if frame is None else (code_of(frame), frame.f_lasti)


def codes_of(frame: FrameType | None) -> tuple[CodeType, ...]:
    """The model's codes that run in a frame and in those that have called it, from the innermost
    on."""
    found = []
    while frame is not None and frame.f_code.co_name != WHERE_RUNS_BEGIN:
        code = frame.f_code
        if not _is_library(code.co_filename):
            found.append(stand_ins.get(id(code), code))
        frame = frame.f_back
    return tuple(found)


def frame_of_model() -> FrameType | None:
    """The innermost frame that is neither PyTorch's nor ours."""
    return _of_model(sys._getframe(1))


def frame_that_asks() -> FrameType | None:
    """The innermost frame that is not ours; it may be PyTorch's."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and frame.f_code.co_filename.startswith(_OURS):
        frame = frame.f_back
    return frame


def caller_of(frame: FrameType) -> FrameType | None:
    """The frame of the model's code that has called this one."""
    return _of_model(frame.f_back)


def _of_model(frame: FrameType | None) -> FrameType | None:
    while frame is not None and _is_library(frame.f_code.co_filename):
        frame = frame.f_back
    return frame


def is_in_torchs_layer(frame: FrameType | None) -> bool:
    """Whether it is the code of a layer of PyTorch's, which makes the same calls in every run."""
    return frame is not None and frame.f_code.co_filename.startswith(_LAYERS)


def is_model_code(frame: FrameType) -> bool:
    return not _is_library(frame.f_code.co_filename)


@functools.lru_cache(maxsize=1024)
def _is_library(filename: str) -> bool:
    return filename.startswith(_LIBRARY) and not filename.startswith(REWRITTEN)
