"""Real preferences, cut into what is learned and what is held out, for the study of reward models."""

from __future__ import annotations

import gzip
import json
from collections.abc import Sequence
from itertools import combinations
from pathlib import Path
from typing import NamedTuple

import numpy as np

from align.data.readers import read_records, write_records
from align.data.records import Ranking


class Part(NamedTuple):
    """A set of rankings, in two files.

    Attributes:
        name: what they are, and how many there are to learn from.
        train, held_out: no prompt stands in both.
        prompt, response: tokens that are read at most: the end of a prompt, the beginning of a response.
        batch: rankings in one update.
    """

    name: str
    train: Path
    held_out: Path
    prompt: int
    response: int
    batch: int


def people_pairs(data: Path, folder: Path, train: int, held_out: int) -> Part:
    """People's pairs: the last rows are held out; the few with an empty answer are left out.

    Args:
        train, held_out: pairs; 0 to learn from: all that are left.
    """
    rows = list(read_records(data / "hh-harmless-2000.jsonl.gz", Ranking, skip_bad_rows=True))
    learned = rows[:-held_out][: train or None]
    return _write(folder, f"people-{len(learned)}", learned, rows[-held_out:], (160, 96, 8))


def kwise(data: Path, folder: Path, name: str, train: int, held_out: int) -> tuple[Part, Part]:
    """Rankings of K responses as they are, and the same rankings as pairs that read each response once.

    Args:
        name: `k9`, nine models' answers, or `k4`, four answers that people compared.
        train, held_out: rankings.
    """
    rows = alpaca_rankings(data) if name == "k9" else qa_rankings(data)
    rows = [row for row in rows if len(row.ranks) == int(name[1])]  # two have only eight answers
    rows = [rows[index] for index in np.random.default_rng(0).permutation(len(rows))]
    held = rows[train : train + held_out]
    whole = _write(folder, f"{name}-rankings-{train}", rows[:train], held, (64, 64, 8))
    random = np.random.default_rng(1)
    pairs = [pair for row in rows[:train] for pair in disjoint_pairs(row, random)]
    per_update = round(whole.batch * len(pairs) / train)
    return whole, _write(folder, f"{name}-pairs-{len(pairs)}", pairs, held, (64, 64, per_update))


def alpaca_rankings(data: Path) -> list[Ranking]:
    """GPT-4's rankings of nine models' answers; those that tie all of them are left out."""
    return list(read_records(data / "alpaca-eval-rankings.jsonl.gz", Ranking, skip_bad_rows=True))


def qa_rankings(data: Path) -> list[Ranking]:
    """People's pairwise preferences among four answers as rankings: by the number of wins, an equal pair half a win each."""
    rankings = []
    with gzip.open(data / "qa-feedback-400.jsonl.gz", "rt", encoding="utf-8") as lines:
        for row in map(json.loads, lines):
            texts = tuple(row[f"prediction {number}"] for number in (1, 2, 3, 4))
            if len(set(ranks := ranks_of(row["preference"]))) > 1:  # four equals teach nothing
                rankings.append(Ranking(prompt=row["question"], responses=texts, ranks=ranks))
    return rankings


def ranks_of(preference: Sequence[int]) -> tuple[int, ...]:
    """Ranks of four answers, 1 for the best.

    Args:
        preference: of the pairs 12, 13, 14, 23, 24, 34: 0 equal, 1 the first is better, 2 the second.
    """
    wins = [0.0] * 4
    for (first, second), verdict in zip(combinations(range(4), 2), preference, strict=True):
        wins[first] += {0: 0.5, 1: 1.0, 2: 0.0}[verdict]
        wins[second] += {0: 0.5, 1: 0.0, 2: 1.0}[verdict]
    levels = sorted(set(wins), reverse=True)
    return tuple(levels.index(value) + 1 for value in wins)


def disjoint_pairs(ranking: Ranking, random: np.random.Generator) -> list[Ranking]:
    """Pairs of differently ranked responses, none in two of them: what labels give when pairs are all that is read."""
    left = [int(place) for place in random.permutation(len(ranking.ranks))]
    found = []
    while left:
        first = left.pop()
        second = next((place for place in left if ranking.ranks[place] != ranking.ranks[first]), None)
        if second is None:
            continue
        left.remove(second)
        texts = (ranking.responses[first], ranking.responses[second])
        ranks = (1, 2) if ranking.ranks[first] < ranking.ranks[second] else (2, 1)
        found.append(Ranking(prompt=ranking.prompt, responses=texts, ranks=ranks))
    return found


def _write(
    folder: Path, name: str, train: Sequence[Ranking], held_out: Sequence[Ranking], sizes: tuple[int, int, int]
) -> Part:
    part = Part(name, folder / f"{name}.train.jsonl", folder / f"{name}.held-out.jsonl", *sizes)
    for path, rows in ((part.train, train), (part.held_out, held_out)):
        if not path.exists():
            write_records(path, rows)
    return part
