"""Rows of an evaluation that share words with training data (contamination)."""

import os
import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

from align.core.errors import counted
from align.data.sources import iter_rows

WORDS = 13  # GPT-3, appendix C
FEWEST_WORDS = 8  # the same: the smallest N for data sets of short texts; here for a text that is shorter than 13 words
FREQUENT = 10  # the same: "N-grams that occur more than 10 times" are left out
LISTED = 20
_WORD = re.compile(r"\w+")
Gram = tuple[str, ...]


class Match(NamedTuple):
    """An evaluation row, the first training row that shares words with it, and the words."""

    evaluation: str
    training: str
    words: str


class Overlap(NamedTuple):
    """What two sources share.

    Attributes:
        rows: of the evaluation.
        too_short: of those, how many have no text of `FEWEST_WORDS` words and are not compared.
        training_rows: rows of the training data.
        matches: one for each suspicious row, in the order of the evaluation.
        frequent: word sequences of the evaluation that were left out because many training rows have them.
    """

    rows: int
    too_short: int
    training_rows: int
    matches: list[Match]
    frequent: int


def find_overlap(training: str | os.PathLike[str], evaluation: str | os.PathLike[str]) -> Overlap:
    """Compare every text of every row, in any layout; the training data are streamed and may be larger than memory.

    As GPT-3's check for contamination (Brown et al. 2020, arXiv 2005.14165, section 4 and appendix C): a row is suspicious
    if it shares 13 consecutive words with the training data, ignoring case and punctuation. Word sequences that occur in
    more than ten training rows are common phrases or templates, and are ignored.

    A text of fewer words must match as a whole.
    """
    rows_of_gram: dict[Gram, list[str]] = {}
    order: list[str] = []
    too_short = training_rows = 0
    for where, texts in _texts_of_rows(evaluation):
        long = (text for text in texts if len(text) >= FEWEST_WORDS)
        grams = {gram for text in long for gram in _windows(text, min(WORDS, len(text)))}
        too_short += not grams
        order.append(where)
        for gram in grams:
            rows_of_gram.setdefault(gram, []).append(where)
    # A text of the evaluation with fewer words can lie anywhere in a training text.
    lengths = sorted({len(gram) for gram in rows_of_gram})
    counts = Counter[Gram]()
    first: dict[Gram, str] = {}
    for where, texts in _texts_of_rows(training):
        training_rows += 1
        sequences = (gram for text in texts for length in lengths for gram in _windows(text, length))
        grams = {gram for gram in sequences if gram in rows_of_gram}
        counts.update(grams)
        for gram in grams:
            first.setdefault(gram, where)
    match_of: dict[str, Match] = {}
    for gram in sorted(gram for gram, count in counts.items() if count <= FREQUENT):
        for where in rows_of_gram[gram]:
            match_of.setdefault(where, Match(where, first[gram], " ".join(gram)))
    matches = [match_of[where] for where in order if where in match_of]
    frequent = sum(count > FREQUENT for count in counts.values())
    return Overlap(len(order), too_short, training_rows, matches, frequent)


def describe_overlap(training: str, evaluation: str) -> str:
    """`find_overlap` in words, one fact a line, with the suspicious rows at the end."""
    found = find_overlap(training, evaluation)
    judged = found.rows - found.too_short
    share = f" ({100 * len(found.matches) / judged:.1f} %)" if judged else ""
    rows = counted(found.rows, "row")
    lines = [
        f"training:      {training}, {counted(found.training_rows, 'row')}",
        f"evaluation:    {evaluation}, {rows}, of which {found.too_short} have no text of {FEWEST_WORDS} words",
        f"shared:        {len(found.matches)} of {judged} rows{share} share {WORDS} words in a row, or a whole shorter text",
    ]
    if found.frequent:
        lines.append(f"left out:      {found.frequent} word sequences that more than {FREQUENT} training rows have")
    lines += [f'  {match.evaluation} with {match.training}: "{match.words}"' for match in found.matches[:LISTED]]
    more = len(found.matches) - LISTED
    return "\n".join(lines + ([f"  and {more} more"] if more > 0 else []))


def _texts_of_rows(source: str | os.PathLike[str]) -> Iterator[tuple[str, list[list[str]]]]:
    """Where each row is, and the words of each of its texts."""
    for row in iter_rows(os.fspath(source)):
        yield row.where, [_WORD.findall(text.lower().replace("_", " ")) for text in _texts(row.row)]


def _texts(value: object) -> Iterator[str]:
    """Every text in a row, whatever its layout: words of different texts never make one sequence."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping):
        for part in value.values():
            yield from _texts(part)
    elif isinstance(value, Sequence):
        for part in value:
            yield from _texts(part)


def _windows(text: list[str], length: int) -> Iterator[Gram]:
    for start in range(len(text) - length + 1):
        yield tuple(text[start : start + length])
