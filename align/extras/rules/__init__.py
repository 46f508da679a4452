"""Rule models: how likely a response violates a rule, from judgments that people gave."""

from align.extras.rules.train import RuleConfig, RuleTrainer, run_rule_model

__all__ = ["RuleConfig", "RuleTrainer", "run_rule_model"]
