"""Reward models on real preferences: accuracy and time beside TRL, K-wise rankings against pairs, ensembles, calibration.

    OMP_NUM_THREADS=1 python -m benchmarks.studies.reward_models [--seeds 0 1 2] [--peer_seeds 0]

The data is not part of the project: docs/studies/reward-models.md says where it comes from. Every model starts from
SmolLM2-135M-Instruct and passes once over its data. TRL's RewardTrainer gets the same token ids, batch and schedule.
Every run that is finished is not done again. Figures go to docs/studies/reward-models/.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from align.commands.stages import run_unless_finished
from align.files import read_json, write_json
from align.launch import quiet_libraries
from align.reward import RewardConfig, run_reward
from align.reward.metrics import ScoredRanking, pairs_and_differences
from align.statistics import mean_interval, pair_calibration, pair_calibration_error
from align.training.metrics_file import read_metrics
from benchmarks.studies.gold import ROOT
from benchmarks.studies.preference_data import Part, kwise, people_pairs

STUDY = ROOT / "docs" / "studies" / "reward-models"
TEMPLATE = ROOT / "configs" / "demo" / "smollm2-135m" / "chat.jinja"
LEARNING_RATE, WARMUP = 2e-5, 0.1
"""Those of configs/reward/smollm2-135m.yaml, for both sides; the rate then falls as a cosine."""


def main() -> None:
    """Do the runs that are not done yet."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, default=ROOT.parent / "shared" / "data", help="folder of the preferences")
    parser.add_argument("--model", default="smollm2-135m", help="where every reward model starts")
    parser.add_argument("--seeds", type=int, nargs="*", default=[0, 1, 2], help="of our reward models on people's pairs")
    parser.add_argument("--peer_seeds", type=int, nargs="*", default=[0], help="of TRL's on the same pairs")
    parser.add_argument("--kwise_seeds", type=int, nargs="*", default=[0], help="of K-wise rankings and of pairs")
    parser.add_argument("--pairs", nargs=2, type=int, default=[0, 312], help="people's, to learn from (0: all), held out")
    parser.add_argument("--k9", nargs=2, type=int, default=[500, 142], help="rankings of nine, to learn from, held out")
    parser.add_argument("--k4", nargs=2, type=int, default=[280, 100], help="rankings of four, to learn from, held out")
    parser.add_argument("--runs", type=Path, default=Path("runs/reward-models"), help="data and models")
    parser.add_argument("--results", type=Path, default=STUDY, help="figures")
    options = parser.parse_args()
    quiet_libraries()
    people = people_pairs(options.data, options.runs / "data", *options.pairs)
    ranked = {"k9": options.k9, "k4": options.k4}
    both = [part for name, sizes in ranked.items() for part in kwise(options.data, options.runs / "data", name, *sizes)]
    work = [(people, "ours", seed) for seed in options.seeds[:1]]
    work += [(people, "trl", seed) for seed in options.peer_seeds]
    work += [(people, "ours", seed) for seed in options.seeds[1:]]
    work += [(part, "ours", seed) for seed in options.kwise_seeds for part in both]
    for part, side, seed in work:
        folder = options.runs / f"{part.name}-{side}-{seed}"
        if not (folder / "result.json").exists():
            train, began = train_ours if side == "ours" else train_trl, time.process_time()
            result = train(part, options.model, folder, seed)
            # Of loading, learning and scoring together: it hardly depends on what else the machine does.
            write_json(folder / "result.json", {"processor_seconds": time.process_time() - began} | result)
        print(f"{folder.name}: {accuracy([scored(folder)])}", flush=True)
        write_figures(options.runs, options.results)


def settings(part: Part, model: str, folder: Path, seed: int) -> RewardConfig:
    """Ours; the other side reads the ids that they give."""
    return RewardConfig(
        model=model,
        chat_template=str(TEMPLATE),
        train_data=str(part.train),
        validation_data=str(part.held_out),
        batch_size=part.batch,
        learning_rate=LEARNING_RATE,
        warmup=WARMUP,
        max_prompt_tokens=part.prompt,
        max_response_tokens=part.response,
        overlong="truncate",
        output_dir=str(folder),
        log_to=["none"],
        seed=seed,
    )


def train_ours(part: Part, model: str, folder: Path, seed: int) -> dict[str, Any]:
    """Train one of ours; its seconds of learning, the tokens it read, its number of updates and its held-out rewards."""
    run_unless_finished(run_reward, settings(part, model, folder, seed))
    rows = [row for row in read_metrics(folder) if row["update"] > 0]
    seconds = sum((row["time/learn"] + row["time/step"]) * row["time/update"] for row in rows)
    figures = {"seconds": seconds, "tokens": sum(row["tokens/read"] for row in rows), "updates": len(rows)}
    return figures | {"held_out": read_json(folder / "validation.json")}


def train_trl(part: Part, model: str, folder: Path, seed: int) -> dict[str, Any]:
    """The same of TRL's RewardTrainer on the same ids."""
    from benchmarks.studies.reward_models_trl import train

    return train(part, settings(part, model, folder, seed))


def scored(folder: Path) -> list[ScoredRanking]:
    """Held-out rankings with a run's rewards."""
    rows = read_json(folder / "result.json")["held_out"]
    return [ScoredRanking(tuple(row["ranks"]), tuple(row["rewards"]), tuple(row["lengths"])) for row in rows]


def ensemble(members: Sequence[Sequence[ScoredRanking]]) -> list[ScoredRanking]:
    """Held-out rankings with the mean of several models' rewards."""
    return [
        ScoredRanking(items[0].ranks, tuple(np.mean([item.rewards for item in items], axis=0).tolist()), items[0].lengths)
        for items in zip(*members, strict=True)
    ]


def accuracy(members: Sequence[Sequence[ScoredRanking]]) -> dict[str, Any]:
    """Held-out accuracy of the mean of some models with its interval, its calibration, and the pairs."""
    pairs, difference = pairs_and_differences(ensemble(members))
    right = ((difference > 0).double() + 0.5 * (difference == 0).double()).numpy()
    low, high = mean_interval(right, groups=pairs.ranking.tolist())
    return {
        "accuracy": float(right.mean()),
        "interval": [low, high],
        "pairs": len(right),
        "calibration_error": pair_calibration_error(difference),
        "calibration": pair_calibration(difference),
    }


def write_figures(runs: Path, results: Path) -> None:
    """figures.json and figures.svg, of all runs that are finished."""
    found: dict[str, dict[str, Any]] = {}
    groups: dict[str, list[list[ScoredRanking]]] = {}
    for path in sorted(runs.glob("*/result.json")):
        members = scored(path.parent)
        facts = {key: value for key, value in read_json(path).items() if key != "held_out"}
        found[path.parent.name] = accuracy([members]) | facts
        groups.setdefault(path.parent.name.rpartition("-")[0], []).append(members)
    for name, several in groups.items():
        if len(several) > 1:
            found[f"{name}-ensemble"] = accuracy(several) | {"members": len(several)}
    write_json(results / "figures.json", found)
    draw(found, results / "figures.svg")


def draw(found: dict[str, dict[str, Any]], path: Path) -> None:
    """Accuracy of every model with its interval, and how often those on people's pairs are right when they are how sure."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(10, 4), layout="constrained")
    left, right = figure.subplots(1, 2)
    for place, (name, row) in enumerate(reversed(found.items())):
        color = "#c0392b" if "trl" in name else "#1f5fa8"
        left.plot(row["interval"], [place, place], "-", color=color)
        left.plot(row["accuracy"], place, "o", color=color)
        if name.startswith("people") and row.get("calibration"):
            stated, actual, _ = zip(*row["calibration"], strict=True)
            style = "-" if "ensemble" in name else ":"
            right.plot(stated, actual, style, marker="o", ms=3, color=color, label=name)
    left.set_yticks(range(len(found)), list(reversed(found)))
    left.axvline(0.5, color="#777777", linewidth=0.8)
    left.set_xlabel("held-out pairs in the right order, 95 % bootstrap over rankings")
    right.plot([0.5, 1], [0.5, 1], "-", color="#777777", linewidth=0.8)
    right.set_xlabel("probability of the order that the model states")
    right.set_ylabel("share of these orders that are right")
    right.legend(fontsize=7)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, metadata={"Date": None})


if __name__ == "__main__":
    main()
