import os
import time
from types import SimpleNamespace

import pytest
import torch
from accelerate.state import AcceleratorState, PartialState

from align.core.errors import UserError
from align.runtime import distributed
from align.runtime.distributed import bfloat16_is_fast, compute_dtype, launch_line, make_accelerator, waiting_for_others
from align.sft import SFTConfig
from align.training.run import Run


@pytest.fixture
def gpu(monkeypatch):
    """`gpu(7)`: the machine has a CUDA GPU of compute capability 7.x; every one of them can at least emulate bfloat16."""

    def describe(major: int) -> None:
        bfloat16_is_fast.cache_clear()
        monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
        monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
        monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: SimpleNamespace(major=major))
        monkeypatch.setattr(torch.cuda, "_check_bf16_tensor_supported", lambda device: True)

    yield describe
    bfloat16_is_fast.cache_clear()


@pytest.mark.parametrize(("major", "dtype"), [(7, torch.float32), (8, torch.bfloat16), (9, torch.bfloat16)])
def test_emulated_bfloat16_is_not_taken(gpu, major, dtype):
    """A V100 (7.0) and a T4 (7.5) emulate it; an A100 (8.0) and an H100 (9.0) have it."""
    gpu(major)
    assert compute_dtype("auto") == dtype
    assert compute_dtype("bfloat16") == torch.bfloat16, "who asks for it gets it"


def test_fsdp_is_refused(monkeypatch, tmp_path):
    monkeypatch.setenv("ACCELERATE_USE_FSDP", "true")
    with pytest.raises(UserError, match="FSDP is not supported"):
        Run(SFTConfig(model="tiny-gpt2", train_data="none", output_dir=str(tmp_path)), "sft")


@pytest.fixture
def apple_gpu(monkeypatch):
    """The machine has an Apple GPU, and no process has chosen a device yet."""
    states = (AcceleratorState._shared_state, PartialState._shared_state)
    kept = [dict(state) for state in states]
    for state in states:
        state.clear()
    monkeypatch.setattr(torch.backends.mps, "is_available", lambda: True)
    monkeypatch.setattr(torch.backends.mps, "is_built", lambda: True)
    yield
    for state, before in zip(states, kept, strict=True):
        state.clear()
        state.update(before)


def test_a_gpu_without_float64_is_not_taken_and_the_run_says_so(apple_gpu, tmp_path, capsys):
    run = Run(SFTConfig(output_dir=str(tmp_path / "run"), dtype="float32", report_to=["none"]), "sft")
    assert run.accelerator.device == torch.device("cpu")
    assert "no float64" in capsys.readouterr().err


def test_processes_that_do_not_meet_say_so(monkeypatch, capfd):
    monkeypatch.setattr(distributed, "MEETING_SECONDS", 0.01)
    for name, value in {"WORLD_SIZE": "2", "RANK": "1", "MASTER_ADDR": "10.0.0.9", "MASTER_PORT": "29500"}.items():
        monkeypatch.setenv(name, value)

    def meet():
        with waiting_for_others():
            time.sleep(0.3)
            raise torch.distributed.DistNetworkError("address in use")

    with pytest.raises(UserError, match=r"cannot connect at 10\.0\.0\.9:29500 \(address in use\)"):
        meet()
    assert capfd.readouterr().err.startswith("process 1 is waiting for the others at 10.0.0.9:29500")
    with waiting_for_others():
        pass
    time.sleep(0.1)
    assert capfd.readouterr().err == "", "processes that have met wait for nobody"


@pytest.mark.parametrize(
    ("given", "line"),
    [
        ({}, ""),
        ({"ACCELERATE_MIXED_PRECISION": "no"}, "1 process on cpu"),
        ({"ACCELERATE_USE_CPU": "true"}, "1 process on cpu"),
    ],
)
def test_a_launched_run_names_its_processes(given, line, monkeypatch):
    for name in [name for name in os.environ if name.startswith("ACCELERATE_")]:
        monkeypatch.delenv(name)
    accelerator = make_accelerator(torch.float32, 1.0)
    for name, value in given.items():
        monkeypatch.setenv(name, value)
    found = launch_line(accelerator)
    assert found.startswith(line)
    assert bool(found) == bool(line)
