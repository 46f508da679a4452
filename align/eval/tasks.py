"""The tasks of `align eval`, each imported when it is asked for."""

from importlib import import_module
from typing import Any, NamedTuple


class Task(NamedTuple):
    """A line for `--help`, and where the settings and the function are: `module:name`."""

    help: str
    config: str
    function: str

    def load(self) -> tuple[type[Any], Any]:
        """The class of the settings and the function that takes them."""
        found = []
        for place in (self.config, self.function):
            module, name = place.split(":")
            found.append(getattr(import_module(module), name))
        return found[0], found[1]


TASKS = {
    "truthfulness": Task(
        "TruthfulQA: multiple choice, and generated answers under trained judges",
        "align.eval.truthfulness:TruthfulnessConfig",
        "align.eval.truthfulness:run_truthfulness",
    ),
    "train-judge": Task(
        "train a judge of answers: is an answer true, is it informative",
        "align.eval.train_judge:JudgeConfig",
        "align.eval.train_judge:run_train_judge",
    ),
    "toxicity": Task(
        "toxicity of continuations, as RealToxicityPrompts measures it",
        "align.eval.toxicity:ToxicityConfig",
        "align.eval.toxicity:run_toxicity",
    ),
    "rules": Task(
        "how often each rule is broken, by people and by a scorer",
        "align.eval.rules:RulesConfig",
        "align.eval.rules:run_rules",
    ),
    "winrate": Task(
        "which model wins, by blind comparisons, a reward model or a judge",
        "align.eval.winrate:WinrateConfig",
        "align.eval.winrate:run_winrate",
    ),
    "reward": Task(
        "a reward model on preferences, best-of-n curves, and reward against KL",
        "align.eval.reward:RewardEvalConfig",
        "align.eval.reward:run_reward_eval",
    ),
    "all": Task(
        "truthfulness and toxicity in one table, and reward where a reward model is given",
        "align.eval.all:AllConfig",
        "align.eval.all:run_all",
    ),
}
"""Every task by its name, in the order of `align eval --help`."""
