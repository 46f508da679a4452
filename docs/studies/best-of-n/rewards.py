"""Other rewards for the demo's PPO: bounded ones (PAR), and averaged reward models (WARM).

    OMP_NUM_THREADS=1 PYTHONPATH=. python docs/studies/best-of-n/rewards.py [--seeds 0 1 2] [--variants demo par warm]

Each seed trains a fine-tuned model and two reward models by the demo's settings; all variants of a seed start from these.
The policies answer the held-out prompts; the first reward model and the shipped judge score the answers.
"""

import argparse
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from accelerate import Accelerator
from safetensors.torch import load_file, save_file

from align.core.files import new_folder, read_json, write_json
from align.core.launch import quiet_libraries, run_unless_finished
from align.core.seeds import RngStream
from align.core.settings import ModelConfig
from align.core.settings_parser import parse
from align.data.readers import read_records
from align.data.records import Prompt
from align.eval.policy_comparison import sample_and_score
from align.models.loading import load
from align.ppo import PPOConfig, run_ppo
from align.reward import RewardConfig, run_reward
from align.reward.checkpoint import load_reward_model
from align.runtime.distributed import compute_dtype
from align.sampling.generation import SamplingParams
from align.sft import SFTConfig, run_sft
from benchmarks.kept import kept
from benchmarks.studies.gaming_rollouts import prompt_key
from benchmarks.studies.runner import ROOT, compare_with_start

DEMO = ROOT / "configs" / "demo" / "smollm2-135m"
SAMPLING = SamplingParams(64, 0.7)
REFERENCES = 16
SETTINGS: dict[str, dict[str, object]] = {
    "demo": {},
    "par": {"extensions": "benchmarks.studies.reward_gaming:RewardAgainstReference"},
    "warm": {},
}


def main() -> None:
    """Do the runs that are not done yet, and write rewards.json."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--variants", nargs="+", choices=list(SETTINGS), default=list(SETTINGS))
    parser.add_argument("--runs", type=Path, default=Path("runs/best-of-n"))
    parser.add_argument("--results", type=Path, default=Path(__file__).parent)
    options = parser.parse_args()
    quiet_libraries()
    found: dict[str, Any] = {}
    for seed in options.seeds:
        for variant in options.variants:
            folder = options.runs / f"seed{seed}"
            name = f"{variant}, seed {seed}"
            found[name] = kept(folder / f"rewards-{variant}.json", partial(train_and_compare, folder, variant, seed))
            print(name, found[name], flush=True)
    write_json(options.results / "rewards.json", found)


def train_and_compare(folder: Path, variant: str, seed: int) -> dict[str, Any]:
    """Train the models of a variant, and return figures of its policy."""
    sft = run_unless_finished(run_sft, settings(SFTConfig, "sft", seed, output_dir=folder / "sft"))
    first = reward_model(sft, folder / "reward", seed)
    models = [first]
    if variant == "warm":
        models = [average_adapters([first, reward_model(sft, folder / "reward-second", seed + 100)], folder / "warm")]
    if variant == "par":
        kept(folder / "references.json", lambda: reference_rewards(sft, first, seed))
    more = SETTINGS[variant] | {"model": sft, "reward_model": ",".join(map(str, models))}
    policy = run_unless_finished(run_ppo, settings(PPOConfig, "ppo", seed, output_dir=folder / f"rewards-{variant}", **more))
    options = argparse.Namespace(sft=str(sft), reward=str(first), judge="smollm2-135m-judge", samples=2)
    options.prompts = str(ROOT / "data/prompts_heldout.jsonl")
    comparison, figures = compare_with_start(options, str(policy), SAMPLING, seed)
    sides = (comparison.before, comparison.after)
    return figures | {"words": [float(np.mean([len(text.split()) for text in side.texts])) for side in sides]}


def settings(kind: type[Any], stage: str, seed: int, **values: object) -> Any:
    """Return the demo's settings of a stage with `values` on top."""
    words = ["--config", str(DEMO / f"{stage}.yaml"), "--seed", str(seed)]
    return parse(kind, words + [word for name, value in values.items() for word in (f"--{name}", str(value))])


def reward_model(sft: Path, folder: Path, seed: int) -> Path:
    """Train a reward model unless that is done; return its folder."""
    return run_unless_finished(run_reward, settings(RewardConfig, "reward", seed, model=sft, output_dir=folder))


def average_adapters(models: list[Path], folder: Path) -> Path:
    """Save a reward model whose change of the weights is the mean of those of the LoRA adapters; return its folder.

    The mean of low-rank products has as many ranks as all of them together: A is stacked, B / n put side by side.
    """
    if folder.exists():
        return folder
    with new_folder(folder) as temporary:
        for path in models[0].iterdir():
            (temporary / path.name).write_bytes(path.read_bytes())
        adapters = [load_file(model / "adapter_model.safetensors") for model in models]
        merged = {}
        for name in adapters[0]:
            parts = [adapter[name] for adapter in adapters]
            if "lora_" in name:
                merged[name] = torch.cat(parts, 0) if "lora_A" in name else torch.cat(parts, 1) / len(parts)
            else:
                merged[name] = torch.stack([part.float() for part in parts]).mean(0).to(parts[0].dtype)
        save_file(merged, temporary / "adapter_model.safetensors", metadata={"format": "pt"})
        heads = [load_file(model / "reward_head.safetensors") for model in models]
        mean = {name: torch.stack([head[name] for head in heads]).mean(0) for name in heads[0]}
        save_file(mean, temporary / "reward_head.safetensors", metadata={"format": "pt"})
        config = read_json(temporary / "adapter_config.json")
        config |= {name: config[name] * len(models) for name in ("r", "lora_alpha")}
        write_json(temporary / "adapter_config.json", config)
    return folder


def reference_rewards(sft: Path, reward: Path, seed: int) -> dict[str, list[float]]:
    """Return the rewards of the fine-tuned model's answers to each training prompt."""
    prompts = read_records(ROOT / "data/prompts.jsonl", Prompt)
    policy = load(ModelConfig(model=str(sft)), compute_dtype("auto"))
    policy.backbone.requires_grad_(False)
    repeated = [prompt for prompt in prompts for _ in range(REFERENCES)]
    noise = (seed, RngStream.BEST_OF)
    drawn = sample_and_score(policy, load_reward_model(str(reward)), repeated, SAMPLING, noise, Accelerator(cpu=True))
    rewards = iter(drawn.rewards)
    return {prompt_key(prompt.prompt): [next(rewards) for _ in range(REFERENCES)] for prompt in prompts}


if __name__ == "__main__":
    main()
