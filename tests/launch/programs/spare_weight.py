"""Resumes a module of which one weight never gets a gradient, and takes two more steps.

Usage: spare_weight.py FOLDER: a folder with a run, see test_spare_weight.py.
"""

import sys
from pathlib import Path

import torch
from torch import Tensor, nn

from align.batches.micro_batches import MicroBatch
from align.sft import SFTConfig
from align.training import checkpoint
from align.training.run import Run
from align.training.start import make_optimization


def train(folder: Path, updates: int, resume: bool) -> None:
    """Train from the last checkpoint on, at a constant rate of 0.1 and a weight decay of 0.5; save the end.

    Args:
        updates: of the whole run.
    """
    rates = {"learning_rate": 0.1, "schedule": "constant", "warmup": 0.0, "weight_decay": 0.5, "max_grad_norm": 0.0}
    run = Run(SFTConfig(output_dir=str(folder), dtype="float32", log_to=["none"], resume=resume, **rates), "sft")
    module = nn.ModuleDict({name: nn.Linear(4, 4, bias=False) for name in ("used", "spare")})
    for weight in module.parameters():
        nn.init.ones_(weight)
    optimization = make_optimization(run, module, updates)
    computing = getattr(optimization.module, "module", optimization.module)
    rows, share = torch.arange(8.0).reshape(2, 4) / 8, 1 / run.accelerator.num_processes

    def loss(_: list[int]) -> tuple[Tensor, dict[str, Tensor]]:
        return computing["used"](rows).tanh().square().sum() * share, {}

    done, _ = checkpoint.load(run, optimization)
    for update in range(done + 1, updates + 1):
        optimization.accumulate([MicroBatch([0], 1.0)], loss)
        optimization.step(update)
    checkpoint.save(run, optimization, updates, {})
    run.close()


if __name__ == "__main__":
    train(Path(sys.argv[1]), 4, resume=True)
