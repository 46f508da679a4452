"""An extension of PPO: responses of one sentence earn a bonus."""

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from align.ppo.extensions import Extension, RoleOutputs, Rollout, TrainingSignal

BONUS = 0.5


def is_one_sentence(text: str) -> bool:
    """Whether a text has at most one full stop, question mark or exclamation mark."""
    return sum(text.count(mark) for mark in ".?!") <= 1


class BriefAnswers(Extension):
    """Adds a bonus to the training scores of responses of one sentence, and counts them over the run."""

    def __init__(self) -> None:
        self.count = 0

    def shape(self, signal: TrainingSignal, rollout: Rollout, old: RoleOutputs) -> TrainingSignal:
        brief: Tensor = torch.tensor([float(is_one_sentence(text)) for text in rollout.texts])
        self.count += int(brief.sum())
        signal.components["brief"] = brief  # logged as reward/brief
        return replace(signal, scores=signal.scores + BONUS * brief)

    def metrics(self) -> dict[str, float]:
        return {"brief_answers/count": float(self.count)}

    def state_dict(self) -> dict[str, Any]:
        return {"count": self.count}  # saved in checkpoints

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.count = state["count"]
