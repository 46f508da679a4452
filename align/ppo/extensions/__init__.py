"""Optional parts of PPO, one file each. Subclass `Extension` to write another."""

from align.ppo.extensions.extension import Extension, OptimizerStep, PolicyEvaluation, TrainingContext
from align.ppo.records import Experience, RoleOutputs, Rollout, TrainingSignal

__all__ = [
    "Experience",
    "Extension",
    "OptimizerStep",
    "PolicyEvaluation",
    "RoleOutputs",
    "Rollout",
    "TrainingContext",
    "TrainingSignal",
]
