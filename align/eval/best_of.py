"""The best of n answers: what reward it has, and how far the choice is from the model's own answers. numpy alone."""

from functools import cache
from math import comb, log

import numpy as np


def kl_bound(n: int) -> float:
    """Nats between the best of n and a single answer, at most: log n - (n - 1) / n.

    Stated by Stiennon et al. 2020 (appendix G.3) as the KL; Beirami et al. 2024 show that it is an upper bound.
    """
    return log(n) - (n - 1) / n


@cache
def _chances(samples: int, n: int) -> tuple[float, ...]:
    """How likely each of the samples, in ascending order, is the largest of n that are drawn without replacement."""
    return tuple(comb(place, n - 1) / comb(samples, n) for place in range(samples))


def expected_best(rewards: np.ndarray, values: np.ndarray, n: int) -> float:
    """Expected value of the answer that has the highest reward of n, from N >= n answers; unbiased.

    It is the mean over all subsets of n of the N answers, in closed form by order statistics. Answers of equal reward
    share their chances.

    Args:
        rewards: [N] what the answer is chosen by.
        values: [N] what is wanted of the chosen one; the rewards themselves, or another model's.
    """
    order = np.argsort(rewards, kind="stable")
    chances = np.array(_chances(len(rewards), n))
    _, group = np.unique(rewards[order], return_inverse=True)
    shared = np.bincount(group, chances) / np.bincount(group)
    return float(shared[group] @ values[order])


def powers_of_two(samples: int) -> list[int]:
    """1, 2, 4 and so on, up to and with `samples`."""
    return sorted({2**power for power in range(samples.bit_length()) if 2**power <= samples} | {samples})
