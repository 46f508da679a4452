"""RLHF for instruction-tuned language models: supervised fine-tuning, reward model and PPO over one backbone."""

__version__ = "0.1.0"

from align.heap import ask_for_large_pages

ask_for_large_pages()
