"""Comparisons decided by a reward model: the answer with the higher reward wins."""

from itertools import combinations
from pathlib import Path

import yaml
from accelerate import Accelerator

from align.builtin.zoo import resolve_model
from align.eval.core.answers import answer_settings, answered_by_all, sample_answers, score_answers
from align.eval.core.evaluated_models import open_models
from align.eval.core.fingerprints import fingerprint
from align.eval.winrate.pairwise import PairwiseComparison, outcome_of_rewards
from align.eval.winrate.settings import WinrateConfig
from align.examples import SampledResponse
from align.reward.checkpoint import load_reward_model
from align.reward.scoring import RewardModelScorer
from align.runtime.console import console


def compare_by_reward_model(config: WinrateConfig, accelerator: Accelerator) -> tuple[list[PairwiseComparison], str]:
    """Sample all models' answers and compare every pair on the prompts that all answered; returns the scorer's name too."""
    folder = str(resolve_model(config.reward_model))
    reward, reward_fingerprint = load_reward_model(folder, config.dtype, config.chat_template), fingerprint(folder)
    answers: dict[str, dict[str, list[SampledResponse]]] = {}
    rewards: dict[str, dict[str, list[float]]] = {}
    for evaluated in open_models(config, accelerator):
        name = evaluated.name
        answers[name] = sample_answers(config, "winrate", evaluated, accelerator)
        scorer = RewardModelScorer.from_loaded(reward, evaluated.loaded.tokenization, accelerator, config.batch_tokens)
        settings = answer_settings(config) | {
            "model": evaluated.source,
            "weights": evaluated.fingerprint,
            "reward_model": reward_fingerprint,
        }
        path = Path(config.output) / f"winrate-{name}-{reward_fingerprint}.jsonl"
        rewards[name] = score_answers(path, settings, scorer, answers[name], accelerator)
        if training_reward_fingerprint(evaluated.source) == reward_fingerprint:
            console.print(f"{name} was trained on this reward model: its win rate measures what it was optimized for")
    comparisons = []
    for number in answered_by_all(list(answers.values())):
        for first, second in combinations(answers, 2):
            outcome = outcome_of_rewards(rewards[first][number][0], rewards[second][number][0])
            lengths = (len(answers[first][number][0].text), len(answers[second][number][0].text))
            comparisons.append(PairwiseComparison(number, first, second, outcome, lengths))
    return comparisons, f"reward model {Path(folder).name} {reward_fingerprint}".strip()


def training_reward_fingerprint(model: str) -> str:
    """The fingerprint of the reward model that a run's policy was trained on; '' where that is not known."""
    for folder in (Path(model), Path(model).parent):
        try:
            settings = yaml.safe_load((folder / "config.yaml").read_text(encoding="utf-8"))
        except (OSError, ValueError, yaml.YAMLError):
            continue
        return fingerprint(settings.get("reward_model") or "") if isinstance(settings, dict) else ""
    return ""
