"""What a plan may cost: parameters, multiply-accumulates or seconds, asked for and reached."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from ..errors import SettingError
from ..modules.given import is_number, is_whole
from .timing import LatencyTable

CLOSE = 0.01  # relative distance from what is asked for that is as good as there
MEASURES = ("params", "macs", "latency")
_UNITS = {"s": 1.0, "ms": 1e-3, "us": 1e-6, "µs": 1e-6, "ns": 1e-9}


@dataclass(frozen=True)
class Target:
    """What is to be left of a model, instead of a sparsity: one of three.

    Args:
        params: numbers that the parameters hold: a fraction of the original's in (0, 1), or how
            many, as an integer.
        macs: multiply-accumulates of one run on the example input, batch included, as
            :mod:`torch.utils.flop_counter` counts them: a fraction in (0, 1), or how many.
        latency: seconds of one run on the example input, on the model's device: a fraction in
            (0, 1), or a time with its unit (``"2ms"``, ``"350us"``, ``"1.5s"``). It is predicted
            from the times of single layers (:class:`fxprune.LatencyTable`).
        table: where layers' times come from and are kept; by default a new
            :class:`fxprune.LatencyTable`.

    Raises:
        SettingError: none or several are given, or a number that means nothing.
    """

    params: float | int | None = None
    macs: float | int | None = None
    latency: float | str | None = None
    table: LatencyTable | None = None

    def __post_init__(self) -> None:
        given = [name for name in MEASURES if getattr(self, name) is not None]
        if len(given) != 1:
            raise SettingError(
                f"a Target is one of params=, macs= and latency=, not {' and '.join(given) or None}"
            )
        if self.table is not None and self.measure != "latency":
            raise SettingError("table= is for Target(latency=…) only")
        if self.table is not None and not isinstance(self.table, LatencyTable):
            raise SettingError(f"table={self.table!r} is no fxprune.LatencyTable")
        self.goal(1.0)  # raises where it means nothing

    @property
    def measure(self) -> str:
        """``"params"``, ``"macs"`` or ``"latency"``."""
        return next(name for name in MEASURES if getattr(self, name) is not None)

    def goal(self, original: float) -> float:
        """What may be left of ``original``."""
        value = getattr(self, self.measure)
        if self.measure == "latency" and isinstance(value, str):
            found = re.fullmatch(r"\s*([0-9.]+(?:e-?[0-9]+)?)\s*(s|ms|us|µs|ns)\s*", value)
            try:
                seconds = float(found[1]) * _UNITS[found[2]] if found else 0.0
            except ValueError:
                seconds = 0.0
            if seconds > 0:
                return seconds
        elif is_number(value):
            if 0 < float(value) < 1:
                return float(value) * original
            absolute = self.measure == "macs" or is_whole(value)
            if self.measure != "latency" and absolute and 1 < float(value) < float("inf"):
                return float(value)
        whole = {"params": "an integer above 1", "macs": "a number above 1",
                 "latency": "a time with its unit, such as '2ms'"}[self.measure]  # fmt: skip
        raise SettingError(
            f"{self.measure}={value!r} is neither a fraction in (0, 1) of the original's nor "
            f"{whole}"
        )

    def towards(self, original: float, share: float) -> Target:
        """A share of the way from ``original`` to this target."""
        left = original - (original - self.goal(original)) * share
        if self.measure == "latency":
            return replace(self, latency=f"{left}s")
        if self.measure == "macs":
            return replace(self, macs=max(2.0, left))
        return replace(self, params=max(2, round(left)))

    def __repr__(self) -> str:
        return f"Target({self.measure}={getattr(self, self.measure)!r})"


@dataclass(frozen=True)
class Reached:
    """What a plan with a target comes to.

    Attributes:
        measure: ``"params"``, ``"macs"`` or ``"latency"`` (seconds).
        original: of the model as it is.
        asked: what the target comes to.
        got: what the plan leaves; a latency is predicted.
        least: what would be left if every group lost all that it may.
    """

    measure: str
    original: float
    asked: float
    got: float
    least: float

    @property
    def error(self) -> float:
        """How far off it is, relative to what was asked for."""
        return self.got / self.asked - 1 if self.asked else 0.0

    def __str__(self) -> str:
        predicted = " (predicted)" * (self.measure == "latency")
        return (
            f"target: {self.measure} asked {self._show(self.asked)}, got {self._show(self.got)}"
            f"{predicted}, of {show(self.measure, self.original)}"
        )

    def _show(self, value: float) -> str:
        return f"{show(self.measure, value)} ({value / max(self.original, 1e-30):.1%})"


def show(measure: str, value: float) -> str:
    """With its unit."""
    return f"{value * 1e3:.4g} ms" if measure == "latency" else f"{value:,.0f}"


Measure = Callable[[Any], float]  # of an array that says of each unit class whether it stays
