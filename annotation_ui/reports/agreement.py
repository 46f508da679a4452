"""Agreement between labelers: reliability coefficients of a scale, and the similarity of two answers.

Coefficients are computed from the number of units with each combination of values. A coefficient is None if there is
nothing to compare, because no item is shared or only one value occurs.
"""

from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from itertools import permutations
from typing import Any, Literal, NamedTuple

import numpy as np
from statsmodels.stats import inter_rater

from annotation_ui.tasks import Json, Task

Level = Literal["nominal", "ordinal"]
Patterns = Mapping[tuple[Any, ...], int]
"""Sorted values of a unit -> number of units with these values."""


class Unit(NamedTuple):
    """Labelers' values for one part of an item on one scale (`Task.values`)."""

    scale: str
    level: Level
    values: Mapping[str, Any]


def units_of(task: Task, by_labeler: Mapping[str, Json]) -> list[Unit]:
    """Return the units of an item from its answers."""
    found: dict[tuple[str, Level, Any], dict[str, Any]] = {}
    for labeler, answer in by_labeler.items():
        for scale, level, unit, value in task.values(answer):
            values = found.setdefault((scale, level, unit), {})
            if value is not None:
                values[labeler] = value
    return [Unit(scale, level, values) for (scale, level, _), values in found.items()]


def pattern(unit: Unit) -> tuple[Any, ...]:
    """Return the sorted values of a unit."""
    return tuple(sorted(unit.values.values()))


def krippendorff_alpha(patterns: Patterns, level: Level) -> float | None:
    """Return Krippendorff's alpha over units with values from at least two labelers.

    See Krippendorff (2011), "Computing Krippendorff's Alpha-Reliability". Equal units are counted together.
    """
    compared = {values: units for values, units in patterns.items() if len(values) > 1 and units}
    domain = sorted({value for values in compared for value in values})
    if len(domain) < 2:
        return None
    counts = np.array([[values.count(value) for value in domain] for values in compared], dtype=float)  # [patterns, values]
    weights = np.array(list(compared.values())) / (counts.sum(axis=1) - 1)
    coincidences = np.einsum("p,pc,pk->ck", weights, counts, counts) - np.diag(weights @ counts)
    totals = coincidences.sum(axis=0)
    if level == "nominal":
        distances = 1 - np.eye(len(domain))
    else:  # number of values between two ranks, counting half of each end
        ranks = np.cumsum(totals) - totals / 2
        distances = (ranks[:, None] - ranks[None, :]) ** 2
    expected = (np.outer(totals, totals) - np.diag(totals)) / (totals.sum() - 1)
    return float(1 - (coincidences * distances).sum() / (expected * distances).sum())


def fleiss_kappa(patterns: Patterns) -> float | None:
    """Return Fleiss' kappa over units with the same number of labelers: the most frequent number above one."""
    sizes: Counter[int] = Counter()
    for values, units in patterns.items():
        if len(values) > 1 and units:
            sizes[len(values)] += units
    if not sizes:
        return None
    most_frequent = max(sizes, key=lambda size: (sizes[size], size))
    compared = {values: units for values, units in patterns.items() if len(values) == most_frequent and units}
    categories = sorted({value for values in compared for value in values})
    if len(categories) < 2:
        return None
    table = np.array([[values.count(category) for category in categories] for values in compared])
    return float(inter_rater.fleiss_kappa(np.repeat(table, list(compared.values()), axis=0)))


def agreement_sums(by_labeler: Mapping[str, Json], similarity: Callable[[Any, Any], float]) -> dict[str, tuple[float, int]]:
    """Map each labeler of an item to the sum of similarities to the other labelers' answers, and to their number."""
    sums = dict.fromkeys(by_labeler, (0.0, 0))
    for one, other in permutations(by_labeler, 2):
        total, count = sums[one]
        sums[one] = total + similarity(by_labeler[one], by_labeler[other]), count + 1
    return sums


def mean_of_sums(sums: Iterable[tuple[float, int]]) -> float | None:
    """Return the mean over all terms of (sum, number of terms) pairs, or None if there are no terms."""
    totals, counts = [0.0], [0]
    for total, count in sums:
        totals.append(total)
        counts.append(count)
    return sum(totals) / sum(counts) if sum(counts) else None
