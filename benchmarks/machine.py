"""The machine that the numbers belong to: `python -m benchmarks.machine` prints it as JSON."""

import json
import os
import platform
import re
import time
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch

from align.runtime.distributed import cpu_flags

MATMUL = {"cpu": 2048, "cuda": 8192}
"""Rows and columns of the square matrices whose product is timed: large enough to keep every unit busy."""


def matmul_flops(dtype: torch.dtype, device: str, repeats: int = 7) -> float:
    """FLOP/s of a linear layer's product of square matrices (2 n^3 operations), from the shortest of some runs."""
    size, seconds = MATMUL[device], []
    left, right = (torch.randn(size, size, device=device).to(dtype) for _ in range(2))
    for _ in range(repeats):
        begun = time.perf_counter()
        torch.nn.functional.linear(left, right)
        if device == "cuda":
            torch.cuda.synchronize()
        seconds.append(time.perf_counter() - begun)
    return 2 * size**3 / min(seconds)


def describe() -> dict[str, Any]:
    """Processor or GPU, its measured limits, and the versions of what runs on it."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    name = torch.cuda.get_device_name() if device == "cuda" else _processor()
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return {
        "device": name,
        "cores": os.cpu_count(),
        "memory_gib": round(memory / 2**30, 1),
        "bfloat16_tflops": round(matmul_flops(torch.bfloat16, device) / 1e12, 3),
        "float32_tflops": round(matmul_flops(torch.float32, device) / 1e12, 3),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "transformers": version("transformers"),
    }


def _processor() -> str:
    """The processor's name and whether it multiplies bfloat16."""
    file = Path("/proc/cpuinfo")
    found = re.search(r"^model name\s*: (.*)", file.read_text(encoding="utf-8"), re.M) if file.exists() else None
    units = [unit for unit in ("amx_bf16", "avx512_bf16") if unit in cpu_flags()]
    return f"{found[1] if found else platform.machine()} ({', '.join(units) or 'no bfloat16 unit'})"


if __name__ == "__main__":
    print(json.dumps(describe()))
