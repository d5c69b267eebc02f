"""Seconds that single layers take on a device, measured once and kept on disk."""

from __future__ import annotations

import hashlib
import json
import math
import os
import platform
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn

from ..benchmarking import seconds_of
from ..errors import SettingError, warn
from ..modules.given import check_path

Timer = Callable[[nn.Module, tuple[Any, ...], dict[str, Any]], float]


class LatencyTable:
    """Seconds that layers take, measured where they are not known, and kept on disk.

    There is a file for each device and version of PyTorch, in ``~/.cache/fxprune`` or where the
    environment variable ``FXPRUNE_CACHE`` says. A time holds for a layer of a type, with its
    settings, widths, input shapes, dtypes and memory formats, and a number of CPU threads.

    Args:
        path: a folder for the files instead.
        timer: ``timer(module, args, kwargs) -> seconds`` of one call, instead of the clock: for a
            device that PyTorch does not run on. Its times are not kept on disk but in ``path``,
            if that is given.
    """

    def __init__(self, path: str | Path | None = None, *, timer: Timer | None = None) -> None:
        if path is not None:
            check_path(path)
        if timer is not None and not callable(timer):
            raise SettingError(f"timer={timer!r} is no function of a module and its inputs")
        self.timer = timer
        self.folder = None
        if path is not None or timer is None:
            default = os.environ.get("FXPRUNE_CACHE") or Path.home() / ".cache" / "fxprune"
            self.folder = Path(path if path is not None else default).expanduser()
        self.times: dict[str, float] = {}
        self.measured = 0  # how many were not known
        self._read: set[Path] = set()

    def __repr__(self) -> str:
        return f"LatencyTable({str(self.folder or '')!r}, {len(self.times)} layers)"

    def time(self, key: str, device: torch.device, make: Callable[[], Any]) -> float:
        """Of the layer that ``key`` names; ``make`` gives (module, args, kwargs)."""
        self.load(device)
        if key not in self.times:
            module, args, kwargs = make()
            with torch.no_grad():
                found = (self.timer or seconds_of)(module, args, kwargs)
            if not (isinstance(found, float | int) and math.isfinite(found) and found >= 0):
                raise SettingError(f"timer returned {found!r}, which is no number of seconds")
            self.times[key] = float(found)
            self.measured += 1
        return self.times[key]

    def file(self, device: torch.device) -> Path | None:
        if self.folder is None:
            return None
        name = torch.cuda.get_device_name(device) if device.type == "cuda" else _processor()
        words = f"{name} {device.type} torch {torch.__version__}"
        short = "".join(c if c.isalnum() or c in ".+" else "-" for c in words)[:80]
        return self.folder / f"{short}-{hashlib.sha1(words.encode()).hexdigest()[:8]}.json"

    def load(self, device: torch.device) -> None:
        """What is on disk, once."""
        file = self.file(device)
        if file is not None and file not in self._read:
            self._read.add(file)
            self.times = _read(file) | self.times

    def save(self, device: torch.device) -> None:
        """Write the file, at once as a whole."""
        file = self.file(device)
        if file is None or not self.measured:
            return
        try:
            file.parent.mkdir(parents=True, exist_ok=True)
            self.times = _read(file, tell=False) | self.times  # another process may write, too
            with tempfile.NamedTemporaryFile("w", dir=file.parent, delete=False) as new:
                json.dump(self.times, new, indent=0)
            os.replace(new.name, file)
        except OSError as error:
            warn(f"{file} cannot be written ({error}): layers will be measured again next time")


def _read(file: Path, *, tell: bool = True) -> dict[str, float]:
    """Nothing from a file that cannot be read: what was there is measured anew."""
    try:
        found = json.loads(file.read_text())
        times = {str(key): float(value) for key, value in found.items()}
        if not all(math.isfinite(t) and t >= 0 for t in times.values()):
            raise ValueError("a time is no number of seconds")
    except FileNotFoundError:
        return {}
    except (OSError, ValueError, TypeError, AttributeError) as error:
        if tell:
            warn(f"{file} cannot be read ({error}): its layers are measured anew")
        return {}
    return times


def _processor() -> str:
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()
