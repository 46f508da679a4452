"""DPO from the command line: `accelerate launch align/dpo/train.py --config configs/dpo/x.yaml`."""

from align.core.launch import run_stage
from align.dpo import DPOConfig, run_dpo

if __name__ == "__main__":
    run_stage(DPOConfig, run_dpo)
