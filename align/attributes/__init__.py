"""Attribute models: several qualities of a response, each with a head of its own on one trunk."""

from align.attributes.tasks import AttributeConfig
from align.attributes.train import AttributeTrainer, run_attribute_model

__all__ = ["AttributeConfig", "AttributeTrainer", "run_attribute_model"]
