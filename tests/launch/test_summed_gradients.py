"""A gradient does not depend on micro-batches, in any engine and number format, within the rounding of float32 sums."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from tests.launch.launcher import launch_in_turn
from tests.launch.programs.summed_gradients import SHAPES, gradients

PROGRAM = str(Path(__file__).parent / "programs" / "summed_gradients.py")
CASES = [("bfloat16", 2, 0), ("bfloat16", 96, 1), ("bfloat16", 512, 2), ("float32", 96, 3)]


@pytest.mark.parametrize("processes", [1, 2])
@pytest.mark.parametrize("settings", ["ddp", "zero1", "zero2", "zero3"])
def test_gradients_add_up_in_float32_in_every_engine(tmp_path: Path, settings: str, processes: int) -> None:
    scripts = [[PROGRAM, str(tmp_path), dtype, str(count), str(seed)] for dtype, count, seed in CASES]
    launch_in_turn(scripts, tmp_path, settings, processes)
    for dtype, count, seed in CASES:
        micro = gradients(getattr(torch, dtype), count, seed)
        expected = [sum(each[number].double() for each in micro).flatten() for number in range(len(SHAPES))]
        parts = [load_file(tmp_path / f"{dtype}-{count}-{seed}.{rank}.safetensors") for rank in range(processes)]
        for number, total in enumerate(expected):
            name, found = f"w.{number}", torch.full_like(total, float("nan"))
            for part in parts:
                if name in part:
                    start = int(part[f"{name}.start"])
                    found[start : start + len(part[name])] = part[name].double()
            # A float32 sum of n numbers is within n x 2^-24 of their absolute sum.
            limit = 2**-23 * sum(each[number].double().abs() for each in micro).flatten() * max(1, count)
            assert bool(((found - total).abs() <= limit).all()), (settings, processes, dtype, count, name)
        norm = float(torch.cat(expected).norm())
        assert float(parts[0]["norm"]) == pytest.approx(norm, rel=1e-5), (settings, processes, dtype, count)
