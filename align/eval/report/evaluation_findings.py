"""The results of `align eval` in sentences."""

from collections.abc import Sequence
from itertools import groupby

from align.eval.core.results import Evaluation, Figure
from align.eval.report.summary import Rating, Summary

REWARD_MODEL_TASKS = ("reward", "rewardbench", "rewardbench-2")
"""Tasks whose models are reward models side by side, not a start and what was trained from it."""


def add_evaluation_findings(summary: Summary, evaluations: Sequence[Evaluation]) -> None:
    """Say which figures of the first and the last model have 95 % intervals that do not overlap.

    `Figure.better` decides whether a change is good; figures without a better direction are left out.
    """
    for task, group in groupby(evaluations, lambda evaluation: evaluation.task):
        models = list(group)
        if len(models) < 2 or task in REWARD_MODEL_TASKS:
            continue
        first, last = models[0], models[-1]
        pairs = [(before, after) for before in first.figures for after in last.figures if before.name == after.name]
        rated = [(before, after) for before, after in pairs if after.better]
        differences = 0
        for before, after in rated:
            direction = _clear_direction(before, after)
            if direction:
                differences += 1
                verb = "rose" if direction > 0 else "fell"
                text = f"{task.capitalize()}: {before.name} {verb} from {before.text} ({first.model}) to {after.text}"
                rating: Rating = "good" if (direction > 0) == (after.better == "higher") else "bad"
                summary.add_finding(rating, f"{text} ({last.model}), beyond both 95 % intervals.")
        if rated and not differences:
            text = f"{task.capitalize()}: no figure of {first.model} and {last.model} differs beyond its 95 % interval"
            summary.add_finding("note", f"{text} (n = {rated[0][0].n}).")


def _clear_direction(before: Figure, after: Figure) -> int:
    """1 where the interval after lies above the one before, -1 below, 0 where they overlap or one is unknown."""
    if before.low is None or before.high is None or after.low is None or after.high is None:
        return 0
    return (after.low > before.high) - (after.high < before.low)
