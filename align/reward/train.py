"""Reward modeling from the command line: `accelerate launch align/reward/train.py --config configs/reward/x.yaml`."""

from align.core.launch import run_stage
from align.reward import RewardConfig, run_reward

if __name__ == "__main__":
    run_stage(RewardConfig, run_reward)
