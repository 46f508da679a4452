"""RLHF for instruction-tuned language models: supervised fine-tuning, reward model and PPO over one backbone."""

__version__ = "0.1.0"

from align.runtime.process import request_huge_pages, share_cores

request_huge_pages()
share_cores()
