"""The one place that knows T5 from GPT and BERT; every other module speaks of prompts and responses."""

from align.models.backbone.classifier import (
    CLASSIFIER,
    classifier_adapter,
    classifier_head,
    is_classifier,
    reads_last_token,
    require_classifier,
    save_classifier,
)
from align.models.backbone.contract import Backbone
from align.models.backbone.costs import cache_elements_per_token, flops_profile
from align.models.backbone.decoder import is_prefix_lm
from align.models.backbone.determinism import disable_dropout, is_dropout_rate
from align.models.backbone.kinds import (
    adapter_settings,
    attention_kernel,
    has_separate_encoder,
    is_encoder,
    linear_layers,
    make_prefix_lm,
    model_class,
    new_modules,
    prepare_model,
    published_class,
    require_language_model,
    wrap,
)
from align.models.backbone.layers import with_every_layer
from align.models.backbone.verification import require_deterministic

__all__ = [
    "CLASSIFIER",
    "Backbone",
    "adapter_settings",
    "attention_kernel",
    "cache_elements_per_token",
    "classifier_adapter",
    "classifier_head",
    "disable_dropout",
    "flops_profile",
    "has_separate_encoder",
    "is_classifier",
    "is_dropout_rate",
    "is_encoder",
    "is_prefix_lm",
    "linear_layers",
    "make_prefix_lm",
    "model_class",
    "new_modules",
    "prepare_model",
    "published_class",
    "reads_last_token",
    "require_classifier",
    "require_deterministic",
    "require_language_model",
    "save_classifier",
    "with_every_layer",
    "wrap",
]
