"""Files of the tests of evaluation: rows to read, and rows that an evaluation stored."""

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any


def write_rows(path: Path, rows: Iterable[Any]) -> str:
    """Write rows as JSON Lines; returns the path as settings have it."""
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return str(path)


def stored_rows(path: Path) -> dict[str, dict[str, Any]]:
    """The rows of a file of results by their items; the last of an item counts."""
    rows = map(json.loads, path.read_text(encoding="utf-8").splitlines())
    return {row["item"]: row for row in rows if "item" in row}


def values(measurements: Iterable[Any]) -> dict[str, float | None]:
    """The values of measurements by their names."""
    return {measurement.name: measurement.value for measurement in measurements}
