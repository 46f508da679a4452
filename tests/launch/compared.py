"""What several processes trained beside what one trained: the largest differences of figures and of saved weights."""

import math
from pathlib import Path
from typing import NamedTuple

from safetensors.torch import load_file

from tests.files import read_rows

CLOCKS = ("seconds", "time/", "speed/", "memory/")
"""Metrics that name a time or memory, not a number."""
COUNTS = ("tokens/", "flops")


class Apart(NamedTuple):
    """The largest difference of each kind, absolute or, of numbers above 1, relative, and where it is."""

    figure: float
    of_figure: str
    weight: float
    of_weight: str
    updates: int
    """Rows of figures that were compared."""

    @property
    def largest(self) -> float:
        """Of both kinds."""
        return max(self.figure, self.weight)


def metrics(folder: Path) -> list[dict[str, float]]:
    """The metrics of a run, without those that tell the time."""
    rows = read_rows(folder / "metrics.jsonl")
    return [{key: value for key, value in row.items() if not key.startswith(CLOCKS)} for row in rows]


def _of_first_order(name: str, value: float) -> float:
    """A figure in the order of the values that it comes from.

    1 - explained variance is a ratio of squares, whose relative error is twice that of the values: its root is compared.
    """
    return math.sqrt(max(0.0, 1 - value)) if name.endswith("explained_variance") else value


def compare(one: Path, several: Path) -> Apart:
    """Compare two runs of the same settings.

    Args:
        one: a run's folder.
        several: that of the run which several processes made.

    Raises:
        ValueError: where the runs have other updates, figures or weights, or counted other tokens.
    """
    figure, weight = (0.0, ""), (0.0, "")
    rows, twins = metrics(one), metrics(several)
    if [row.keys() for row in rows] != [row.keys() for row in twins]:
        raise ValueError("other updates or figures")
    for row, twin in zip(rows, twins, strict=True):
        for name, value in row.items():
            if name.startswith(COUNTS) and value != twin[name]:
                raise ValueError(f"update {row['update']:.0f}: {name} is {twin[name]}, not {value}: rows lost or read twice")
            if math.isnan(twin[name]) or math.isnan(value):
                raise ValueError(f"update {row['update']:.0f}: {name} is {twin[name]}, not {value}")
            ours, theirs = _of_first_order(name, value), _of_first_order(name, twin[name])
            size = max(1.0, abs(ours), abs(theirs))
            figure = max(figure, (abs(ours - theirs) / size, f"update {row['update']:.0f}: {name}"))
    (path,) = (one / "model").glob("*model.safetensors")
    ours, theirs = load_file(path), load_file(several / "model" / path.name)
    if {name: value.shape for name, value in ours.items()} != {name: value.shape for name, value in theirs.items()}:
        raise ValueError("the saved model has other weights")
    for name, value in ours.items():
        if not theirs[name].isfinite().all():
            raise ValueError(f"the saved '{name}' holds NaN or Inf")
        weight = max(weight, (float((value - theirs[name]).abs().max()), name))
    return Apart(*figure, *weight, len(rows))
