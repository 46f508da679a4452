"""How long a checkpoint of a sharded state takes, and how much memory.

Three ways: all on the first process, each process its part, and that in the background.

    accelerate launch --config_file configs/accelerate/zero3.yaml --num_processes 2 benchmarks/checkpoint_save.py \
        --layers 18 --pairs 3 --folder /tmp/save

A stack of random matrices stands for a model: 16.8 million weights each, 12 bytes a weight in a checkpoint. All ways write
the same float32 numbers, read them back, compare them and take their checksums. In the background, "waits" are the seconds
until training could go on.
"""

import argparse
import json
import shutil
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch
from deepspeed.utils import safe_get_full_fp32_param, safe_get_full_optimizer_state
from safetensors.torch import save_file
from torch import Tensor, nn

from align.files import new_folder
from align.launch import end_process_group, quiet_libraries
from align.models.checkpoint import require_equal_file
from align.sft import SFTConfig
from align.training.checkpoint import save_checkpoint
from align.training.checkpoint_files import forget_cached, write_checksums
from align.training.deepspeed_engine import MOMENTS, DeepSpeedOptimization
from align.training.factory import make_optimization
from align.training.memory import GIB
from align.training.run import Run

WIDTH = 4096


def save_on_first(run: Run, optimization: DeepSpeedOptimization, target: Path) -> None:
    """The way before each process wrote its part: every tensor is gathered, and the first process writes all of them."""
    tensors: dict[str, Tensor] = {}
    for name, weight in optimization.trainable.items():
        state = {"master": safe_get_full_fp32_param(weight)}
        state |= {key: safe_get_full_optimizer_state(weight, key) for key in MOMENTS}
        if run.is_main:
            tensors |= {f"{key}/{name}": value.cpu() for key, value in state.items()}
    if run.is_main:
        with new_folder(target) as folder:
            save_file({key: value.contiguous() for key, value in tensors.items()}, folder / "state.safetensors")
            forget_cached(folder / "state.safetensors")
            require_equal_file(folder / "state.safetensors", tensors)
            write_checksums(folder)
    run.accelerator.wait_for_everyone()


def timed(run: Run, work: Callable[[], None]) -> dict[str, float]:
    """Seconds, and the peak of this process's memory in GiB."""
    Path("/proc/self/clear_refs").write_text("5", encoding="ascii")
    run.accelerator.wait_for_everyone()
    begun = time.perf_counter()
    work()
    return {"seconds": round(time.perf_counter() - begun, 2), "peak": round(run.memory.peak() / GIB, 2)}


def in_background(run: Run, optimization: DeepSpeedOptimization) -> dict[str, float]:
    """As `timed`, and how long training waits; nothing else computes meanwhile."""
    run.config.checkpoint_in_background = True
    begun = timed(run, lambda: save_checkpoint(run, optimization, 1, {}))
    written = timed(run, run.background.finish)
    run.config.checkpoint_in_background = False
    seconds, peak = begun["seconds"] + written["seconds"], max(begun["peak"], written["peak"])
    return {"waits": begun["seconds"], "seconds": round(seconds, 2), "peak": peak}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--layers", type=int, default=18)
    parser.add_argument("--pairs", type=int, default=3)
    parser.add_argument("--folder", type=Path, required=True)
    options = parser.parse_args()
    quiet_libraries()
    run = Run(SFTConfig(output_dir=str(options.folder / "run"), dtype="float32", log_to=["none"], memory_limit=1e3), "sft")
    module = nn.Sequential(*(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(options.layers)))
    optimization = make_optimization(run, module, 1)
    assert isinstance(optimization, DeepSpeedOptimization)
    for pair in range(options.pairs):
        former = timed(run, lambda: save_on_first(run, optimization, options.folder / "former"))
        in_parts = timed(run, lambda: save_checkpoint(run, optimization, 1, {}))
        beside = in_background(run, optimization)
        if run.is_main:
            weights = options.layers * WIDTH**2
            row = {"pair": pair + 1, "weights": weights, "first process": former, "each its part": in_parts}
            sys.stdout.write(json.dumps(row | {"in the background": beside}) + "\n")
            sys.stdout.flush()
    if run.is_main:
        shutil.rmtree(options.folder)
    run.accelerator.wait_for_everyone()
    end_process_group()


if __name__ == "__main__":
    torch.manual_seed(0)
    main()
