"""`align launch` ends in order: asked to stop, killed in one process, no traceback, and a code that says which."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from align.signals import EXIT_STOPPED
from tests.launch.launcher import free_port

ROOT = Path(__file__).parents[2]
WORDS = (
    "--model tiny-gpt2 --dtype float32 --log_to none --overlong truncate --max_prompt_tokens 32 --epochs 500 --batch_size 6"
)
WORDS += " --train_data data/demonstrations_heldout.jsonl --max_response_tokens 16 --learning_rate 1e-3"


def start(folder: Path, processes: int, *more: str) -> "subprocess.Popen[str]":
    launcher = ["launch", "--config_file", f"configs/accelerate/{'cpu2' if processes == 2 else 'cpu'}.yaml"]
    launcher += ["--num_processes", str(processes), "--main_process_port", str(free_port())]
    words = [*launcher, "align/sft/train.py", *WORDS.split(), "--output_dir", str(folder), *more]
    variables = os.environ | {"PYTHONPATH": str(ROOT), "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
    program = [sys.executable, "-c", "from align.cli import main; main()", *words]
    return subprocess.Popen(program, cwd=ROOT, env=variables, stderr=subprocess.PIPE, text=True)


def wait_for_update(process: "subprocess.Popen[str]", folder: Path, update: int) -> None:
    metrics = folder / "metrics.jsonl"
    while process.poll() is None and not (metrics.exists() and f'"update": {update},' in metrics.read_text()):
        time.sleep(0.05)


@pytest.mark.full
@pytest.mark.parametrize(("processes", "number"), [(1, signal.SIGTERM), (2, signal.SIGTERM), (2, signal.SIGUSR1)])
def test_a_launch_that_is_asked_to_stop_saves_and_goes_on(processes, number, tmp_path):
    process = start(tmp_path / "run", processes)
    wait_for_update(process, tmp_path / "run", 3)
    workers = psutil.Process(process.pid).children(recursive=True)
    process.send_signal(number)
    printed = process.communicate(timeout=240)[1]
    assert process.returncode == EXIT_STOPPED, printed
    assert "Traceback" not in printed, printed
    assert printed.count(f"stopped by {number.name} after update") == 1
    (saved,) = tmp_path.glob("run/checkpoints/update-*")
    assert not [worker for worker in workers if worker.is_running() and worker.status() != psutil.STATUS_ZOMBIE]
    again = start(tmp_path / "run", processes, "--resume", "auto")
    wait_for_update(again, tmp_path / "run", int(saved.name.removeprefix("update-")) + 1)
    again.send_signal(number)
    assert f"resumed from {saved}" in again.communicate(timeout=240)[1]


@pytest.mark.full
def test_two_processes_one_of_which_is_killed(tmp_path):
    process = start(tmp_path / "run", 2)
    wait_for_update(process, tmp_path / "run", 2)
    ranks = {child.environ().get("RANK"): child for child in psutil.Process(process.pid).children(recursive=True)}
    ranks["1"].kill()
    printed = process.communicate(timeout=240)[1]
    assert process.returncode == 128 + signal.SIGKILL
    assert "error: process 1 ended first, by signal SIGKILL; the others were ended" in printed
    assert "Traceback" not in printed, printed
