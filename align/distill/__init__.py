"""Distillation: a smaller student learns to predict what its teacher predicts."""

from align.distill.config import DistillConfig
from align.distill.train import DistillTrainer, run_distill

__all__ = ["DistillConfig", "DistillTrainer", "run_distill"]
