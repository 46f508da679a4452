"""Reward gaming: PPO on proxy reward models with a planted bias, with and without defenses.

    OMP_NUM_THREADS=1 python -m benchmarks.studies.reward_gaming --sft runs/demo/sft/model --gold runs/demo/reward/model

A gold reward model and a bias label pairs of sampled answers (`planted_bias`). Proxies, which have the first layers of the
fine-tuned model, are trained on these pairs, and PPO on the proxies. PPO uses each prompt once, and none that was labeled.
The gold model and the judge score its rollouts (`gaming_figures`). Two biases run side by side (`--jobs 2`).
"""

import argparse
import multiprocessing
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from align.commands.sample import SampleConfig, run_sample
from align.core.files import new_folder, read_json, read_json_lines
from align.core.launch import quiet_libraries, run_unless_finished
from align.core.settings import ModelConfig
from align.core.settings_parser import Settings, parse
from align.data.readers import read_records, write_records
from align.data.records import Prompt
from align.extras.loop_labels import AnswerScorer
from align.models.heads import ScalarHead
from align.models.loading import load
from align.ppo import PPOConfig, run_ppo
from align.ppo.extensions import Extension, TrainingContext
from align.ppo.records import RoleOutputs, Rollout, TrainingSignal
from align.reward import RewardConfig, run_reward
from align.reward.checkpoint import HEAD, save_reward_model
from benchmarks.kept import kept
from benchmarks.studies.gaming_figures import prompt_key, score_rollouts, write_figures
from benchmarks.studies.planted_bias import BIASES, biased_pairs, planted

ROOT = Path(__file__).resolve().parents[2]
MEMBERS = 3
DECIDED = 0.4
"""Fraction of pairs that the bias decides."""


CONDITIONS: dict[str, tuple[str, dict[str, object]]] = {
    "none": ("first", {}),
    "KL penalty": ("first", {"kl_coef": 0.05}),
    "mean of 3": ("ensemble", {"reward_ensemble": "mean"}),
    "minimum of 3": ("ensemble", {"reward_ensemble": "wco"}),
    "WARM": ("mean weights", {}),
    "PAR": ("first", {"extensions": "benchmarks.studies.reward_gaming:RewardAgainstReference"}),
    "length adjustment": ("first", {"length_adjustment": 1.0}),
}
"""Defense -> (reward: first proxy, ensemble of all proxies, or model with their mean weights; PPO settings)."""
CONTROLS: dict[str, tuple[str, dict[str, object]]] = {
    "gold": ("gold", {}),
    "untrained": ("ensemble", {"learning_rate": 1e-12}),
}
"""Runs for the first bias only: the gold model as the reward, and the noise of metrics between rollouts of one policy."""


@dataclass(frozen=True)
class Size:
    """Settings of a study. Settings of stages override the demo's files.

    Attributes:
        labeled: file of prompts whose answers are labeled.
        held_out: file of prompts for PPO, each of which is used once.
        layers: number of layers of the proxies.
        pairs: number of training pairs of each proxy, drawn with replacement.
        sample: settings for sampling the labeled answers.
        reference: settings for sampling the fine-tuned model's answers to the PPO prompts.
    """

    labeled: str
    held_out: str
    layers: int
    pairs: int
    sample: dict[str, object]
    reference: dict[str, object]
    reward: dict[str, object]
    ppo: dict[str, Any]

    @property
    def prompts(self) -> int:
        """Number of PPO prompts."""
        responses = self.ppo["total_updates"] * self.ppo["rollout_batch_size"]
        return int(responses // self.ppo["samples_per_prompt"])


SIZES = {
    "smollm2-135m": Size(
        labeled="data/prompts.jsonl",
        held_out="data/prompts_heldout.jsonl",
        layers=6,
        pairs=512,
        sample={"temperature": 0.8, "max_new_tokens": 40, "max_prompt_tokens": 64, "overlong": "drop"},
        reference={"temperature": 0.8, "max_new_tokens": 24},
        reward={"lora_r": 0, "learning_rate": 3e-4, "batch_size": 32, "demonstrations": "", "report_to": "none"},
        ppo={
            "temperature": 0.8,
            "max_new_tokens": 24,
            "missing_eos_penalty": "none",
            "missing_eos_score": "none",
            "kl_coef": 0,
            "length_adjustment": 0,
            "learning_rate": 3e-3,
            "lr_scheduler_type": "constant",
            "total_updates": 6,
            "rollout_batch_size": 24,
            "samples_per_prompt": 4,
            "num_mini_batches": 3,
            "report_to": "none",
        },
    ),
    "tiny": Size(  # only to check that the study runs
        labeled="data/prompts_validation.jsonl",
        held_out="data/prompts_heldout.jsonl",
        layers=1,
        pairs=16,
        sample={"max_prompt_tokens": 96, "max_new_tokens": 8, "overlong": "drop"},
        reference={"max_prompt_tokens": 128, "max_new_tokens": 8, "overlong": "truncate"},
        reward={"demonstrations": "", "overlong": "drop", "report_to": "none"},
        ppo={
            "overlong": "truncate",
            "max_new_tokens": 8,
            "total_updates": 3,
            "rollout_batch_size": 8,
            "samples_per_prompt": 2,
            "advantage_estimator": "rloo",
            "num_mini_batches": 2,
            "report_to": "none",
        },
    ),
}


# Files in the folder of runs.
ANSWERS = "answers.jsonl"  # sampled answers to label, with gold rewards
PROMPTS = "prompts.jsonl"  # PPO prompts
REFERENCES = "references.jsonl"  # the fine-tuned model's answers to the PPO prompts, with gold rewards
START = "start"  # initial reward model of all proxies


def main() -> None:
    """Do the missing steps, and write figures.json and the plot."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sft", required=True, help="folder of the fine-tuned model")
    parser.add_argument("--gold", required=True, help="folder of the gold reward model")
    parser.add_argument("--judge", default="smollm2-135m-judge", help="a reward model that no stage was trained on")
    parser.add_argument("--samples", type=int, default=4, help="answers to each prompt")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0])
    parser.add_argument("--runs", type=Path, default=Path("runs/reward-gaming"), help="models and answers")
    parser.add_argument("--results", type=Path, default=ROOT / "docs/studies/reward-gaming", help="folder of the figures")
    parser.add_argument("--size", choices=list(SIZES), default="smollm2-135m", help="the settings of the stages")
    parser.add_argument("--biases", nargs="+", choices=list(BIASES), default=list(BIASES))
    parser.add_argument("--conditions", nargs="+", choices=list(CONDITIONS), default=list(CONDITIONS))
    parser.add_argument("--jobs", type=int, default=2, help="biases that run side by side")
    options = parser.parse_args()
    quiet_libraries()
    prepare(options)
    with ProcessPoolExecutor(options.jobs, multiprocessing.get_context("spawn")) as pool:
        both = [(bias, seed) for seed in options.seeds for bias in options.biases]
        controls = {both[0]: list(CONTROLS)}
        tasks = [pool.submit(run_bias, options, *pair, [*controls.get(pair, []), *options.conditions]) for pair in both]
        for task in tasks:
            task.result()
    folders = {f"{bias}, seed {seed}": folder_of(options, bias, seed) for bias, seed in both}
    conditions = {name: folder_name(name) for name in (*options.conditions, "gold")}
    write_figures(folders, conditions, folder_of(options, *both[0]) / "untrained", options.results)


def prepare(options: argparse.Namespace) -> None:
    """Sample answers, score them with the gold model, and create the initial reward model of the proxies."""
    size = SIZES[options.size]
    if not (options.runs / PROMPTS).exists():
        options.runs.mkdir(parents=True, exist_ok=True)
        write_records(options.runs / PROMPTS, read_records(ROOT / size.held_out, Prompt)[: size.prompts])
    if not (options.runs / ANSWERS).exists():
        sample_answers(options, ROOT / size.labeled, options.runs / ANSWERS, size.sample)
    if not (options.runs / REFERENCES).exists():
        sample_answers(options, options.runs / PROMPTS, options.runs / REFERENCES, size.reference)
    kept(options.runs / "judged.json", lambda: reference_scores(options, options.judge))
    kept(options.runs / "gold.json", lambda: reference_scores(options, options.gold))
    if not (options.runs / START).exists():
        cut_reward_model(options.sft, size.layers, options.runs / START)


def demo_settings(kind: type[Settings], demo: str, stage: str, **values: object) -> Settings:
    """Return the settings of a stage ("" for none) in a folder of configs/demo/, overridden by `values`."""
    words = ["--config", str(ROOT / "configs" / "demo" / demo / f"{stage}.yaml")] if stage else []
    for name, value in values.items():
        words += [f"--{name}", *(map(str, value) if isinstance(value, list) else [str(value)])]
    return parse(kind, words)


def sample_answers(options: argparse.Namespace, prompts: Path, output: Path, sampling: Mapping[str, object]) -> None:
    """Sample answers of the fine-tuned model, and write them with their gold rewards."""
    more: dict[str, object] = {"prompts": prompts, "output": output, "samples_per_prompt": options.samples}
    more |= {"model": options.sft, "reward_model": options.gold}
    run_sample(demo_settings(SampleConfig, options.size, "", **more, **sampling))


def cut_reward_model(model: str, layers: int, folder: Path) -> None:
    """Save the first layers of a decoder as a reward model with a new head."""
    loaded = load(ModelConfig(model=model), torch.float32)
    inner = loaded.backbone.model.get_decoder()
    inner.layers = inner.layers[:layers]
    loaded.backbone.model.config.num_hidden_layers = layers
    torch.manual_seed(0)
    head = ScalarHead(loaded.backbone.hidden_size, bias=False).linear.weight
    save_reward_model(
        folder,
        loaded,
        loaded.backbone.model.state_dict(),
        head,
        {"mean": 0.0},
        {"title": "Untrained", "stage": "reward", "data": "none"},
    )


@cache
def scorer(folder: str) -> AnswerScorer:
    """Return the scorer of a reward model. The model is loaded once per process."""
    return AnswerScorer(folder)


def scored(rows: Sequence[dict[str, Any]], score: AnswerScorer) -> Iterator[tuple[dict[str, Any], list[float]]]:
    """Yield each row with the scores of its responses."""
    texts = [(row["prompt"], text) for row in rows for text in row["responses"]]
    scores = iter(score(*zip(*texts, strict=True)))
    for row in rows:
        yield row, [next(scores) for _ in row["responses"]]


def run_bias(options: argparse.Namespace, bias: str, seed: int, conditions: Sequence[str]) -> None:
    """Train the proxies of a bias and a policy under each condition, and score the policies' rollouts."""
    quiet_libraries()
    folder = folder_of(options, bias, seed)
    labels = kept(folder / "labels.json", lambda: write_labels(options, bias, seed))
    print(f"{folder.name}: {labels}", flush=True)
    models = [train_proxy(options, folder, member, seed) for member in range(MEMBERS)]
    warm = folder / "warm"
    if not warm.exists():
        average_weights(models, warm)
    kept(folder / "references.json", lambda: reference_scores(options, str(models[0])))
    judged, gold = (read_json(options.runs / f"{name}.json") for name in ("judged", "gold"))
    for condition in conditions:
        members = {"first": models[:1], "ensemble": models, "mean weights": [warm], "gold": [Path(options.gold)]}
        reward = members[(CONDITIONS | CONTROLS)[condition][0]]
        run = train_policy(options, folder, condition, reward, seed)

        def score(run: Path = run) -> list[dict[str, Any]]:
            scorers = {"gold": (scorer(options.gold), gold), "judge": (scorer(options.judge), judged)}
            return score_rollouts(run, scorers, BIASES[bias].feature)

        kept(run / "scored.json", score)


def write_labels(options: argparse.Namespace, bias: str, seed: int) -> dict[str, float]:
    """Write a bootstrap sample of the labeled pairs for each proxy. Return figures of the labels."""
    random = np.random.default_rng(seed)
    rows = planted(BIASES[bias], read_json_lines(options.runs / ANSWERS), 0.5, random)
    if BIASES[bias].plant:
        rows = [row | {"rewards": scores} for row, scores in scored(rows, scorer(options.gold))]
    pairs, figures = biased_pairs(BIASES[bias], rows, DECIDED)
    for member in range(MEMBERS):
        drawn = random.integers(len(pairs), size=SIZES[options.size].pairs)
        write_records(folder_of(options, bias, seed) / f"pairs-{member}.jsonl", [pairs[index] for index in drawn])
    return figures


def train_proxy(options: argparse.Namespace, folder: Path, member: int, seed: int) -> Path:
    """Train a proxy if necessary. Return the model's folder."""
    more: dict[str, object] = {"model": options.runs / START, "train_data": folder / f"pairs-{member}.jsonl"}
    more |= {"validation_data": "", "output_dir": folder / f"proxy-{member}", "seed": 10 * seed + member}
    config = demo_settings(RewardConfig, options.size, "reward", **more, **SIZES[options.size].reward)
    return run_unless_finished(run_reward, config)


def average_weights(models: Sequence[Path], folder: Path) -> None:
    """Save the mean weights of reward models with the same initialization (WARM, Rame et al. 2024, arXiv 2401.12187)."""
    with new_folder(folder) as temporary:
        for path in models[0].iterdir():
            (temporary / path.name).write_bytes(path.read_bytes())
        for name in ("model.safetensors", HEAD):
            parts = [load_file(model / name) for model in models]
            mean = {
                key: torch.stack([part[key].float() for part in parts]).mean(0).to(value.dtype)
                for key, value in parts[0].items()
            }
            save_file(mean, temporary / name, metadata={"format": "pt"})


def reference_scores(options: argparse.Namespace, model: str) -> dict[str, list[float]]:
    """Map `prompt_key` of each PPO prompt to a reward model's scores of the fine-tuned model's answers."""
    rows = read_json_lines(options.runs / REFERENCES)
    return {prompt_key(row["prompt"]): scores for row, scores in scored(rows, AnswerScorer(model))}


def against_references(scores: Tensor, references: Sequence[Sequence[float]]) -> Tensor:
    """Return 4 times the mean of sigmoid(score - reference score) over the references of each prompt [B].

    With the factor 4, the slope is 1 where both scores are equal, so the penalty for a missing EOS keeps its relative size.
    """
    return torch.stack(
        [4 * torch.sigmoid(score - torch.tensor(found)).mean() for score, found in zip(scores, references, strict=True)]
    )


class RewardAgainstReference(Extension):
    """Preference as reward (PAR, Fu et al. 2025, arXiv 2502.18770): bounded rewards relative to the initial answers."""

    def load(self, context: TrainingContext) -> None:
        self.references = read_json(context.run.folder.parent / "references.json")

    def shape(self, signal: TrainingSignal, rollout: Rollout, old: RoleOutputs) -> TrainingSignal:
        keys = [prompt_key(prompt.conversation) for prompt in rollout.prompts]
        return replace(signal, scores=against_references(signal.scores, [self.references[key] for key in keys]))


def folder_of(options: argparse.Namespace, bias: str, seed: int) -> Path:
    """Return the folder with the proxies and policies of a bias."""
    return Path(options.runs) / f"{bias}-seed{seed}"


def folder_name(condition: str) -> str:
    """Return the name of a run's folder."""
    return condition.replace(" ", "-").lower()


def train_policy(options: argparse.Namespace, folder: Path, condition: str, models: Sequence[Path], seed: int) -> Path:
    """Train a policy if necessary. Return the run folder."""
    size, run = SIZES[options.size], folder / folder_name(condition)
    settings: dict[str, object] = {
        "model": options.sft,
        "prompts": options.runs / PROMPTS,
        "validation_prompts": "",
        "reward_model": list(models),
        "output_dir": run,
        "seed": seed,
    }
    settings |= size.ppo | (CONDITIONS | CONTROLS)[condition][1]
    run_unless_finished(run_ppo, demo_settings(PPOConfig, options.size, "ppo", **settings))
    return run


if __name__ == "__main__":
    main()
