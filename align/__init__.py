"""RLHF for instruction-tuned language models: supervised fine-tuning, reward model and PPO over one backbone."""

__version__ = "0.1.0"

import logging
import warnings

from align.runtime.process import request_huge_pages, share_cores

request_huge_pages()
share_cores()
# PEFT imports bitsandbytes if it is installed, which warns on a CPU of a kernel package that nothing here needs.
logging.getLogger("bitsandbytes").setLevel(logging.ERROR)
# `python -m align.ppo.train` runs a module that its package has imported, which changes nothing here.
warnings.filterwarnings("ignore", r"'align\.\w+\.train' found in sys\.modules", RuntimeWarning)
# On a CPU, bitsandbytes warns on import that an optional kernel for 4-bit weights is missing.
logging.getLogger("bitsandbytes.backends.cpu.ops").setLevel(logging.ERROR)
