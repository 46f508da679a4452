"""Reliability of labelers and confidence in answers: the one-coin model of Dawid and Skene.

Each labeler is right with a fixed probability, and otherwise gives each of the other answers with equal probability.
Expectation maximization estimates these probabilities and the true answers together (Zhang et al. 2016, arXiv 1406.3824).
One number for each labeler can be estimated from few judgments. On simulated labelers it predicted the true answers better
than the full confusion matrices of Dawid and Skene, than GLAD and than the majority
(`tests/annotation_ui/reports/test_agreement.py`). Two labelers who share all of their items cannot be told apart.

Units with the same answers of the same labelers have the same posterior. The estimate reads each such pattern once, with
its number of units: 50,000 judgments are a few thousand patterns. crowd-kit's implementation, with which a test compares
this one, reads each judgment.
"""

from collections import Counter
from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations

import numpy as np

from annotation_ui.tasks.rankings import BETTER, WORSE, preferences_of

ITERATIONS, TOLERANCE = 100, 1e-6  # the estimate ends when no labeler's reliability changes by more
TINY = 1e-10  # the least probability of an answer
Row = tuple[Hashable, str, str]  # unit, labeler, answer
Pattern = tuple[tuple[str, str], ...]
"""The answers to one unit: (labeler, answer), sorted."""


@dataclass(frozen=True)
class Reliability:
    """Estimates of the model.

    Attributes:
        labelers: labeler -> probability that an answer of theirs is right; only those who share a unit with another.
        posteriors: pattern -> answer -> probability that it is the true one.
    """

    labelers: Mapping[str, float]
    posteriors: Mapping[Pattern, Mapping[str, float]]


def estimate_reliability(patterns: Mapping[Pattern, int]) -> Reliability:
    """Estimate labelers and answers together from the number of units with each pattern of answers.

    The estimate is empty if no unit was answered twice or only one answer ever occurs.
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
    posteriors /= posteriors.sum(axis=1, keepdims=True)  # the start: the share of each answer
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
    """Return the pattern of each unit from (unit, labeler, answer); a labeler answers a unit once."""
    answers: dict[Hashable, list[tuple[str, str]]] = {}
    for unit, labeler, answer in rows:
        answers.setdefault(unit, []).append((labeler, answer))
    return {unit: tuple(sorted(given)) for unit, given in answers.items()}


def preference_rows(rankings: Mapping[Hashable, Mapping[str, Sequence[int]]]) -> Iterable[Row]:
    """Yield the rows of rankings (item -> labeler -> ranks): unit (item, i, j) asks whether i is better than j, or tied."""
    for item, by_labeler in rankings.items():
        for labeler, ranks in by_labeler.items():
            yield from (((item, i, j), labeler, answer) for (i, j), answer in preferences_of(ranks).items())


def preference_matrices(rankings: Mapping[Hashable, Mapping[str, Sequence[int]]]) -> dict[Hashable, list[list[float]]]:
    """Return for each item the probability that response i is better than response j [K, K], given all labelers' rankings.

    The probability of a tie is 1 minus those of (i, j) and (j, i). Rounded to four digits. Empty where no item was ranked
    twice: no reliability is known then.
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
