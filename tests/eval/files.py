"""What an evaluation stored and measured, by name."""

from collections.abc import Iterable
from pathlib import Path
from typing import Any

from tests.files import read_rows


def stored_rows(path: Path) -> dict[str, dict[str, Any]]:
    """The rows of a file of results by their items; the last of an item counts."""
    return {row["item"]: row for row in read_rows(path) if "item" in row}


def values(measurements: Iterable[Any]) -> dict[str, float | None]:
    """The values of measurements by their names."""
    return {measurement.name: measurement.value for measurement in measurements}
