"""Distillation from the command line: `accelerate launch align/distill/train.py --config configs/distill/x.yaml`."""

from align.core.launch import run_stage
from align.distill import DistillConfig, run_distill

if __name__ == "__main__":
    run_stage(DistillConfig, run_distill)
