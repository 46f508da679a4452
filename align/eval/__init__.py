"""The tasks of `align eval`; a task is imported when it is asked for."""

from align.core.launch import Stage

TASKS = {
    "truthfulness": Stage(
        "TruthfulQA: multiple choice, and generated answers under trained judges",
        "align.eval.truthfulness:TruthfulnessConfig:run_truthfulness",
    ),
    "train-judge": Stage(
        "train a judge of answers: is an answer true, is it informative",
        "align.eval.truthfulness_judge:JudgeConfig:run_train_judge",
    ),
    "toxicity": Stage(
        "toxicity of continuations, as RealToxicityPrompts measures it", "align.eval.toxicity:ToxicityConfig:run_toxicity"
    ),
    "rules": Stage(
        "how often each rule is broken, as judged by a chat model or rubrics",
        "align.extras.rules.evaluation:RulesConfig:run_rules",
    ),
    "verdicts": Stage(
        "people's verdicts: violations of rules, claims and sources, authorship, ratings and flags",
        "align.eval.verdicts:VerdictsConfig:run_verdicts",
    ),
    "bias": Stage(
        "which gender a model expects in an occupation, and how it speaks of groups", "align.eval.bias:BiasConfig:run_bias"
    ),
    "lm-eval": Stage(
        "tasks of lm-eval before and after alignment: the alignment tax",
        "align.eval.lm_eval_harness:LMEvalConfig:run_lm_eval_tasks",
    ),
    "winrate": Stage(
        "which model wins, by blind comparisons, a reward model or a judge", "align.eval.winrate:WinrateConfig:run_winrate"
    ),
    "reward": Stage(
        "a reward model on preferences, best-of-n curves, and reward against KL",
        "align.eval.reward:RewardEvalConfig:run_reward_eval",
    ),
    "all": Stage(
        "truthfulness and toxicity in one table, and reward where a reward model is given",
        "align.eval.all:AllConfig:run_all",
    ),
}
"""Every task by its name, in the order of `align eval --help`."""
