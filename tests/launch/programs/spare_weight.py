"""Resumes a module of which one weight never gets a gradient, and takes two more steps.

Usage: spare_weight.py FOLDER: a folder with a run, see test_checkpoints_of_two.py.
"""

import sys
from pathlib import Path

import torch
from torch import nn

from align.batches.micro_batches import MicroBatch
from align.training.checkpoint import Checkpoint
from tests.launch.programs.small import small_run
from tests.training.toy_modules import accumulate

RATES = {
    "learning_rate": 0.1,
    "lr_scheduler_type": "constant",
    "warmup_ratio": 0.0,
    "weight_decay": 0.5,
    "max_grad_norm": 0.0,
}


def train(folder: Path, updates: int, resume_from_checkpoint: bool) -> None:
    """Train from the last checkpoint to an update, and save there."""
    module = nn.ModuleDict({name: nn.Linear(4, 4, bias=False) for name in ("used", "spare")})
    for weight in module.parameters():
        nn.init.ones_(weight)
    run, engine = small_run(folder, module, updates, resume_from_checkpoint=resume_from_checkpoint, **RATES)
    computing = getattr(engine.module, "module", engine.module)
    rows, share = torch.arange(8.0).reshape(2, 4) / 8, 1 / run.accelerator.num_processes
    checkpoint = Checkpoint(run, engine, {})
    done = checkpoint.load()
    for update in range(done + 1, updates + 1):
        accumulate(engine, [MicroBatch([0], 1.0)], lambda _: (computing["used"](rows).tanh().square().sum() * share, {}))
        engine.step(update)
    checkpoint.save(updates)
    run.close()


if __name__ == "__main__":
    train(Path(sys.argv[1]), 4, resume_from_checkpoint=True)
