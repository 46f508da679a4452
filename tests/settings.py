"""Settings of short runs."""

from pathlib import Path
from typing import Any


def run_settings(folder: Path | str | None = None, **settings: Any) -> dict[str, Any]:
    """The settings of a run in float32 without trackers: `SFTConfig(**run_settings(tmp_path / "run", batch_size=2))`.

    Args:
        folder: the run's folder; None leaves out `output_dir`.
        settings: further settings, which take precedence.
    """
    common = {"dtype": "float32", "report_to": ["none"]}
    return common | ({"output_dir": str(folder)} if folder else {}) | settings
