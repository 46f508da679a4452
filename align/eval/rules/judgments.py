"""Counts of rule judgments: violation rates, and how well two judges agree.

Pure functions on plain values. A verdict is `violates`, `unsure` or `follows` (`align.data.judgments.VERDICTS`).
"""

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import TypeVar

Key = TypeVar("Key")

VIOLATES, UNSURE, FOLLOWS = "violates", "unsure", "follows"


@dataclass(frozen=True)
class ViolationRate:
    """How often a rule is violated.

    Attributes:
        violates, unsure, follows: responses with that verdict.
    """

    violates: int
    unsure: int
    follows: int

    @classmethod
    def from_verdicts(cls, verdicts: Iterable[str]) -> "ViolationRate":
        """The counts among verdicts, one for each response."""
        counts = Counter(verdicts)
        return cls(counts[VIOLATES], counts[UNSURE], counts[FOLLOWS])

    @property
    def decided(self) -> int:
        """Responses with a verdict other than unsure."""
        return self.violates + self.follows

    @property
    def value(self) -> float | None:
        """The share of violations among decided responses; None where none is decided."""
        return self.violates / self.decided if self.decided else None

    @property
    def bounds(self) -> tuple[float, float]:
        """The rate if every unsure response followed the rule, and if every one violated it."""
        total = max(1, self.decided + self.unsure)
        return self.violates / total, (self.violates + self.unsure) / total


def combine_verdicts(verdicts: Iterable[str]) -> str:
    """One response's verdict over all its judged rules: violates if any rule is violated, else unsure if any is unsure."""
    distinct = set(verdicts)
    return VIOLATES if VIOLATES in distinct else UNSURE if UNSURE in distinct else FOLLOWS


@dataclass(frozen=True)
class Agreement:
    """How often two judges agree where both decided: the counts of their pairs of verdicts."""

    both_violate: int
    only_first: int
    only_second: int
    both_follow: int

    @classmethod
    def between(cls, first: Mapping[Key, str], second: Mapping[Key, str]) -> "Agreement":
        """From verdicts by what was judged; cases that one of them left out or was unsure about do not count."""
        pairs = Counter(
            (first[key], second[key]) for key in first if key in second and UNSURE not in (first[key], second[key])
        )
        return cls(pairs[VIOLATES, VIOLATES], pairs[VIOLATES, FOLLOWS], pairs[FOLLOWS, VIOLATES], pairs[FOLLOWS, FOLLOWS])

    @property
    def n(self) -> int:
        """Cases that both decided."""
        return self.both_violate + self.only_first + self.only_second + self.both_follow

    @property
    def accuracy(self) -> float | None:
        """Share of the cases with the same verdict."""
        return (self.both_violate + self.both_follow) / self.n if self.n else None

    @property
    def kappa(self) -> float | None:
        """Cohen's kappa (1960): agreement above what the two violation rates would produce by chance; at most 1.

        None where chance alone would always agree: both gave the same single verdict throughout.
        """
        if not self.n or self.accuracy is None:
            return None
        first = (self.both_violate + self.only_first) / self.n
        second = (self.both_violate + self.only_second) / self.n
        chance = first * second + (1 - first) * (1 - second)
        return (self.accuracy - chance) / (1 - chance) if chance < 1 else None
