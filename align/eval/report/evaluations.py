"""What `align eval` found, told in sentences."""

from collections.abc import Sequence
from itertools import groupby

from align.eval.report.summary import Digest
from align.eval.results import Evaluation, Figure

RISING_IS_GOOD = {"truthfulness": True, "toxicity": False, "rules": False, "winrate": True}
"""Tasks whose figures all have a good direction."""
NEUTRAL = ("empty", "ties", "position flips")
"""Beginnings or parts of the names of figures that have none."""


def evaluation_findings(result: Digest, evaluations: Sequence[Evaluation]) -> None:
    """Say which figures differ between the first and the last model by more than their intervals leave open."""
    for task, group in groupby(evaluations, lambda each: each.task):
        models = list(group)
        if len(models) < 2 or task not in RISING_IS_GOOD:
            continue
        first, last = models[0], models[-1]
        pairs = [(before, after) for before in first.figures for after in last.figures if before.name == after.name]
        told = 0
        for before, after in pairs:
            way = _direction(before, after)
            if way and not any(word in before.name for word in NEUTRAL):
                told += 1
                mood = "good" if (way > 0) == RISING_IS_GOOD[task] else "bad"
                word = "rose" if way > 0 else "fell"
                text = f"{task.capitalize()}: {before.name} {word} from {before.text} ({first.model}) to {after.text}"
                result.say("good" if mood == "good" else "bad", f"{text} ({last.model}), beyond both 95 % intervals.")
        if pairs and not told:
            text = f"{task.capitalize()}: no figure of {first.model} and {last.model} differs beyond its 95 % interval"
            result.say("note", f"{text} (n = {pairs[0][0].n}).")


def _direction(before: Figure, after: Figure) -> int:
    """1 where the interval after lies above the one before, -1 below, 0 where they touch or are not known."""
    if None in (before.low, before.high, after.low, after.high):
        return 0
    assert before.low is not None
    assert before.high is not None
    assert after.low is not None
    assert after.high is not None
    return (after.low > before.high) - (after.high < before.low)
