"""Reliability of labelers and confidence in answers: the one-coin model of Dawid and Skene.

Each labeler is right with a fixed probability, and otherwise gives each of the other answers with equal probability.
These probabilities and the true answers are estimated together by expectation maximization (Zhang et al. 2016, arXiv
1406.3824), as crowd-kit implements it. One number for each labeler can be estimated from few judgments. On simulated
labelers it predicted the true answers better than the full confusion matrices of Dawid and Skene, than GLAD and than
the majority (`tests/annotation_ui/reports/test_agreement.py`). Two labelers who share all of their items cannot be told
apart.
"""

import warnings
from collections import defaultdict
from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations

from annotation_ui.tasks.rankings import BETTER, WORSE, preferences_of

ITERATIONS = 100  # crowd-kit's default; it stops earlier where the likelihood no longer grows
Row = tuple[Hashable, str, str]  # unit, labeler, answer


@dataclass(frozen=True)
class Reliability:
    """Estimates of the model.

    Attributes:
        labelers: labeler -> probability that an answer of theirs is right; only those who share a unit with another.
        posteriors: unit -> answer -> probability that it is the true one.
    """

    labelers: dict[str, float]
    posteriors: dict[Hashable, dict[str, float]]


def estimate_reliability(rows: Iterable[Row]) -> Reliability:
    """Estimate labelers and answers together from (unit, labeler, answer); a labeler answers a unit once.

    The estimate is empty if no unit was answered twice or only one answer ever occurs.
    """
    rows = list(rows)
    count: dict[Hashable, int] = defaultdict(int)
    for unit, _, _ in rows:
        count[unit] += 1
    shared = {labeler for unit, labeler, _ in rows if count[unit] > 1}
    if not shared or len({answer for _, _, answer in rows}) < 2:
        return Reliability({}, {})
    import pandas as pd
    from crowdkit.aggregation.classification.dawid_skene import OneCoinDawidSkene  # takes seconds to import

    units = list(count)
    numbers = {unit: number for number, unit in enumerate(units)}
    table = pd.DataFrame([(numbers[unit], *rest) for unit, *rest in rows], columns=["task", "worker", "label"])
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # crowd-kit still passes arguments that pandas 3 ignores
        model = OneCoinDawidSkene(n_iter=ITERATIONS).fit(table)
    posteriors = {units[number]: answers for number, answers in model.probas_.to_dict("index").items()}  # type: ignore[union-attr]
    return Reliability({name: float(model.skills_[name]) for name in sorted(shared)}, posteriors)


def preference_rows(rankings: Mapping[Hashable, Mapping[str, Sequence[int]]]) -> Iterable[Row]:
    """Rankings (item -> labeler -> ranks) as rows: unit (item, i, j) asks whether response i is better than j, or tied."""
    for item, by_labeler in rankings.items():
        for labeler, ranks in by_labeler.items():
            yield from (((item, i, j), labeler, answer) for (i, j), answer in preferences_of(ranks).items())


def preference_matrices(rankings: Mapping[Hashable, Mapping[str, Sequence[int]]]) -> dict[Hashable, list[list[float]]]:
    """For each item how probable it is that response i is better than response j [K, K], given all labelers' rankings.

    The probability of a tie is 1 minus those of (i, j) and (j, i). Rounded to four digits. Empty where no item was ranked
    twice: no reliability is known then.
    """
    posteriors = estimate_reliability(preference_rows(rankings)).posteriors
    if not posteriors:
        return {}
    matrices: dict[Hashable, list[list[float]]] = {}
    for item, by_labeler in rankings.items():
        size = len(next(iter(by_labeler.values())))
        matrices[item] = [[0.0] * size for _ in range(size)]
        for i, j in combinations(range(size), 2):
            answers = posteriors[item, i, j]
            for place, answer in (((i, j), BETTER), ((j, i), WORSE)):
                matrices[item][place[0]][place[1]] = round(float(answers.get(answer, 0.0)), 4)
    return matrices
