"""Violation rates, and the agreement of a scorer with people, as the figures and tables of a report."""

from collections import Counter

import numpy as np

from align.eval.core.results import Figure, Json, share_figure
from align.eval.rules.judgments import FOLLOWS, UNSURE, VIOLATES, Agreement, ViolationRate, combine_verdicts
from align.eval.rules.scorers import RuleCase
from align.statistics import share_interval, statistic_interval

Verdicts = dict[RuleCase, str]
"""Each case with one verdict on it."""


def violation_figures(who: str, verdicts: Verdicts, scorer: str) -> tuple[list[Figure], list[Json]]:
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
        decided = [each == VIOLATES for each in group if each != UNSURE]
        note = f"{rate.unsure} of {len(group)} unsure, left out; with them {least:.3f} to {most:.3f}" if rate.unsure else ""
        label = f"{who}: {name} violation rate"
        figures.append(share_figure(label, decided, scorer, note, note or "nothing was judged", better="lower"))
        counts = {"violates": rate.violates, "unsure": rate.unsure, "follows": rate.follows}
        table.append({"rule": name, "n": len(group), **counts})
    return figures, table


def agreement_figures(by_people: Verdicts, by_scorer: Verdicts, resamples: int, scorer: str) -> list[Figure]:
    """Accuracy of the scorer against people, and Cohen's kappa, where both decided; intervals over cases."""
    agreement = Agreement.between(by_people, by_scorer)
    decided = [case for case in by_people if UNSURE not in (by_people[case], by_scorer[case])]
    people, scores = (np.array([side[case] == VIOLATES for case in decided]) for side in (by_people, by_scorer))
    accuracy = share_figure(
        "agreement: accuracy", people == scores, scorer, nothing="decided nothing together", better="higher"
    )
    low, high = None, None
    if agreement.kappa is not None:
        low, high = _kappa_interval(people, scores, resamples)
    note = "both gave one and the same verdict throughout, or decided nothing together" if agreement.kappa is None else ""
    kappa = Figure("agreement: Cohen's kappa", agreement.kappa, low, high, agreement.n, scorer, note, "higher")
    return [accuracy, kappa]


def _kappa_interval(people: np.ndarray, scores: np.ndarray, resamples: int) -> tuple[float, float]:
    """The bootstrap interval of kappa, at least as wide as that of the accuracy makes it with the chance agreement fixed.

    The second part is Cohen's (1960). The bootstrap has no width where all cases agree.
    """

    def chance(first: np.ndarray, second: np.ndarray) -> np.ndarray:
        agreed: np.ndarray = first * second + (1 - first) * (1 - second)
        return agreed

    def kappa_of_resamples(drawn: np.ndarray) -> np.ndarray:
        by_chance = chance(people[drawn].mean(-1), scores[drawn].mean(-1))
        accuracy = (people[drawn] == scores[drawn]).mean(-1)
        with np.errstate(invalid="ignore", divide="ignore"):
            kappa: np.ndarray = np.where(by_chance < 1, (accuracy - by_chance) / (1 - by_chance), np.nan)
        return kappa

    by_chance = float(chance(people.mean(), scores.mean()))
    fixed = [(end - by_chance) / (1 - by_chance) for end in share_interval(people == scores)]
    low, high = statistic_interval(kappa_of_resamples, len(people), resamples)
    return max(-1.0, min(low, fixed[0])), max(high, fixed[1])


def confusion(by_people: Verdicts, by_scorer: Verdicts) -> list[Json]:
    """How often the scorer gave each verdict, by people's verdict, unsure ones included."""
    kinds = (VIOLATES, UNSURE, FOLLOWS)
    pairs = Counter((by_people[case], by_scorer[case]) for case in by_people)
    return [{"people": first, **{f"scorer {second}": pairs[first, second] for second in kinds}} for first in kinds]
