"""Sampling of responses: with transformers in the training process, or with vLLM on GPUs."""
