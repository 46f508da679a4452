"""What samples the responses of a rollout: transformers in the training process, or vLLM on GPUs."""

from align.engines.base import SamplingEngine, make_engine

__all__ = ["SamplingEngine", "make_engine"]
