"""Trains stages in every variant for a few updates each, in the processes of a launcher: for test_every_stage.py.

Usage: every_stage.py FOLDER SHARED UPDATES [CASE...]: SHARED holds the encoder, and the reward models that PPO learns from,
so that they are the same whoever trains. A CASE is stage/model/rank, such as `ppo/tiny-llama/4`.
"""

import math
import sys
from pathlib import Path

from align.dpo import DPOConfig, run_dpo
from align.ppo import PPOConfig, run_ppo
from align.reward import RewardConfig, run_reward
from align.sft import SFTConfig, run_sft

MODELS = ("tiny-llama", "tiny-t5")
CASES = [f"{stage}/{model}/{rank}" for model in MODELS for rank in (0, 4) for stage in ("sft", "reward", "dpo", "ppo")]
CASES += ["reward/encoder/0", "reward/encoder/4", "ptx/tiny-llama/4"]
SETTINGS = ("cpu2", "zero1", "zero2", "zero3", "zero3-offload")
"""Files in configs/accelerate: each whole, and what is sharded. cpu2 is DDP's on processors."""
TOLERANCE = 1e-5
"""Of float32: several processes add in another order than one."""
ENDED = "ended"
"""A file in the folder of a case that has ended: the best model so far is there before."""
ADAM_EPSILON = 1e-4
"""Adam divides by a gradient's size: with a small epsilon, rounding errors of gradients near 0 become whole steps."""


def run_case(case: str, folder: Path, shared: Path, updates: int) -> None:
    """Run one case into `folder`/case, for at least so many updates: fixed examples are read in whole epochs."""
    stage, model, rank = case.split("/")
    common = {
        "model": str(shared / "encoder") if model == "encoder" else model,
        "lora_r": int(rank),
        "output_dir": str(folder / case),
        "dtype": "float32",
        "report_to": ["none"],
        "overlong": "truncate",
        "max_prompt_tokens": 64,  # truncation keeps a system turn, which some records have
        "learning_rate": 1e-3,
        "adam_epsilon": ADAM_EPSILON,
        "micro_batch_tokens": 400,
    }
    if stage in ("ppo", "ptx"):
        texts = {"ptx": {"data": "data/demonstrations_heldout.jsonl"}} if stage == "ptx" else {}
        # What follows one number for all processes: the KL coefficient, the critic's own rate.
        followed = {"kl_target": 6.0, "value_learning_rate": 2e-3, "critic_warmup": 1}
        critic = {"critic": "separate"} if rank == "0" else followed
        run_ppo(
            PPOConfig(
                **common,
                **critic,
                **texts,
                prompts="data/prompts_heldout.jsonl",
                validation_prompts="data/prompts_validation.jsonl",
                reward_model=str(shared / "reward" / model / rank / "model"),
                total_updates=updates,
                rollout_batch_size=7,
                num_mini_batches=2,
                num_ppo_epochs=2,
                max_new_tokens=8,
                missing_eos_score=None,
            )
        )
        return
    config, run, data, size, an_epoch = {
        "sft": (SFTConfig, run_sft, "demonstrations_heldout", 6, 4),
        "reward": (RewardConfig, run_reward, "rankings_heldout", 13, 5),
        "dpo": (DPOConfig, run_dpo, "rankings_heldout", 13, 5),
    }[stage]
    # The last batch of an epoch has 2 of 20 demonstrations, or 8 of 60 rankings.
    data, epochs = f"data/{data}.jsonl", math.ceil(updates / an_epoch)
    more = {"demonstrations": "data/demonstrations_heldout.jsonl"} if stage == "reward" else {}
    sizes = {"batch_size": size, "num_train_epochs": epochs, "max_response_tokens": 32}
    run(config(**common, **more, **sizes, train_data=data, validation_data=data))


if __name__ == "__main__":
    for named in sys.argv[4:] or CASES:
        run_case(named, Path(sys.argv[1]), Path(sys.argv[2]), int(sys.argv[3]))
        (Path(sys.argv[1]) / named / ENDED).touch()
