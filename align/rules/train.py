"""Rule models from the command line: `accelerate launch align/rules/train.py --config configs/rule-model/x.yaml`."""

from align.core.launch import run_stage
from align.rules import RuleConfig, run_rule_model

if __name__ == "__main__":
    run_stage(RuleConfig, run_rule_model)
