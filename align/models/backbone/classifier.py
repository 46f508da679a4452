"""Reward models on disk, in the format that transformers, PEFT and TRL load as a classifier with one label."""

import copy
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AutoModelForSequenceClassification, PreTrainedConfig

from align.core.errors import UserError
from align.models.backbone.contract import Backbone
from align.models.backbone.decoder import DecoderBackbone
from align.models.backbone.encoder import EncoderBackbone, classifier_tensors, head_modules
from align.models.backbone.encoder_decoder import EncoderDecoderBackbone
from align.models.backbone.user_changes import require_plain_head, require_published_forward

CLASSIFIER = "ForSequenceClassification"
"""Suffix of the names of transformers' sequence classifier classes."""


def is_classifier(config: PreTrainedConfig) -> bool:
    """Return whether a folder's model was saved as a sequence classifier, which has no vocabulary matrix."""
    return any(name.endswith(CLASSIFIER) for name in config.architectures or [])


def classifier_head(backbone: Backbone) -> nn.Linear:
    """Return the head of a transformers classifier with one label."""
    head, labels = getattr(backbone.model, "score", None), backbone.model.config.num_labels
    if isinstance(backbone, EncoderBackbone):
        head = backbone.summary_state.removed
    if labels != 1:
        raise UserError(f"it is a classifier of {labels} labels; a reward model has one")
    if not isinstance(head, nn.Linear):
        name = type(backbone.model).__name__
        raise UserError(f"its class {name} has no linear layer 'score'; give a reward function that calls it")
    require_published_forward(backbone.model)
    require_plain_head(head, "its layer 'score'")
    return head


def require_classifier(backbone: Backbone) -> None:
    """Raise a UserError, before training, if transformers has no classifier of a decoder's architecture."""
    known = type(backbone.model.config) in AutoModelForSequenceClassification._model_mapping
    if isinstance(backbone, DecoderBackbone) and not known:
        name = backbone.model.config.model_type
        raise UserError(f"model type '{name}': transformers has no sequence classifier of it to save a reward model as")


def reads_last_token(backbone: Backbone) -> bool:
    """Return whether the saved classifier reads its score at the last token that is not padding."""
    return isinstance(backbone, DecoderBackbone)


def save_classifier(
    backbone: Backbone, folder: Path, state: Mapping[str, Tensor], head: Tensor, pad_id: int | None = None
) -> None:
    """Save a backbone with a reward head as a classifier with one label.

    A decoder becomes the class that TRL's RewardTrainer makes, an encoder keeps its class. An encoder-decoder stays a
    language model: transformers' T5 classifier passes one text to both encoder and decoder, which is another model.

    Args:
        state: full weights by their names in `backbone.model`.
        head: [1, H] weight.
        pad_id: padding token of a classifier that reads the last token. If None, it accepts only single rows.
    """
    if isinstance(backbone, EncoderDecoderBackbone):
        backbone.model.save_pretrained(folder, state_dict=dict(state))
        return
    config = copy.deepcopy(backbone.model.config)
    config.num_labels = 1
    if isinstance(backbone, DecoderBackbone):
        config.get_text_config().pad_token_id = pad_id
    with torch.device("meta"):
        classifier = AutoModelForSequenceClassification.from_config(config, dtype=backbone.model.dtype)
    if isinstance(backbone, EncoderBackbone):
        weights = {**state, **classifier_tensors(backbone, head)}
    else:
        prefix = classifier.base_model_prefix + "."
        weights = {key: value for key, value in state.items() if key.startswith(prefix)}
        weights["score.weight"] = head.to(backbone.model.dtype)
    classifier.save_pretrained(folder, state_dict=weights)


def classifier_adapter(backbone: Backbone, name: str, head: Tensor) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """Return the changes to the PEFT config of the reward adapter `name`, and its further tensors by name."""
    if isinstance(backbone, EncoderDecoderBackbone):
        return {}, {}
    modules, tensors = ["classifier", "score"], {"score.weight": head.to(backbone.model.dtype)}
    if isinstance(backbone, EncoderBackbone):
        last = backbone.summary_state.place.split(".")[0]
        modules, tensors = [*head_modules(backbone.model), last], classifier_tensors(backbone, head)
    assert backbone.peft is not None
    # PEFT writes a full module that the config does not list into the base.
    modules = sorted({*modules, *(getattr(backbone.peft.peft_config[name], "modules_to_save", None) or ())})
    changes = {"task_type": "SEQ_CLS", "modules_to_save": modules}
    return changes, {f"base_model.model.{name}": value for name, value in tensors.items()}
