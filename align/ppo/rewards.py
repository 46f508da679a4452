"""Where scores come from: a reward model, any Python callables, or both, each with a weight and logged by itself."""

import importlib
import math
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from align.data.records import Conversation
from align.distributed import place_frozen
from align.errors import UserError
from align.models.heads import ScalarHead
from align.models.loading import Loaded, add_adapter, base_of
from align.ppo.rollout import Rollout
from align.reward.checkpoint import is_reward_model, load_head, load_reward_model
from align.run import Run
from align.tensor_ops import Padded
from align.tokenization import Tokenization, first_line
from align.training import over_rows

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
    found = []
    if str(Path.cwd()) not in sys.path:
        sys.path.append(str(Path.cwd()))
    for text in specifications:
        path, _, weight = text.partition("=")
        module, _, name = path.partition(":")
        try:
            function = getattr(importlib.import_module(module), name)
            found.append(Weighted(name, float(weight or 1.0), function))
        except (ImportError, AttributeError, ValueError) as error:
            raise UserError(
                f"reward function '{text}': {first_line(error)}; write module:function or module:function=weight"
            ) from error
    return found


def call(reward: Weighted, prompts: Sequence[Conversation], responses: Sequence[str]) -> list[float]:
    """The scores of a reward function, checked.

    Raises:
        UserError: if it gives another number of scores, or one that is not finite.
    """
    scores = [float(score) for score in reward.function(prompts, responses)]
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
    return is_adapter and base == policy.base


def mount_reward(folder: str, policy: Loaded) -> tuple[ScalarHead, float]:
    """Load a reward adapter onto the policy's base; gives its head and its mean."""
    head, mean = load_head(folder, policy.backbone.hidden_size)
    add_adapter(policy.backbone, folder, "reward")
    return head.requires_grad_(False), mean


class RewardModelScorer:
    """A frozen reward model that scores rollouts.

    Args:
        module: takes prompts and responses as `Padded` and gives rewards [B].
        tokenization: the reward model's own, where it is not the policy's: texts are then tokenized again.
        mean: subtracted from every reward.
        fits: whether the model can read a prompt and a response of given lengths.
    """

    def __init__(
        self,
        run: Run,
        module: Callable[[Padded, Padded], Tensor],
        mean: float,
        fits: Callable[[int, int], bool],
        tokenization: Tokenization | None = None,
    ) -> None:
        self.run, self.module, self.mean, self.fits, self.tokenization = run, module, mean, fits, tokenization

    @classmethod
    def load(cls, run: Run, folder: str, dtype: str, policy: Tokenization) -> "RewardModelScorer":
        """Load a reward model of its own.

        Raises:
            UserError: if there is none in the folder.
        """
        found = load_reward_model(folder, dtype)
        theirs = found.loaded.tokenization
        same = theirs.tokenizer.get_vocab() == policy.tokenizer.get_vocab()
        same = same and theirs.tokenizer.chat_template == policy.tokenizer.chat_template
        if not same:
            run.say(f"{folder}: tokenizer or chat template differ from the policy's; texts are tokenized again for it")
        module = place_frozen(found.model, run.accelerator)
        return cls(run, module, found.mean, found.loaded.backbone.fits, None if same else theirs)

    @torch.no_grad()
    def __call__(self, rollout: Rollout) -> list[float]:
        """Rewards of a rollout's responses, less the mean over demonstrations; the same on every process."""
        rows = [
            (prompt.ids, ids)
            if self.tokenization is None
            else (self.tokenization.prompt_ids(prompt.conversation), self.tokenization.response_ids(text))
            for prompt, ids, text in zip(rollout.prompts, rollout.responses, rollout.texts, strict=True)
        ]
        for prompt, response in rows:
            if not self.fits(len(prompt), len(response)):
                raise UserError(
                    f"the reward model cannot read {len(prompt)} prompt and {len(response)} response tokens; "
                    "lower max_prompt_tokens or max_new_tokens"
                )
        device = self.run.accelerator.device

        def work(batch: list[int]) -> list[float]:
            prompt = Padded.from_lists([rows[row][0] for row in batch]).to(device)
            response = Padded.from_lists([rows[row][1] for row in batch]).to(device)
            return (self.module(prompt, response) - self.mean).tolist()

        costs = [len(prompt) + len(response) for prompt, response in rows]
        return over_rows(costs, self.run.config.micro_batch_tokens, self.run.accelerator, work)


class Rewards:
    """All rewards of a run: each is logged by its name, their weighted sum is the score."""

    def __init__(self, model: RewardModelScorer | None, functions: Sequence[Weighted]) -> None:
        self.model, self.functions = model, list(functions)

    def __call__(self, rollout: Rollout) -> tuple[Tensor, dict[str, Tensor]]:
        """Scores [B] and the parts [B] they are the sum of, by name; float32 on the CPU."""
        parts: dict[str, Tensor] = {}
        if self.model is not None:
            parts["model"] = torch.tensor(self.model(rollout))
        conversations = [prompt.conversation for prompt in rollout.prompts]
        for reward in self.functions:
            parts[reward.name] = reward.weight * torch.tensor(call(reward, conversations, rollout.texts))
        return torch.stack(list(parts.values())).sum(0), parts
