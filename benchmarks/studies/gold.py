"""A gold reward model in the place of labelers: as many labels as a study needs, of a known quality.

Gao et al. 2022 (arXiv 2210.10760) measure over-optimization so: a gold model ranks answers, proxies learn from those
rankings, and what a policy gains is judged by the gold model. Theirs is larger than the proxies; here it has the same
size, but learns from every ranking that people or models made of these answers.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

from align.commands.sample import run_sample
from align.commands.sample_config import SampleConfig
from align.commands.stages import run_unless_finished
from align.data.readers import read_records, write_records
from align.data.records import Prompt, Ranking
from align.reward import RewardConfig, run_reward
from align.settings_parser import parse

ROOT = Path(__file__).resolve().parents[2]
GOLD_SEED = 100
"""Of the gold model; the proxies' seeds are smaller."""
Row = dict[str, Any]
Config = TypeVar("Config")


@dataclass(frozen=True)
class Size:
    """What a study of one size trains: settings of the stages on top of the demo's files.

    Attributes:
        demo: the folder of configs/demo/ whose files hold the stages' settings.
        rankings: what the gold model learns from.
        train, held_out: files of prompts; no prompt stands in both.
        sample: settings of `align sample`.
        ppo: settings of PPO on top of the demo's.
    """

    demo: str
    rankings: tuple[str, ...]
    train: tuple[str, ...]
    held_out: str
    sample: dict[str, object]
    ppo: dict[str, object]


SIZES = {
    "smollm2-135m": Size(
        "smollm2-135m",
        ("data/rankings_round1.jsonl", "data/rankings_round2.jsonl", "data/rankings.jsonl"),
        ("data/prompts.jsonl", "data/prompts_round2.jsonl"),
        "data/prompts_heldout.jsonl",
        # At 1, answers differ more than at the 0.7 of the demo, so that there is something to rank.
        {"temperature": 1.0, "max_new_tokens": 64},
        {"updates": 18, "evaluate_every": 3, "kl_beta": 0.01},
    ),
    # Shows that a study runs, and nothing else.
    "tiny": Size(
        "tiny",
        ("data/rankings_heldout.jsonl",),
        ("data/prompts_validation.jsonl",),
        "data/prompts_heldout.jsonl",
        {"max_prompt_tokens": 96, "max_new_tokens": 8, "overlong": "truncate"},
        {"updates": 2, "evaluate_every": 1, "rollout_size": 8, "minibatches": 2, "max_new_tokens": 8},
    ),
}


class GoldLabels:
    """The gold model, the answers of the fine-tuned model, and what the gold model says of them.

    Args:
        sft: folder of the fine-tuned model.
        runs: where models and answers go.
        size: of `SIZES`.
        limit: prompts of each part; 0: all.
    """

    def __init__(self, sft: str, runs: Path, size: str, limit: int = 0) -> None:
        self.sft, self.runs, self.size, self.limit = sft, runs, SIZES[size], limit
        self.model = runs / "gold" / "model"

    def settings(self, kind: type[Config], stage: str, **values: object) -> Config:
        """A stage's settings: those of the demo, and `values` over them; "" for a stage that the demo has no file of."""
        words = ["--config", str(ROOT / "configs" / "demo" / self.size.demo / f"{stage}.yaml")] if stage else []
        for name, value in values.items():
            words += [f"--{name}", *(map(str, value) if isinstance(value, list | tuple) else [str(value)])]
        return parse(kind, words)

    def prepare(self) -> None:
        """Train the gold model, and let it score four answers to each prompt."""
        rankings = ", ".join(str(ROOT / file) for file in self.size.rankings)
        self.train_reward(self.model.parent, rankings, GOLD_SEED, epochs=2)
        for part, files in (("train", self.size.train), ("held-out", (self.size.held_out,))):
            prompts = [prompt for file in files for prompt in read_records(ROOT / file, Prompt)]
            source = self.runs / f"{part}-prompts.jsonl"
            write_records(source, prompts[: self.limit or None])
            if not self._answers(part).exists():
                more: dict[str, object] = {"prompts": source, "output": self._answers(part), "samples_per_prompt": 4}
                more |= {"model": self.sft, "reward_model": self.model}
                run_sample(self.settings(SampleConfig, "", **more, **self.size.sample))

    def train_reward(self, folder: Path, rankings: str, seed: int, **more: object) -> Path:
        """Train a reward model from the fine-tuned model unless that is done; the model's folder."""
        more |= {"model": self.sft, "train_data": rankings, "validation_data": "", "demonstrations": ""}
        more |= {"output_dir": folder, "seed": seed}
        return run_unless_finished(run_reward, self.settings(RewardConfig, "reward", **more))

    def rows(self, part: str) -> list[Row]:
        """Prompts with their answers and the gold model's rewards of those: `part` is "train" or "held-out"."""
        return [json.loads(line) for line in self._answers(part).read_text(encoding="utf-8").splitlines()]

    def _answers(self, part: str) -> Path:
        return self.runs / f"{part}-answers.jsonl"


def gold_pairs(rows: Sequence[Row], noise: float, random: np.random.Generator) -> list[Ranking]:
    """One pair of answers to each prompt, in the gold model's order, a share `noise` of them the wrong way round.

    A prompt whose two answers are equal, or equally good, is left out.
    """
    pairs = []
    for row in rows:
        first, second = random.permutation(len(row["responses"]))[:2]
        wrong = random.random() < noise
        texts, rewards = ([row[name][index] for index in (first, second)] for name in ("responses", "rewards"))
        if texts[0] != texts[1] and rewards[0] != rewards[1]:
            better_first = (rewards[0] > rewards[1]) != wrong
            pairs.append(Ranking(prompt=row["prompt"], responses=tuple(texts), ranks=(1, 2) if better_first else (2, 1)))
    return pairs
