"""Several scripts, one after another, in the processes that a launcher started: their imports are paid for once.

Usage: in_turn.py FILE [compile], with a JSON list of command lines, each of which begins with a script's path. LOST_AFTER in
the environment replaces the seconds without a heartbeat after which a process counts as lost.
"""

import json
import os
import runpy
import sys
import traceback
from collections.abc import Sequence
from pathlib import Path
from typing import NoReturn

import torch

from align.core import heartbeat
from align.core.launch import end_process_group


def avoid_compiling() -> None:
    """Let DeepSpeed exchange over gloo alone: its own exchange on one CPU is compiled on first use, for two minutes."""
    if os.environ.get("ACCELERATE_USE_DEEPSPEED") == "true":
        import deepspeed

        deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False


def run_scripts(scripts: Sequence[Sequence[str]]) -> NoReturn:
    """Run command lines one after another, and end this process."""
    # A script leaves the process group at its end, but the next one needs it.
    leave, torch.distributed.destroy_process_group = torch.distributed.destroy_process_group, lambda *_: None
    status = 1
    try:
        for words in scripts:
            sys.argv = list(words)
            runpy.run_path(words[0], run_name="__main__")
        status = 0
    except SystemExit as ended:
        status = ended.code if isinstance(ended.code, int) else int(ended.code is not None)
    except BaseException:
        traceback.print_exc()
    torch.distributed.destroy_process_group = leave
    end_process_group()
    sys.stdout.flush()
    sys.stderr.flush()
    # What several runs of one process leave (DeepSpeed's engines, threads) can make the interpreter abort at its end.
    os._exit(status)


if __name__ == "__main__":
    heartbeat.LOST_AFTER = float(os.environ.get("LOST_AFTER", heartbeat.LOST_AFTER))
    if sys.argv[2:] != ["compile"]:
        avoid_compiling()
    run_scripts(json.loads(Path(sys.argv[1]).read_text(encoding="utf-8")))
