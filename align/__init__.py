"""RLHF for instruction-tuned language models: supervised fine-tuning, reward model and PPO over one backbone."""

__version__ = "0.1.0"

import warnings

from align.runtime.process import request_huge_pages, share_cores

request_huge_pages()
share_cores()
# `python -m align.ppo.train` runs a module that its package has imported, which changes nothing here.
warnings.filterwarnings("ignore", r"'align\.\w+\.train' found in sys\.modules", RuntimeWarning)
