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
from align.training import checkpoint
from tests.launch.programs.small import small_run

folder, fails = Path(sys.argv[1]), int(sys.argv[2])
torch.manual_seed(0)
run, optimization = small_run(folder / "run", nn.Sequential(nn.Linear(256, 256), nn.Linear(256, 256)), 1)
rank, sums, message = run.accelerator.process_index, [], ""
run.config.checkpoint_in_background = True
checkpoint.save(run, optimization, 1, {"sums": []})
for _ in range(100):  # of the training, while the threads exchange something else
    sums.append(float(sum_across_processes(torch.tensor(float(rank + 1)), run.accelerator)))
    run.background.check()
run.background.finish()
run.config.checkpoint_in_background = False
checkpoint.save(run, optimization, 2, {"sums": []})
run.config.checkpoint_in_background = True
if rank == fails:
    resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, resource.RLIM_INFINITY))
try:
    checkpoint.save(run, optimization, 3, {})
    run.background.finish()
except UserError as error:
    message = str(error)
resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
(folder / f"{rank}.json").write_text(json.dumps({"sums": sorted(set(sums)), "error": message}))
run.close()
torch.distributed.destroy_process_group()
