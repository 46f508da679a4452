"""How sure a number is: percentile bootstrap intervals over items (Efron 1979). numpy alone, with a seed of its own."""

from collections.abc import Callable, Sequence

import numpy as np
from numpy.typing import ArrayLike

from align.errors import UserError

SEED = 20220304
"""Of all resampling: an interval is the same whenever it is computed again."""
LEVEL = 0.95
CHUNK = 4_000_000
"""Drawn numbers that are held in memory at once."""


def mean_interval(
    values: ArrayLike, resamples: int = 2000, groups: Sequence[int] | None = None, level: float = LEVEL
) -> tuple[float, float]:
    """Interval of a mean.

    Args:
        values: [N], finite.
        groups: [N] the group of each value, numbers from 0; whole groups are drawn again, because what belongs to one
            question or one ranking hangs together. None: each value stands alone.

    Raises:
        UserError: if a value is not finite, or there is none.
    """
    numbers = np.asarray(values, dtype=np.float64)
    if numbers.size == 0 or not np.isfinite(numbers).all():
        raise UserError("an interval needs finite values, and at least one")
    group = np.arange(len(numbers)) if groups is None else np.asarray(groups)
    sums, counts = np.bincount(group, numbers), np.bincount(group)
    return statistic_interval(lambda drawn: sums[drawn].sum(-1) / counts[drawn].sum(-1), len(sums), resamples, level)


def statistic_interval(
    statistic: Callable[[np.ndarray], np.ndarray], items: int, resamples: int = 2000, level: float = LEVEL
) -> tuple[float, float]:
    """Interval of anything that can be computed from items drawn again.

    Args:
        statistic: takes numbers of items [R, items] and gives the statistic of each row [R]. NaN where a drawn sample
            has none (no item of a rare kind among them): left out.
        items: how many there are.
    """
    low, high = percentiles(resample(statistic, items, resamples), level)
    return float(low), float(high)


def resample(statistic: Callable[[np.ndarray], np.ndarray], items: int, resamples: int) -> np.ndarray:
    """The statistic of each resample, [resamples, ...]; the numbers drawn depend on `items` and `resamples` alone."""
    generator = np.random.default_rng(SEED)
    rows = max(1, CHUNK // max(1, items))
    found = []
    for start in range(0, resamples, rows):
        drawn = generator.integers(items, size=(min(rows, resamples - start), items))
        found.append(np.asarray(statistic(drawn)))
    return np.concatenate(found)


def percentiles(found: np.ndarray, level: float = LEVEL) -> tuple[np.ndarray, np.ndarray]:
    """The ends of the middle `level` of resamples [R, ...]: low [...] and high [...]."""
    tail = 50 * (1 - level)
    return np.nanpercentile(found, tail, axis=0), np.nanpercentile(found, 100 - tail, axis=0)
