"""The one place that knows T5 from GPT; every other module speaks of prompts and responses."""

from align.models.backbone.attention import attention_kernel
from align.models.backbone.contract import Backbone
from align.models.backbone.kinds import model_class, task_type, wrap

__all__ = ["Backbone", "attention_kernel", "model_class", "task_type", "wrap"]
