"""Comparisons that a reward model decides: the answer with the higher reward wins."""

from dataclasses import dataclass
from itertools import combinations
from pathlib import Path

import yaml
from accelerate import Accelerator

from align.builtin.zoo import resolve_model
from align.eval.core.answers import answer_settings, answered_by_all, draw_answers, score_answers
from align.eval.core.fingerprints import fingerprint
from align.eval.core.subjects import subjects
from align.eval.winrate.pairwise import PairwiseComparison, outcome_of_rewards
from align.eval.winrate.settings import WinrateConfig
from align.examples import SampledResponse
from align.reward.checkpoint import load_reward_model
from align.reward.scoring import RewardModelScorer
from align.runtime.console import console


@dataclass(frozen=True)
class RewardedAnswers:
    """What models answered and the rewards, by model and by the prompt's number.

    Attributes:
        scorer: the reward model's name.
    """

    answers: dict[str, dict[str, list[SampledResponse]]]
    rewards: dict[str, dict[str, list[float]]]
    scorer: str

    @property
    def prompts(self) -> list[str]:
        """Numbers of the prompts that every model answered."""
        return answered_by_all(list(self.answers.values()))

    def of(self, model: str) -> list[float]:
        """A model's reward for each of `prompts`."""
        return [self.rewards[model][number][0] for number in self.prompts]


def compare_by_reward_model(config: WinrateConfig, accelerator: Accelerator) -> tuple[list[PairwiseComparison], str]:
    """Let all models answer the prompts and compare their rewards; returns the scorer's name too."""
    found = reward_answers(config, accelerator)
    return compare_rewards(found), found.scorer


def reward_answers(config: WinrateConfig, accelerator: Accelerator) -> RewardedAnswers:
    """Let all models answer the prompts, and the reward model score what they say."""
    folder = str(resolve_model(config.reward_model))
    reward, reward_fingerprint = load_reward_model(folder, config.dtype), fingerprint(folder)
    answers: dict[str, dict[str, list[SampledResponse]]] = {}
    rewards: dict[str, dict[str, list[float]]] = {}
    for subject in subjects(config, accelerator):
        name = subject.name
        answers[name] = draw_answers(config, "winrate", subject, accelerator)
        scorer = RewardModelScorer.from_loaded(reward, subject.loaded.tokenization, accelerator, config.batch_tokens)
        settings = answer_settings(config) | {
            "model": subject.source,
            "weights": subject.fingerprint,
            "reward_model": reward_fingerprint,
        }
        path = Path(config.output) / f"winrate-{name}-{reward_fingerprint}.jsonl"
        rewards[name] = score_answers(path, settings, scorer, answers[name], accelerator)
        if training_reward_fingerprint(subject.source) == reward_fingerprint:
            console.print(f"{name} was trained on this reward model: its win rate measures what it was optimized for")
    return RewardedAnswers(answers, rewards, f"reward model {Path(folder).name} {reward_fingerprint}".strip())


def compare_rewards(found: RewardedAnswers) -> list[PairwiseComparison]:
    """Every pair of models on every prompt that all answered: the higher reward wins."""
    comparisons = []
    for number in found.prompts:
        for first, second in combinations(found.answers, 2):
            outcome = outcome_of_rewards(found.rewards[first][number][0], found.rewards[second][number][0])
            lengths = (len(found.answers[first][number][0].text), len(found.answers[second][number][0].text))
            comparisons.append(PairwiseComparison(number, first, second, outcome, lengths))
    return comparisons


def training_reward_fingerprint(model: str) -> str:
    """The fingerprint of the reward model that a run's policy was trained on; '' where that is not known."""
    for folder in (Path(model), Path(model).parent):
        try:
            settings = yaml.safe_load((folder / "config.yaml").read_text(encoding="utf-8"))
        except (OSError, ValueError, yaml.YAMLError):
            continue
        return fingerprint(settings.get("reward_model") or "") if isinstance(settings, dict) else ""
    return ""
