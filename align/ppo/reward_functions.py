"""Reward functions of the user: found by their names, called and checked."""

import copy
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from align.core.errors import UserError
from align.core.plugins import call_own_code, checked_scores, import_function
from align.data.records import Conversation

RewardFunction = Callable[[Sequence[Conversation], Sequence[str]], Sequence[float]]
"""Prompts and the texts of their responses, one each, to scores."""


@dataclass(frozen=True)
class WeightedFunction:
    """A reward function with its weight and the name it is logged under."""

    name: str
    weight: float
    function: RewardFunction
    specification: str = ""
    """As given in the settings; empty for an object in memory."""


def load_functions(specifications: Sequence[str]) -> list[WeightedFunction]:
    """Import `module:function` or `module:function=weight`; modules in the working directory are found too.

    Raises:
        UserError: if a module or function cannot be imported, or a weight is not a finite number.
    """
    functions: list[WeightedFunction] = []
    form = "module:function or module:function=weight"
    for text in specifications:
        path, _, weight = text.partition("=")
        try:
            factor = float(weight or 1.0)
        except ValueError as error:
            raise UserError(f"reward function '{text}': {error}; write {form}") from error
        if not math.isfinite(factor):
            raise UserError(f"reward function '{text}': its weight must be a finite number")
        function = import_function(path, "reward function", form)
        functions.append(WeightedFunction(path.partition(":")[2], factor, function, text))
    return functions


def call_reward_function(reward: WeightedFunction, prompts: Sequence[Conversation], responses: Sequence[str]) -> list[float]:
    """Call a reward function on copies of its inputs, and check its scores.

    Raises:
        UserError: if it raises, or returns anything but one finite number for each response.
    """
    name = f"reward function '{reward.name}'"
    return checked_scores(
        call_own_code(name, reward.function, copy.deepcopy(list(prompts)), list(responses)),
        len(responses),
        name,
        items="responses",
        describe=lambda index: f"the response {responses[index][:60]!r}",
    )
