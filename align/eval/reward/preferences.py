"""How well a reward model agrees with people's preferences: accuracy, calibration, order and length."""

from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

import numpy as np
import torch
from accelerate import Accelerator

from align.batches.encoding import Limits, encode_rankings
from align.batches.micro_batches import map_rows
from align.core.statistics import (
    correlation,
    difference_interval,
    kendall_tau,
    pair_calibration,
    pair_calibration_error,
    percentiles,
    resample,
)
from align.eval.core.fingerprints import fingerprint
from align.eval.core.result_store import ResultStore
from align.eval.core.results import Evaluation, Figure, Json
from align.eval.reward.settings import NamedRewardModel, RewardEvalConfig
from align.reward.rankings import ScoredRanking, group_sizes, pairs_and_differences, ranking_metrics, reward_rankings
from align.runtime.sharding import place_frozen_model
from align.tokenization.encoded import EncodedRanking

Interval = tuple[float | None, float | None]
CALIBRATION_NOTE = "an absolute value: resamples hold fewer different pairs, so they and the interval come out higher"


def evaluate_on_preferences(config: RewardEvalConfig, model: NamedRewardModel, accelerator: Accelerator) -> Evaluation:
    """Accuracy, calibration and order of a reward model on rankings, over all of them and by category."""
    rankings = score_rankings(config, model, accelerator)
    total = ranking_metrics(rankings)
    taus = [kendall_tau(item.ranks, item.rewards) for item in rankings]
    tau = float(np.mean(taus)), *difference_interval(taus)
    pairs, low, high = int(total["pairs"]), total["accuracy/low"], total["accuracy/high"]
    responses = sum(len(item.rewards) for item in rankings)
    intervals = calibration_and_length_intervals(rankings, config.resamples)
    length, by = total["length_correlation"], model.scorer
    calibration = total["calibration_error"], *intervals["calibration"]
    figures = [
        Figure("accuracy", total["accuracy"], low, high, pairs, by, "share of pairs in the labelers' order", "higher"),
        Figure("Kendall's tau", *tau, len(taus), by, "", "higher"),
        Figure("calibration error", *calibration, pairs, by, CALIBRATION_NOTE, "lower"),
        Figure("length correlation", length, *intervals["length"], responses, by),
    ]
    _, differences = pairs_and_differences(rankings)
    reliability = [
        {"stated": round(stated, 4), "right": round(right, 4), "pairs": count}
        for stated, right, count in pair_calibration(differences)
    ]
    tables = {"by category": category_rows(rankings), "calibration": reliability}
    return Evaluation("reward", model.name, asdict(config) | {"reward_sha256": model.fingerprint}, figures, tables)


def calibration_and_length_intervals(rankings: Sequence[ScoredRanking], resamples: int) -> dict[str, Interval]:
    """Bootstrap intervals of the `calibration` error and the `length` correlation; whole rankings are resampled.

    A single ranking has no interval, and neither has a correlation where rewards or lengths do not vary.
    """
    rewards, lengths = (
        [torch.tensor(getattr(item, name), dtype=torch.float64) for item in rankings] for name in ("rewards", "lengths")
    )
    differences = [pairs_and_differences([item])[1] for item in rankings]

    def measure_resample(drawn: np.ndarray) -> tuple[float, float]:
        columns = (torch.cat([values[number] for number in drawn]) for values in (differences, rewards, lengths))
        difference, reward, length = columns
        return pair_calibration_error(difference), correlation(reward, length)

    def measure_resamples(rows: np.ndarray) -> np.ndarray:
        return np.array([measure_resample(row) for row in rows])

    low, high = percentiles(resample(measure_resamples, len(rankings), resamples))
    found: dict[str, Interval] = {
        name: (float(low[i]), float(high[i])) if high[i] > low[i] else (None, None)
        for i, name in enumerate(("calibration", "length"))
    }
    return found


def category_rows(rankings: Sequence[ScoredRanking]) -> list[Json]:
    """A row for each category among the rankings."""
    metrics = {"accuracy": "accuracy", "low": "accuracy/low", "high": "accuracy/high", "Kendall's tau": "kendall_tau"}
    metrics["calibration error"] = "calibration_error"
    rows = []
    for category in sorted({item.category or "none" for item in rankings}):
        total = ranking_metrics([item for item in rankings if (item.category or "none") == category])
        figures = {column: round(total[metric], 4) for column, metric in metrics.items()}
        rows.append({"category": category, "pairs": int(total["pairs"]), **figures})
    return rows


def score_rankings(config: RewardEvalConfig, model: NamedRewardModel, accelerator: Accelerator) -> list[ScoredRanking]:
    """The reward of every response among the preferences; stored in `OUTPUT/reward-<name>.jsonl`."""
    loaded = model.reward.loaded
    limits = Limits(config.max_prompt_tokens, config.max_response_tokens, config.overlong)
    whole_turns = model.reward.reads_whole_turns
    rankings = encode_rankings(config.preferences, loaded, limits, config.skip_bad_rows, whole_turns)
    module = place_frozen_model(model.reward.model, accelerator)

    @torch.no_grad()
    def score_chunk(chunk: list[EncodedRanking]) -> list[Json]:
        def score_rows(rows: list[int]) -> list[list[float]]:
            batch = [chunk[row] for row in rows]
            flat = iter((reward_rankings(module, batch, accelerator.device) - model.reward.mean).tolist())
            return [[next(flat) for _ in item.responses] for item in batch]

        costs = group_sizes(loaded.backbone, chunk)
        return [{"rewards": rewards} for rewards in map_rows(costs, config.batch_tokens, accelerator, score_rows)]

    names = ("dtype", "chat_template", "preferences", "max_prompt_tokens", "max_response_tokens", "overlong")
    settings = {name: getattr(config, name) for name in names} | {"reward_sha256": model.fingerprint}
    settings["preferences_sha256"] = fingerprint(config.preferences)
    stored = ResultStore(Path(config.output) / f"reward-{model.name}.jsonl", settings, accelerator)
    numbered = {str(number): item for number, item in enumerate(rankings, 1)}
    rows = stored.fill(numbered, score_chunk, content=lambda item: [item.prompt, item.responses])
    return [
        ScoredRanking(tuple(item.ranks), tuple(row["rewards"]), tuple(map(len, item.responses)), item.category)
        for item, row in zip(rankings, rows, strict=True)
    ]
