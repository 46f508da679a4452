"""RewardBench 2 with its own scoring: the best of four, and ties.

Source: Malik et al. 2025, arXiv 2506.01937; the score of ties as in `rewardbench/utils.py` of allenai/reward-bench.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from align.core.errors import UserError
from align.data.fields import check_texts, field_error, required_field
from align.data.readers import parse_rows
from align.data.records import Conversation, Prompt

TIES = "ties"


@dataclass(frozen=True)
class BenchmarkRow:
    """A prompt with its responses, of which the first `good` ones are good."""

    id: str
    prompt: Conversation
    responses: tuple[str, ...]
    good: int
    subset: str


def read_benchmark(source: str) -> list[BenchmarkRow]:
    """The rows of a file, folder or hub name, of its split `test`. Raises: UserError for a bad row."""
    return parse_rows([source], lambda row, _: [_benchmark_row(row)], "it holds no row", split="test")


def _benchmark_row(row: Mapping[str, Any]) -> BenchmarkRow:
    texts = []
    for name in ("chosen", "rejected"):
        texts.append(check_texts(required_field(row, name, "give a list of texts"), name, may_be_empty=True))
        if not texts[-1]:
            raise field_error(name, "is empty", "give the responses as the benchmark has them")
    good, bad = texts
    subset = required_field(row, "subset", "the scores are by subset")
    number = required_field(row, "id", "give each row a unique id")
    prompt = Prompt.from_row({"prompt": required_field(row, "prompt", "the responses answer it")}).prompt
    return BenchmarkRow(str(number), prompt, (*good, *bad), len(good), str(subset))


def good_response_wins(rewards: Sequence[float]) -> float:
    """Whether the first response, the good one, wins: 1 or 0; a k-way tie for best counts 1/k."""
    best = max(rewards)
    return 1 / list(rewards).count(best) if rewards[0] == best else 0.0


def ties_score(rows: Sequence[tuple[str, int, Sequence[float]]]) -> float:
    """RewardBench 2's score of prompts with several good answers, each with a reference prompt that has one.

    Shares with weight 0.3: tied prompts, and reference prompts, whose good answers all beat the bad ones. Shares with weight
    0.2: tied prompts whose good answers lie closer together than above the bad ones, there and in the reference too.
    The size of that margin has weight 0.01.

    Args:
        rows: the id (`tied:7`, `ref:7`), the number of good responses, and the rewards, good ones first.

    Raises:
        UserError: if an id has another form.
    """
    spread: dict[str, dict[str, float]] = {"tied": {}, "ref": {}}
    lead: dict[str, dict[str, float]] = {"tied": {}, "ref": {}}
    for name, good, rewards in rows:
        kind, _, prompt = name.partition(":")
        if kind not in spread or not prompt:
            raise UserError(f"the row '{name}' of the subset Ties: an id there is tied:<number> or ref:<number>")
        spread[kind][prompt] = max(rewards[:good]) - min(rewards[:good])
        lead[kind][prompt] = min(rewards[:good]) - max(rewards[good:])
    right = {kind: float(np.mean([value > 0 for value in found.values()])) if found else 0.0 for kind, found in lead.items()}
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
