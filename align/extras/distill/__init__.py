"""Distillation of a teacher into a smaller student."""

from align.extras.distill.train import DistillConfig, DistillTrainer, run_distill

__all__ = ["DistillConfig", "DistillTrainer", "run_distill"]
