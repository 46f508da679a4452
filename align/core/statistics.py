"""Statistics shared by several stages: confidence intervals, calibration, rank and linear correlation, votes.

scipy and scikit-learn take seconds to import, so the functions that need them import them.
"""

from collections import Counter
from collections.abc import Callable, Hashable, Sequence
from typing import TypeVar

import numpy as np
from numpy.typing import ArrayLike

from align.core.errors import UserError

Vote = TypeVar("Vote", bound=Hashable)

SEED = 20220304
"""Seed of all resampling, for reproducible intervals."""
LEVEL = 0.95
CHUNK = 4_000_000
"""Maximum number of random indices held in memory."""


# --------------------------------------------------------------------------------------------- intervals of proportions

# A bootstrap of a proportion has zero width if all items agree, and covers only 40 to 80 % at n = 10 to 30 near 0 or 1.


def design_effect(values: ArrayLike, groups: Sequence[int] | np.ndarray | None = None) -> float:
    """Return the ratio of the variance of a mean of grouped values to the variance for independent Bernoulli values.

    The ratio is 1 for independent values of 0 or 1, the group size if all values within each group are equal, and below 1
    for values between 0 and 1. A group of zeros and a group of ones are added because groups that agree show no variance.

    Args:
        values: [N], from 0 to 1.
        groups: [N] group of each value. If None, all values are independent.
    """
    numbers = np.asarray(values, dtype=np.float64)
    group = np.arange(len(numbers)) if groups is None else np.unique(groups, return_inverse=True)[1]
    counts = np.bincount(group).astype(np.float64)
    size = counts.mean()
    sums, counts = np.append(np.bincount(group, numbers), [0.0, size]), np.append(counts, [size, size])
    total, mean = counts.sum(), sums.sum() / counts.sum()
    variance = ((sums - mean * counts) ** 2).sum() / total**2
    return float(variance * total / (mean * (1 - mean)))


def share_interval(values: ArrayLike, groups: Sequence[int] | np.ndarray | None = None) -> tuple[float, float]:
    """Return the confidence interval of a proportion, or of a mean of other values in [0, 1], such as outcomes with ties
    counted as 0.5.

    Clopper and Pearson (1934) at the effective number of values, N / `design_effect` (Korn and Graubard 1998): exact for
    independent values that are 0 or 1.

    Args:
        values: [N], from 0 to 1.
        groups: [N] group of each value, such as its prompt. If None, all values are independent.

    Raises:
        UserError: if a value is not from 0 to 1, or there is none.
    """
    from scipy.stats import beta

    numbers = np.asarray(values, dtype=np.float64)
    if numbers.size == 0 or not ((numbers >= 0) & (numbers <= 1)).all():
        raise UserError("the interval of a proportion needs at least one value, all from 0 to 1")
    independent = 1.0 if groups is not None and len(np.unique(groups)) == 1 else None
    effective = independent or len(numbers) / design_effect(numbers, groups)
    mean, tail = float(numbers.mean()), (1 - LEVEL) / 2
    yes, no = mean * effective, (1 - mean) * effective
    low = float(beta.ppf(tail, yes, no + 1)) if mean > 0 else 0.0
    high = float(beta.ppf(1 - tail, yes + 1, no)) if mean < 1 else 1.0
    return low, high


def difference_interval(values: ArrayLike) -> tuple[float, float]:
    """Return the confidence interval of a mean of values in [-1, 1], such as paired differences; see `share_interval`."""
    low, high = share_interval((np.asarray(values, dtype=np.float64) + 1) / 2)
    return 2 * low - 1, 2 * high - 1


# -------------------------------------------------------------------------------------------------- bootstrap intervals

# Percentile bootstrap over items (Efron 1979). Not scipy.stats.bootstrap, which rejects a single item, makes the interval
# undefined if one resample is, and does not support statistics with several values per resample.


def mean_interval(
    values: ArrayLike, resamples: int = 2000, groups: Sequence[int] | None = None, level: float = LEVEL
) -> tuple[float, float]:
    """Return the bootstrap confidence interval of a mean. For proportions, use `share_interval`.

    Args:
        values: [N], finite.
        groups: [N] group index of each value, from 0; groups are resampled as units. If None, all values are independent.
        level: confidence level: the fraction of resamples inside the interval.

    Raises:
        UserError: if a value is not finite, or there is none.
    """
    numbers = np.asarray(values, dtype=np.float64)
    if numbers.size == 0 or not np.isfinite(numbers).all():
        raise UserError("an interval needs at least one value, all finite")
    group = np.arange(len(numbers)) if groups is None else np.asarray(groups)
    sums, counts = np.bincount(group, numbers), np.bincount(group)
    return statistic_interval(lambda drawn: sums[drawn].sum(-1) / counts[drawn].sum(-1), len(sums), resamples, level)


def statistic_interval(
    statistic: Callable[[np.ndarray], np.ndarray], items: int, resamples: int = 2000, level: float = LEVEL
) -> tuple[float, float]:
    """Return the bootstrap confidence interval of any statistic.

    `statistic` maps the indices of drawn items [R, items] to [R]. NaN, if a resample lacks a rare kind of item, is ignored.
    """
    tail, resampled = 50 * (1 - level), resample(statistic, items, resamples)
    return float(np.nanpercentile(resampled, tail)), float(np.nanpercentile(resampled, 100 - tail))


def resample(statistic: Callable[[np.ndarray], np.ndarray], items: int, resamples: int) -> np.ndarray:
    """Evaluate a statistic on bootstrap resamples, [resamples, ...]. The drawn indices depend only on `items` and
    `resamples`.
    """
    generator = np.random.default_rng(SEED)
    rows = max(1, CHUNK // max(1, items))
    chunks = []
    for start in range(0, resamples, rows):
        drawn = generator.integers(items, size=(min(rows, resamples - start), items))
        chunks.append(np.asarray(statistic(drawn)))
    return np.concatenate(chunks)


# ---------------------------------------------------------------------------------------------------------- calibration


def calibration(
    probabilities: ArrayLike, outcomes: ArrayLike, lowest: float = 0.0, bins: int = 10
) -> list[tuple[float, float, int]]:
    """Return the reliability table: (mean probability, observed frequency, count) of each non-empty bin of equal width.

    Args:
        probabilities: [N], from `lowest`, the lower edge of the first bin, to 1.
        outcomes: [N], 1 if the event occurred, 0 if it did not, in between for a tie.
    """
    stated, actual = np.asarray(probabilities, dtype=np.float64), np.asarray(outcomes, dtype=np.float64)
    place = np.minimum(((stated - lowest) / (1 - lowest) * bins).astype(int), bins - 1)
    counts = np.bincount(place, minlength=bins)
    columns = [np.bincount(place, column, minlength=bins) / np.maximum(counts, 1) for column in (stated, actual)]
    return [(float(mean), float(share), int(n)) for mean, share, n in zip(*columns, counts, strict=True) if n]


def calibration_error(probabilities: ArrayLike, outcomes: ArrayLike, lowest: float = 0.0, bins: int = 10) -> float:
    """Return the expected calibration error (Guo et al. 2017): mean |probability - frequency|, weighted by bin count."""
    table = calibration(probabilities, outcomes, lowest, bins)
    total = sum(count for _, _, count in table)
    return sum(abs(stated - actual) * count for stated, actual, count in table) / max(1, total)


def pair_calibration(difference: ArrayLike) -> list[tuple[float, float, int]]:
    """Return the reliability table of a preference model from its reward differences [N], better minus worse."""
    return calibration(*_stated_and_right(difference), lowest=0.5)


def pair_calibration_error(difference: ArrayLike) -> float:
    """Return the expected calibration error of a preference model; see `pair_calibration`."""
    return calibration_error(*_stated_and_right(difference), lowest=0.5)


def _stated_and_right(difference: ArrayLike) -> tuple[np.ndarray, np.ndarray]:
    """Return the model's confidence sigmoid(|difference|) in the response it prefers, and whether it is right."""
    from scipy.special import expit

    values = np.asarray(difference, dtype=np.float64)
    return expit(np.abs(values)), (values > 0) + 0.5 * (values == 0)


# ---------------------------------------------------------------------------------------------------- order, correlation


def kendall_tau(ranks: Sequence[int], rewards: Sequence[float]) -> float:
    """Return Kendall's tau-b between ranks (1 is best) and rewards. 0 if one side is fully tied.

    Rewards that agree to five digits are ties: equal responses differ by rounding, which depends on their batch.
    """
    from scipy.stats import kendalltau

    rounded = np.round(np.asarray(rewards) / max(np.abs(rewards).max(), np.finfo(float).tiny), 5)
    if len(set(ranks)) < 2 or len(set(rounded.tolist())) < 2:
        return 0.0
    return float(kendalltau([-rank for rank in ranks], rounded).statistic)


def correlation(left: ArrayLike, right: ArrayLike) -> float:
    """Return the Pearson correlation. 0 if one side is constant."""
    columns = np.asarray(left, dtype=np.float64), np.asarray(right, dtype=np.float64)
    if any(len(column) < 2 or np.ptp(column) == 0 for column in columns):
        return 0.0
    return float(np.corrcoef(*columns)[0, 1])


def roc_auc(scores: ArrayLike, labels: ArrayLike) -> float:
    """Return the area under the ROC curve. 0.5 if there is only one class."""
    from sklearn.metrics import roc_auc_score

    positive = np.asarray(labels, dtype=bool)
    if positive.all() or not positive.any():
        return 0.5
    return float(roc_auc_score(positive, np.asarray(scores)))


# ---------------------------------------------------------------------------------------------------------------- votes


def majority(votes: Sequence[Vote], tie: Vote) -> Vote:
    """Return the most frequent vote, or `tie` if it is not unique."""
    (first, count), *others = Counter(votes).most_common()
    return tie if others and others[0][1] == count else first
