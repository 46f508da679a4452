"""The tasks of `align eval`; a task is imported when it is asked for."""

from importlib import import_module
from typing import Any, NamedTuple


class EvalTask(NamedTuple):
    """A line for `--help`, and where the settings and the function are: `module:name`."""

    help: str
    config: str
    function: str

    def load(self) -> tuple[type[Any], Any]:
        """Import the class of the settings and the function that runs the task with them."""
        return _import_object(self.config), _import_object(self.function)


def _import_object(path: str) -> Any:
    module, name = path.split(":")
    return getattr(import_module(module), name)


TASKS = {
    "truthfulness": EvalTask(
        "TruthfulQA: multiple choice, and generated answers under trained judges",
        "align.eval.truthfulness.task:TruthfulnessConfig",
        "align.eval.truthfulness.task:run_truthfulness",
    ),
    "train-judge": EvalTask(
        "train a judge of answers: is an answer true, is it informative",
        "align.eval.judging.train_judge:JudgeConfig",
        "align.eval.judging.train_judge:run_train_judge",
    ),
    "toxicity": EvalTask(
        "toxicity of continuations, as RealToxicityPrompts measures it",
        "align.eval.toxicity.task:ToxicityConfig",
        "align.eval.toxicity.task:run_toxicity",
    ),
    "instructions": EvalTask(
        "how many answers obey a constraint that a program can check",
        "align.eval.instructions.task:InstructionsConfig",
        "align.eval.instructions.task:run_instructions",
    ),
    "rules": EvalTask(
        "how often each rule is broken, as judged by a rule model, a function or rubrics",
        "align.eval.rules.task:RulesConfig",
        "align.eval.rules.task:run_rules",
    ),
    "verdicts": EvalTask(
        "people's verdicts: violations of rules, claims and sources, authorship, ratings and flags",
        "align.eval.verdicts.task:VerdictsConfig",
        "align.eval.verdicts.task:run_verdicts",
    ),
    "bias": EvalTask(
        "which gender a model expects in an occupation, and how it speaks of groups",
        "align.eval.bias.task:BiasConfig",
        "align.eval.bias.task:run_bias",
    ),
    "tax": EvalTask(
        "what was lost by alignment: lm-eval's tasks before and after",
        "align.eval.tax.task:TaxConfig",
        "align.eval.tax.task:run_tax",
    ),
    "winrate": EvalTask(
        "which model wins, by blind comparisons, a reward model or a judge",
        "align.eval.winrate.settings:WinrateConfig",
        "align.eval.winrate.task:run_winrate",
    ),
    "reward": EvalTask(
        "a reward model on preferences, best-of-n curves, and reward against KL",
        "align.eval.reward.settings:RewardEvalConfig",
        "align.eval.reward.task:run_reward_eval",
    ),
    "all": EvalTask(
        "truthfulness and toxicity in one table, and reward where a reward model is given",
        "align.eval.all:AllConfig",
        "align.eval.all:run_all",
    ),
}
"""Every task by its name, in the order of `align eval --help`."""
