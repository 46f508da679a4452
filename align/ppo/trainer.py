"""PPO for notebooks: policy, rewards and prompts from files or from objects in memory."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from peft import PeftConfig, PeftModel
from torch import nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from align.batches.encoding import Data
from align.batches.mixtures import data_name
from align.core.errors import UserError
from align.models.checkpoint import save_model_into
from align.ppo.config import PPOConfig
from align.ppo.evaluation import save_policy
from align.ppo.extensions.discovery import configured_extensions
from align.ppo.inputs import PPOInputs, sharing_pair
from align.ppo.reward_functions import RewardFunction, WeightedFunction
from align.ppo.scoring_models import RewardModelLike
from align.ppo.setup import prepare
from align.ppo.train import train
from align.reward.checkpoint import LoadedReward
from align.training.model_source import Model, ModelSource

if TYPE_CHECKING:
    from transformers import TrainerCallback

    from align.training.callbacks import TrainerCallbacks

Reward = str | Path | LoadedReward | PreTrainedModel | RewardFunction | WeightedFunction
"""A part of the reward: the folder of a reward model, a loaded one (`align.reward.checkpoint.reward_of_classifier` makes one
of a transformers classifier in memory), a classifier that reads the policy's token ids, or a function."""


class PPOTrainer:
    """PPO of a policy against rewards, on prompts.

        def politeness(prompts, responses):
            return [float("please" in response) for response in responses]

        config = PPOConfig(output_dir="runs/polite", total_updates=20)
        trainer = PPOTrainer("smollm2-135m", [politeness], ["Ask me for the salt."], config)
        folder = trainer.train()

    Args:
        policy: a name or folder, a transformers model, a `PeftModel`, whose active adapter is trained, or a `LoadedModel`.
            The reference is a frozen copy of the policy, or its base if a new LoRA adapter is trained.
        reward: reward models, combined by `reward_ensemble`, and functions; their weighted sum is the score of a response.
        prompts: a file, folder or hub name, or prompts in memory (`align.batches.encoding.Data`).
        config: all other settings. Its `model`, `prompts`, `validation_prompts`, `reward_model` and
            `reward_functions` are ignored.
        validation_prompts: fixed prompts for evaluation and for selecting the best policy.
        tokenizer: tokenizer of a transformers model.
        selection_reward_model: a reward model or function that selects the policy to keep, instead of
            `config.selection.reward_model`.
        reference: a language model for the KL penalty instead of the initial policy. With a `PeftModel`
            as policy, also the name of another of its adapters, or `base` for its base without adapters.
        value_model: a sequence classifier with one label, or a language model with TRL's value head, such as
            `align.trl.AutoModelForSeq2SeqLMWithValueHead` of a T5. It becomes the critic and is trained in place, even
            with a LoRA policy; `config.critic` is ignored.
        peft_config: settings of a new LoRA adapter, instead of `config.lora_r` and related settings.
        optimizers: an optimizer over all trained weights and a scheduler, instead of the learning rate settings. The
            scheduler advances once per update.
        callbacks: transformers callbacks, or an `align.training.callbacks.TrainerCallbacks` that holds them.

    Raises:
        UserError: if the settings or the data are invalid.
    """

    def __init__(
        self,
        policy: Model,
        reward: Sequence[Reward],
        prompts: Data,
        config: PPOConfig,
        validation_prompts: Data = (),
        tokenizer: PreTrainedTokenizerBase | None = None,
        selection_reward_model: Reward | None = None,
        *,
        reference: PreTrainedModel | str | None = None,
        value_model: nn.Module | None = None,
        peft_config: PeftConfig | None = None,
        optimizers: tuple[Optimizer | None, LRScheduler | None] = (None, None),
        callbacks: "Sequence[TrainerCallback | type[TrainerCallback]] | TrainerCallbacks" = (),
    ) -> None:
        require_separate_weights(policy, reference, (*reward, selection_reward_model), value_model)
        models, functions = split_rewards(reward)
        names, objects = reward_settings(models, functions), {}
        if selection_reward_model:
            selection = split_rewards([selection_reward_model])
            (objects["selection"],) = (reward for kind in selection for reward in kind)
            (name,) = (name for kind in reward_settings(*selection).values() for name in kind)
            patience = config.selection.early_stopping_patience if config.selection else 0
            names["selection"] = {"reward_model": name, "early_stopping_patience": patience}
        self.config = replace(config, prompts=data_name(prompts), validation_prompts=data_name(validation_prompts), **names)
        extensions = configured_extensions(self.config, **objects)
        if any(part is not None for part in optimizers):
            from align.ppo.extensions.given_optimizer import GivenOptimizer

            extensions.append(GivenOptimizer(*optimizers))
        inputs = PPOInputs(
            policy=ModelSource(policy, tokenizer, peft_config),
            reward_models=models,
            functions=functions,
            extensions=extensions,
            prompts=prompts,
            validation=validation_prompts,
            reference=reference,
            value_model=value_model,
            callbacks=trainer_callbacks(callbacks, lr_scheduler=optimizers[1]),
        )
        self.setup = prepare(self.config, inputs)
        self.run = self.setup.run
        if self.run.callbacks:
            from align.training.callbacks import unfired_methods

            if unfired := unfired_methods(self.run.callbacks.handler.callbacks):
                events = ", ".join(unfired)
                self.run.print(f"warning: callbacks: events that never fire: {events}; evaluations are in on_log")

    def train(self) -> Path:
        """Run all updates from the last checkpoint on; return the folder of the best policy, or of the last."""
        with self.setup:
            return train(self.config, self.setup)

    def save_model(self, folder: str | Path) -> None:
        """Save the current policy to a folder; after `train`, this is the last policy. Other files in the folder stay."""
        with self.setup.averaged_weights():
            save_policy(self.setup, Path(folder), {}, write=save_model_into)


def trainer_callbacks(
    callbacks: "Sequence[TrainerCallback | type[TrainerCallback]] | TrainerCallbacks",
    lr_scheduler: LRScheduler | None = None,
) -> "TrainerCallbacks | None":
    """Return the callbacks of a run, which receive `lr_scheduler`. Without any, return None and do not import their module.

    Raises:
        UserError: if they are not a list, or one is not supported.
    """
    if isinstance(callbacks, Sequence) and not callbacks:
        return None
    from align.training.callbacks import TrainerCallbacks, require_callbacks

    if isinstance(callbacks, TrainerCallbacks):
        return callbacks
    require_callbacks(callbacks)
    return TrainerCallbacks(callbacks, lr_scheduler=lr_scheduler)


def split_rewards(
    rewards: Sequence[Reward], argument: str = "reward"
) -> tuple[list[RewardModelLike], list[WeightedFunction]]:
    """Split rewards into reward models and weighted functions.

    Args:
        argument: argument name for error messages.

    Raises:
        UserError: if a module is not a classifier.
    """
    models: list[RewardModelLike] = []
    functions: list[WeightedFunction] = []
    for reward in rewards:
        if isinstance(reward, str | Path):
            models.append(str(reward))
        elif isinstance(reward, LoadedReward | PreTrainedModel):
            models.append(reward)
        elif isinstance(reward, WeightedFunction):
            functions.append(reward)
        elif isinstance(reward, nn.Module):
            remedy = "merge its adapter first, by merge_and_unload()"
            remedy = remedy if isinstance(reward, PeftModel) else "give a function that calls it"
            raise UserError(f"{argument}: {type(reward).__name__} is a model, but no transformers classifier: {remedy}")
        elif not callable(reward):
            raise UserError(f"{argument}: {reward!r} is no reward model, nor a function; give one of them")
        else:
            name = getattr(reward, "__name__", type(reward).__name__)
            functions.append(WeightedFunction("function" if name == "<lambda>" else name, 1.0, reward))
    return models, functions


def require_separate_weights(policy: object, reference: object, rewards: Sequence[object], value_model: object) -> None:
    """Raise a UserError if the policy or the value model shares weights with another model in memory."""
    rewards_by_name = [("reward", reward) for reward in rewards]
    models = [("policy", policy), ("reference", reference), *rewards_by_name, ("value_model", value_model)]
    if pair := sharing_pair(models, trained=("policy", "value_model")):
        other = {"policy": "policy's own model", "reward": "reward model"}.get(pair[0], pair[0])
        raise UserError(f"{pair[1]}: it is the {other}, or shares weights with it, which training changes; give a copy")


def reward_settings(models: Sequence[RewardModelLike], functions: Sequence[WeightedFunction]) -> dict[str, Any]:
    """Return the settings that describe a run's rewards."""

    def name(model: RewardModelLike) -> str:
        if isinstance(model, LoadedReward):
            return model.loaded.base
        return model if isinstance(model, str) else model.config.name_or_path or "the classifier in memory"

    names = [function.specification or function.name for function in functions]
    return {"reward_model": list(map(name, models)), "reward_functions": names}
