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
from align.sft import SFTConfig
from align.training.run import Run
from align.training.start import make_optimization
from tests.launch.programs.in_turn import avoid_compiling

avoid_compiling()
folder, timeout = Path(sys.argv[1]), float(sys.argv[2])
with one_line_errors():
    config = SFTConfig(output_dir=str(folder / "run"), dtype="float32", log_to=["none"], collective_timeout=timeout)
    run = Run(config, "sft")
    module = nn.Linear(4, 4)
    optimization = make_optimization(run, module, 2)
    share_rows(run.accelerator, 2)
    rows = torch.ones(2, 4)

    def loss(_: list[int]) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        return optimization.module(rows).square().sum(), {}

    rank = run.accelerator.process_index
    for update in (1, 2):
        if update == 2:
            seconds = [group._get_backend(torch.device("cpu")).options._timeout.seconds for group in c10d._world.pg_names]
            (folder / f"{rank}.part").write_text(json.dumps(seconds))
            (folder / f"{rank}.part").rename(folder / f"{rank}.json")
            if rank == 1:
                os.kill(os.getpid(), signal.SIGSTOP)
        optimization.accumulate([MicroBatch([0], 1.0)], loss)
        optimization.step(update)
