"""`align eval distillation`: how a student compares with its teacher in size, speed, win rate and reward.

From a launcher: `accelerate launch align/eval/distillation.py --config FILE`.
"""

import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass

import numpy as np
import torch
from accelerate import Accelerator

from align.eval.core.answers import read_prompts
from align.eval.core.evaluated_models import EvaluatedModel, open_accelerator, open_models, short_names
from align.eval.core.results import Evaluation, Figure, mean_figure, publish
from align.eval.winrate.by_judge import compare_by_judge
from align.eval.winrate.by_reward_model import compare_rewards, reward_answers
from align.eval.winrate.pairwise import win_rate
from align.eval.winrate.settings import WinrateConfig
from align.launch import run_stage
from align.sampling.generation import Sampling, row_uniforms, sample
from align.seeds import Stream
from align.settings import option, require_setting
from align.statistics import percentiles, resample

TASK = "distillation"
MOST_WITHOUT_GAIN = 0.01
"""Share of the resamples that may show no gain of the teacher."""
TIMED_ROWS, TIMED_TOKENS, TIMED_PASSES = 16, 64, 3
"""Speed is measured on one batch of `TIMED_ROWS` responses of `TIMED_TOKENS` tokens; the fastest pass counts."""


@dataclass(kw_only=True)
class DistillationConfig(WinrateConfig):
    """A teacher and its students. One of `reward_model`, `judge` and `endpoint` decides who wins."""

    models: list[str] = option([], "the teacher, its students, and the baseline if there is one")
    baseline: str = option(
        "",
        "model whose mean reward counts as 0 % kept, such as the policy before PPO, by its name in the table; empty: none",
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        require_setting(self, "comparisons", not self.comparisons, "empty: the models answer")
        require_setting(self, "models", len(self.models) >= 2, "a teacher and at least one student")
        names = short_names(self.models)
        require_setting(self, "baseline", self.baseline in ("", *names[1:]), f"one of {', '.join(names[1:])}")
        named = not self.baseline or bool(self.reward_model)
        require_setting(self, "baseline", named, "empty without reward_model")


def run_distillation(config: DistillationConfig) -> list[Evaluation]:
    """Compare students with their teacher and write `distillation.json`; returns an evaluation for each model.

    Raises:
        UserError: for a mistake in the settings or the data, or a judge that fails; what was judged is kept.
    """
    accelerator = open_accelerator(config)
    names = short_names(config.models)
    figures = {
        evaluated.name: size_and_speed(config, evaluated, accelerator) for evaluated in open_models(config, accelerator)
    }
    rewards: dict[str, list[float]] = {}
    if config.reward_model:
        rewarded = reward_answers(config, accelerator)
        comparisons, scorer = compare_rewards(rewarded), rewarded.scorer
        rewards = {name: rewarded.rewards_of(name) for name in names}
    else:
        comparisons, scorer = compare_by_judge(config, accelerator)
    teacher = names[0]
    for name in names:
        own = [each for each in comparisons if {each.first, each.second} == {name, teacher}]
        if own:
            rate = win_rate(own, name)
            figures[name].append(
                Figure(f"preferred to {teacher}", *rate, len(own), scorer, "a tie counts as half", "higher")
            )
        if rewards:
            figures[name].append(mean_figure("reward", rewards[name], config.resamples, scorer, better="higher"))
        if config.baseline:
            figures[name].append(reward_kept(rewards, name, teacher, config.baseline, config.resamples, scorer))
    evaluations = [Evaluation(TASK, name, asdict(config), figures[name]) for name in names]
    return publish(config, evaluations, accelerator)


def size_and_speed(config: DistillationConfig, evaluated: EvaluatedModel, accelerator: Accelerator) -> list[Figure]:
    """Parameters, and how fast a model samples on one process of this machine."""
    model = evaluated.loaded.backbone.model
    count = sum(weight.numel() for weight in model.parameters())
    prompts = [numbered.prompt.ids for numbered in read_prompts(config, evaluated.loaded).values()]
    rows = (prompts * TIMED_ROWS)[:TIMED_ROWS]
    speed = max(sampling_speed(evaluated, rows) for _ in range(TIMED_PASSES))
    accelerator.wait_for_everyone()
    note = f"sampled, {TIMED_ROWS} responses of {TIMED_TOKENS} tokens in one batch, the fastest of {TIMED_PASSES}"
    return [
        Figure("million parameters", count / 1e6, None, None, 1),
        Figure("tokens/s", speed, None, None, TIMED_PASSES, "", note, "higher"),
    ]


def sampling_speed(evaluated: EvaluatedModel, prompts: Sequence[list[int]]) -> float:
    """Tokens a second of one batch of responses, none of which ends early."""
    sampling = Sampling(TIMED_TOKENS, batch_tokens=10**9)
    uniforms = row_uniforms(len(prompts), sampling, 0, Stream.EVALUATION_ANSWERS)
    started = time.perf_counter()
    sample(evaluated.loaded.backbone, list(prompts), uniforms, sampling, frozenset())
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return len(prompts) * TIMED_TOKENS / (time.perf_counter() - started)


def reward_kept(
    rewards: dict[str, list[float]], name: str, teacher: str, baseline: str, resamples: int, scorer: str
) -> Figure:
    """The share of the teacher's gain over the baseline that a model has: 1 is the teacher, 0 the baseline.

    The interval is over prompts, which all three models share. There is none where more than one resample in 100 shows no
    gain of the teacher: the share is then unbounded.
    """
    own, best, zero = (np.array(rewards[model]) for model in (name, teacher, baseline))
    label, note = "share of reward kept", f"of the gain of {teacher} over {baseline}"
    if best.mean() <= zero.mean():
        return Figure(label, None, None, None, len(own), scorer, f"{teacher} gains nothing over {baseline}")

    def shares(drawn: np.ndarray) -> np.ndarray:
        gain = (best - zero)[drawn].mean(1)
        with np.errstate(divide="ignore", invalid="ignore"):
            return np.where(gain > 0, (own - zero)[drawn].mean(1) / gain, np.nan)

    value = float((own - zero).mean() / (best - zero).mean())
    if name == teacher:
        return Figure(label, value, None, None, len(own), scorer, note)  # 1 by definition
    resampled = resample(shares, len(own), resamples)
    if np.isnan(resampled).mean() > MOST_WITHOUT_GAIN or np.ptp(resampled[~np.isnan(resampled)]) == 0:
        return Figure(
            label, value, None, None, len(own), scorer, f"{note}, which is too uncertain for an interval", "higher"
        )
    low, high = percentiles(resampled)
    return Figure(label, value, float(low), float(high), len(own), scorer, note, "higher")


if __name__ == "__main__":
    run_stage(DistillationConfig, run_distillation)
