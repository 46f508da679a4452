"""A stand-in for vLLM: what TRL imports of it, over a plain transformers model on the CPU and TCP instead of NCCL.

It generates one row at a time from the row's own seed, reports the log-probs of what it drew, and takes weights by name.
`server.py` speaks the part of vLLM's HTTP protocol that TRL's client uses, as vLLM 0.31.0 does.
"""

from vllm.model import LLM, RequestOutput
from vllm.sampling_params import SamplingParams

__version__ = "0.31.0"
__all__ = ["LLM", "RequestOutput", "SamplingParams"]
