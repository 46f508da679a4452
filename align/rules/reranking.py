"""Which of several responses to a prompt is kept, by a preference and by rules. Plain Python."""

import math
from collections.abc import Sequence
from typing import Literal

RuleUse = Literal["filter", "multiply"]


def geometric_mean(probabilities: Sequence[float]) -> float:
    """(p1 x ... x pK)^(1/K): 0 if any is 0, and 1 if there are none."""
    if not probabilities:
        return 1.0
    if min(probabilities) <= 0.0:
        return 0.0
    return math.exp(sum(map(math.log, probabilities)) / len(probabilities))


def best_response(rewards: Sequence[float], follows: Sequence[Sequence[float]], use: RuleUse, threshold: float) -> int:
    """The index of the response that is kept; of several equally good ones, the first.

    Args:
        rewards: [N] of the preference; all equal where there is none.
        follows: [N, K], how likely each response follows each rule.
        use: `filter` keeps the responses whose geometric mean over rules is at least `threshold`, and of those the one
            with the highest reward; where none is left, the one with the highest geometric mean. `multiply` keeps the
            highest sigmoid(reward - mean reward) x geometric mean (after Glaese et al. 2022, section 2.7: the preference
            becomes a probability first, since a reward may be negative).
        threshold: see `filter`.
    """
    compliance, mean = [geometric_mean(each) for each in follows], sum(rewards) / len(rewards)
    if use == "multiply":
        scores = [_sigmoid(reward - mean) * rule for reward, rule in zip(rewards, compliance, strict=True)]
        return max(range(len(scores)), key=scores.__getitem__)
    passing = [number for number, rule in enumerate(compliance) if rule >= threshold]
    return max(passing, key=rewards.__getitem__) if passing else max(range(len(compliance)), key=compliance.__getitem__)


def _sigmoid(value: float) -> float:
    return 0.5 * (1.0 + math.tanh(value / 2))
