"""Widths that a device works well with."""

from __future__ import annotations

import torch
from torch import nn

# Bytes of a vector register: a layer whose channels fill whole ones has no rest to work off.
_REGISTERS = {"AVX512": 64, "AVX2": 32, "SVE256": 32}


def preferred(model: nn.Module) -> tuple[int, str]:
    """The number of which widths are best multiples, and why.

    On NVIDIA's tensor cores 16 bytes: 8 channels of float16 or bfloat16, 4 of float32 where it is
    multiplied as TF32 (NVIDIA, "Deep Learning Performance Documentation: Matrix Multiplication
    Background", section on tensor core requirements). On a CPU as many as a vector register holds.
    Elsewhere 1.
    """
    counts: dict[torch.dtype, int] = {}
    for p in model.parameters():
        if p.is_floating_point():
            counts[p.dtype] = counts.get(p.dtype, 0) + p.numel()
    if not counts:
        return 1, "no parameters"
    dtype = max(counts, key=counts.__getitem__)
    device = next(p.device for p in model.parameters() if p.dtype == dtype)
    word = str(dtype).removeprefix("torch.")
    if device.type == "cuda":
        return _on_gpu(dtype, device), f"{word} on {torch.cuda.get_device_name(device)}"
    if device.type == "cpu":
        capability = torch.backends.cpu.get_cpu_capability()
        width = max(1, _REGISTERS.get(capability, 1) // dtype.itemsize)
        return width, f"{word} on a CPU with {capability}"
    return 1, f"{word} on {device.type}"


def _on_gpu(dtype: torch.dtype, device: torch.device) -> int:
    major, _ = torch.cuda.get_device_capability(device)
    if dtype in (torch.float16, torch.bfloat16) and major >= 7:
        return 8
    tf32 = torch.backends.cudnn.allow_tf32 or torch.backends.cuda.matmul.allow_tf32
    return 4 if dtype == torch.float32 and major >= 8 and tf32 else 1
