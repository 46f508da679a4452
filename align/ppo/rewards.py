"""Where scores come from: a reward model, any Python callables, or both, each with a weight and logged by itself."""

import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from align.data.records import Conversation
from align.errors import UserError
from align.flops import Shape
from align.functions import import_function
from align.models.heads import ScalarHead
from align.models.loading import Loaded, add_adapter, base_of
from align.ppo.rollout import Rollout
from align.reward.checkpoint import is_reward_model, load_head
from align.reward.scoring import RewardModelScorer
from align.tokenization import first_line

RewardFunction = Callable[[Sequence[Conversation], Sequence[str]], Sequence[float]]
"""Prompts and the texts of their responses, one each, to scores."""


@dataclass(frozen=True)
class Weighted:
    """A reward function with its weight and the name it is logged under."""

    name: str
    weight: float
    function: RewardFunction


def load_functions(specifications: Sequence[str]) -> list[Weighted]:
    """Import `module:function` or `module:function=weight`; modules beside the working directory are found too.

    Raises:
        UserError: if a module, a function or a weight is not what it should be.
    """
    found, form = [], "module:function or module:function=weight"
    for text in specifications:
        path, _, weight = text.partition("=")
        try:
            factor = float(weight or 1.0)
        except ValueError as error:
            raise UserError(f"reward function '{text}': {error}; write {form}") from error
        if not math.isfinite(factor):
            raise UserError(f"reward function '{text}': its weight must be a finite number")
        function = import_function(path, "reward function", form)
        found.append(Weighted(path.partition(":")[2], factor, function))
    return found


def call(reward: Weighted, prompts: Sequence[Conversation], responses: Sequence[str]) -> list[float]:
    """The scores of a reward function, checked.

    Raises:
        UserError: if it gives anything but one finite number for each response.
    """
    given = reward.function(prompts, responses)
    try:
        scores = [float(score) for score in given]
    except (TypeError, ValueError) as error:
        raise UserError(f"reward function '{reward.name}' must give a list of numbers ({first_line(error)})") from error
    if len(scores) != len(responses):
        raise UserError(f"reward function '{reward.name}' gave {len(scores)} scores for {len(responses)} responses")
    for score, response in zip(scores, responses, strict=True):
        if not math.isfinite(score):
            raise UserError(f"reward function '{reward.name}' gave {score} for the response {response[:60]!r}")
    return scores


def shares_base(folder: str, policy: Loaded) -> bool:
    """Whether a reward model is an adapter on the base that the policy's adapter is on: then one base serves both."""
    if policy.adapter is None or not is_reward_model(folder):
        return False
    base, is_adapter = base_of(folder)
    return is_adapter and Path(base).resolve() == Path(policy.base).resolve()


class MountedReward(NamedTuple):
    """A reward model that lives on the policy's base, as the adapter `reward`."""

    head: ScalarHead
    mean: float
    """Of its rewards over demonstrations."""


def mount_reward(folder: str, policy: Loaded) -> MountedReward:
    """Load a reward adapter onto the policy's base."""
    head, mean = load_head(folder, policy.backbone.hidden_size)
    add_adapter(policy.backbone, folder, "reward")
    return MountedReward(head.requires_grad_(False), mean)


class Rewards:
    """All rewards of a run: each is logged by its name, their weighted sum is the score."""

    def __init__(self, model: RewardModelScorer | None, functions: Sequence[Weighted]) -> None:
        self.model, self.functions = model, list(functions)

    @property
    def shape(self) -> Shape | None:
        """What the cost of the reward model depends on; None where functions score alone."""
        return self.model.shape if self.model else None

    def __call__(self, rollout: Rollout) -> tuple[Tensor, dict[str, Tensor]]:
        """Scores [B] and the parts [B] they are the sum of, by name; float32 on the CPU."""
        parts: dict[str, Tensor] = {}
        if self.model is not None:
            parts["model"] = torch.tensor(self.model(rollout.answers))
        conversations = [prompt.conversation for prompt in rollout.prompts]
        for reward in self.functions:
            numbered = (f"{reward.name}_{number}" for number in itertools.count(2))
            name = next(name for name in itertools.chain([reward.name], numbered) if name not in parts)  # none is replaced
            parts[name] = reward.weight * torch.tensor(call(reward, conversations, rollout.texts))
        return torch.stack(list(parts.values())).sum(0), parts
