from types import SimpleNamespace

import pytest
import torch
from accelerate.state import AcceleratorState, PartialState

from align.core.errors import UserError
from align.runtime.distributed import bfloat16_is_fast, compute_dtype
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
    with pytest.raises(UserError, match="FSDP, which the launcher asks for, is not supported: use DeepSpeed"):
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
