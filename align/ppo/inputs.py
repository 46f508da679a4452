"""The inputs of a PPO run: policy, rewards and prompts by name or in memory; further models and callbacks in memory."""

from collections.abc import Container, Sequence
from dataclasses import dataclass, replace
from itertools import combinations
from typing import TYPE_CHECKING, Any, NamedTuple

from torch import nn
from transformers import PreTrainedModel

from align.batches.encoding import Data
from align.core.errors import UserError
from align.models.backbone import Backbone, classifier_head, has_separate_encoder, is_classifier
from align.models.backbone.user_changes import HEAD_ADVICE, require_plain_head, require_unchanged
from align.models.heads import ScalarHead
from align.models.loading import LoadedModel, read_by_ids_of
from align.models.lora import START_ADAPTER
from align.ppo.extensions.active import Extensions
from align.ppo.reward_functions import WeightedFunction
from align.ppo.scoring_models import RewardModelLike
from align.reward.checkpoint import LoadedReward
from align.tokenization.encoded import EncodedPrompt
from align.training.model_source import ModelSource

if TYPE_CHECKING:
    from align.training.callbacks import TrainerCallbacks

BASE_REFERENCE = "base"
"""Name of the policy's base without adapters, as the reference."""


class CalledCritic(NamedTuple):
    """A critic whose backbone calls a user's module."""

    backbone: Backbone
    head: ScalarHead


@dataclass(frozen=True)
class PPOInputs:
    """The models, rewards, extensions and data of a run, by name or as objects in memory; see `PPOTrainer`."""

    policy: ModelSource
    reward_models: Sequence[RewardModelLike]
    functions: Sequence[WeightedFunction]
    extensions: Extensions
    prompts: Data
    validation: Data = ()
    """Fixed prompts for evaluation; may be empty."""
    reference: PreTrainedModel | str | None = None
    """Default: the initial policy."""
    value_model: nn.Module | CalledCritic | None = None
    """If None, `critic` decides."""
    callbacks: "TrainerCallbacks | None" = None


def sharing_pair(models: Sequence[tuple[str, object]], trained: Container[str]) -> tuple[str, str] | None:
    """Return the names of the first two models that share weights or layers that training changes, or None.

    They may share frozen weights, as with TRL's `create_reference_model`, but not layers, because adapters change these.

    Args:
        models: models with their names. Anything but a model in memory, such as a folder or function, has no weights.
        trained: names of the trained models.
    """
    parts = [(name, _layers_and_weights(model)) for name, model in models]
    for (first, one), (second, other) in combinations(parts, 2):
        shared = one.keys() & other.keys()
        if any((first in trained and one[place]) or (second in trained and other[place]) for place in shared):
            return first, second
    return None


def _layers_and_weights(model: object) -> dict[int, bool]:
    """Return the memory addresses of weights and of the layers that hold them, and whether training can change each."""
    if isinstance(model, LoadedModel):
        model = model.backbone.model
    elif isinstance(model, LoadedReward):
        model = model.model
    if not isinstance(model, nn.Module):
        return {}
    layers = {id(layer): True for layer in model.modules() if any(True for _ in layer.parameters(recurse=False))}
    # A weight that ZeRO-3 has sharded is empty.
    return layers | {weight.data_ptr() or id(weight): weight.requires_grad for weight in model.parameters()}


def reference_and_value_model(
    policy: LoadedModel,
    inputs: PPOInputs,
    prompts: Sequence[EncodedPrompt],
    new_tokens: int,
    gradient_checkpointing: bool,
    has_critic: bool,
) -> tuple[Backbone | None, tuple[Backbone, ScalarHead] | None]:
    """Return the reference and the value model with its head from the inputs, each None if not given.

    Raises:
        UserError: if one of them cannot process all prompts with responses of `new_tokens` tokens, or the value model has
            no head or no trained weights.
    """
    longest_prompt = max(len(prompt.ids) for prompt in prompts)

    def second_model(model: Any, role: str, recomputes: bool = False) -> Backbone:
        backbone = read_by_ids_of(policy, model, role, recomputes)
        backbone.require_fit(longest_prompt, new_tokens, role)
        return backbone

    is_model = not (inputs.reference is None or isinstance(inputs.reference, str))
    reference = second_model(inputs.reference, "reference") if is_model else None
    if inputs.value_model is None:
        return reference, None
    if not has_critic:
        raise UserError("value_model: this estimator of advantages has no critic; leave the model out")
    if isinstance(inputs.value_model, CalledCritic):
        inputs.value_model.backbone.require_fit(longest_prompt, new_tokens, "value_model")
        return reference, inputs.value_model
    # A language model with a value head contains the model whose states are the head's input.
    body = getattr(inputs.value_model, "pretrained_model", inputs.value_model)
    backbone = second_model(body, "value_model", gradient_checkpointing)
    if not any(weight.requires_grad for weight in inputs.value_model.parameters()):
        raise UserError("value_model: all its weights are frozen; call requires_grad_(True) on it, or on a part of it")
    return reference, (backbone, _value_head(inputs.value_model, backbone))


def _value_head(value_model: nn.Module, backbone: Backbone) -> ScalarHead:
    """Return the head of a value model, which shares the weights of its linear layer.

    Raises:
        UserError: if it is neither a classifier with one label nor a language model with a value head.
    """
    summary = getattr(getattr(value_model, "v_head", None), "summary", None)
    if isinstance(summary, nn.Linear) and summary.out_features == 1:
        require_unchanged(value_model, "value_model", HEAD_ADVICE)
        require_unchanged(value_model.v_head, "value_model: its v_head", HEAD_ADVICE)  # type: ignore[arg-type]
        require_plain_head(summary, "value_model: its v_head.summary")
        return ScalarHead.around(summary)
    kind = type(value_model).__name__
    if not is_classifier(backbone.model.config):
        raise UserError(f"value_model: {kind} is neither a sequence classifier with one label nor a model with a value head")
    if has_separate_encoder(backbone.model.config):
        other = "give one of the models with a value head in align.trl"
        raise UserError(f"value_model: {kind} has no linear layer 'score' on its decoder; {other}")
    try:
        return ScalarHead.around(classifier_head(backbone))
    except UserError as error:
        raise UserError(f"value_model: {error}") from error


def with_reference_adapter(policy: LoadedModel, name: PreTrainedModel | str | None) -> LoadedModel:
    """Return the policy with the named adapter of its PEFT model as the reference, or `base` for none.

    Raises:
        UserError: if the policy has no such adapter.
    """
    if not isinstance(name, str):
        return policy
    peft_model = policy.backbone.peft
    others = sorted(
        {*(peft_model.peft_config if peft_model else ()), BASE_REFERENCE} - {policy.adapter or "", START_ADAPTER}
    )
    if peft_model is None or name not in others:
        raise UserError(f"reference: the policy has no adapter '{name}'; give a model or one of {', '.join(others)}")
    if policy.initial_adapter == START_ADAPTER:
        peft_model.delete_adapter(START_ADAPTER)
    return replace(policy, initial_adapter=None if name == BASE_REFERENCE else name)
