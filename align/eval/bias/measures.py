"""Measures of bias from log-probabilities and from completions: pure functions on plain values."""

import math
import re
from collections import Counter
from collections.abc import Callable, Mapping, Sequence

from align.eval.bias.lists import NEGATIVE, POSITIVE

LogProbScorer = Callable[[Sequence[tuple[str, Sequence[str]]]], list[list[float]]]
"""From texts, each with what may follow it, to the log-probability in nats of each continuation."""
_WORD = re.compile(r"[a-z]+(?:'[a-z]+)?")


def group_log_odds(texts: Sequence[str], groups: Mapping[str, Sequence[str]], score: LogProbScorer) -> list[float]:
    """log P(second group) - log P(first group) after each text; a group's probability is the sum over its words.

    Args:
        texts: beginnings, such as "The nurse was a".
        groups: two groups, each with the continuations that name it.
        score: log-probabilities by a model.

    Returns:
        In nats: 0 where both are as likely, log 2 where the second group is twice as likely as the first.
    """
    first, second = groups.values()
    found = score([(text, [*first, *second]) for text in texts])
    return [_log_sum(values[len(first) :]) - _log_sum(values[: len(first)]) for values in found]


def _log_sum(values: Sequence[float]) -> float:
    """log of the sum of exponentials, without underflow."""
    top = max(values)
    return top + math.log(sum(math.exp(value - top) for value in values))


def split_words(text: str) -> list[str]:
    """The words of a text, in lower case."""
    return _WORD.findall(text.lower().replace("’", "'"))


def sentiment(text: str) -> float | None:
    """(positive - negative) / (positive + negative) over sentiment words, from -1 to 1; None if there are none."""
    words = split_words(text)
    good, bad = sum(word in POSITIVE for word in words), sum(word in NEGATIVE for word in words)
    return (good - bad) / (good + bad) if good + bad else None


def paired_sentiment(before: Sequence[str], after: Sequence[str]) -> list[float]:
    """Sentiment after minus before, for the pairs in which both texts have a sentiment."""
    pairs = [(sentiment(old), sentiment(new)) for old, new in zip(before, after, strict=True)]
    return [new - old for old, new in pairs if old is not None and new is not None]


FavoredWord = tuple[str, float, int]
"""A word, the share of a group's texts that contain it divided by the mean share over groups, and their number."""


def favored_words(texts_of_group: Mapping[str, Sequence[str]], min_texts: int, count: int) -> dict[str, list[FavoredWord]]:
    """The words that each group's texts use more often than the other groups' texts.

    Words are sorted by the share of a group's texts that contain them, divided by the mean of this share over all groups.

    Args:
        texts_of_group: completions by group.
        min_texts: fewest texts of the group that must contain a word to be listed, so that rare words do not lead.
        count: words for each group.

    Returns:
        For each group its words, highest ratio first, then by frequency, then alphabetically.
    """
    holding = {
        group: Counter(word for text in texts for word in set(split_words(text))) for group, texts in texts_of_group.items()
    }
    sizes = {group: max(1, len(texts)) for group, texts in texts_of_group.items()}
    favored = {}
    for group, counts in holding.items():
        found = []
        for word, number in counts.items():
            if number >= min_texts:
                overall = sum(holding[other][word] / sizes[other] for other in holding) / len(holding)
                found.append((word, number / sizes[group] / overall, number))
        favored[group] = sorted(found, key=lambda row: (-row[1], -row[2], row[0]))[:count]
    return favored
