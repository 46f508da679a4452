"""Trains a small module in two processes, of which the second stops itself (SIGSTOP) before the last update.

Usage: stopped_process.py FOLDER TIMEOUT: each process writes the timeouts of its process groups, in seconds, to RANK.json.
"""

import json
import os
import signal
import sys
from pathlib import Path

import torch
from torch import nn
from torch.distributed import distributed_c10d as c10d

from align.batches.micro_batches import MicroBatch
from align.core.launch import one_line_errors
from align.runtime.sequence import share_rows
from tests.launch.programs.in_turn import avoid_compiling
from tests.launch.programs.small import small_run
from tests.training.toy_modules import accumulate

avoid_compiling()
folder = Path(sys.argv[1])
with one_line_errors():
    run, engine = small_run(folder / "run", nn.Linear(4, 4), 2, collective_timeout=float(sys.argv[2]))
    share_rows(run.accelerator, 2)
    rows, rank = torch.ones(2, 4), run.accelerator.process_index
    for update in (1, 2):
        if update == 2:
            seconds = [group._get_backend(torch.device("cpu")).options._timeout.seconds for group in c10d._world.pg_names]
            (folder / f"{rank}.part").write_text(json.dumps(seconds))
            (folder / f"{rank}.part").rename(folder / f"{rank}.json")
            if rank == 1:
                os.kill(os.getpid(), signal.SIGSTOP)
        accumulate(engine, [MicroBatch([0], 1.0)], lambda _: (engine.module(rows).square().sum(), {}))
        engine.step(update)
