import os
import subprocess
import sys

import pytest
import torch
import torch.utils.cpp_extension as torch_extensions

from align.runtime.distributed import prepare_compiling

TAKE = """
import sys
from align.runtime.distributed import OperatorLock
lock = OperatorLock(sys.argv[1], warn_after_seconds=1.0)
print("asked", flush=True)
lock.try_acquire()
print("taken", flush=True)
sys.stdin.read()
"""


def test_a_lock_is_waited_for_and_ends_with_its_process(tmp_path):
    program = [sys.executable, "-c", TAKE, str(tmp_path / "lock")]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    holder = subprocess.Popen(program, **pipes)
    assert [holder.stdout.readline() for _ in range(2)] == ["asked\n", "taken\n"]
    other = subprocess.Popen(program, **pipes)
    assert other.stdout.readline() == "asked\n"
    with pytest.raises(subprocess.TimeoutExpired):
        other.wait(0.5)
    holder.kill()
    assert other.communicate(timeout=60)[0] == "taken\n"
    holder.communicate()


@pytest.fixture
def compiling(monkeypatch):
    """Torch compiles with this package's lock; all is put back afterwards."""
    monkeypatch.setattr(torch_extensions, "FileBaton", torch_extensions.FileBaton)
    monkeypatch.setenv("PATH", os.environ["PATH"])
    prepare_compiling()


def test_torch_compiles_where_a_killed_process_left_its_file(compiling, tmp_path):
    (tmp_path / "one.cpp").write_text("int one() { return 1; }")
    (tmp_path / "lock").touch()  # torch itself would wait for its removal
    torch_extensions.load("one", str(tmp_path / "one.cpp"), build_directory=str(tmp_path), is_python_module=False)
    assert (tmp_path / "one.so").exists()


STEPS = 40


@pytest.mark.slow  # compiles for minutes where nothing has before
def test_an_offloaded_adam_that_takes_over_makes_the_same_steps(compiling):
    """DeepSpeed's Adam on the processor goes on to the same bits where an optimizer that was made anew takes over."""
    from deepspeed.ops.adam import DeepSpeedCPUAdam

    from align.training.deepspeed_engine import count_up

    def train(new_before=0, counted=True):
        torch.manual_seed(0)
        weight = torch.nn.Parameter(torch.randn(100))
        settings = {"lr": 0.1, "betas": (0.9, 0.95), "eps": 1e-5}
        optimizer = DeepSpeedCPUAdam([weight], **settings)
        for step in range(1, STEPS + 1):
            if step == new_before:
                state = optimizer.state[weight]
                optimizer = DeepSpeedCPUAdam([weight], **settings)
                optimizer.state[weight] = state
                if counted:
                    count_up(optimizer, step - 1)
            weight.grad = torch.sin(step * weight.detach())
            optimizer.step()
        return weight.detach().clone()

    unbroken = train()
    assert all(torch.equal(train(place), unbroken) for place in range(2, STEPS))
    # What is mended: of the number of a step alone, DeepSpeed takes other powers than it has multiplied up.
    assert any(not torch.equal(train(place, counted=False), unbroken) for place in range(2, STEPS))
