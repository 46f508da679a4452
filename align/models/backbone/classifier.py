"""How a reward model is saved: in the form that transformers, PEFT and TRL load as a classifier with one label."""

import copy
from collections.abc import Mapping
from functools import singledispatch
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


def is_classifier(config: PreTrainedConfig) -> bool:
    """Whether a folder's model was saved as a sequence classifier, which has no vocabulary matrix."""
    return any(name.endswith("ForSequenceClassification") for name in config.architectures or [])


def classifier_head(backbone: Backbone) -> nn.Linear:
    """The head of a transformers classifier with one label, which is a reward.

    Raises:
        UserError: if it has another number of labels, or a head that is not one matrix.
    """
    head, labels = _last_matrix(backbone), backbone.model.config.num_labels
    if labels != 1:
        raise UserError(f"it is a classifier of {labels} labels; a reward model has one")
    if not isinstance(head, nn.Linear):
        name = type(backbone.model).__name__
        raise UserError(f"its class {name} has no linear layer 'score' that could be read as a reward head")
    return head


@singledispatch
def _last_matrix(backbone: Backbone) -> Any:
    """The matrix that makes a classifier's scores, or None."""
    return getattr(backbone.model, "score", None)


@_last_matrix.register
def _(backbone: EncoderBackbone) -> nn.Linear:
    return backbone.summary_state.removed


def require_classifier(backbone: Backbone) -> None:
    """Refuse, before training, a reward model that could not be saved at the end.

    Raises:
        UserError: if transformers has no classifier of this architecture, or if the model was saved as one, whose head reads
            the last layer, and another choice of layers is to be read.
    """
    (_require_classifier if backbone.layers is None else _require_body)(backbone)


def reads_last_token(backbone: Backbone) -> bool:
    """Whether the saved classifier reads its score at the last token that is not padding."""
    return backbone.layers is None and _reads_last_token(backbone)


@singledispatch
def _reads_last_token(backbone: Backbone) -> bool:
    return False


@_reads_last_token.register
def _(backbone: DecoderBackbone) -> bool:
    return True


def save_classifier(
    backbone: Backbone, folder: Path, state: Mapping[str, Tensor], head: Tensor, pad_id: int | None = None
) -> None:
    """Save a backbone with a reward head in the form that other libraries load.

    A classifier of transformers reads the last layer. For a head that reads other layers, the model under it is saved
    (an encoder's body, or the language model) with the head next to it, which only this package can combine.

    Args:
        state: whole weights by their names in `backbone.model`.
        head: [1, S] weight.
        pad_id: of a classifier that reads its last token; None: it reads single rows only.
    """
    if backbone.layers is None:
        _save_classifier(backbone, folder, state, head, pad_id)
    else:
        save_body(backbone, folder, state)


def classifier_adapter(backbone: Backbone, head: Tensor) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """What a saved reward adapter needs in addition: changes to its PEFT config, and further tensors by their names."""
    return _classifier_adapter(backbone, head) if backbone.layers is None else ({}, {})


@singledispatch
def _require_body(backbone: Backbone) -> None:
    """Refuse a model of which nothing but a classifier can be saved."""
    config = backbone.model.config
    if is_classifier(config):
        raise UserError(
            f"read_layers: the head of model '{config.name_or_path}' reads its last layer; start from a language model"
        )


@_require_body.register
def _(backbone: EncoderBackbone) -> None:
    """Its body is a module apart from the classifier."""


@singledispatch
def save_body(backbone: Backbone, folder: Path, state: Mapping[str, Tensor]) -> None:
    """Save the model under a head: an encoder's body, or the language model.

    Args:
        state: whole weights by their names in `backbone.model`.
    """
    backbone.model.save_pretrained(folder, state_dict=dict(state))


@save_body.register
def _(backbone: EncoderBackbone, folder: Path, state: Mapping[str, Tensor]) -> None:
    inside = f"{backbone.model.base_model_prefix}."
    weights = {key.removeprefix(inside): value for key, value in state.items() if key.startswith(inside)}
    body: Any = backbone.model.base_model
    body.save_pretrained(folder, state_dict=weights)


@singledispatch
def _require_classifier(backbone: Backbone) -> None:
    raise TypeError(f"no classifier is known for a {type(backbone).__name__}")


@singledispatch
def _save_classifier(
    backbone: Backbone, folder: Path, state: Mapping[str, Tensor], head: Tensor, pad_id: int | None
) -> None:
    raise TypeError(f"no classifier is known for a {type(backbone).__name__}")


@singledispatch
def _classifier_adapter(backbone: Backbone, head: Tensor) -> tuple[dict[str, Any], dict[str, Tensor]]:
    raise TypeError(f"no classifier is known for a {type(backbone).__name__}")


@_require_classifier.register
def _(backbone: DecoderBackbone) -> None:
    if type(backbone.model.config) not in AutoModelForSequenceClassification._model_mapping:
        name = backbone.model.config.model_type
        raise UserError(f"model type '{name}': transformers has no sequence classifier of it to save a reward model as")


@_save_classifier.register
def _(backbone: DecoderBackbone, folder: Path, state: Mapping[str, Tensor], head: Tensor, pad_id: int | None) -> None:
    """As `...ForSequenceClassification` with one label: the class that TRL's RewardTrainer makes."""
    config = copy.deepcopy(backbone.model.config)
    config.num_labels = 1
    config.get_text_config().pad_token_id = pad_id
    with torch.device("meta"):
        classifier = AutoModelForSequenceClassification.from_config(config, dtype=backbone.model.dtype)
    prefix = classifier.base_model_prefix + "."
    weights = {key: value for key, value in state.items() if key.startswith(prefix)}
    weights["score.weight"] = head.to(backbone.model.dtype)
    classifier.save_pretrained(folder, state_dict=weights)


@_classifier_adapter.register
def _(backbone: DecoderBackbone, head: Tensor) -> tuple[dict[str, Any], dict[str, Tensor]]:
    changes = {"task_type": "SEQ_CLS", "modules_to_save": ["classifier", "score"]}
    return changes, {"base_model.model.score.weight": head.to(backbone.model.dtype)}


@_require_classifier.register
def _(backbone: EncoderBackbone) -> None:
    """Always possible: it is loaded as a classifier."""


@_save_classifier.register
def _(backbone: EncoderBackbone, folder: Path, state: Mapping[str, Tensor], head: Tensor, pad_id: int | None) -> None:
    """As the class that it was loaded as, with one label: `tokenizer(prompt, response)` gives it what it reads here."""
    config = copy.deepcopy(backbone.model.config)
    config.num_labels = 1
    with torch.device("meta"):
        classifier = AutoModelForSequenceClassification.from_config(config, dtype=backbone.model.dtype)
    classifier.save_pretrained(folder, state_dict={**state, **classifier_tensors(backbone, head)})


@_classifier_adapter.register
def _(backbone: EncoderBackbone, head: Tensor) -> tuple[dict[str, Any], dict[str, Tensor]]:
    last = backbone.summary_state.place.split(".")[0]
    changes = {"task_type": "SEQ_CLS", "modules_to_save": sorted({*head_modules(backbone.model), last})}
    return changes, {f"base_model.model.{name}": value for name, value in classifier_tensors(backbone, head).items()}


@_require_classifier.register
def _(backbone: EncoderDecoderBackbone) -> None:
    """Always possible: see `_save_classifier`."""


@_save_classifier.register
def _(backbone: EncoderDecoderBackbone, folder: Path, state: Mapping[str, Tensor], head: Tensor, pad_id: int | None) -> None:
    """As the language model it is: transformers' T5 classifier reads one text with both halves, which is another model."""
    backbone.model.save_pretrained(folder, state_dict=dict(state))


@_classifier_adapter.register
def _(backbone: EncoderDecoderBackbone, head: Tensor) -> tuple[dict[str, Any], dict[str, Tensor]]:
    return {}, {}
