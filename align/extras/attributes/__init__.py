"""Attribute models: several qualities of a response, with several heads or a language model."""

from align.extras.attributes.train import AttributeConfig, AttributeTrainer, run_attribute_model

__all__ = ["AttributeConfig", "AttributeTrainer", "run_attribute_model"]
