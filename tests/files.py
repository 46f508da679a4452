"""The folder of the checkout, and files of JSON lines as tests write and read them."""

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]


def write_rows(path: Path, rows: Iterable[Any]) -> str:
    """Write a row in each line; returns the path as a setting."""
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return str(path)


def read_rows(path: Path) -> list[Any]:
    """The rows of a file."""
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def metrics_of(folder: Path) -> list[dict[str, float]]:
    """Every line of a run's metrics."""
    return read_rows(folder / "metrics.jsonl")
