"""`align eval reward`: a reward model on preferences and benchmarks, best-of-n curves, reward against KL of PPO's policies.

A second reward model, called gold, shows over-optimization: answers that the first one prefers and the second does not.
"""

from align.core.launch import run_stage
from align.eval.core.evaluated_models import open_accelerator, open_models
from align.eval.core.results import Evaluation, publish
from align.eval.reward.curves import best_of_n, frontier
from align.eval.reward.preferences import evaluate_on_preferences
from align.eval.reward.rewardbench import evaluate_on_benchmark
from align.eval.reward.settings import RewardEvalConfig, open_reward_models


def run_reward_eval(config: RewardEvalConfig) -> list[Evaluation]:
    """Evaluate and write `reward.json`, and `rewardbench.json`, `best-of-n.json` and `frontier.json` where asked for.

    Raises:
        UserError: for a mistake in the settings, the data or a model; what was computed is kept.
    """
    accelerator = open_accelerator(config)
    reward_models = open_reward_models(config)
    evaluations: list[Evaluation] = []
    if config.preferences:
        evaluations += [evaluate_on_preferences(config, model, accelerator) for model in reward_models]
    if config.benchmark:
        evaluations += [evaluate_on_benchmark(config, model, accelerator) for model in reward_models]
    if config.models:
        evaluations += [
            best_of_n(config, evaluated, reward_models, accelerator) for evaluated in open_models(config, accelerator)
        ]
    if config.frontier:
        evaluations += frontier(config, reward_models, accelerator)
    return publish(config, evaluations, accelerator)


if __name__ == "__main__":
    run_stage(RewardEvalConfig, run_reward_eval)
