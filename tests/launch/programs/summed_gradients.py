"""Sums of gradients over many micro-batches, in the processes that a launcher started: test_summed_gradients.py.

Usage: summed_gradients.py FOLDER DTYPE MICRO_BATCHES SEED: `RANK.safetensors` has the process's part of each weight's
gradient, as a flat tensor `NAME`, and where it starts, `NAME.start`; `norm` is the norm of all of it.
"""

import sys
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from align.batches.micro_batches import MicroBatch
from align.sft import SFTConfig
from align.training.checkpoint.state import FlatTensorSlice
from align.training.run import Run
from align.training.setup import build_engine
from tests.training.toy_modules import accumulate

SHAPES = ((17, 5), (33,), (8, 8))
BETA = 0.5


class Weights(nn.Module):
    """Weights whose gradient is their input."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.w = nn.ParameterList([nn.Parameter(torch.zeros(shape, dtype=dtype)) for shape in SHAPES])

    def forward(self, inputs: list[Tensor]) -> Tensor:
        """The products of weights and inputs."""
        return sum((weight * each).sum() for weight, each in zip(self.w, inputs, strict=True))


def gradients(dtype: torch.dtype, count: int, seed: int) -> list[list[Tensor]]:
    """The gradient of each weight in each micro-batch: one direction with noise, so that sums grow."""
    generator = torch.Generator().manual_seed(seed)
    return [[(1 + torch.randn(shape, generator=generator)).to(dtype) for shape in SHAPES] for _ in range(count)]


def main(folder: Path, dtype: str, count: int, seed: int) -> None:
    """One step."""
    settings = {"report_to": ["none"], "lr_scheduler_type": "constant", "warmup_ratio": 0.0, "max_grad_norm": 0.0}
    name = f"{dtype}-{count}-{seed}"
    run = Run(SFTConfig(**settings, dtype=dtype, adam_beta1=BETA, output_dir=str(folder / name), model="none"), "sft")
    format_ = getattr(torch, dtype)
    engine, inputs = build_engine(run, Weights(format_), 1), gradients(format_, count, seed)
    rank, processes = run.accelerator.process_index, run.accelerator.num_processes
    plan = [MicroBatch([[row]]) for row in range(rank, count, processes)]
    accumulate(
        engine, plan, lambda rows: (engine.module([each.to(engine.accelerator.device) for each in inputs[rows[0]]]), {})
    )
    norm = engine.step(1)["grad_norm"]
    found = {"norm": torch.tensor(norm)}
    for key, value in engine.state()[0].items():
        kind, weight = key.split("/", 1)
        if kind == "exp_avg":  # (1 - beta) x gradient after the first step
            part = value if isinstance(value, FlatTensorSlice) else FlatTensorSlice(value.flatten(), 0, tuple(value.shape))
            found |= {weight: part.values / (1 - BETA), f"{weight}.start": torch.tensor(part.start)}
    save_file(found, folder / f"{name}.{rank}.safetensors")


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2], int(sys.argv[3]), int(sys.argv[4]))
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()
