"""Saves a state twice, the second time with one process that cannot write.

Usage: failing_save.py FOLDER FAILS: each process writes its error to `RANK.json`; FAILS is the rank that cannot.
"""

import json
import resource
import sys
from pathlib import Path

import torch
from torch import nn

from align.core.errors import UserError
from align.training.checkpoint import Checkpoint
from tests.launch.programs.small import small_run
from tests.training.toy_modules import Kept

folder, fails = Path(sys.argv[1]), int(sys.argv[2])
torch.manual_seed(0)
run, engine = small_run(folder / "run", nn.Sequential(nn.Linear(256, 256), nn.Linear(256, 256)), 1)
rank, message = run.accelerator.process_index, ""
checkpoint = Checkpoint(run, engine, {"sums": Kept([])})
checkpoint.save(1)
if rank == fails:
    resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, resource.RLIM_INFINITY))
try:
    checkpoint.save(2)
except UserError as error:
    message = str(error)
resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
(folder / f"{rank}.json").write_text(json.dumps({"error": message}))
run.close()
torch.distributed.destroy_process_group()
