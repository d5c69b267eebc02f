"""The one family of errors that fxprune raises on purpose.

Every message says what happened, where, and what to do next.
"""

from __future__ import annotations

import contextlib
import pathlib
import sys
import warnings

# Frames that are not the caller's: the package's, and those of what decorates its entry points.
_OWN = (f"{pathlib.Path(__file__).parent}/", contextlib.__file__)


class PruningError(Exception):
    """Base of everything fxprune raises on purpose."""


class ModelError(PruningError):
    """The model is not one that can be pruned (scripted, quantized, lazy, on several devices …)."""


class InputError(PruningError):
    """The example input does not run through the model; the model's own error is chained."""


class SettingError(PruningError, ValueError):
    """A setting has a value that means nothing: sparsity outside [0, 1), an unknown importance …"""


class PatternError(PruningError, ValueError):
    """A pattern cannot be what it says, or is not what it claims to be."""


class PlanError(PruningError):
    """The plan does not fit the model it is applied to."""


class FileError(PruningError, OSError):
    """The file cannot be read or written: missing, damaged, of another program …"""


class ProofError(PruningError):
    """The pruned model does not compute what the masked model computes."""


class PruningWarning(UserWarning):
    """Something the caller should know; pruning goes on."""


def warn(message: str) -> None:
    """A :class:`PruningWarning` at the line outside fxprune that called it."""
    frame, level = sys._getframe(1), 2
    while frame.f_back is not None and frame.f_code.co_filename.startswith(_OWN):
        frame, level = frame.f_back, level + 1
    warnings.warn(message, PruningWarning, stacklevel=level)
