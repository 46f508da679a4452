"""Scores of the rollouts of a run of PPO that uses each prompt once: an evaluation of the policy before each update."""

import json
import re
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq

from align.data.conversation import to_json
from align.data.records import Prompt
from align.ppo.extensions.rollout_files import rollout_paths
from align.training.run_folder import read_metrics

AnswerScorer = Callable[[Sequence[Any], Sequence[str]], list[float]]
References = Mapping[str, Sequence[float]]
"""Scores of the initial policy's answers to each prompt, by `prompt_key`."""
Point = dict[str, Any]


def prompt_key(prompt: Any) -> str:
    """Return the text by which a prompt's reference scores are found, for a text or a list of turns."""
    return json.dumps(to_json(Prompt.from_row({"prompt": prompt}).prompt))


def score_rollouts(
    run: Path, scorers: Mapping[str, tuple[AnswerScorer, References]], feature: Callable[[str], float]
) -> list[Point]:
    """Return a point for each rollout of a run: KL, the proxy's reward, the planted feature, and scores of other models.

    The change of a score is relative to the mean of its references, and has a standard error over prompts.
    """
    metrics = {int(row["update"]): row for row in read_metrics(run)}
    points = []
    for update, path in sorted(rollout_paths(run).items()):
        rows = pq.read_table(path, columns=["prompt", "text"]).to_pylist()
        prompts, texts = [row["prompt"] for row in rows], [row["text"] for row in rows]
        point: Point = {"update": update, "kl": metrics[update]["kl/k1"], "proxy": metrics[update]["reward/mean"]}
        for name, (score, references) in scorers.items():
            point |= changes(name, prompts, score(prompts, texts), references)
        point |= {"feature": float(np.mean([feature(text) for text in texts])), "top phrase": top_phrase_share(texts)}
        point |= {"words": float(np.mean([len(text.split()) for text in texts]))}
        points.append(point)
    return points


def changes(name: str, prompts: Sequence[Any], scores: Sequence[float], references: References) -> Point:
    """Return the mean of a score, and its change from the references with the standard error and each prompt's change."""
    by_prompt: dict[str, list[float]] = {}
    for prompt, score in zip(prompts, scores, strict=True):
        by_prompt.setdefault(prompt_key(prompt), []).append(score)
    found = np.array([np.mean(own) - np.mean(references[key]) for key, own in by_prompt.items()])
    mean, error = float(found.mean()), standard_error(found)
    each = [round(float(change), 3) for change in found]
    return {name: float(np.mean(scores)), f"{name} change": mean, f"{name} error": error, f"{name} changes": each}


def standard_error(values: np.ndarray) -> float:
    """Return the standard error of the mean."""
    return float(values.std(ddof=1) / np.sqrt(len(values)))


def top_phrase_share(texts: Sequence[str], n: int = 4) -> float:
    """Return the share of texts that contain the most frequent phrase of n words."""
    counts: Counter[tuple[str, ...]] = Counter()
    for text in texts:
        found = re.findall(r"[\w']+", text.lower())
        counts.update({tuple(found[start : start + n]) for start in range(len(found) - n + 1)})
    return max(counts.values(), default=0) / len(texts)
