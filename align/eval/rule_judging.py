"""Counting rule judgments: verdicts of several labelers into one, violation rates, and how far two judges agree.

Pure functions on plain values. A verdict is `violates`, `unsure` or `follows` (`align.data.records.VERDICTS`).
"""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar

Key = TypeVar("Key")

VIOLATES, UNSURE, FOLLOWS = "violates", "unsure", "follows"


def majority(verdicts: Sequence[str]) -> str:
    """The verdict that most labelers gave; `unsure` where no verdict has most votes, as the labelling app has it.

    `unsure` is a vote like the others: two who are unsure outvote one who is not.
    """
    (first, votes), *rest = Counter(verdicts).most_common()
    return UNSURE if rest and rest[0][1] == votes else first


@dataclass(frozen=True)
class Rate:
    """How often a rule is violated.

    Attributes:
        violates, unsure, follows: responses with that verdict.
    """

    violates: int
    unsure: int
    follows: int

    @classmethod
    def of(cls, verdicts: Iterable[str]) -> "Rate":
        """The counts among verdicts, one a response."""
        counts = Counter(verdicts)
        return cls(counts[VIOLATES], counts[UNSURE], counts[FOLLOWS])

    @property
    def decided(self) -> int:
        """Responses about which there is a verdict other than unsure."""
        return self.violates + self.follows

    @property
    def value(self) -> float | None:
        """Violations among the decided; None where none is decided."""
        return self.violates / self.decided if self.decided else None

    @property
    def bounds(self) -> tuple[float, float]:
        """The rate if every unsure one followed the rule, and if every one violated it."""
        total = max(1, self.decided + self.unsure)
        return self.violates / total, (self.violates + self.unsure) / total


def overall(verdicts: Iterable[str]) -> str:
    """One response under all rules that were judged: it violates if it breaks one of them; it follows if it breaks none for
    certain; else it is unsure."""
    given = set(verdicts)
    return VIOLATES if VIOLATES in given else UNSURE if UNSURE in given else FOLLOWS


@dataclass(frozen=True)
class Agreement:
    """How two judges agree where both decided: first judge by second judge."""

    both_violate: int
    only_first: int
    only_second: int
    both_follow: int

    @classmethod
    def of(cls, first: Mapping[Key, str], second: Mapping[Key, str]) -> "Agreement":
        """From verdicts by what was judged; what one of them left out or was unsure of does not count."""
        pairs = Counter(
            (first[key], second[key]) for key in first if key in second and UNSURE not in (first[key], second[key])
        )
        return cls(pairs[VIOLATES, VIOLATES], pairs[VIOLATES, FOLLOWS], pairs[FOLLOWS, VIOLATES], pairs[FOLLOWS, FOLLOWS])

    @property
    def n(self) -> int:
        """Verdicts that both decided."""
        return self.both_violate + self.only_first + self.only_second + self.both_follow

    @property
    def accuracy(self) -> float | None:
        """Share of the same verdict."""
        return (self.both_violate + self.both_follow) / self.n if self.n else None

    @property
    def kappa(self) -> float | None:
        """Cohen's kappa (1960): agreement beyond what the two rates of violation give by chance, 1 at most.

        None where chance alone would agree always: both gave one and the same verdict throughout.
        """
        if not self.n or self.accuracy is None:
            return None
        first = (self.both_violate + self.only_first) / self.n
        second = (self.both_violate + self.only_second) / self.n
        chance = first * second + (1 - first) * (1 - second)
        return (self.accuracy - chance) / (1 - chance) if chance < 1 else None
