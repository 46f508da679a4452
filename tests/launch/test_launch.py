"""Every stage under `accelerate launch` with two processes on ZeRO-2 and ZeRO-3: it trains to the numbers of one process."""

import json
import math
import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

ROOT = Path(__file__).parents[2]
SCRIPT = Path(__file__).with_name("three_stages.py")
STAGES = ("sft", "reward", "ppo")
# Figures that name a time, not a number.
CLOCKS = ("seconds", "time/", "speed/", "memory/")


def launch(words: list[str], processes: int, stage: int | None) -> subprocess.CompletedProcess[str]:
    """Run a script as its user would: plainly, or through accelerate with the shipped ZeRO settings on the CPU."""
    program = [sys.executable, *words]
    if stage is not None:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        settings = f"configs/accelerate/zero{stage}.yaml"
        program = [sys.executable, "-m", "accelerate.commands.launch", "--config_file", settings, "--cpu"]
        program += ["--num_processes", str(processes), "--main_process_port", str(port), *words]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    return subprocess.run(program, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=300, check=False)


def metrics(folder: Path) -> list[dict[str, float]]:
    """The figures of a run, without those that tell the time."""
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [{key: value for key, value in row.items() if not key.startswith(CLOCKS)} for row in rows]


def assert_close(one: list[dict[str, float]], other: list[dict[str, float]], tolerance: float) -> None:
    """Every figure of every update, to a relative and absolute tolerance."""
    assert [row["update"] for row in one] == [row["update"] for row in other]
    for row, twin in zip(one, other, strict=True):
        assert row.keys() == twin.keys()
        for key, value in row.items():
            assert math.isclose(value, twin[key], rel_tol=tolerance, abs_tol=tolerance), (
                row["update"],
                key,
                value,
                twin[key],
            )


@pytest.fixture(scope="module", params=["tiny-llama", "tiny-t5"])
def alone(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[str, Path]:
    """A model's name and its three stages on one process, to compare with."""
    folder = tmp_path_factory.mktemp(request.param)
    done = launch([str(SCRIPT), request.param, str(folder)], 1, None)
    assert done.returncode == 0, done.stderr[-3000:]
    return request.param, folder


@pytest.mark.slow
@pytest.mark.parametrize("stage", [2, 3])
def test_two_processes_train_every_stage_to_the_numbers_of_one(alone: tuple[str, Path], stage: int, tmp_path: Path) -> None:
    model, reference = alone
    done = launch([str(SCRIPT), model, str(tmp_path)], 2, stage)
    assert done.returncode == 0, done.stderr[-3000:]
    for name in STAGES:
        assert_close(metrics(reference / name), metrics(tmp_path / name), 2e-3)
        ours, theirs = (load_file(folder / name / "model" / "model.safetensors") for folder in (reference, tmp_path))
        assert ours.keys() == theirs.keys()
        assert all(torch.allclose(ours[key], theirs[key], atol=2e-3) for key in ours)


@pytest.mark.slow
def test_a_zero3_checkpoint_resumes_on_one_process(alone: tuple[str, Path], tmp_path: Path) -> None:
    """The state on disk knows neither ZeRO stage nor number of processes: PPO goes on alone where two left off."""
    model, _ = alone
    words = [
        "align/ppo/train.py",
        "--model",
        model,
        "--reward_functions",
        "align.ppo.examples:share_of_e",
        "--dtype",
        "float32",
    ]
    words += [
        "--output_dir",
        str(tmp_path / "ppo"),
        "--max_prompt_tokens",
        "48",
        "--overlong",
        "truncate",
        "--log_to",
        "none",
    ]
    words += [
        "--max_new_tokens",
        "8",
        "--rollout_size",
        "6",
        "--updates",
        "2",
        "--save_every",
        "1",
        "--schedule",
        "constant",
    ]
    words += ["--learning_rate", "1e-3", "--missing_end", "keep"]
    whole = launch([*words, "--output_dir", str(tmp_path / "whole")], 1, None)
    assert whole.returncode == 0, whole.stderr[-3000:]
    first = launch([*words, "--updates", "1"], 2, 3)
    assert first.returncode == 0, first.stderr[-3000:]
    second = launch([*words, "--resume", "true"], 1, None)
    assert second.returncode == 0, second.stderr[-3000:]
    assert "resumed from" in second.stderr
    assert_close(metrics(tmp_path / "whole"), metrics(tmp_path / "ppo"), 2e-3)
