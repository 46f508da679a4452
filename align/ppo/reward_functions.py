"""The user's reward functions: imported by name, called and checked."""

import asyncio
import copy
import functools
import inspect
import math
from collections.abc import Awaitable, Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

from align.core.errors import UserError
from align.core.plugins import call_own_code, checked_scores, import_function
from align.data.records import Conversation

RewardFunction = Callable[..., Sequence[float | None] | Awaitable[Sequence[float | None]]]
"""Maps prompts and the text of one response to each to scores. Further parameters receive columns of the prompts' rows."""


@dataclass(frozen=True)
class WeightedFunction:
    """A reward function with its weight and its name in logs."""

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
    reward: WeightedFunction,
    prompts: Sequence[Conversation],
    responses: Sequence[str],
    columns: Sequence[Mapping[str, Any]] = (),
) -> list[float]:
    """Call a reward function on copies of its inputs, and check its scores; a score of None counts as 0.

    Args:
        columns: further columns of each prompt's row. The function receives the columns for which it has parameters.

    Raises:
        UserError: if it raises, or does not return one finite number or None per response.
    """
    name = f"reward function '{reward.name}'"
    further = {column: [row.get(column) for row in columns] for column in _columns_for(reward.function, columns)}
    function = functools.partial(reward.function, **copy.deepcopy(further))
    prompts_copy, responses_copy = copy.deepcopy(list(prompts)), list(responses)
    if "completions" in _parameters(reward.function):  # the form of TRL's GRPO, which names all arguments
        named = {"prompts": prompts_copy} if _takes(reward.function, "prompts") else {}
        scores = call_own_code(name, functools.partial(function, completions=responses_copy, **named))
    else:
        scores = call_own_code(name, function, prompts_copy, responses_copy)
    if inspect.isawaitable(scores):
        scores = call_own_code(name, functools.wraps(reward.function)(_wait_for), scores)
    if isinstance(scores, list | tuple):
        scores = [0.0 if score is None else score for score in scores]
    return checked_scores(
        scores,
        len(responses),
        name,
        items="responses",
        describe=lambda index: f"the response {responses[index][:60]!r}",
    )


def _parameters(function: RewardFunction) -> Mapping[str, inspect.Parameter]:
    """Return the parameters of a function by name; empty if they are unknown."""
    try:
        return inspect.signature(function).parameters
    except (TypeError, ValueError):  # of a compiled module
        return {}


def _takes(function: RewardFunction, name: str) -> bool:
    """Return whether a function can be called with an argument of this name."""
    parameters = _parameters(function)
    return name in parameters or any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values())


def _columns_for(function: RewardFunction, columns: Sequence[Mapping[str, Any]]) -> list[str]:
    """Return the names of the columns for which a function has parameters, besides prompts and responses."""
    parameters = _parameters(function)
    first = {"prompts", "completions"} if "completions" in parameters else {*list(parameters)[:2]}
    names = dict.fromkeys(name for row in columns for name in row)
    return [name for name in names if name not in first and _takes(function, name)]


def _wait_for(awaitable: Awaitable[Any]) -> Any:
    """Run an async function to completion, in a thread because a notebook already runs an event loop."""

    async def waiting() -> Any:
        return await awaitable

    with ThreadPoolExecutor(1) as thread:
        return thread.submit(asyncio.run, waiting()).result()
