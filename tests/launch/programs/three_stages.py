"""All three stages and DPO, two updates each, in the processes that a launcher started; see test_launch.py.

Usage: three_stages.py MODEL FOLDER
"""

import sys
from pathlib import Path

from align.dpo import DPOConfig, run_dpo
from align.ppo import PPOConfig, run_ppo
from align.reward import RewardConfig, run_reward
from align.sft import SFTConfig, run_sft

model, folder = sys.argv[1], Path(sys.argv[2])
common = {"dtype": "float32", "log_to": ["none"], "overlong": "truncate", "max_prompt_tokens": 64, "learning_rate": 1e-3}
sft = run_sft(
    SFTConfig(
        **common,
        model=model,
        output_dir=str(folder / "sft"),
        train_data="data/demonstrations_heldout.jsonl",
        validation_data="data/demonstrations_heldout.jsonl",
        batch_size=10 if model == "tiny-llama" else 12,
        max_response_tokens=32,
    )
)
reward = run_reward(
    RewardConfig(
        **common,
        model=str(sft),
        output_dir=str(folder / "reward"),
        train_data="data/rankings_heldout.jsonl",
        validation_data="data/rankings_heldout.jsonl",
        demonstrations="data/demonstrations_heldout.jsonl",
        batch_size=30,
        max_response_tokens=32,
    )
)
run_dpo(
    DPOConfig(
        **common,
        model=str(sft),
        output_dir=str(folder / "dpo"),
        train_data="data/rankings_heldout.jsonl",
        validation_data="data/rankings_heldout.jsonl",
        batch_size=30,
        max_response_tokens=32,
    )
)
ppo = {
    **common,
    "model": str(sft),
    "reward_model": str(reward),
    "output_dir": str(folder / "ppo"),
    "validation_prompts": "data/prompts_validation.jsonl",
    "updates": 2,
    "rollout_size": 6,
    "minibatches": 2,
    "epochs": 2,
    "max_new_tokens": 8,
    "missing_eos": "keep",
    "save_every": 1,
    "kl_target": 6.0,
    "value_learning_rate": 2e-3,
    "critic_warmup": 1,
    "normalize_scores": "scale",
}
run_ppo(PPOConfig(**ppo))
