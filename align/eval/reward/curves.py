"""Over-optimization in two curves: the reward of the best of n answers, and reward against KL over PPO's policies."""

from collections.abc import Sequence
from dataclasses import asdict, replace
from functools import cache
from math import comb, log
from pathlib import Path

import numpy as np
import yaml
from accelerate import Accelerator

from align.core.errors import UserError
from align.core.files import numbered_paths
from align.core.settings import ModelConfig
from align.eval.core.answers import answer_settings, sample_answers, score_answers
from align.eval.core.evaluated_models import EvaluatedModel, open_models
from align.eval.core.results import Evaluation, Json, format_figure, mean_figure
from align.eval.reward.policy_comparison import response_kl
from align.eval.reward.settings import NamedRewardModel, RewardEvalConfig
from align.models.loading import LoadedModel, load
from align.reward.scoring import RewardModelScorer
from align.runtime.distributed import compute_dtype
from align.tokenization.encoded import SampledResponse


def rewarded_answers(
    config: RewardEvalConfig,
    task: str,
    evaluated: EvaluatedModel,
    reward_models: Sequence[NamedRewardModel],
    accelerator: Accelerator,
    samples: int,
) -> tuple[dict[str, list[SampledResponse]], list[np.ndarray]]:
    """A model's answers by the prompt's number, and their rewards [prompts, samples] by each reward model."""
    answers = sample_answers(config, task, evaluated, accelerator, samples)
    rewards = []
    for model in reward_models:
        scorer = RewardModelScorer.from_loaded(model.reward, evaluated.loaded.tokenization, accelerator, config.batch_tokens)
        settings = answer_settings(config) | {
            "weights": evaluated.fingerprint,
            "copies": samples,
            "reward_sha256": model.fingerprint,
        }
        path = Path(config.output) / f"{task}-{evaluated.name}-by-{model.name}.jsonl"
        rewards.append(np.array(list(score_answers(path, settings, scorer, answers, accelerator).values())))
    return answers, rewards


def best_of_n(
    config: RewardEvalConfig, evaluated: EvaluatedModel, reward_models: Sequence[NamedRewardModel], accelerator: Accelerator
) -> Evaluation:
    """The curve of a model: the expected reward of its best of n answers, and the gold model's reward of those."""
    _, rewards = rewarded_answers(config, "best-of-n", evaluated, reward_models, accelerator, config.samples)
    proxy_rewards, curve, figures = rewards[0], [], []
    for n in sizes_on_curve(config.samples):
        row: Json = {"n": n, "KL bound": round(kl_bound(n), 4)}
        for model, values in zip(reward_models, rewards, strict=True):
            best = [expected_best(proxy_rewards[i], values[i], n) for i in range(len(values))]
            note = f"KL to the model's own answers at most {kl_bound(n):.2f} nats" if n > 1 else ""
            name, role = f"{model.role}, best of {n}", model.role
            figure = mean_figure(name, best, config.resamples, model.scorer, note, better="higher")
            figures.append(figure)
            ends = {role: figure.value, f"{role} low": figure.low, f"{role} high": figure.high}
            row |= {column: None if value is None else round(value, 4) for column, value in ends.items()}
        curve.append(row)
    figures.sort(key=lambda figure: figure.name.startswith("gold"))  # the proxy's curve first, then the gold model's
    settings = asdict(config) | {"weights": evaluated.fingerprint}
    return Evaluation("best-of-n", evaluated.name, settings, figures, {"curve": curve})


def frontier(
    config: RewardEvalConfig, reward_models: Sequence[NamedRewardModel], accelerator: Accelerator
) -> list[Evaluation]:
    """Reward, gold reward and KL to the start of every policy that a PPO run kept, and of the start itself."""
    policies, start = policies_of(config.frontier)
    start_settings = ModelConfig(model=start, chat_template=config.chat_template, dtype=config.dtype)
    reference = load(start_settings, compute_dtype(config.dtype))
    reference.backbone.to(accelerator.device).eval().requires_grad_(False)
    evaluations = []
    for evaluated in open_models(replace(config, models=[start, *policies]), accelerator):
        answers, rewards = rewarded_answers(config, "frontier", evaluated, reward_models, accelerator, 1)
        kl = kl_to_start(config, evaluated, reference, answers, accelerator)
        figures = [mean_figure("KL", kl, config.resamples, note="nats per response")]
        for model, values in zip(reward_models, rewards, strict=True):
            rewards_of_model = values[:, 0].tolist()
            figures.append(mean_figure(model.role, rewards_of_model, config.resamples, model.scorer, better="higher"))
        settings = asdict(config) | {"weights": evaluated.fingerprint}
        evaluations.append(Evaluation("frontier", evaluated.name, settings, figures))
    curve = [
        {"policy": evaluation.model} | {figure.name: format_figure(figure.value or 0.0) for figure in evaluation.figures}
        for evaluation in evaluations
    ]
    return [replace(evaluation, tables={"reward against KL": curve}) for evaluation in evaluations]


def policies_of(run: str) -> tuple[list[str], str]:
    """The folders of the policies that a PPO run kept, in the order of updates, and the model that it started from.

    Raises:
        UserError: if the folder is not such a run.
    """
    folder = Path(run)
    policies = [str(path) for path in numbered_paths(folder / "policies", "update-").values()]
    if not policies:
        raise UserError(f"frontier {run}: no policies/ in it; train with keep_policies")
    try:
        settings = yaml.safe_load((folder / "config.yaml").read_text(encoding="utf-8"))
        return policies, str(settings["model"])
    except (OSError, ValueError, yaml.YAMLError, KeyError, TypeError) as error:
        raise UserError(f"{folder / 'config.yaml'}: not the settings of a PPO run") from error


def kl_to_start(
    config: RewardEvalConfig,
    evaluated: EvaluatedModel,
    reference: LoadedModel,
    answers: dict[str, list[SampledResponse]],
    accelerator: Accelerator,
) -> list[float]:
    """KL of each prompt's first answer from the model that PPO started from."""
    first_answers = [samples[0] for samples in answers.values()]
    contexts, ids = [answer.prompt_ids for answer in first_answers], [answer.ids for answer in first_answers]
    return response_kl(evaluated.loaded, reference, contexts, ids, config.temperature or 1.0, accelerator)


# -------------------------------------------------------------------------------------------- best of n in closed form


def kl_bound(n: int) -> float:
    """Upper bound on the KL between the best of n and a single answer, in nats: log n - (n - 1) / n.

    Stated by Stiennon et al. 2020 (appendix G.3) as the KL; Beirami et al. 2024 show that it is an upper bound.
    """
    return log(n) - (n - 1) / n


@cache
def _best_probabilities(samples: int, n: int) -> tuple[float, ...]:
    """For each of the samples, in ascending order, the probability of being the largest of n drawn without replacement."""
    return tuple(comb(rank, n - 1) / comb(samples, n) for rank in range(samples))


def expected_best(rewards: np.ndarray, values: np.ndarray, n: int) -> float:
    """Expected value of the answer that has the highest reward of n, from N >= n answers; unbiased.

    It is the mean over all subsets of n of the N answers, in closed form by order statistics. Answers of equal reward
    share their probabilities.

    Args:
        rewards: [N] the rewards by which the answer is chosen.
        values: [N] what is averaged over the chosen answers: the same rewards, or another model's.
    """
    order = np.argsort(rewards, kind="stable")
    probabilities = np.array(_best_probabilities(len(rewards), n))
    _, group = np.unique(rewards[order], return_inverse=True)
    shared = np.bincount(group, probabilities) / np.bincount(group)
    return float(shared[group] @ values[order])


def sizes_on_curve(samples: int) -> list[int]:
    """The n of a best-of-n curve: the powers of two up to `samples`, and `samples` itself."""
    return sorted({2**power for power in range(samples.bit_length()) if 2**power <= samples} | {samples})
