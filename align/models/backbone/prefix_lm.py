"""Prefix language models: which decoders can be one, and how a checkpoint says that it is one."""

from transformers import PreTrainedConfig


def is_prefix_lm(config: PreTrainedConfig) -> bool:
    """Whether a decoder lets its prompts see themselves whole, as `make_prefix_lm` noted in its config."""
    return bool(getattr(config, "prefix_lm", False))


def attention_window(config: PreTrainedConfig) -> int | None:
    """How many tokens back some layer of a decoder sees at most; None: all."""
    named = (getattr(config, name, None) for name in ("sliding_window", "attention_chunk_size", "window_size"))
    return min((int(window) for window in named if window), default=None)
