"""PPO from the command line: `accelerate launch align/ppo/train.py --config configs/ppo/x.yaml`."""

from align.core.launch import run_stage
from align.ppo import PPOConfig, run_ppo

if __name__ == "__main__":
    run_stage(PPOConfig, run_ppo)
