"""`align eval reward`: reward model accuracy, benchmarks, best-of-n curves, and reward against KL.

A second reward model, called gold, shows over-optimization: answers that the first one prefers and the second does not.
"""

import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import torch
from accelerate import Accelerator

from align.batches.encoding import Limits, encode_rankings
from align.core.errors import UserError
from align.core.launch import run_stage
from align.core.settings import option, require_setting
from align.core.statistics import (
    correlation,
    difference_interval,
    kendall_tau,
    pair_calibration,
    pair_calibration_error,
    statistic_interval,
)
from align.data.fields import check_texts, field_error, required_field
from align.data.readers import parse_rows
from align.data.records import Conversation, Prompt
from align.eval.answers import (
    EvaluatedModel,
    EvaluationContext,
    NamedRewardModel,
    open_context,
    open_models,
    open_reward_models,
    reward_answers,
    sample_answers,
)
from align.eval.policy_comparison import expected_best, kl_bound, response_kl, sizes_on_curve
from align.eval.results import (
    EvalConfig,
    EvalPromptsConfig,
    Evaluation,
    Measurement,
    format_value,
    mean_measurement,
    publish,
    share_measurement,
)
from align.eval.store import Json, compute_once
from align.reward.rankings import (
    ScoredRanking,
    pairs_and_differences,
    ranking_metrics,
    reward_rankings,
    score_rankings,
    with_rewards,
)
from align.runtime.distributed import run_on_main
from align.runtime.sharding import place_frozen_model
from align.sampling.settings import AnsweringConfig, InferenceConfig
from align.tokenization.encoded import EncodedRanking, SampledResponse
from align.training.checkpoint.consolidation import consolidate
from align.training.checkpoint.files import checkpoints_in
from align.training.run_folder import read_settings

ROLES = ("reward", "gold")
"""Measurement names of the reward model and the gold model on curves."""


@dataclass(kw_only=True)
class RewardEvalConfig(EvalPromptsConfig, AnsweringConfig, EvalConfig, InferenceConfig):
    """Evaluate a reward model on preferences or a benchmark. Adds best-of-n curves with `models`, and reward against KL with
    `frontier`.
    """

    reward_model: str = option(
        "", "Reward model to evaluate: folder or run. Also selects among the models' answers.", required=True
    )
    gold_model: str = option("", "Gold reward model, used to measure only.")
    preferences: str = option(
        "data/rankings_heldout.jsonl", "Held-out rankings or pairs, in the training data of neither reward model."
    )
    max_response_tokens: int = option(1024, "Maximum response length in preferences, in tokens.", gt=0)
    benchmark: str = option("", "RewardBench 2: file, folder or Hub id.")
    samples: int = option(64, "Answers sampled per prompt and model. The largest n of the best-of-n curves.", gt=1)
    frontier: str = option("", "PPO run with all its checkpoints (save_total_limit 0), for its curve of reward against KL.")

    def __post_init__(self) -> None:
        super().__post_init__()
        require_setting(self, "gold_model", self.gold_model != self.reward_model, "different from reward_model")
        has_input = bool(self.preferences or self.models or self.frontier or self.benchmark)
        require_setting(self, "preferences", has_input, "set, unless models, frontier or benchmark is")


def run_reward_eval(config: RewardEvalConfig) -> list[Evaluation]:
    """Evaluate and write `reward.json`, and on request `rewardbench-2.json`, `best-of-n.json` and `frontier.json`."""
    context = open_context(config.output, config)
    reward_models = open_reward_models([name for name in (config.reward_model, config.gold_model) if name], config)
    evaluations: list[Evaluation] = []
    if config.preferences:
        limits = Limits(config.max_prompt_tokens, config.max_response_tokens, config.overlong)
        for model in reward_models:
            rankings = rewarded_preferences(config.preferences, limits, model, context)
            evaluations.append(evaluate_on_preferences(rankings, model))
    if config.benchmark:
        evaluations += [evaluate_on_benchmark(config.benchmark, model, context) for model in reward_models]
    answer = partial(sample_answers, config, config)
    if config.models:
        for evaluated in open_models(config.models, context):
            answers = answer("best-of-n", evaluated, config.samples)
            evaluations.append(best_of_n(evaluated, answers, reward_models))
    if config.frontier:
        evaluations += frontier(config.frontier, answer, config.temperature or 1.0, reward_models, context)
    evaluations = [replace(evaluation, settings=asdict(config) | evaluation.settings) for evaluation in evaluations]
    return publish(config, evaluations, context.accelerator)


# ---------------------------------------------------------------------------------------------------------- preferences

CALIBRATION_NOTE = "biased upward: bootstrap resamples contain fewer distinct pairs, so the interval is too high"


def evaluate_on_preferences(rankings: Sequence[ScoredRanking], model: NamedRewardModel) -> Evaluation:
    """Measure accuracy, calibration and rank correlation of a reward model on rankings, overall and by category."""
    total, (_, differences) = ranking_metrics(rankings), pairs_and_differences(rankings)
    taus = [kendall_tau(item.ranks, item.rewards) for item in rankings]
    pairs, responses, by = int(total["pairs"]), sum(len(item.rewards) for item in rankings), model.scorer
    columns = [np.array([item.rewards, item.lengths]) for item in rankings]
    length = interval_over_rankings(lambda joined: correlation(*joined), columns)
    differences_of_each = [pairs_and_differences([item])[1].numpy() for item in rankings]
    calibration = interval_over_rankings(pair_calibration_error, differences_of_each)
    accuracy, note = (total["accuracy/low"], total["accuracy/high"]), "fraction of pairs ranked as in the labels"
    order = float(np.mean(taus)), *difference_interval(taus)
    measurements = [
        Measurement("accuracy", total["accuracy"], *accuracy, pairs, by, note, "higher"),
        Measurement("Kendall's tau", *order, len(taus), by, "", "higher"),
        Measurement("calibration error", total["calibration_error"], *calibration, pairs, by, CALIBRATION_NOTE, "lower"),
        Measurement("length correlation", total["length_correlation"], *length, responses, by),
    ]
    reliability = [
        {"stated": round(stated, 4), "right": round(right, 4), "pairs": count}
        for stated, right, count in pair_calibration(differences)
    ]
    tables = {"by category": category_rows(rankings), "calibration": reliability}
    return Evaluation("reward", model.name, {"reward_sha256": model.fingerprint}, measurements, tables)


def interval_over_rankings(
    statistic: Callable[[np.ndarray], float], rankings: Sequence[np.ndarray]
) -> tuple[float | None, float | None]:
    """Interval of a statistic over rankings, joined along the last axis. None if it has zero width.

    Rankings are resampled as units.
    """

    def of_resamples(drawn: np.ndarray) -> np.ndarray:
        return np.array([statistic(np.concatenate([rankings[number] for number in row], -1)) for row in drawn])

    low, high = statistic_interval(of_resamples, len(rankings))
    return (low, high) if high > low else (None, None)


def category_rows(rankings: Sequence[ScoredRanking]) -> list[Json]:
    """Return one row per category."""
    metrics = {"accuracy": "accuracy", "low": "accuracy/low", "high": "accuracy/high", "Kendall's tau": "kendall_tau"}
    metrics, rows = metrics | {"calibration error": "calibration_error"}, []
    for category in sorted({item.category or "none" for item in rankings}):
        total = ranking_metrics([item for item in rankings if (item.category or "none") == category])
        measurements = {column: round(total[metric], 4) for column, metric in metrics.items()}
        rows.append({"category": category, "pairs": int(total["pairs"]), **measurements})
    return rows


def rewarded_preferences(
    preferences: str, limits: Limits, model: NamedRewardModel, context: EvaluationContext
) -> list[ScoredRanking]:
    """Return the preferences with the reward of every response. Stored in `OUTPUT/reward-<name>.jsonl`."""
    loaded, accelerator, inference = model.reward.loaded, context.accelerator, context.inference
    rankings = encode_rankings(preferences, loaded, limits, inference.skip_bad_rows, model.reward.reads_whole_turns)
    module = place_frozen_model(model.reward.model, accelerator)

    def read(batch: Sequence[EncodedRanking]) -> torch.Tensor:
        return reward_rankings(module, batch, accelerator.device) - model.reward.mean

    def score_chunk(chunk: list[EncodedRanking]) -> list[Json]:
        scored = score_rankings(read, chunk, loaded.backbone, inference.batch_tokens, accelerator)
        return [{"rewards": rewards} for rewards in scored]

    rows = compute_once(
        context.output / f"reward-{model.name}.jsonl",
        {"dtype": inference.dtype, "reward_sha256": model.fingerprint},
        {str(number): item for number, item in enumerate(rankings, 1)},
        score_chunk,
        accelerator,
        content=lambda item: [item.prompt, item.responses],
    )
    return with_rewards(rankings, [row["rewards"] for row in rows])


# ------------------------------------------------------------------------------------ best of n, and reward against KL


Answers = Mapping[str, list[SampledResponse]]
"""A model's answers to each prompt, by prompt number."""


def rewards_of(
    task: str, evaluated: EvaluatedModel, answers: Answers, reward_models: Sequence[NamedRewardModel]
) -> list[np.ndarray]:
    """Return the rewards [prompts, samples] of a model's answers by each reward model."""
    name, read = f"{task}-{evaluated.name}", (answers, evaluated.loaded.tokenization, evaluated.settings)
    return [np.array(reward_answers(evaluated.context, name, model, *read)) for model in reward_models]


def best_of_n(evaluated: EvaluatedModel, answers: Answers, reward_models: Sequence[NamedRewardModel]) -> Evaluation:
    """Best-of-n curve of a model: expected reward of the best of n answers, and the gold model's reward of these."""
    rewards = rewards_of("best-of-n", evaluated, answers, reward_models)
    curve: list[Json] = [{"n": n, "KL bound": round(kl_bound(n), 4)} for n in sizes_on_curve(rewards[0].shape[1])]
    measurements = []
    for role, model, values in zip(ROLES, reward_models, rewards, strict=False):
        for row in curve:
            n = row["n"]
            best = [expected_best(*answers, n) for answers in zip(rewards[0], values, strict=True)]
            note = f"KL to the model's samples at most {kl_bound(n):.2f} nats" if n > 1 else ""
            measurement = mean_measurement(f"{role}, best of {n}", best, model.scorer, note, better="higher")
            measurements.append(measurement)
            ends = {role: measurement.value, f"{role} low": measurement.low, f"{role} high": measurement.high}
            row |= {column: None if value is None else round(value, 4) for column, value in ends.items()}
    return Evaluation("best-of-n", evaluated.name, {"weights": evaluated.fingerprint}, measurements, {"curve": curve})


def frontier(
    run: str,
    answer: Callable[[str, EvaluatedModel], Answers],
    temperature: float,
    reward_models: Sequence[NamedRewardModel],
    context: EvaluationContext,
) -> list[Evaluation]:
    """Reward, gold reward and KL of the policy in each checkpoint of a PPO run, and of the initial policy.

    `answer` samples an answer of a model to each prompt, see `sample_answers`.
    """
    checkpoints, start = checkpoints_of(run)
    reference = next(open_models([start], context)).loaded
    evaluations, curve = [], list[Json]()
    for policy in chain([start], policies_of(checkpoints, context.output, context.accelerator)):
        (evaluated,) = open_models([policy], context)
        answers = answer("frontier", evaluated)
        rewards = rewards_of("frontier", evaluated, answers, reward_models)
        written = [each for (each,) in answers.values()]
        kl = response_kl(evaluated.loaded, reference, written, temperature, context.accelerator)
        measurements = [mean_measurement("KL", kl, note="nats per response")]
        for role, model, values in zip(ROLES, reward_models, rewards, strict=False):
            measurements.append(mean_measurement(role, values[:, 0].tolist(), model.scorer, better="higher"))
        curve.append({"policy": evaluated.name} | {each.name: format_value(each.value or 0.0) for each in measurements})
        tables, settings = {"reward against KL": curve}, {"weights": evaluated.fingerprint}
        evaluations.append(Evaluation("frontier", evaluated.name, settings, measurements, tables))
    return evaluations


def checkpoints_of(run: str) -> tuple[list[Path], str]:
    """Return the checkpoints of a PPO run in order, and its initial model."""
    folder = Path(run)
    checkpoints = list(checkpoints_in(folder).values())
    if not checkpoints:
        raise UserError(f"frontier {run}: no checkpoints; train with save_steps and save_total_limit 0")
    settings = read_settings(folder / "config.yaml") or {}
    if "model" not in settings:
        raise UserError(f"{folder / 'config.yaml'}: not the config of a PPO run")
    return checkpoints, str(settings["model"])


def policies_of(checkpoints: Sequence[Path], output: Path, accelerator: Accelerator) -> Iterator[str]:
    """Yield the policies of checkpoints as model folders in `output`, deleting each before writing the next."""
    for checkpoint in checkpoints:
        folder = output / checkpoint.name
        run_on_main(partial(consolidate, checkpoint, folder), accelerator)
        yield str(folder)
        accelerator.wait_for_everyone()
        run_on_main(partial(shutil.rmtree, folder), accelerator)


# ---------------------------------------------------------------------------------------------------------- benchmarks


def evaluate_on_benchmark(benchmark: str, model: NamedRewardModel, context: EvaluationContext) -> Evaluation:
    """Scores of a reward model on the benchmark, by subset and overall."""
    rows = read_benchmark(benchmark)
    tokenization, answers = model.reward.loaded.tokenization, {}
    for number, row in enumerate(rows, 1):
        prompt, responses = tokenization.answers_ids(row.prompt, row.responses, whole=False)
        texts = zip(responses, row.responses, strict=True)
        answers[f"{number}:{row.id}"] = [SampledResponse(row.prompt, prompt, ids, text) for ids, text in texts]
    settings = {"chat_template": context.inference.chat_template}
    rewards = reward_answers(context, "rewardbench", model, answers, tokenization, settings)
    by, measurements = model.scorer, list[Measurement]()
    for subset in sorted({row.subset for row in rows}):
        chosen = [(row, row_rewards) for row, row_rewards in zip(rows, rewards, strict=True) if row.subset == subset]
        if subset.lower() == TIES:
            ties = ties_score([(row.id, row.good, row_rewards) for row, row_rewards in chosen])
            measurements.append(Measurement(subset, ties, None, None, len(chosen), by, "", "higher"))
        else:
            wins = [good_response_wins(row_rewards) for _, row_rewards in chosen]
            measurements.append(share_measurement(subset, wins, by, better="higher"))
    score, note = (
        float(np.mean([measurement.value or 0.0 for measurement in measurements])),
        f"mean of {len(measurements)} subsets",
    )
    measurements.append(Measurement("score", score, None, None, len(rows), by, note, "higher"))
    return Evaluation("rewardbench-2", model.name, {"reward_sha256": model.fingerprint}, measurements, {})


# ----------------------------------------------------------------------------------------------------------- RewardBench 2


TIES = "ties"


@dataclass(frozen=True)
class BenchmarkRow:
    """A prompt with its responses. The first `good` ones are good."""

    id: str
    prompt: Conversation
    responses: tuple[str, ...]
    good: int
    subset: str


def read_benchmark(source: str) -> list[BenchmarkRow]:
    """Read the `test` split of a file, folder or Hub data set. Raise a UserError for a bad row."""
    return parse_rows([source], lambda row, _: [_benchmark_row(row)], "no rows", split="test")


def _benchmark_row(row: Mapping[str, Any]) -> BenchmarkRow:
    texts = []
    for name in ("chosen", "rejected"):
        texts.append(check_texts(required_field(row, name, "add a list of strings"), name, may_be_empty=True))
        if not texts[-1]:
            raise field_error(name, "is empty", "add the benchmark's responses")
    good, bad = texts
    subset = required_field(row, "subset", "add the subset")
    number = required_field(row, "id", "add a unique id")
    prompt = Prompt.from_row({"prompt": required_field(row, "prompt", "add the prompt")}).prompt
    return BenchmarkRow(str(number), prompt, (*good, *bad), len(good), str(subset))


def good_response_wins(rewards: Sequence[float]) -> float:
    """Return 1 if the first (good) response wins, else 0. A k-way tie for the best counts 1/k."""
    best = max(rewards)
    return 1 / list(rewards).count(best) if rewards[0] == best else 0.0


def ties_score(rows: Sequence[tuple[str, int, Sequence[float]]]) -> float:
    """Compute RewardBench 2's score of prompts with several good answers, each with a reference prompt that has one.

    Source: Malik et al. 2025, arXiv 2506.01937, and `rewardbench/utils.py` of allenai/reward-bench.
    Fractions with weight 0.3: tied prompts, and reference prompts, whose good answers all beat the bad ones. Fractions with
    weight 0.2: tied prompts whose good answers differ less than their margin over the bad ones, in the prompt and also in
    the reference. The size of that margin has weight 0.01.

    Args:
        rows: id (`tied:7`, `ref:7`), number of good responses, and rewards, good ones first.

    Raises:
        UserError: if an id has another format.
    """
    spread: dict[str, dict[str, float]] = {"tied": {}, "ref": {}}
    lead: dict[str, dict[str, float]] = {"tied": {}, "ref": {}}
    for name, good, rewards in rows:
        kind, _, prompt = name.partition(":")
        if kind not in spread or not prompt:
            raise UserError(f"subset Ties: invalid id '{name}'; use tied:<number> or ref:<number>")
        spread[kind][prompt] = max(rewards[:good]) - min(rewards[:good])
        lead[kind][prompt] = min(rewards[:good]) - max(rewards[good:])
    right = {kind: float(np.mean([value > 0 for value in leads.values()])) if leads else 0.0 for kind, leads in lead.items()}
    both = sorted(lead["tied"].keys() & lead["ref"].keys())
    if not both:
        return 0.3 * right["tied"] + 0.3 * right["ref"]
    within = np.array([spread["tied"][prompt] for prompt in both])
    above = np.array([lead["tied"][prompt] for prompt in both])
    least = np.minimum(above, [lead["ref"][prompt] for prompt in both])
    with np.errstate(divide="ignore", invalid="ignore"):
        margin = np.nan_to_num(np.tanh(least / within - 1), nan=0.0)
    parts = (0.2 * np.mean(above > within), 0.2 * np.mean(least > within), 0.01 * np.mean(margin))
    return float(0.3 * right["tied"] + 0.3 * right["ref"] + sum(parts))


if __name__ == "__main__":
    run_stage(RewardEvalConfig, run_reward_eval)
