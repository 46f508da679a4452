"""Two processes under `accelerate launch`, with and without DeepSpeed: they know each other and start from equal weights."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from tests.launch.launcher import launch_in_turn

PROGRAMS = Path(__file__).parent / "programs"


@pytest.mark.parametrize(
    ("settings", "real"),
    [("cpu2", True), ("zero3", False), *(pytest.param(name, True, marks=pytest.mark.slow) for name in ("zero1", "zero2"))],
)
def test_two_processes_know_each_other_and_start_from_the_same_weights(settings, real, tmp_path):
    """Adapters and heads are drawn: with another seed on each rank, all of them start with those of the first."""
    scripts = [[str(PROGRAMS / "same_start.py"), str(tmp_path)], [str(PROGRAMS / "who.py")]]
    printed = launch_in_turn(scripts, tmp_path, settings, real=real)
    assert printed.count("[0, 1] 2 cpu") == 2
    drawn, drawn_by_other = (load_file(tmp_path / f"drawn-{rank}.safetensors") for rank in (0, 1))
    assert {"head.linear.weight"} < drawn.keys(), "an adapter and a head"
    assert not torch.equal(drawn["head.linear.weight"], drawn_by_other["head.linear.weight"])
    for rank in (0, 1):
        trained = load_file(tmp_path / f"{rank}.safetensors")
        assert trained.keys() == drawn.keys()
        assert all(torch.equal(trained[key], drawn[key]) for key in drawn)
