"""Records of a run's files, as a report uses them."""

import math
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from align.eval.core.results import Evaluation
from align.ppo.rollout_files import RolloutRow
from align.reward.metrics import ScoredRanking

STAGES = ("sft", "reward", "dpo", "ppo", "distill")
OPTIONAL_STAGES = ("dpo", "distill")
"""Stages that a complete run need not have: DPO is a comparison, distillation makes a smaller model."""


@dataclass(frozen=True)
class Series:
    """One metric over updates; only finite values, updates ascending.

    Attributes:
        updates: [N] numbers of updates.
        values: [N].
    """

    updates: tuple[int, ...]
    values: tuple[float, ...]

    def __bool__(self) -> bool:
        return bool(self.updates)

    def at(self, update: int) -> float | None:
        """The value at an update, or None."""
        return self.values[self.updates.index(update)] if update in self.updates else None


@dataclass
class StageRun:
    """One stage's folder; what could not be read is empty.

    Attributes:
        stage: `sft`, `reward`, `dpo`, `ppo` or `distill`.
        config: resolved settings.
        environment: versions and machine, see `align.runtime.environment`.
        metrics: from an update to its figures.
    """

    stage: str
    folder: Path
    config: dict[str, Any] = field(default_factory=dict)
    environment: dict[str, Any] = field(default_factory=dict)
    metrics: dict[int, dict[str, float]] = field(default_factory=dict)

    def series(self, name: str) -> Series:
        """A metric over updates; empty if it was never written."""
        points = [
            (update, row[name]) for update, row in sorted(self.metrics.items()) if math.isfinite(row.get(name, math.nan))
        ]
        return Series(tuple(update for update, _ in points), tuple(value for _, value in points))


@dataclass(frozen=True)
class Sample:
    """A response to a fixed prompt at one evaluation.

    Attributes:
        prompt: (role, content) of each turn.
        ended: whether the response ended by itself.
        category: what the prompt is about, if the row says so.
    """

    prompt: tuple[tuple[str, str], ...]
    response: str
    reward: float
    ended: bool
    category: str | None = None


@dataclass(frozen=True)
class SummaryRow:
    """A row of summary.json: a value before and after, as text or as a number."""

    name: str
    before: float | str
    after: float | str
    interval: str = ""
    note: str = ""


@dataclass
class RunData:
    """All that a report is made from: a folder with the folders of its stages.

    Attributes:
        stages: by name; a missing stage has no entry.
        rankings: the reward model's held-out rankings with its rewards.
        dpo_rankings: held-out rankings with the implicit rewards of a policy trained by DPO.
        samples: from an update to the responses of that evaluation.
        rollouts: rows of some updates of PPO, as they were learned from.
        summary: the rows of summary.json.
        evaluations: what `align eval` wrote into the folder's subfolder `eval`.
        problems: what is missing or unreadable, one sentence each.
    """

    folder: Path
    stages: dict[str, StageRun] = field(default_factory=dict)
    rankings: list[ScoredRanking] = field(default_factory=list)
    dpo_rankings: list[ScoredRanking] = field(default_factory=list)
    samples: dict[int, list[Sample]] = field(default_factory=dict)
    rollouts: list[list[RolloutRow]] = field(default_factory=list)
    summary: list[SummaryRow] = field(default_factory=list)
    evaluations: list[Evaluation] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)
