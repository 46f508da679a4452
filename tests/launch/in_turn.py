"""Several scripts, one after another, in the processes that a launcher started: their imports are paid for once.

Usage: in_turn.py FILE, with a JSON list of command lines, each of which begins with a script's path.
"""

import json
import os
import runpy
import sys
from pathlib import Path

import torch

from align.launch import end_process_group

if os.environ.get("ACCELERATE_USE_DEEPSPEED") == "true" and os.environ.get("ALIGN_FULL") != "1":
    # Its own exchange between processes of one CPU is compiled on first use, for two minutes on a new machine.
    import deepspeed

    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
# A script leaves the process group at its end, but the next one needs it.
leave, torch.distributed.destroy_process_group = torch.distributed.destroy_process_group, lambda *_: None
try:
    for words in json.loads(Path(sys.argv[1]).read_text(encoding="utf-8")):
        sys.argv = words
        runpy.run_path(words[0], run_name="__main__")
finally:  # also of a script that exits: a process that ends within the group may abort, and the others take it for lost
    torch.distributed.destroy_process_group = leave
    end_process_group()
