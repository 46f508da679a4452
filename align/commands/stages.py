"""Running each stage of a command once."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

from align.core.settings import RunConfig


def run_unless_finished(stage: Callable[[Any], Path], config: RunConfig) -> Path:
    """Run a stage unless it has finished; returns the model's folder.

    An interrupted stage resumes from its last checkpoint.
    """
    folder = Path(config.output_dir)
    if (folder / "model").exists() and (folder / "finished").exists():
        return folder / "model"
    if (folder / "metrics.jsonl").exists():
        config.resume = True
    model = stage(config)
    (folder / "finished").touch()
    return model
