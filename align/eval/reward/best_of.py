"""The best of n answers: its expected reward, and a bound on the KL from a single answer."""

from functools import cache
from math import comb, log

import numpy as np


def kl_bound(n: int) -> float:
    """Upper bound on the KL between the best of n and a single answer, in nats: log n - (n - 1) / n.

    Stated by Stiennon et al. 2020 (appendix G.3) as the KL; Beirami et al. 2024 show that it is an upper bound.
    """
    return log(n) - (n - 1) / n


@cache
def _best_probabilities(samples: int, n: int) -> tuple[float, ...]:
    """For each of the samples, in ascending order, the probability of being the largest of n drawn without replacement."""
    return tuple(comb(rank, n - 1) / comb(samples, n) for rank in range(samples))


def expected_best(rewards: np.ndarray, values: np.ndarray, n: int) -> float:
    """Expected value of the answer that has the highest reward of n, from N >= n answers; unbiased.

    It is the mean over all subsets of n of the N answers, in closed form by order statistics. Answers of equal reward
    share their probabilities.

    Args:
        rewards: [N] the rewards by which the answer is chosen.
        values: [N] what is averaged over the chosen answers: the same rewards, or another model's.
    """
    order = np.argsort(rewards, kind="stable")
    probabilities = np.array(_best_probabilities(len(rewards), n))
    _, group = np.unique(rewards[order], return_inverse=True)
    shared = np.bincount(group, probabilities) / np.bincount(group)
    return float(shared[group] @ values[order])


def sizes_on_curve(samples: int) -> list[int]:
    """The n of a best-of-n curve: the powers of two up to `samples`, and `samples` itself."""
    return sorted({2**power for power in range(samples.bit_length()) if 2**power <= samples} | {samples})
