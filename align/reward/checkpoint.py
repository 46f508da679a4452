"""The reward model on disk: weights that transformers, PEFT and TRL load as a classifier with one label, and its mean.

`reward.json` holds what those classes cannot store: the mean reward over demonstrations, which is subtracted, and the
origin of the model. `reward_head.safetensors` holds the head for every kind of backbone. Classifiers of other libraries
can be loaded too.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import torch
from peft import PeftModel
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from align.core.errors import UserError, first_line
from align.core.files import new_folder, read_json, write_json
from align.core.settings import ModelConfig
from align.core.tensor_ops import Padded
from align.model_registry.registry import REWARD_MODELS, resolve_model
from align.models.backbone import Backbone, is_classifier
from align.models.backbone.classifier import (
    CLASSIFIER,
    classifier_adapter,
    classifier_head,
    reads_last_token,
    require_classifier,
    save_classifier,
)
from align.models.backbone.kinds import published_class
from align.models.checkpoint import finish_folder, require_savable, save_adapter
from align.models.folders import load_config
from align.models.heads import RewardModel, ScalarHead
from align.models.loading import LoadedModel, from_objects, load_whole, read_by_ids_of
from align.models.vocabulary import vocabulary_rows, with_unread_padding
from align.runtime.distributed import compute_dtype
from align.runtime.sharding import gathered_parameters
from align.tokenization import PairTokenization, Tokenization

HEAD = "reward_head.safetensors"


class HeadType(NamedTuple):
    """A kind of model with a scalar head, recognized by the metadata file in its folder."""

    metadata_file: str
    name: str
    command: str
    """`align` command that trains this kind."""


REWARD = HeadType("reward.json", "reward model", "reward")
RULE = HeadType("rules.json", "rule model", "rules")
"""Its output is the logit of a violation, so its folder is never accepted as a reward model."""
ATTRIBUTE = HeadType("attributes.json", "attribute model", "attributes")


@dataclass(frozen=True)
class LoadedReward:
    """A reward model from disk.

    Attributes:
        model: module with the interface of `RewardModel`.
        mean: subtracted from every reward.
        reads_whole_turns: whether the score is read after all text that the template writes behind a response, as in other
            libraries' reward models, instead of at the token that ends the turn.
        has_template: False for a classifier whose tokenizer has no chat template.
        reads_policy_ids: whether the model reads the policy's token ids, because its tokenizer is unknown.
        scores_at_end: whether a truncated response gets an end token, at which the score is read, as in training. False for
            other libraries' models, whose training is unknown.
    """

    model: nn.Module
    loaded: LoadedModel
    mean: float
    reads_whole_turns: bool = False
    has_template: bool = True
    reads_policy_ids: bool = False
    scores_at_end: bool = True


# ---------------------------------------------------------------------------------------------------------------- saving


def save_reward_model(
    folder: Path,
    loaded: LoadedModel,
    state: Mapping[str, Tensor],
    head: Tensor,
    metadata: Mapping[str, Any],
    card: Mapping[str, Any],
    kind: HeadType = REWARD,
    more: Mapping[str, Tensor] | None = None,
) -> None:
    """Save a reward model atomically.

    Args:
        state: full weights by their names in `loaded.backbone.model`.
        head: [1, H] weight of the reward head.
        metadata: contents of the kind's metadata file; requires `mean`.
        more: further tensors for the file of the head.
    """
    tokenizer = classifier_tokenizer(loaded)
    if reads_last_token(loaded.backbone):
        card = {**card, "pad_token_id": tokenizer.pad_token_id}
    with new_folder(folder) as temporary:
        if loaded.adapter is not None:
            name = loaded.adapter
            save_adapter(temporary, loaded, name, state, *classifier_adapter(loaded.backbone, name, head))
        else:
            save_classifier(loaded.backbone, temporary, state, head, tokenizer.pad_token_id)
        tensors = {"weight": head, **(more or {})}
        save_file({name: value.detach().float().cpu().clone() for name, value in tensors.items()}, temporary / HEAD)
        write_json(temporary / kind.metadata_file, metadata)
        finish_folder(temporary, loaded, card, tokenizer)


def require_savable_classifier(loaded: LoadedModel) -> None:
    """Raise a UserError, before training, if transformers cannot create or save a model's classifier."""
    require_classifier(loaded.backbone)
    if loaded.adapter is None:
        head, pad_id = torch.zeros(1, loaded.backbone.hidden_size), classifier_tokenizer(loaded).pad_token_id
        require_savable(loaded, lambda folder: save_classifier(loaded.backbone, folder, {}, head, pad_id))


def classifier_tokenizer(loaded: LoadedModel) -> PreTrainedTokenizerBase:
    """Return the tokenizer to save with a reward model: padding ends no text if the classifier reads the last token."""
    if not reads_last_token(loaded.backbone):
        return loaded.tokenization.tokenizer
    return with_unread_padding(loaded.tokenization, vocabulary_rows(loaded.backbone.model))


def scorer_folder(source: str) -> str:
    """Return the folder of a built-in reward model, made if missing, or of a run's model. Other names are unchanged."""
    if source in REWARD_MODELS:
        return str(resolve_model(source))
    folder = Path(source)
    is_run = not (folder / HEAD).exists() and (folder / "model" / HEAD).exists()
    return str(folder / "model") if is_run else source


def is_reward_model(folder: str, kind: HeadType = REWARD) -> bool:
    """Return whether a folder or a built-in name is a model of this kind that this package saved."""
    return (Path(scorer_folder(folder)) / kind.metadata_file).exists()


def is_external(source: str) -> bool:
    """Return whether a folder or hub name is a reward model of another library: a classifier, or a published class."""
    if any(is_reward_model(source, kind) for kind in (REWARD, RULE, ATTRIBUTE)):
        return False
    try:
        config = load_config(source)
        return is_classifier(config) or published_class(config) is not None
    except UserError:
        return False


def require_reward_model(source: str, kind: HeadType = REWARD) -> None:
    """Raise a UserError unless a folder or hub name is a model of this kind or, for rewards, a transformers classifier."""
    if not is_reward_model(source, kind) and not (kind is REWARD and is_external(source)):
        nor = ", nor a transformers classifier" if kind is REWARD else ""
        neither = "neither" if nor else "not"
        is_adapter = (Path(source) / "adapter_config.json").exists()
        merge = "merge its adapter into its classifier by merge_and_unload() and save that, or " if is_adapter else ""
        raise UserError(
            f"{source}: {neither} a {kind.name} of this package ({kind.metadata_file} is missing){nor}; "
            f"{merge}train one with `align {kind.command}`"
        )


# --------------------------------------------------------------------------------------------------------------- loading


def load_head(folder: str, backbone: Backbone, kind: HeadType = REWARD) -> tuple[ScalarHead, float]:
    """Load the head and the mean of a reward model.

    Raises:
        UserError: if its files are broken, or the width of the head does not match.
    """
    folder = scorer_folder(folder)
    try:
        tensors = load_file(Path(folder) / HEAD)
        metadata = read_json(Path(folder) / kind.metadata_file)
        weight, mean = tensors["weight"], float(metadata["mean"])
    except (OSError, SafetensorError, KeyError, TypeError, ValueError) as error:
        raise UserError(
            f"{folder}: its {HEAD} or {kind.metadata_file} is broken ({first_line(error)}); train it again"
        ) from error
    if not (torch.isfinite(weight).all() and math.isfinite(mean)):
        raise UserError(f"{folder}: its {HEAD} or {kind.metadata_file} holds NaN or infinite numbers; train it again")
    width = backbone.hidden_size
    if weight.shape[1] != width:
        raise UserError(f"{folder}: its head is made for states of width {weight.shape[1]}, the model's have {width}")
    head = ScalarHead(width, bias=False)
    with torch.no_grad():
        head.linear.weight.copy_(weight)
    return head, mean


def initial_head(source: str, backbone: Backbone, kind: HeadType = REWARD) -> ScalarHead:
    """Return the head of the initial model, or a new one. For errors, see `load_head`."""
    if is_reward_model(source, kind):
        return load_head(source, backbone, kind)[0]
    return ScalarHead(backbone.hidden_size, bias=False)


def load_reward_model(
    folder: str, dtype: str = "auto", chat_template: str = "auto", kind: HeadType = REWARD, quantization: str = ""
) -> LoadedReward:
    """Load a frozen reward model for scoring, with adapters merged.

    Args:
        folder: one of this package, a built-in name, or the folder or hub name of any transformers classifier with one
            label of a decoder or an encoder.
        chat_template: chat template for a decoder classifier whose tokenizer has none.
        kind: kind of the model. Only reward models may be from another library.
        quantization: see `load_whole`.

    Raises:
        UserError: if it is not a model of this kind.
    """
    require_reward_model(folder, kind)
    loaded = load_whole(folder, compute_dtype(dtype), allow_reward_model=True, quantization=quantization)
    if published := published_class(loaded.backbone.model.config):
        model = published.reward_model(loaded.backbone, loaded.tokenization, folder)
        return LoadedReward(model.eval().requires_grad_(False), loaded, 0.0, reads_whole_turns=True, scores_at_end=False)
    if not is_reward_model(folder, kind):
        return _external_reward(folder, loaded, chat_template)
    head, mean = load_head(folder, loaded.backbone, kind)
    model = RewardModel(loaded.backbone, head, loaded.adapter)
    return LoadedReward(model.eval().requires_grad_(False), loaded, mean)


# ---------------------------------------------------------------------------------------- classifiers of other libraries


def reward_of_classifier(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> LoadedReward:
    """Make a reward model of a transformers classifier in memory, which is changed in place.

    Raises:
        UserError: if the model is not a classifier with one label.
    """
    _require_classifier_class(model)
    return _external_reward("the classifier in memory", from_objects(model, tokenizer, ModelConfig()))


def reward_that_reads_ids_of(policy: LoadedModel, model: PreTrainedModel) -> LoadedReward:
    """Make a reward model of a transformers classifier in memory that reads the policy's token ids as they are.

    Raises:
        UserError: if the model is not a classifier with one label, or its vocabulary differs from the policy's.
    """
    _require_classifier_class(model)
    name = "the classifier in memory"
    backbone = read_by_ids_of(policy, model, "reward", reads_text_alone=True)
    loaded = LoadedModel(backbone, policy.tokenization, name)
    return replace(_external_reward(name, loaded), reads_whole_turns=False, reads_policy_ids=True)


def _require_classifier_class(model: PreTrainedModel) -> None:
    if isinstance(model, PeftModel):
        raise UserError(f"{type(model).__name__} has an adapter: merge it by merge_and_unload()")
    if not type(model).__name__.endswith(CLASSIFIER):
        raise UserError(f"{type(model).__name__} is no sequence classifier: a reward model has one label")


class ExternalRewardModel(RewardModel):
    """A reward model that leaves out padding ids at the end of a text.

    If padding is the token that ends a turn, the model was trained to give its score at the token before it.

    Args:
        pad_id: padding token id in the classifier's config.
    """

    def __init__(self, backbone: Backbone, head: ScalarHead, pad_id: int) -> None:
        super().__init__(backbone, head)
        self.pad_id = pad_id

    def forward(self, prompt: Padded, response: Padded, prompt_of_response: Tensor | None = None) -> Tensor:
        """Return rewards [B] of B responses to P prompts. `prompt_of_response` [B] is the prompt index of each response."""
        written = [self._cut(ids) for ids in response.tolists()]
        device = response.ids.device
        if not all(written):  # an empty response is scored at its prompt, which is truncated as well
            asked = prompt.tolists()
            owner = range(len(asked)) if prompt_of_response is None else prompt_of_response.tolist()
            read = [asked[n] if ids else self._cut(asked[n]) for n, ids in zip(owner, written, strict=True)]
            prompt, prompt_of_response = Padded.from_lists(read).to(device), None
        return super().forward(prompt, Padded.from_lists(written).to(device), prompt_of_response)

    def _cut(self, ids: list[int]) -> list[int]:
        """Return the ids up to the last one that is not padding."""
        end = next((place for place in range(len(ids), 0, -1) if ids[place - 1] != self.pad_id), 0)
        return ids[:end]


@torch.no_grad()
def _external_reward(name: str, loaded: LoadedModel, chat_template: str = "auto") -> LoadedReward:
    """Return a classifier of another library, which reads full turns with its chat template, if it has one.

    The negative of its head's bias is the mean.
    """
    try:
        score = classifier_head(loaded.backbone)
    except UserError as error:
        raise UserError(f"{name}: {error}") from error
    head = ScalarHead(loaded.backbone.hidden_size, bias=False)
    with gathered_parameters(score.parameters()):
        head.linear.weight.copy_(score.weight)
        mean = 0.0 if score.bias is None else -float(score.bias)
    model, pad_id = RewardModel(loaded.backbone, head), loaded.backbone.model.config.get_text_config().pad_token_id
    if pad_id is not None and reads_last_token(loaded.backbone):
        model = ExternalRewardModel(loaded.backbone, head, pad_id)
    model.eval().requires_grad_(False)
    has_template, own = loaded.tokenization.has_own_template, loaded.tokenization
    if not has_template and chat_template != "auto" and not isinstance(own, PairTokenization):
        loaded = replace(loaded, tokenization=Tokenization(own.tokenizer, chat_template))
    return LoadedReward(model, loaded, mean, has_template, has_template, scores_at_end=False)
