"""The lines of a run's metrics.jsonl, one for each update."""

import json
import math
from pathlib import Path

from align.core.errors import UserError


def update_of(line: str) -> float:
    """The update of a line of metrics; infinity for a line that was cut short by a kill, so that it is dropped as well."""
    try:
        return int(json.loads(line)["update"])
    except (ValueError, KeyError, TypeError):
        return math.inf


def read_metrics(folder: Path) -> list[dict[str, float]]:
    """The lines of a run's metrics.jsonl.

    Raises:
        UserError: if the file is missing or is not JSON.
    """
    path = folder / "metrics.jsonl"
    try:
        return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    except (OSError, ValueError) as error:
        raise UserError(f"{path}: not the metrics of a run ({error})") from error
