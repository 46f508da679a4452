"""Rule models: the probability that a response violates a rule, trained on human judgments."""

from align.extras.rules.train import RuleConfig, RuleTrainer, run_rule_model

__all__ = ["RuleConfig", "RuleTrainer", "run_rule_model"]
