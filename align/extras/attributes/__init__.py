"""Attribute models: several qualities of a response, by several heads on one trunk or by a language model."""

from align.extras.attributes.config import AttributeConfig
from align.extras.attributes.train import AttributeTrainer, run_attribute_model

__all__ = ["AttributeConfig", "AttributeTrainer", "run_attribute_model"]
