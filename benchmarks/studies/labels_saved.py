"""Labels saved by choosing what is labeled: pairs that an ensemble disputes against pairs at random.

    OMP_NUM_THREADS=1 python -m benchmarks.studies.labels_saved --sft runs/demo/sft/model [--seeds 0 1 2]

A gold model stands for the labeler. Both arms begin with the same pairs, at random. Then one adds, round by round, the pairs
on whose order three reward models disagree most, with a fifth at random (`align loop` chooses so; Christiano et al. 2017,
section 2.2.4); the other adds pairs at random. Reward models start anew in each round. Measured is how many pairs of
answers to held-out prompts a reward model orders as the gold model does. Every step that is finished is not done again.
Figures go to docs/studies/labels-saved/.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from align.commands.loop.choice import most_disputed
from align.commands.loop.labelers import ModelScorer
from align.data.readers import write_records
from align.files import read_json, write_json
from align.launch import quiet_libraries
from align.statistics import mean_interval
from benchmarks.studies.gold import ROOT, SIZES, GoldLabels, gold_pairs, pair_accuracy

STUDY = ROOT / "docs" / "studies" / "labels-saved"
MEMBERS = 3
DISPUTED_SHARE = 0.8


def main() -> None:
    """Do the steps that are not done yet."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sft", required=True, help="folder of the fine-tuned model")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--size", choices=list(SIZES), default="smollm2-135m", help="the settings of the stages")
    parser.add_argument("--rounds", type=int, nargs="+", default=[50, 100, 200, 300], help="labels after each round")
    parser.add_argument("--more", type=int, nargs="+", default=[450], help="further sizes of the random arm")
    parser.add_argument("--runs", type=Path, default=Path("runs/gold-studies"), help="models and answers")
    parser.add_argument("--results", type=Path, default=STUDY, help="figures")
    parser.add_argument("--limit", type=int, default=0, help="prompts of each part; 0: all")
    options = parser.parse_args()
    quiet_libraries()
    labels = GoldLabels(options.sft, options.runs, options.size, options.limit)
    labels.prepare()
    for seed in options.seeds:
        began = time.monotonic()
        Arms(labels, seed).run(options.rounds, options.more)
        print(f"seed {seed}: finished, {time.monotonic() - began:.0f} s", flush=True)
        write_figures(labels.runs, options.results)


class Arms:
    """Both ways to choose, with one seed."""

    def __init__(self, labels: GoldLabels, seed: int) -> None:
        self.labels, self.seed = labels, seed
        order = np.random.default_rng((seed, 1)).permutation(len(rows := labels.rows("train")))
        pairs = gold_pairs([rows[index] for index in order], 0.0, np.random.default_rng((seed, 2)))
        self.pairs = {str(number): pair for number, pair in enumerate(pairs)}
        self.held_out = labels.rows("held-out")

    def run(self, rounds: Sequence[int], more: Sequence[int]) -> None:
        """Train and measure at every size; the first one belongs to both arms."""
        chosen = list(self.pairs)[: rounds[0]]
        members = self._measure("random", chosen, MEMBERS)
        for number, size in enumerate(rounds[1:]):
            chosen = chosen + self._disputed(chosen, members, size - len(chosen), number)
            members = self._measure("disputed", chosen, MEMBERS)
        for size in [*rounds[1:], *more]:
            self._measure("random", list(self.pairs)[:size], MEMBERS)

    def _disputed(self, chosen: Sequence[str], members: Sequence[Path], count: int, number: int) -> list[str]:
        """The pairs to label next, from those that are left."""
        target = self._folder("disputed", len(chosen) + count) / "chosen.json"
        if target.exists():
            return list(read_json(target))
        left = [
            {"id": key, "prompt": pair.to_row()["prompt"], "responses": list(pair.responses)}
            for key, pair in self.pairs.items()
            if key not in set(chosen)
        ]
        scorers = [ModelScorer(str(member)) for member in members]
        found = most_disputed(left, scorers, count, DISPUTED_SHARE, np.random.default_rng((self.seed, 3, number)))
        for scorer in scorers:
            scorer.close()
        ids = [str(row["id"]) for row in found]
        write_json(target, ids)
        return ids

    def _measure(self, arm: str, chosen: Sequence[str], members: int) -> list[Path]:
        """Reward models that learned from these pairs, after their accuracy was written."""
        folder = self._folder(arm, len(chosen))
        file = folder / "pairs.jsonl"
        if not file.exists():
            write_records(file, [self.pairs[key] for key in chosen])
        models = [
            self.labels.train_reward(folder / str(member), str(file), 10 * self.seed + member) for member in range(members)
        ]
        if not (folder / "accuracy.json").exists():
            gold = [row["rewards"] for row in self.held_out]
            shares = np.mean([pair_accuracy(self._rewards(model), gold) for model in models], axis=0)
            write_json(folder / "accuracy.json", {"mean": float(shares.mean()), "interval": list(mean_interval(shares))})
        return models

    def _rewards(self, model: Path) -> list[list[float]]:
        """A model's rewards of the held-out answers, prompt by prompt."""
        scorer = ModelScorer(str(model))
        prompts = [row["prompt"] for row in self.held_out for _ in row["responses"]]
        rewards = iter(scorer(prompts, [text for row in self.held_out for text in row["responses"]]))
        scorer.close()
        return [[next(rewards) for _ in row["responses"]] for row in self.held_out]

    def _folder(self, arm: str, size: int) -> Path:
        return self.labels.runs / f"seed{self.seed}" / f"{arm}-{size}"


def write_figures(runs: Path, results: Path) -> None:
    """figures.json and curve.svg, of all sizes that are finished."""
    found: dict[str, dict[int, list[float]]] = {"random": {}, "disputed": {}}
    for path in sorted(runs.glob("seed*/*/accuracy.json")):
        arm, size = path.parent.name.rsplit("-", 1)
        found[arm].setdefault(int(size), []).append(read_json(path)["mean"])
    figures: dict[str, Any] = {arm: {str(size): sizes[size] for size in sorted(sizes)} for arm, sizes in found.items()}
    write_json(results / "figures.json", figures)
    draw(found, results / "curve.svg")


def draw(found: dict[str, dict[int, list[float]]], path: Path) -> None:
    """Accuracy over the number of labels: a point a seed, a line through the means."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7, 4), layout="constrained")
    axes = figure.subplots()
    for (arm, sizes), color in zip(found.items(), ("#777777", "#1f5fa8"), strict=True):
        x = sorted(sizes)
        axes.plot(x, [np.mean(sizes[size]) for size in x], "-", color=color, label=arm)
        axes.plot([size for size in x for _ in sizes[size]], [v for size in x for v in sizes[size]], "o", color=color, ms=4)
    axes.set_xlabel("labeled pairs")
    axes.set_ylabel("held-out pairs ordered as the gold model does")
    axes.legend()
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, metadata={"Date": None})


if __name__ == "__main__":
    main()
