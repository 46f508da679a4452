"""Which policy of a PPO run is kept."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import NormalDist, fmean, stdev


@dataclass(frozen=True)
class Candidate:
    """A policy as an evaluation found it.

    Attributes:
        update: after which it was evaluated; 0: the starting model.
        scores: of its responses to the fixed prompts [N].
        within_budgets: whether it keeps all `rule_budgets`; True without any.
    """

    update: int
    scores: list[float]
    within_budgets: bool = True


def replaces(candidate: Candidate, kept: Candidate | None, confidence: float = 0.0, evaluations: int = 1) -> bool:
    """Whether a policy replaces the one kept so far: budgets come first, then scores; arguments as `is_new_best`."""
    if kept is None or candidate.within_budgets == kept.within_budgets:
        return is_new_best(candidate.scores, kept.scores if kept else None, confidence, evaluations)
    return candidate.within_budgets and math.isfinite(fmean(candidate.scores))


def is_new_best(
    scores: Sequence[float], kept: Sequence[float] | None, confidence: float = 0.0, evaluations: int = 1
) -> bool:
    """Whether the policy of an evaluation replaces the one kept so far.

    Both answered the same prompts, so that the differences of their scores say more than their means. Taking the highest
    of many noisy means favors luck; a test at each evaluation does so too unless its level is divided among them
    (Bonferroni), as it is here.

    Args:
        scores: of the policy's responses to the fixed prompts [N].
        kept: those of the policy kept so far [N], None for none; of equal means the first stays.
        confidence: that the mean is higher, by a one-sided paired test (normal approximation) which errs at most
            once in 1 / (1 - confidence) runs; 0: any higher mean will do.
        evaluations: of the whole run.
    """
    if kept is None:
        return math.isfinite(fmean(scores))
    differences = [new - old for new, old in zip(scores, kept, strict=True)]
    mean = fmean(differences)
    if not confidence or len(differences) < 2:
        return mean > 0
    quantile = NormalDist().inv_cdf(1 - (1 - confidence) / evaluations)
    return mean > quantile * stdev(differences) / math.sqrt(len(differences))
