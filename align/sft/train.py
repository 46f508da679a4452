"""Supervised fine-tuning from the command line: `accelerate launch align/sft/train.py --config configs/sft/x.yaml`."""

from align.core.launch import run_stage
from align.sft import SFTConfig, run_sft

if __name__ == "__main__":
    run_stage(SFTConfig, run_sft)
