"""A gold reward model in place of labelers (Gao et al. 2022, arXiv 2210.10760): as many labels as a study needs.

The gold model ranks answers, proxies are trained on those rankings, and the gold model judges what a policy gains. Theirs is
larger than the proxies; here it has the same size, but is trained on every shipped ranking of these answers.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

from align.commands.sample import SampleConfig, run_sample
from align.core.files import read_json_lines
from align.core.launch import run_unless_finished
from align.core.settings_parser import parse
from align.data.readers import read_records, write_records
from align.data.records import Prompt, Ranking
from align.reward import RewardConfig, run_reward
from benchmarks.studies.runner import ROOT

GOLD_SEED = 100
"""Of the gold model; the proxies' seeds are smaller."""
Row = dict[str, Any]
Config = TypeVar("Config")


@dataclass(frozen=True)
class Size:
    """A study of one size: the gold model's rankings, prompts, and settings on top of the demo's files."""

    rankings: tuple[str, ...]
    train: tuple[str, ...]
    held_out: str
    sample: dict[str, object]
    ppo: dict[str, object]


SIZES = {
    "smollm2-135m": Size(
        ("data/rankings_round1.jsonl", "data/rankings_round2.jsonl", "data/rankings.jsonl"),
        ("data/prompts.jsonl", "data/prompts_round2.jsonl"),
        "data/prompts_heldout.jsonl",
        {"temperature": 1.0, "max_new_tokens": 64},  # answers differ more than at the demo's 0.7
        {"total_updates": 18, "eval_steps": 3, "kl_coef": 0.01},
    ),
    "tiny": Size(  # only shows that a study runs
        ("data/rankings_heldout.jsonl",),
        ("data/prompts_validation.jsonl",),
        "data/prompts_heldout.jsonl",
        {"max_prompt_tokens": 96, "max_new_tokens": 8, "overlong": "truncate"},
        {"total_updates": 2, "eval_steps": 1, "rollout_batch_size": 8, "num_mini_batches": 2, "max_new_tokens": 8},
    ),
}


def demo_settings(kind: type[Config], demo: str, stage: str, **values: object) -> Config:
    """Return the settings of a stage ("" for none) in a folder of configs/demo/, with `values` on top."""
    words = ["--config", str(ROOT / "configs" / "demo" / demo / f"{stage}.yaml")] if stage else []
    for name, value in values.items():
        words += [f"--{name}", *(map(str, value) if isinstance(value, list | tuple) else [str(value)])]
    return parse(kind, words)


class GoldLabels:
    """The gold model, the answers of the fine-tuned model in `sft`, and the gold model's rewards of these.

    Args:
        size: of `SIZES`, and a folder of configs/demo/.
        limit: prompts of each part; 0: all.
    """

    def __init__(self, sft: str, runs: Path, size: str, limit: int = 0) -> None:
        self.sft, self.runs, self.demo, self.size, self.limit = sft, runs, size, SIZES[size], limit
        self.model = runs / "gold" / "model"

    def settings(self, kind: type[Config], stage: str, **values: object) -> Config:
        """The demo's settings of a stage ("" for none) with `values` on top."""
        return demo_settings(kind, self.demo, stage, **values)

    def prepare(self) -> None:
        """Train the gold model, and let it score four answers to each prompt."""
        rankings = ", ".join(str(ROOT / file) for file in self.size.rankings)
        self.train_reward(self.model.parent, rankings, GOLD_SEED, num_train_epochs=2)
        for part, files in (("train", self.size.train), ("held-out", (self.size.held_out,))):
            prompts = [prompt for file in files for prompt in read_records(ROOT / file, Prompt)]
            source = self.runs / f"{part}-prompts.jsonl"
            write_records(source, prompts[: self.limit or None])
            if not self._answers(part).exists():
                more: dict[str, object] = {"prompts": source, "output": self._answers(part), "samples_per_prompt": 4}
                more |= {"model": self.sft, "reward_model": self.model}
                run_sample(self.settings(SampleConfig, "", **more, **self.size.sample))

    def train_reward(self, folder: Path, rankings: str, seed: int, **more: object) -> Path:
        """Train a reward model from the fine-tuned model unless that is done; return the model's folder."""
        more |= {"model": self.sft, "train_data": rankings, "validation_data": "", "demonstrations": ""}
        more |= {"output_dir": folder, "seed": seed}
        return run_unless_finished(run_reward, self.settings(RewardConfig, "reward", **more))

    def proxies(self, noise: float, seed: int, members: int) -> list[Path]:
        """Reward models trained on the same pairs, with other heads and another order."""
        pairs = self.runs / f"pairs-noise{noise:g}-seed{seed}.jsonl"
        if not pairs.exists():
            rows = read_json_lines(self._answers("train"))
            write_records(pairs, gold_pairs(rows, noise, np.random.default_rng(seed)))
        folders = [self.runs / f"proxy-noise{noise:g}-seed{seed}-{member}" for member in range(members)]
        return [self.train_reward(folder, str(pairs), 10 * seed + member) for member, folder in enumerate(folders)]

    def _answers(self, part: str) -> Path:
        return self.runs / f"{part}-answers.jsonl"


def gold_pairs(rows: Sequence[Row], noise: float, random: np.random.Generator) -> list[Ranking]:
    """One pair of answers to each prompt in the gold model's order, a share `noise` of them reversed.

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
