"""Agreement between labelers. The coefficients come from libraries (krippendorff, statsmodels); their tables are built here.

A coefficient is None if there is nothing to compare: no shared item, or only one value.
"""

from collections import Counter, defaultdict
from collections.abc import Callable, Hashable, Iterable, Mapping
from itertools import combinations
from statistics import fmean
from typing import Any, Literal

import krippendorff
import numpy as np
from statsmodels.stats import inter_rater

from annotation_ui.tasks import Json, Task

Values = Mapping[Hashable, Mapping[str, Any]]  # unit -> labeler -> value


def krippendorff_alpha(values: Values, level: Literal["nominal", "ordinal"]) -> float | None:
    """Krippendorff's alpha over the units that at least two labelers gave a value."""
    labelers = sorted({labeler for by_labeler in values.values() for labeler in by_labeler})
    units = [by_labeler for by_labeler in values.values() if len(by_labeler) > 1]
    domain = sorted({value for unit in units for value in unit.values()})
    if len(domain) < 2:
        return None
    codes = {value: (number if isinstance(value, str) else value) for number, value in enumerate(domain)}
    table = np.array([[codes[unit[name]] if name in unit else np.nan for unit in units] for name in labelers], dtype=float)
    return float(krippendorff.alpha(table, level_of_measurement=level, value_domain=[codes[v] for v in domain]))


def fleiss_kappa(values: Values) -> float | None:
    """Fleiss' kappa.

    It needs the same number of labelers on every unit, so only the units with the most frequent number above one count.
    """
    sizes = Counter(len(by_labeler) for by_labeler in values.values() if len(by_labeler) > 1)
    if not sizes:
        return None
    most_frequent = max(sizes, key=lambda size: (sizes[size], size))
    units = [by_labeler for by_labeler in values.values() if len(by_labeler) == most_frequent]
    categories = sorted({value for unit in units for value in unit.values()})
    if len(categories) < 2:
        return None
    table = [[list(unit.values()).count(category) for category in categories] for unit in units]
    return float(inter_rater.fleiss_kappa(np.array(table)))


def scales_of(task: Task, by_item: Mapping[Hashable, Mapping[str, Json]]) -> dict[tuple[str, str], Values]:
    """(scale, level) -> the values (`Task.values`) that labelers gave on it; a unit is a part of an item."""
    scales: dict[tuple[str, str], dict[Hashable, dict[str, Any]]] = {}
    for item, by_labeler in by_item.items():
        for labeler, answer in by_labeler.items():
            for scale, level, unit, value in task.values(answer):
                units = scales.setdefault((scale, level), defaultdict(dict))
                if value is not None:
                    units[item, unit][labeler] = value
    return dict(scales)


def mean_similarity(values: Values, similarity: Callable[[Any, Any], float]) -> float | None:
    """The agreement of two labelers on a unit, averaged over units and pairs of labelers."""
    return _mean(
        similarity(first, second) for by_labeler in values.values() for first, second in combinations(by_labeler.values(), 2)
    )


def agreement_with_others(values: Values, similarity: Callable[[Any, Any], float]) -> dict[str, float | None]:
    """For each labeler, the mean of `similarity(own, other's)` over all units and all other labelers of each unit."""
    scores: dict[str, list[float]] = defaultdict(list)
    for by_labeler in values.values():
        for name, own in by_labeler.items():
            scores[name] += [similarity(own, other) for other_name, other in by_labeler.items() if other_name != name]
    return {name: _mean(own_scores) for name, own_scores in sorted(scores.items())}


def _mean(numbers: Iterable[float]) -> float | None:
    numbers = list(numbers)
    return fmean(numbers) if numbers else None
