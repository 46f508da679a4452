"""Reward functions of the user: found by their names, called with a timeout, and checked."""

import copy
import math
import threading
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, cast

from align.core.errors import UserError, first_line
from align.core.plugins import checked_scores, import_function
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


def call_reward_function(
    reward: WeightedFunction, prompts: Sequence[Conversation], responses: Sequence[str], timeout: float = 0.0
) -> list[float]:
    """Call a reward function on copies of its inputs, and check its scores.

    Args:
        timeout: seconds that it may take; 0: no limit.

    Raises:
        UserError: if it raises, takes longer, or returns anything but one finite number for each response.
    """
    return checked_scores(
        _run_function(reward, prompts, responses, timeout),
        len(responses),
        f"reward function '{reward.name}'",
        items="responses",
        describe=lambda index: f"the response {responses[index][:60]!r}",
    )


def _run_function(
    reward: WeightedFunction, prompts: Sequence[Conversation], responses: Sequence[str], timeout: float
) -> Sequence[float]:
    """Call a reward function, with a timeout in a separate thread."""
    outcome: list[Any] = []
    given = copy.deepcopy(list(prompts)), list(responses)

    def run() -> None:
        try:
            outcome[:] = [True, reward.function(*given)]
        except (Exception, SystemExit) as error:
            outcome[:] = [False, error]

    if timeout:
        thread = threading.Thread(target=run, daemon=True)  # a function that hangs must not keep the process alive
        thread.start()
        thread.join(timeout)
    else:
        run()
    if not outcome:
        raise UserError(
            f"reward function '{reward.name}' returned nothing in {timeout:g} s for {len(responses)} responses; "
            "raise reward_timeout, or fix the function"
        )
    succeeded, result = outcome
    if succeeded:
        return cast(Sequence[float], result)
    if isinstance(result, UserError):
        raise result
    frame = traceback.extract_tb(result.__traceback__)[-1]
    raise UserError(
        f"reward function '{reward.name}' failed: {type(result).__name__}: {first_line(result)} "
        f"({frame.filename}:{frame.lineno})"
    ) from result
