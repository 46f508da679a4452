"""Sampling of responses: by transformers in the training process, or by vLLM on GPUs."""
