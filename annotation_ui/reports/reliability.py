"""Reliability of labelers and confidence in answers: the one-coin model of Dawid and Skene.

Each labeler is right with a fixed probability, and otherwise gives each of the other answers with equal probability.
Expectation maximization estimates these probabilities and the true answers together (Zhang et al. 2016, arXiv 1406.3824).
The model has one parameter per labeler, so it needs few judgments. On simulated labelers, it predicted the true answers
better than the full confusion matrices of Dawid and Skene, GLAD and the majority
(`tests/annotation_ui/reports/test_agreement.py`). Two labelers who share all of their items cannot be told apart.

Units with the same answers by the same labelers have the same posterior. The estimate therefore works on distinct patterns
and their counts: 50,000 judgments have a few thousand patterns. crowd-kit's implementation, against which this one is
tested, reads each judgment.
"""

from collections import Counter
from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations

import numpy as np

from annotation_ui.tasks.rankings import BETTER, WORSE, preferences_of

ITERATIONS, TOLERANCE = 100, 1e-6  # maximum iterations; largest change of a labeler's reliability at convergence
TINY = 1e-10  # minimum probability of an answer
Row = tuple[Hashable, str, str]  # unit, labeler, answer
Pattern = tuple[tuple[str, str], ...]
"""Sorted (labeler, answer) pairs of a unit."""


@dataclass(frozen=True)
class Reliability:
    """Estimates of the model.

    Attributes:
        labelers: labeler -> probability that the labeler's answer is right, for labelers who share a unit with another one.
        posteriors: pattern -> answer -> probability that this answer is true.
    """

    labelers: Mapping[str, float]
    posteriors: Mapping[Pattern, Mapping[str, float]]


def estimate_reliability(patterns: Mapping[Pattern, int]) -> Reliability:
    """Estimate labelers' reliability and the true answers together from the number of units with each pattern.

    The estimate is empty if no unit has two answers or only one answer occurs.
    """
    patterns = {pattern: units for pattern, units in patterns.items() if units}
    shared = {labeler for pattern in patterns if len(pattern) > 1 for labeler, _ in pattern}
    answers = sorted({answer for pattern in patterns for _, answer in pattern})
    if not shared or len(answers) < 2:
        return Reliability({}, {})
    labelers = sorted({labeler for pattern in patterns for labeler, _ in pattern})
    place_of, column_of = ({name: number for number, name in enumerate(names)} for names in (labelers, answers))
    judged = [(row, place_of[name], column_of[answer]) for row, pattern in enumerate(patterns) for name, answer in pattern]
    row, place, column = np.array(judged).T  # one entry for each answer of a pattern
    units = np.array(list(patterns.values()), dtype=float)
    posteriors = np.zeros((len(patterns), len(answers)))
    np.add.at(posteriors, (row, column), 1.0)
    posteriors /= posteriors.sum(axis=1, keepdims=True)  # initial value: fraction of labelers with each answer
    judgments = np.bincount(place, units[row])
    skills = np.zeros(len(labelers))
    for _ in range(ITERATIONS):
        priors = np.clip(units @ posteriors / units.sum(), TINY, None)
        before, skills = skills, np.bincount(place, units[row] * posteriors[row, column]) / judgments
        right = np.log(np.clip(skills, TINY, 1 - TINY))
        wrong = np.log(np.clip((1 - skills) / (len(answers) - 1), TINY, 1 - TINY))
        logs = np.log(priors) + np.bincount(row, wrong[place])[:, None]
        np.add.at(logs, (row, column), (right - wrong)[place])
        posteriors = np.exp(logs - logs.max(axis=1, keepdims=True))
        posteriors /= posteriors.sum(axis=1, keepdims=True)
        if np.abs(skills - before).max() < TOLERANCE:
            break
    by_pattern = {
        pattern: dict(zip(answers, row_of_pattern, strict=True))
        for pattern, row_of_pattern in zip(patterns, posteriors.tolist(), strict=True)
    }
    return Reliability({name: float(skills[place_of[name]]) for name in sorted(shared)}, by_pattern)


def patterns_by_unit(rows: Iterable[Row]) -> dict[Hashable, Pattern]:
    """Return the pattern of each unit from (unit, labeler, answer) rows. A labeler answers each unit once."""
    answers: dict[Hashable, list[tuple[str, str]]] = {}
    for unit, labeler, answer in rows:
        answers.setdefault(unit, []).append((labeler, answer))
    return {unit: tuple(sorted(given)) for unit, given in answers.items()}


def preference_rows(rankings: Mapping[Hashable, Mapping[str, Sequence[int]]]) -> Iterable[Row]:
    """Yield rows for rankings (item -> labeler -> ranks). Unit (item, i, j) is the preference between responses i and j."""
    for item, by_labeler in rankings.items():
        for labeler, ranks in by_labeler.items():
            yield from (((item, i, j), labeler, answer) for (i, j), answer in preferences_of(ranks).items())


def preference_matrices(rankings: Mapping[Hashable, Mapping[str, Sequence[int]]]) -> dict[Hashable, list[list[float]]]:
    """Map each item to the probabilities [K, K] that response i is better than response j, given all labelers' rankings.

    The probability of a tie is 1 minus the sum of the probabilities at (i, j) and (j, i). Probabilities are rounded to four
    decimal places. The result is empty if no item was ranked twice, because reliability is then unknown.
    """
    patterns = patterns_by_unit(preference_rows(rankings))
    posteriors = estimate_reliability(Counter(patterns.values())).posteriors
    if not posteriors:
        return {}
    matrices: dict[Hashable, list[list[float]]] = {}
    for item, by_labeler in rankings.items():
        size = len(next(iter(by_labeler.values())))
        matrices[item] = [[0.0] * size for _ in range(size)]
        for i, j in combinations(range(size), 2):
            answers = posteriors[patterns[item, i, j]]
            for place, answer in (((i, j), BETTER), ((j, i), WORSE)):
                matrices[item][place[0]][place[1]] = round(float(answers.get(answer, 0.0)), 4)
    return matrices
