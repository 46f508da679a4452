"""A stage that sends one of its two processes SIGTERM before the first update, while the other one waits for it.

Usage: one_signal.py RANK FOLDER: the process that gets the signal, and the run's folder.
"""

import os
import signal
import sys

from align.core.launch import run_stage
from align.sft import SFTConfig
from align.training.run import Run


def stage(config: SFTConfig) -> None:
    run = Run(config, "sft")
    if run.accelerator.process_index == int(sys.argv[1]):
        os.kill(os.getpid(), signal.SIGTERM)
    run.accelerator.wait_for_everyone()


run_stage(SFTConfig, stage, ["--dtype", "float32", "--report_to", "none", "--output_dir", sys.argv[2]])
