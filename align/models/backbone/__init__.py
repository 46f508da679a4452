"""The only package that distinguishes T5, GPT and BERT. All other modules work with prompts and responses."""

from align.models.backbone.classifier import classifier_head, is_classifier, require_classifier
from align.models.backbone.contract import Backbone
from align.models.backbone.decoder import is_prefix_lm
from align.models.backbone.encoder_decoder import has_separate_matrix
from align.models.backbone.kinds import has_separate_encoder, is_encoder, model_class, wrap
from align.models.backbone.layers import cache_elements_per_token, flops_profile, with_every_layer

__all__ = [
    "Backbone",
    "cache_elements_per_token",
    "classifier_head",
    "flops_profile",
    "has_separate_encoder",
    "has_separate_matrix",
    "is_classifier",
    "is_encoder",
    "is_prefix_lm",
    "model_class",
    "require_classifier",
    "with_every_layer",
    "wrap",
]
