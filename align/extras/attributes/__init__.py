"""Attribute models: several qualities of a response, by several heads on one trunk or by a language model."""

from align.extras.attributes.train import AttributeConfig, AttributeTrainer, run_attribute_model

__all__ = ["AttributeConfig", "AttributeTrainer", "run_attribute_model"]
