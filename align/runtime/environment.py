"""Package versions and machine, for the record of a result."""

import platform
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import torch
from rich.console import Console

PACKAGES = ("align-rlhf", "torch", "transformers", "trl", "peft", "accelerate", "datasets", "deepspeed", "numpy")


def environment() -> dict[str, Any]:
    """Versions of packages and facts about the machine, which are stored with a run's results."""
    versions = {}
    for name in PACKAGES:
        try:
            versions[name] = version(name)
        except PackageNotFoundError:
            versions[name] = "not installed"
    device = torch.cuda.get_device_name() if torch.cuda.is_available() else platform.processor() or platform.machine()
    return {
        "python": platform.python_version(),
        "packages": versions,
        "system": platform.platform(),
        "device": device,
        "processors": torch.get_num_threads(),
    }


console = Console(stderr=True, soft_wrap=True)
