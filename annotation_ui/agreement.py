"""How far labelers agree. The coefficients come from libraries (krippendorff, statsmodels); their tables are made here.

A number is None where there is nothing to compare: nobody shared an item, or everybody always said the same one thing.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Hashable, Iterable, Mapping
from itertools import combinations
from statistics import fmean
from typing import Any, Literal

import krippendorff
import numpy as np
from statsmodels.stats.inter_rater import fleiss_kappa

from annotation_ui.tasks.rank import pairwise_agreement

Values = Mapping[Hashable, Mapping[str, Any]]  # unit -> labeler -> value


def alpha(values: Values, level: Literal["nominal", "ordinal", "interval"]) -> float | None:
    """Krippendorff's alpha (nominal, ordinal or interval) over units that labelers gave a value."""
    labelers = sorted({labeler for said in values.values() for labeler in said})
    units = [said for said in values.values() if len(said) > 1]
    domain = sorted({value for said in units for value in said.values()})
    if len(domain) < 2:
        return None
    codes = {value: (number if isinstance(value, str) else value) for number, value in enumerate(domain)}
    table = np.array([[codes[s[name]] if name in s else np.nan for s in units] for name in labelers], dtype=float)
    return float(krippendorff.alpha(table, level_of_measurement=level, value_domain=[codes[v] for v in domain]))


def kappa(values: Values) -> float | None:
    """Fleiss' kappa. It needs as many labelers on every unit: those with the most frequent number (above one) count."""
    sizes = Counter(len(said) for said in values.values() if len(said) > 1)
    if not sizes:
        return None
    size = max(sizes, key=lambda each: (sizes[each], each))
    units = [said for said in values.values() if len(said) == size]
    categories = sorted({value for said in units for value in said.values()})
    if len(categories) < 2:
        return None
    table = [[list(said.values()).count(category) for category in categories] for said in units]
    return float(fleiss_kappa(np.array(table)))


def ranking_units(rankings: Mapping[Hashable, Mapping[str, list[Any]]]) -> Values:
    """Rankings of items as units for alpha: each response of each item is one, its rank the (ordinal) value."""
    units: dict[Hashable, dict[str, Any]] = defaultdict(dict)
    for item, said in rankings.items():
        for labeler, ranks in said.items():
            for index, rank in enumerate(ranks):
                if rank is not None:
                    units[item, index][labeler] = rank
    return units


def pairwise(rankings: Mapping[Hashable, Mapping[str, list[int]]]) -> float | None:
    """Mean share of the pairs of responses on which two labelers of an item say the same (ties included)."""
    return _mean(
        pairwise_agreement(first, second) for said in rankings.values() for first, second in combinations(said.values(), 2)
    )


def each_against_rest(values: Values, same: Any) -> dict[str, float | None]:
    """For each labeler the mean of `same(own, other's)` over all units and all others who judged them."""
    scores: dict[str, list[float]] = defaultdict(list)
    for said in values.values():
        for name in said:
            scores[name] += [same(said[name], other) for other_name, other in said.items() if other_name != name]
    return {name: _mean(found) for name, found in sorted(scores.items())}


def _mean(numbers: Iterable[float]) -> float | None:
    known = list(numbers)
    return fmean(known) if known else None
