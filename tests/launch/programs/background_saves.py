"""Saves the same state in the background and in the foreground, then with one process that cannot write.

Usage: background_saves.py FOLDER FAILS: each process writes its error to `RANK.json`; FAILS is the rank that cannot.
"""

import json
import resource
import sys
from pathlib import Path

import torch
from torch import nn

from align.core.errors import UserError
from align.runtime.distributed import sum_across_processes
from align.training.checkpoint import Checkpoint
from tests.launch.programs.small import small_run
from tests.training.toy_modules import Kept

folder, fails = Path(sys.argv[1]), int(sys.argv[2])
torch.manual_seed(0)
run, engine = small_run(folder / "run", nn.Sequential(nn.Linear(256, 256), nn.Linear(256, 256)), 1)
rank, sums, message = run.accelerator.process_index, [], ""
checkpoint = Checkpoint(run, engine, {"sums": Kept([])})
run.config.checkpoint_in_background = True
checkpoint.save(1)
for _ in range(100):  # of the training, while the threads exchange something else
    sums.append(float(sum_across_processes(torch.tensor(float(rank + 1)), run.accelerator)))
    run.background.check()
run.background.finish()
run.config.checkpoint_in_background = False
checkpoint.save(2)
run.config.checkpoint_in_background = True
if rank == fails:
    resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, resource.RLIM_INFINITY))
try:
    checkpoint.save(3)
    run.background.finish()
except UserError as error:
    message = str(error)
resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
(folder / f"{rank}.json").write_text(json.dumps({"sums": sorted(set(sums)), "error": message}))
run.close()
torch.distributed.destroy_process_group()
