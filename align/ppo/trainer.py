"""PPO for notebooks: policy, rewards and prompts from files or from objects in memory."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from torch import nn
from transformers import PreTrainedTokenizerBase

from align.batches.encoding import Data
from align.batches.mixtures import data_name
from align.core.errors import UserError
from align.ppo.config import PPOConfig
from align.ppo.extensions import configured_extensions
from align.ppo.reward_functions import RewardFunction, WeightedFunction
from align.ppo.train import prepare, train
from align.reward.checkpoint import LoadedReward
from align.training.start import Model

Reward = str | Path | LoadedReward | RewardFunction | WeightedFunction
"""A part of the reward: the folder of a reward model, a loaded one (`align.reward.checkpoint.reward_of_classifier` makes one
of a transformers classifier in memory), or a function."""


class PPOTrainer:
    """PPO of a policy against rewards, on prompts.

        def politeness(prompts, responses):
            return [float("please" in response) for response in responses]

        config = PPOConfig(output_dir="runs/polite", updates=20)
        trainer = PPOTrainer("smollm2-135m", [politeness], ["Ask me for the salt."], config)
        folder = trainer.train()

    Args:
        policy: a name or folder, a transformers model, or a `LoadedModel`. The reference is a frozen copy of it, or its
            base if it is trained through LoRA.
        reward: reward models, combined by `reward_ensemble`, and functions; their weighted sum is the score of a response.
        prompts: a file, folder or hub name, or prompts in memory (`align.batches.encoding.Data`).
        config: all other settings. Its `model`, `prompts`, `validation_prompts`, `reward_model` and
            `reward_functions` are not read.
        validation_prompts: fixed prompts that the policy is evaluated on, and by which the best one is kept.
        tokenizer: of a transformers model.
        judge: a reward model or function that selects the policy to keep, in place of `config.selection.reward_model`.

    Raises:
        UserError: for a mistake in the settings or the data.
    """

    def __init__(
        self,
        policy: Model,
        reward: Sequence[Reward],
        prompts: Data,
        config: PPOConfig,
        validation_prompts: Data = (),
        tokenizer: PreTrainedTokenizerBase | None = None,
        judge: Reward | None = None,
    ) -> None:
        models, functions = split_rewards(reward)
        names, objects = reward_settings(models, functions), {}
        if judge:
            (objects["selection"],) = (each for kind in split_rewards([judge]) for each in kind)
            patience = config.selection.patience if config.selection else 0
            names["selection"] = {"reward_model": judge_name(judge), "patience": patience}
        self.config = replace(config, prompts=data_name(prompts), validation_prompts=data_name(validation_prompts), **names)
        extensions = configured_extensions(vars(self.config), **objects)
        data = (prompts, validation_prompts)
        self.prepared = prepare(self.config, policy, models, functions, *data, extensions, tokenizer)
        self.run = self.prepared.run

    def train(self) -> Path:
        """Run all updates from the last checkpoint on; return the folder of the best policy."""
        folder = train(self.config, self.prepared)
        self.prepared.close()
        return folder


def split_rewards(rewards: Sequence[Reward]) -> tuple[list[str | LoadedReward], list[WeightedFunction]]:
    """The reward models, and the functions with their weights. Raises: UserError for a model without a tokenizer."""
    for reward in rewards:
        if isinstance(reward, nn.Module):
            raise UserError(
                f"reward: {type(reward).__name__} is a model, whose tokenizer is not known: give its folder, "
                "align.reward.checkpoint.reward_of_classifier(model, tokenizer), or a function that calls it"
            )
    models = [
        str(reward) if isinstance(reward, Path) else reward
        for reward in rewards
        if isinstance(reward, str | Path | LoadedReward)
    ]
    functions = [
        reward if isinstance(reward, WeightedFunction) else WeightedFunction(function_name(reward), 1.0, reward)
        for reward in rewards
        if not isinstance(reward, str | Path | LoadedReward)
    ]
    return models, functions


def reward_settings(models: Sequence[str | LoadedReward], functions: Sequence[WeightedFunction]) -> dict[str, Any]:
    """The settings that describe a run's rewards."""
    names = [model if isinstance(model, str) else model.loaded.base for model in models]
    return {
        "reward_model": names,
        "reward_functions": [function.specification or function.name for function in functions],
    }


def judge_name(judge: Reward) -> str:
    """The judge's name in a run's settings."""
    if isinstance(judge, (str, Path, LoadedReward)):
        return judge.loaded.base if isinstance(judge, LoadedReward) else str(judge)
    return function_name(judge)


def function_name(function: RewardFunction | WeightedFunction) -> str:
    """The name that a function's reward is logged under."""
    name = getattr(function, "__name__", type(function).__name__)
    return "function" if name == "<lambda>" else name
