"""Short runs of every stage, in this process or as a script: small_runs.py MODEL FOLDER JSON-SETTINGS [layers].

With `layers`, sampling under ZeRO-3 gathers weights layer by layer, as where whole ones do not fit.
"""

import json
import sys
from pathlib import Path
from typing import Any

from align.dpo import DPOConfig, run_dpo
from align.ppo import PPOConfig, run_ppo
from align.reward import RewardConfig, run_reward
from align.sft import SFTConfig, run_sft
from align.training.memory import Memory
from align.training.run_folder import read_metrics

COMMON = {"report_to": ["none"], "overlong": "truncate", "max_prompt_tokens": 64, "learning_rate": 1e-4}
SUPERVISED = {"max_response_tokens": 32, "batch_size": 10}
RANKINGS = {"train_data": "data/rankings_heldout.jsonl", "validation_data": "data/rankings_heldout.jsonl"}
PPO = {
    "total_updates": 2,
    "rollout_batch_size": 8,
    "max_new_tokens": 16,
    "num_ppo_epochs": 1,
    "num_mini_batches": 1,
    "missing_eos_score": None,
}


def sft(model: str, folder: Path, **settings: Any) -> Path:
    """A few updates of supervised fine-tuning."""
    data = {"train_data": "data/demonstrations_heldout.jsonl", "validation_data": "data/demonstrations_heldout.jsonl"}
    return run_sft(SFTConfig(model=model, output_dir=str(folder), **COMMON | SUPERVISED | data | settings))


def reward(model: str, folder: Path, **settings: Any) -> Path:
    """A few updates of a reward model."""
    return run_reward(RewardConfig(model=model, output_dir=str(folder), **COMMON | SUPERVISED | RANKINGS | settings))


def dpo(model: str, folder: Path, **settings: Any) -> Path:
    """A few updates of DPO."""
    return run_dpo(DPOConfig(model=model, output_dir=str(folder), **COMMON | SUPERVISED | RANKINGS | settings))


def ppo(model: str, folder: Path, **settings: Any) -> Path:
    """Two updates of PPO."""
    return run_ppo(PPOConfig(model=model, output_dir=str(folder), **COMMON | PPO | settings))


def all_stages(model: str, folder: Path, settings: dict[str, Any]) -> dict[str, list[dict[str, float]]]:
    """Each stage on what the one before has made; the metrics of each."""
    tuned = sft(model, folder / "sft", **settings)
    rewards = reward(str(tuned), folder / "reward", **settings)
    dpo(str(tuned), folder / "dpo", **settings)
    ppo(str(tuned), folder / "ppo", reward_model=str(rewards), **settings)
    return {stage: read_metrics(folder / stage) for stage in ("sft", "reward", "dpo", "ppo")}


if __name__ == "__main__":
    if "layers" in sys.argv[4:]:
        Memory.left = lambda self: 0  # type: ignore[method-assign]
    all_stages(sys.argv[1], Path(sys.argv[2]), json.loads(sys.argv[3]))
