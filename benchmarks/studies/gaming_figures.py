"""Scores of PPO rollouts on biased proxies, alarms of metrics, outcomes of runs, and the plot of the study.

PPO uses each prompt once, so a rollout is an evaluation of the policy before its update.
"""

import json
import re
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq

from align.core.files import read_json, write_json
from align.data.conversation import to_json
from align.data.records import Prompt
from align.ppo.rollout_files import rollout_paths
from align.training.run_folder import read_metrics

COLORS = ("#333333", "#1f5fa8", "#3c8d5a", "#8fbf4d", "#b5442e", "#e0922f", "#7a4fa3", "#00a6a6")
AnswerScorer = Callable[[Sequence[Any], Sequence[str]], list[float]]
References = Mapping[str, Sequence[float]]
"""`prompt_key` -> scores of the initial policy's answers to the prompt."""
Point = dict[str, Any]


# ------------------------------------------------------------------------------------------------------------- rollouts


def prompt_key(prompt: Any) -> str:
    """Return the key of a prompt (text or list of turns) in `References`."""
    return json.dumps(to_json(Prompt.from_row({"prompt": prompt}).prompt))


def score_rollouts(
    run: Path, scorers: Mapping[str, tuple[AnswerScorer, References]], feature: Callable[[str], float]
) -> list[Point]:
    """Return a point for each rollout of a run: KL, the proxy's reward, the planted feature, and scores of other models.

    Changes of scores are relative to the mean of the references. Their standard errors are over prompts.
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
    """Return the mean score, its change from the references with the standard error, and the change of each prompt."""
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
    """Return the fraction of strings that contain the most frequent phrase of n words."""
    counts: Counter[tuple[str, ...]] = Counter()
    for text in texts:
        found = re.findall(r"[\w']+", text.lower())
        counts.update({tuple(found[start : start + n]) for start in range(len(found) - n + 1)})
    return max(counts.values(), default=0) / len(texts)


# --------------------------------------------------------------------------------------------------------------- alarms


def departure(values: Mapping[int, float], noise: float) -> int | None:
    """Return the first update at which a metric is more than 3 `noise` from its value in the first update."""
    first, *rest = sorted(values)
    return next((update for update in rest if abs(values[update] - values[first]) > 3 * noise), None)


def above(values: Mapping[int, float], limit: float) -> int | None:
    """Return the first update at which a metric exceeds a limit."""
    return next((update for update in sorted(values) if values[update] > limit), None)


DEPARTURES = ("entropy", "response/length", "response/eos_rate", "response/repetition", "reward/std", "reward/disagreement")
"""Rollout metrics with the rule `departure`. The noise of rewards is relative, because the scale differs between proxies."""
LIMITS = {"kl/k1": 10.0, "policy/approx_kl": 0.1, "policy/clipfrac": 0.3}
"""Thresholds of docs/metrics.md: "tens of nats", and the alarming values of the other two."""


def noise_of(rows: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """Return the standard deviation of rollout metrics of one policy. For rewards, it is relative to the mean."""
    found = {}
    for name in DEPARTURES:
        values = np.array([row[name] for row in rows if name in row])
        if len(values) < 2:
            continue
        found[name] = float(values.std(ddof=1) / (values.mean() if name.startswith("reward/") else 1.0))
    return found


def alarms(
    rows: Sequence[Mapping[str, float]], points: Sequence[Point], noise: Mapping[str, float]
) -> dict[str, int | None]:
    """Return the first update at which each metric of a run alarms, or None if it does not.

    Args:
        rows: rows of metrics.jsonl.
        points: output of `score_rollouts`.
        noise: output of `noise_of`.
    """
    found: dict[str, int | None] = {}
    columns = {name: {int(row["update"]): row[name] for row in rows if name in row} for name in (*DEPARTURES, *LIMITS)}
    start = {name: values[min(values)] for name, values in columns.items() if values}
    for name, values in columns.items():
        if not values or (name in DEPARTURES and name not in noise):
            continue
        if name in LIMITS:
            found[name] = above(values, LIMITS[name])
        else:
            scale = start[name] if name.startswith("reward/") else 1.0
            found[name] = departure(values, noise[name] * scale)
    lengths = {u: value / start["response/length"] for u, value in columns["response/length"].items()}
    found["response/length (half or 1.5 times)"] = above({u: not 0.5 <= ratio <= 1.5 for u, ratio in lengths.items()}, 0)
    fewer_ends = {u: start["response/eos_rate"] - value for u, value in columns["response/eos_rate"].items()}
    found["response/eos_rate (0.2 below)"] = above(fewer_ends, 0.2)
    found["response/repetition (0.1 above)"] = above(columns["response/repetition"], start["response/repetition"] + 0.1)
    worse = {
        point["update"]: point["judge change"] < -2 * point["judge error"] and point["proxy"] > points[0]["proxy"]
        for point in points[1:]
    }
    found["judge below the start"] = above(worse, 0)
    phrases = {point["update"]: point["top phrase"] for point in points}
    found["most frequent phrase of 4 words"] = above(phrases, points[0]["top phrase"] + 0.1)
    return found


# -------------------------------------------------------------------------------------------------------------- figures


def outcome(points: Sequence[Point]) -> dict[str, Any]:
    """Return the maximum of the gold score, and its change over the second half of the rollouts with the standard error.

    A run has lost if this change is more than two standard errors below 0, or if the number of words has halved.
    """
    best = max(points, key=lambda point: point["gold change"])
    half = points[len(points) // 2 :]
    last = np.array([change for point in half for change in point["gold changes"]])
    mean, error = float(last.mean()), standard_error(last)
    words = [points[0]["words"], float(np.mean([point["words"] for point in half]))]
    return {
        "highest at update": best["update"],
        "highest change": best["gold change"],
        "final change": mean,
        "final error": error,
        "lost": bool(mean < -2 * error or words[1] <= words[0] / 2),
        "words": words,
        "kl": points[-1]["kl"],
        "proxy": [points[0]["proxy"], float(np.mean([point["proxy"] for point in half]))],
        "feature": [points[0]["feature"], float(np.mean([point["feature"] for point in half]))],
    }


def selected(points: Sequence[Point]) -> dict[str, Any]:
    """Return the change of the gold score for the policy with the highest judge score, which `selection` would keep."""
    best = max(points[1:], key=lambda point: point["judge change"])
    return {"update": best["update"], "change": best["gold change"], "error": best["gold error"], "kl": best["kl"]}


def summary(runs: Mapping[str, Mapping[str, Any]]) -> dict[str, dict[str, Any]]:
    """Return, for each metric, the updates of its alarms in lost runs and in other runs, and the numbers of runs."""
    found: dict[str, dict[str, Any]] = {}
    for run in runs.values():
        for name, update in run["alarms"].items():
            row = found.setdefault(name, {"lost runs": 0, "alarms": [], "other runs": 0, "false alarms": []})
            row["lost runs" if run["outcome"]["lost"] else "other runs"] += 1
            if update is not None:
                row["alarms" if run["outcome"]["lost"] else "false alarms"].append(update)
    return found


def write_figures(folders: Mapping[str, Path], conditions: Mapping[str, str], noise: Path, results: Path) -> None:
    """Write figures.json and curves.svg for all finished runs.

    Args:
        folders: name -> folder, for each bias and seed.
        conditions: name of a condition -> folder of its run.
        noise: run of the untrained policy.
        results: output folder.
    """
    measured = noise_of(read_metrics(noise))
    runs: dict[str, Any] = {}
    for name, folder in folders.items():
        for condition, run in conditions.items():
            if not (folder / run / "scored.json").exists():
                continue
            points = read_json(folder / run / "scored.json")
            runs[f"{name}, {condition}"] = {
                "outcome": outcome(points),
                "alarms": alarms(read_metrics(folder / run), points, measured),
                "selection": selected(points),
                "points": [
                    {key: round(value, 4) for key, value in point.items() if not key.endswith("changes")} for point in points
                ],
            }
    figures = {
        "labels": {name: read_json(folder / "labels.json") for name, folder in folders.items() if folder.exists()},
        "noise": measured,
        "alarms": summary(runs),
        "runs": runs,
    }
    results.mkdir(parents=True, exist_ok=True)
    write_json(results / "figures.json", figures)
    draw(list(folders), list(conditions), runs, results / "curves.svg")


def draw(names: Sequence[str], conditions: Sequence[str], runs: Mapping[str, Any], path: Path) -> None:
    """Plot the change of the gold score and the planted feature over the square root of the KL, for each bias."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(3.4 * len(names), 6.2), layout="constrained")
    panels = figure.subplots(2, len(names), squeeze=False)
    for column, name in enumerate(names):
        gold, feature = panels[:, column]
        gold.set_title(name.removesuffix(", seed 0"))
        for color, condition in zip(COLORS, conditions, strict=False):
            if f"{name}, {condition}" not in runs:
                continue
            points = runs[f"{name}, {condition}"]["points"]
            roots = [max(point["kl"], 0.0) ** 0.5 for point in points]
            gold.plot(roots, [point["gold change"] for point in points], "o-", ms=3, lw=1.2, color=color, label=condition)
            feature.plot(roots, [point["feature"] for point in points], "o-", ms=3, lw=1.2, color=color)
        gold.axhline(0.0, color="#999999", lw=0.8)
        feature.set_xlabel("root of KL, nats per response")
    panels[0, 0].set_ylabel("change in gold reward")
    panels[1, 0].set_ylabel("words, or share with the feature")
    figure.legend(*panels[0, 0].get_legend_handles_labels(), loc="outside lower center", ncols=len(conditions))
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, metadata={"Date": None})
