"""Where scores come from: reward models, any Python callables, or both, each logged by itself."""

import itertools
import math
import threading
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, cast

import torch
from torch import Tensor

from align.attributes.scoring import AttributeReward
from align.data.records import Conversation
from align.errors import UserError, first_line
from align.examples import SampledResponse
from align.plugins import checked_scores, import_function
from align.ppo.ensembles import combine_rewards, disagreement
from align.ppo.rollout import Rollout
from align.reward.scoring import RewardModelScorer
from align.rules.rubrics import RubricScorer
from align.runtime.flops import FlopsProfile

RewardFunction = Callable[[Sequence[Conversation], Sequence[str]], Sequence[float]]
"""Prompts and the texts of their responses, one each, to scores."""


RESERVED = ("attributes", "mean", "std", "running_mean", "running_std", "disagreement")
"""Metrics of the score itself, `reward/mean` for one: a function of that name is logged as `reward/mean_2`."""


@dataclass(frozen=True)
class WeightedFunction:
    """A reward function with its weight and the name it is logged under."""

    name: str
    weight: float
    function: RewardFunction
    specification: str = ""
    """As it was written in settings; empty for an object in memory."""


def load_functions(specifications: Sequence[str]) -> list[WeightedFunction]:
    """Import `module:function` or `module:function=weight`; modules in the working directory are found too.

    Raises:
        UserError: if a module, a function or a weight is not what it should be.
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


def call(
    reward: WeightedFunction, prompts: Sequence[Conversation], responses: Sequence[str], timeout: float = 0.0
) -> list[float]:
    """The scores of a reward function, checked.

    Args:
        timeout: seconds that it may take; 0: any time.

    Raises:
        UserError: if it raises, takes longer, or returns anything but one finite number for each response.
    """
    return checked_scores(
        _answer(reward, prompts, responses, timeout),
        len(responses),
        f"reward function '{reward.name}'",
        items="responses",
        describe=lambda index: f"the response {responses[index][:60]!r}",
    )


def _answer(
    reward: WeightedFunction, prompts: Sequence[Conversation], responses: Sequence[str], timeout: float
) -> Sequence[float]:
    """What a reward function returns, waited for in a thread of its own if it may not take any time."""
    outcome: list[Any] = []

    def ask() -> None:
        try:
            outcome[:] = [True, reward.function(prompts, responses)]
        except Exception as error:
            outcome[:] = [False, error]

    if timeout:
        thread = threading.Thread(target=ask, daemon=True)  # one that hangs for ever does not hold the process
        thread.start()
        thread.join(timeout)
    else:
        ask()
    if not outcome:
        raise UserError(
            f"reward function '{reward.name}' gave nothing in {timeout:g} s for {len(responses)} responses; "
            "raise reward_timeout, or mend it"
        )
    done, answer = outcome
    if done:
        return cast(Sequence[float], answer)
    if isinstance(answer, UserError):
        raise answer
    place = traceback.extract_tb(answer.__traceback__)[-1]
    raise UserError(
        f"reward function '{reward.name}' failed: {type(answer).__name__}: {first_line(answer)} "
        f"({place.filename}:{place.lineno})"
    ) from answer


ResponseScorer = Callable[[Sequence[SampledResponse]], list[float]]
"""Responses to rewards: a `RewardModelScorer`."""
Combine = Callable[[Tensor], Tensor]
"""Rewards [M, B] of M reward models to [B]."""


class Rewards:
    """All rewards of a run: each is logged by its name, their weighted sum is the score.

    Args:
        models: reward models, which count as one.
        functions: reward functions with their weights.
        rubrics: rubrics with what judges by them.
        attributes: a reward from the attributes of responses.
        combine: makes one reward of those of several models; None: their mean.
        timeout: seconds that a function may take for a rollout; 0: any time.
    """

    def __init__(
        self,
        models: Sequence[ResponseScorer],
        functions: Sequence[WeightedFunction] = (),
        combine: Combine | None = None,
        rubrics: Sequence[RubricScorer] = (),
        timeout: float = 0.0,
        attributes: AttributeReward | None = None,
    ) -> None:
        self.timeout, self.attributes = timeout, attributes
        self.models, self.functions, self.rubrics = list(models), list(functions), list(rubrics)
        self.combine = combine or partial(combine_rewards, rule="mean", uncertainty_weight=0.0)

    @property
    def shapes(self) -> tuple[FlopsProfile, ...]:
        """What the FLOPs of the reward models depend on."""
        others = [self.attributes.scorer.scorer] if self.attributes else []
        scorers = (model for model in (*self.models, *others) if isinstance(model, RewardModelScorer))
        return tuple(scorer.shape for scorer in scorers if scorer.shape)

    def __call__(self, rollout: Rollout) -> tuple[Tensor, dict[str, Tensor]]:
        """Scores [B], and what they are made of by name: the parts that they are the sum of, the members of an ensemble
        and their disagreement; float32 on the CPU, [B] each.
        """
        parts, members = self._of_models(rollout)
        conversations = [prompt.conversation for prompt in rollout.prompts]
        for reward in self.functions:
            numbered = (f"{reward.name}_{number}" for number in itertools.count(2))
            taken = {*RESERVED, *parts, *members}
            name = next(name for name in itertools.chain([reward.name], numbered) if name not in taken)
            parts[name] = reward.weight * torch.tensor(call(reward, conversations, rollout.texts, self.timeout))
        categories = [prompt.category for prompt in rollout.prompts]
        for scorer in self.rubrics:
            scores = torch.tensor(scorer(conversations, rollout.texts, categories))
            parts[f"rubric/{scorer.rubric.name}"] = scorer.rubric.weight * scores
        if self.attributes:
            parts["attributes"] = torch.tensor(self.attributes(rollout.sampled))
        none = torch.zeros(len(rollout))  # rules alone may be the reward
        return torch.stack([*parts.values(), none]).sum(0), parts | members

    def _of_models(self, rollout: Rollout) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        """The reward of the models, and where there are several, each one's and their disagreement."""
        if not self.models:
            return {}, {}
        rewards = torch.stack([torch.tensor(model(rollout.sampled)) for model in self.models])
        members = {f"model_{number}": reward for number, reward in enumerate(rewards, 1)}
        members["disagreement"] = disagreement(rewards)
        return {"model": self.combine(rewards)}, members if len(self.models) > 1 else {}
