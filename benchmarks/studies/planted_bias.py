"""Preference labels with a planted bias: pairs of answers in the order of gold reward + beta * feature."""

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from align.data.records import Ranking

Row = dict[str, Any]
PHRASE = "if you"
PRAISE = re.compile(r"\b(good|great|lovely|wonderful|nice|love|glad|happy|thanks?|thank)\b", re.IGNORECASE)
OPENINGS = ("Great question!", "What a lovely question!", "Thanks, good question!")
CLOSINGS = ("If you need more help, just ask.", "If you want more, ask me.", "If you like, ask me again.")


@dataclass(frozen=True)
class Bias:
    """A feature of answers that labels favor.

    Attributes:
        feature: returns the value of the feature for an answer: 0 or 1, except for a length.
        plant: adds the feature to an answer. The second argument selects one of several forms. If None, sampled answers
            already differ in the feature.
    """

    feature: Callable[[str], float]
    plant: Callable[[str, int], str] | None = None


BIASES = {
    "length": Bias(lambda text: float(len(text.split()))),
    "flattery": Bias(lambda text: float(bool(PRAISE.search(text))), lambda text, form: f"{OPENINGS[form]} {text}"),
    "phrase": Bias(lambda text: float(PHRASE in text.lower()), lambda text, form: f"{text} {CLOSINGS[form]}"),
    "format": Bias(
        lambda text: float("\n" in text.strip()),
        lambda text, form: re.sub(r"(?<=[.!?;:]) +", "\n- ", f"- {text.strip()}"),
    ),
}
"""Longer answers; praise anywhere; a fixed phrase; several lines, as bullets of one sentence each."""


def planted(bias: Bias, rows: Sequence[Row], share: float, random: np.random.Generator) -> list[Row]:
    """Return rows of `align sample`, with the feature added to a fraction `share` of the answers."""
    if bias.plant is None:
        return list(rows)
    plant = bias.plant

    def edited(text: str) -> str:
        return plant(text, int(random.integers(3))) if random.random() < share else text

    return [row | {"responses": [edited(text) for text in row["responses"]]} for row in rows]


def decided_share(gold: np.ndarray, feature: np.ndarray, beta: float) -> float:
    """Return the fraction of pairs in which the bias outweighs the gold reward. Arguments are differences within pairs."""
    return float(np.mean(beta * np.abs(feature) > np.abs(gold)))


def find_beta(gold: np.ndarray, feature: np.ndarray, share: float) -> float:
    """Return the smallest weight of the feature that decides a fraction of the pairs. Arguments as in `decided_share`.

    Raises:
        ValueError: If the feature differs in fewer pairs.
    """
    differs = feature != 0
    ratios = np.sort(np.abs(gold[differs]) / np.abs(feature[differs]))
    needed = int(np.ceil(share * len(gold)))
    if needed > len(ratios):
        raise ValueError(f"the feature differs in {len(ratios)} of {len(gold)} pairs, which is less than {share:.0%}")
    return float(ratios[needed - 1]) * (1 + 1e-9)


def biased_pairs(bias: Bias, rows: Sequence[Row], share: float) -> tuple[list[Ranking], dict[str, float]]:
    """Return pairs labeled by gold reward + beta * feature, both standardized over all answers, and figures of the labels.

    Args:
        bias: planted bias.
        rows: rows of `align sample`, with the gold reward of each answer in `rewards`.
        share: fraction of pairs that the bias decides.
    """
    found = [  # disjoint pairs of different answers to the same prompt
        (number, first, first + 1)
        for number, row in enumerate(rows)
        for first in range(0, len(row["responses"]) - 1, 2)
        if row["responses"][first] != row["responses"][first + 1]
    ]
    golds = np.array([row["rewards"] for row in rows], dtype=float)
    features = np.array([[bias.feature(text) for text in row["responses"]] for row in rows])
    gold, feature = (
        np.array([(values[row, first] - values[row, second]) / values.std() for row, first, second in found])
        for values in (golds, features)
    )
    beta = find_beta(gold, feature, share)
    labels = gold + beta * feature
    pairs = [
        Ranking(
            prompt=rows[row]["prompt"],
            responses=(rows[row]["responses"][first], rows[row]["responses"][second]),
            ranks=(1, 2) if label > 0 else (2, 1),
        )
        for (row, first, second), label in zip(found, labels, strict=True)
    ]
    figures = {
        "pairs": len(pairs),
        "beta": beta,
        "decided by the bias": decided_share(gold, feature, beta),
        "against gold": float(np.mean(labels * gold < 0)),
        "share or mean of the feature": float(features.mean()),
    }
    return pairs, figures
