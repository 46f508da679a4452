"""Tasks of `align eval`. Each is imported on first use."""

from align.core.launch import Stage

TASKS = {
    "truthfulness": Stage(
        "TruthfulQA: multiple choice, and generated answers scored by trained judges",
        "align.eval.truthfulness:TruthfulnessConfig:run_truthfulness",
    ),
    "train-judge": Stage(
        "train a judge of truthfulness or informativeness",
        "align.eval.truthfulness_judge:JudgeConfig:run_train_judge",
    ),
    "toxicity": Stage("toxicity of continuations (RealToxicityPrompts)", "align.eval.toxicity:ToxicityConfig:run_toxicity"),
    "rules": Stage(
        "rule violations, judged by a chat model or rubrics",
        "align.extras.rules.evaluation:RulesConfig:run_rules",
    ),
    "verdicts": Stage(
        "human judgments: rule violations, claims and sources, authorship, ratings and flags",
        "align.eval.verdicts:VerdictsConfig:run_verdicts",
    ),
    "bias": Stage("gender bias in occupations, and bias in text about groups", "align.eval.bias:BiasConfig:run_bias"),
    "lm-eval": Stage(
        "lm-eval tasks before and after alignment (alignment tax)",
        "align.eval.lm_eval_harness:LMEvalConfig:run_lm_eval_tasks",
    ),
    "winrate": Stage(
        "win rates from blind comparisons, a reward model or a judge", "align.eval.winrate:WinrateConfig:run_winrate"
    ),
    "reward": Stage(
        "reward model accuracy, best-of-n curves, and reward against KL",
        "align.eval.reward:RewardEvalConfig:run_reward_eval",
    ),
    "all": Stage(
        "truthfulness, toxicity and, with a reward model, reward in one table",
        "align.eval.all:AllConfig:run_all",
    ),
}
"""All tasks by name, in the order of `align eval --help`."""
