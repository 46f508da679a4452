"""Distillation: a smaller student learns to predict what its teacher predicts."""

from align.extras.distill.train import DistillConfig, DistillTrainer, run_distill

__all__ = ["DistillConfig", "DistillTrainer", "run_distill"]
