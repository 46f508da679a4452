"""A small run in each process of a launch, for the programs that need no model."""

from pathlib import Path
from typing import Any

from torch import nn

from align.sft import SFTConfig
from align.training.run import Run
from align.training.start import build_engine


def small_run(folder: Path, module: nn.Module, updates: int, **settings: Any) -> tuple[Run, Any]:
    """A run in a folder, and what trains `module` there for so many updates."""
    run = Run(SFTConfig(output_dir=str(folder), dtype="float32", report_to=["none"], **settings), "sft")
    return run, build_engine(run, module, updates)
