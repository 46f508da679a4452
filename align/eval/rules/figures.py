"""Violation rates, and the agreement of a scorer with people, as the figures and tables of a report."""

from collections import Counter

import numpy as np

from align.eval.core.results import Figure, Json
from align.eval.rules.judgments import FOLLOWS, UNSURE, VIOLATES, Agreement, ViolationRate, combine_verdicts
from align.eval.rules.scorers import RuleCase
from align.statistics import mean_interval, statistic_interval

Verdicts = dict[RuleCase, str]
"""Each case with one verdict on it."""


def violation_figures(who: str, verdicts: Verdicts, resamples: int, scorer: str) -> tuple[list[Figure], list[Json]]:
    """The rate overall (responses that break any rule that was judged) and for each rule, and a table of the counts."""
    by_response: dict[tuple[str, str], list[str]] = {}
    by_rule: dict[str, list[str]] = {}
    for case, case_verdict in verdicts.items():
        by_response.setdefault((case.dialogue, case.response), []).append(case_verdict)
        by_rule.setdefault(case.rule, []).append(case_verdict)
    response_verdicts = [combine_verdicts(rule_verdicts) for rule_verdicts in by_response.values()]
    figures, table = [], []
    for name, group in {"overall": response_verdicts, **dict(sorted(by_rule.items()))}.items():
        rate = ViolationRate.from_verdicts(group)
        least, most = rate.bounds
        decided = [float(each == VIOLATES) for each in group if each != UNSURE]
        low, high = mean_interval(decided, resamples) if len(decided) > 1 else (None, None)
        note = f"{rate.unsure} of {len(group)} unsure, left out; with them {least:.3f} to {most:.3f}" if rate.unsure else ""
        figures.append(Figure(f"{who}: {name} violation rate", rate.value, low, high, rate.decided, scorer, note))
        counts = {"violates": rate.violates, "unsure": rate.unsure, "follows": rate.follows}
        table.append({"rule": name, "n": len(group), **counts})
    return figures, table


def agreement_figures(by_people: Verdicts, by_scorer: Verdicts, resamples: int, scorer: str) -> list[Figure]:
    """Accuracy of the scorer against people, and Cohen's kappa, where both decided; intervals over cases."""
    agreement = Agreement.between(by_people, by_scorer)
    decided = [case for case in by_people if UNSURE not in (by_people[case], by_scorer[case])]
    people, scores = (np.array([side[case] == VIOLATES for case in decided]) for side in (by_people, by_scorer))

    def accuracy_of_resamples(drawn: np.ndarray) -> np.ndarray:
        accuracy: np.ndarray = (people[drawn] == scores[drawn]).mean(-1)
        return accuracy

    def kappa_of_resamples(drawn: np.ndarray) -> np.ndarray:
        first, second = people[drawn].mean(-1), scores[drawn].mean(-1)
        chance = first * second + (1 - first) * (1 - second)
        with np.errstate(invalid="ignore", divide="ignore"):
            kappa: np.ndarray = np.where(chance < 1, (accuracy_of_resamples(drawn) - chance) / (1 - chance), np.nan)
        return kappa

    none, count = (None, None), len(decided)
    accuracy_interval = none if count < 2 else statistic_interval(accuracy_of_resamples, count, resamples)
    kappa_interval = none if agreement.kappa is None else statistic_interval(kappa_of_resamples, count, resamples)
    note = "both gave one and the same verdict throughout, or decided nothing together" if agreement.kappa is None else ""
    return [
        Figure("agreement: accuracy", agreement.accuracy, accuracy_interval[0], accuracy_interval[1], agreement.n, scorer),
        Figure("agreement: Cohen's kappa", agreement.kappa, kappa_interval[0], kappa_interval[1], agreement.n, scorer, note),
    ]


def confusion(by_people: Verdicts, by_scorer: Verdicts) -> list[Json]:
    """How often the scorer gave each verdict, by people's verdict, unsure ones included."""
    kinds = (VIOLATES, UNSURE, FOLLOWS)
    pairs = Counter((by_people[case], by_scorer[case]) for case in by_people)
    return [{"people": first, **{f"scorer {second}": pairs[first, second] for second in kinds}} for first in kinds]
