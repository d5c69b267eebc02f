"""Where the numbers of a benchmark come from."""

from __future__ import annotations

import os
import platform
from pathlib import Path
from typing import Any

import torch

import fxprune


def machine() -> dict[str, Any]:
    processor = platform.processor() or platform.machine()
    info = Path("/proc/cpuinfo")
    if info.exists():
        lines = [s for s in info.read_text().splitlines() if s.startswith("model name")]
        processor = lines[0].partition(":")[2].strip() if lines else processor
    return {
        "torch": torch.__version__,
        "fxprune": fxprune.__version__,
        "python": platform.python_version(),
        "system": platform.system(),
        "processor": processor,
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
    }
