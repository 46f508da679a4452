"""Dispatch by the kind of a model."""

from typing import Any

import torch
from peft import PeftModel
from torch import nn
from transformers import (
    AutoModelForCausalLM,
    AutoModelForSeq2SeqLM,
    AutoModelForSequenceClassification,
    PreTrainedConfig,
    PreTrainedModel,
)
from transformers.models.auto.auto_factory import _get_model_class
from transformers.models.auto.modeling_auto import MODEL_FOR_MASKED_LM_MAPPING_NAMES

from align.core.errors import UserError, reason
from align.core.plugins import import_object
from align.models.backbone.attention import SDPA, best_kernel
from align.models.backbone.classifier import is_classifier
from align.models.backbone.contract import Backbone
from align.models.backbone.decoder import DecoderBackbone, sliding_window
from align.models.backbone.determinism import compute_routers_in_float32, disable_dropout, routers_of
from align.models.backbone.embeddings import sum_embedding_gradients_in_float32
from align.models.backbone.encoder import EncoderBackbone, expose_summary, head_modules
from align.models.backbone.encoder_decoder import EncoderDecoderBackbone
from align.models.backbone.norms import fuse_norms
from align.models.backbone.user_changes import MODEL_ADVICE, require_unchanged
from align.models.backbone.verification import verify
from align.runtime.sharding import readable

PUBLISHED_CLASSES = {"LlamaForRewardModelWithGating": "align.extras.armo_rm:GatedLlama"}
"""Replacements for published model classes that transformers does not implement, by name in `architectures`."""


def wrap(model: PreTrainedModel, peft_model: PeftModel | None = None, check: bool = True) -> Backbone:
    """Return a backbone around `model`, and disable the model's dropout.

    Args:
        model: a causal or sequence-to-sequence language model of transformers, or a sequence classifier.
        peft_model: the PEFT model whose adapter layers are inside `model`.
        check: whether to verify the model and determine whether rows can share a prompt.
    """
    if hasattr(model.config, "text_config"):
        raise UserError(
            f"model type '{model.config.model_type}' reads images or sound beside text; save the language model in it apart "
            "and give that folder"
        )
    disable_dropout(model)
    compute_routers_in_float32(model)
    fuse_norms(model)
    sum_embedding_gradients_in_float32(model)
    kind = EncoderDecoderBackbone if model.config.is_encoder_decoder else DecoderBackbone
    backbone: Backbone = (EncoderBackbone if is_encoder(model.config) else kind)(model, peft_model)
    for module in _passed_by(backbone):
        require_unchanged(module, type(module).__name__, MODEL_ADVICE)
    if check:
        try:
            with readable(model):
                backbone.shares_prompts = verify(backbone)
        except (UserError, MemoryError, torch.OutOfMemoryError):
            raise
        except Exception as error:  # an untested architecture can fail in any way
            raise UserError(
                f"model type '{model.config.model_type}' cannot be read ({reason(error)}); this architecture is not "
                "supported"
            ) from error
    return backbone


def _passed_by(backbone: Backbone) -> list[nn.Module]:
    """Return the modules around a model's layers that the backbone does not call."""
    model, peft_model, called = backbone.model, backbone.peft, backbone.called_modules
    outer: list[nn.Module] = [] if peft_model is None else [peft_model, peft_model.base_model]
    inner = [] if model in called else [module for module in (model, model.base_model) if module not in called]
    return outer + inner


def is_encoder(config: PreTrainedConfig) -> bool:
    """Return whether a model is bidirectional, according to its config."""
    masked = config.model_type in MODEL_FOR_MASKED_LM_MAPPING_NAMES
    return masked and not config.is_encoder_decoder and not getattr(config, "is_decoder", False)


def has_separate_encoder(config: PreTrainedConfig) -> bool:
    """Return whether a model has an encoder for the prompt and a decoder for the response (T5, BART)."""
    return bool(config.is_encoder_decoder)


def make_prefix_lm(config: PreTrainedConfig, name: str) -> None:
    """Let prompt tokens of a decoder see the full prompt. The setting is saved with the config."""
    if config.is_encoder_decoder or is_encoder(config):
        raise UserError(f"prefix_lm: model '{name}' has an encoder, which reads prompts whole as it is; leave it off")
    window = sliding_window(config)
    if window is not None:
        raise UserError(
            f"prefix_lm: a layer of model '{name}' sees only {window} tokens back, which a mask over a whole prompt would "
            "undo; choose a model without a window, or leave it off"
        )
    config.prefix_lm = True


def published_class(config: PreTrainedConfig) -> Any:
    """Return this package's class for a published model that transformers does not implement, else None."""
    name = next((name for name in config.architectures or [] if name in PUBLISHED_CLASSES), None)
    return import_object(PUBLISHED_CLASSES[name]) if name else None


def model_class(config: PreTrainedConfig) -> Any:
    """Return the class that loads a checkpoint."""
    if found := published_class(config):
        return found
    if config.is_encoder_decoder:
        return AutoModelForSeq2SeqLM
    if is_classifier(config) or is_encoder(config):
        return AutoModelForSequenceClassification
    return AutoModelForCausalLM


def attention_kernel(config: PreTrainedConfig) -> str:
    """Return transformers' attention implementation for loading a model."""
    if published_class(config):
        return best_kernel(_get_model_class(config, AutoModelForCausalLM._model_mapping), config)
    mapping = model_class(config)._model_mapping
    return best_kernel(_get_model_class(config, mapping), config) if type(config) in mapping else "eager"


def use_block_attention(backbone: Backbone) -> None:
    """Process rows with several responses by FlexAttention instead of a dense mask."""
    if not isinstance(backbone, DecoderBackbone):
        raise UserError("block_attention is for decoders, whose responses share a row; set block_attention to false")
    if backbone.model.config._attn_implementation != SDPA:
        kind = backbone.model.config.model_type
        raise UserError(f"block_attention: the attention of {kind} is its own; set block_attention to false")
    backbone.block_attention = True


def prepare_model(model: PreTrainedModel) -> None:
    """Prepare a model for adapters: an encoder's classifier matrix is replaced by a `SummaryState`."""
    if is_encoder(model.config):
        expose_summary(model)


def new_modules(model: PreTrainedModel) -> tuple[str, ...]:
    """Return the prefixes of task-specific weights, which a pretrained checkpoint may lack."""
    if not is_encoder(model.config):
        return ()
    return (expose_summary(model).place, *(f"{name}." for name in head_modules(model)))


def linear_layers(model: PreTrainedModel) -> list[str] | None:
    """Return the linear layers of a mixture of experts that get adapters by default, or None for PEFT's choice.

    PEFT would adapt routers, and experts that are slices of one parameter.
    """
    inside = tuple(f"{router.name}." for router in routers_of(model))
    if not inside:
        return None
    linear = {name: module for name, module in model.named_modules() if isinstance(module, nn.Linear)}
    vocabulary = model.get_output_embeddings()
    return [name for name, module in linear.items() if module is not vocabulary and not name.startswith(inside)]


def adapter_settings(model: PreTrainedModel) -> dict[str, Any]:
    """Return PEFT's settings for the kind of a model."""
    if is_encoder(model.config):
        return {"task_type": "SEQ_CLS", "modules_to_save": head_modules(model)}
    return {"task_type": "SEQ_2_SEQ_LM" if model.config.is_encoder_decoder else "CAUSAL_LM"}
