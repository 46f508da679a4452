"""`align launch` ends in order: asked to stop, killed in one process, no traceback, and a code that says which."""

import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest
from torch.distributed.elastic.multiprocessing.errors import ProcessFailure

from align.commands.tools import SHUTDOWN_SECONDS, first_failure
from align.core.signals import EXIT_STOPPED, GRACE_SECONDS, WARNING_SECONDS
from tests.launch.launcher import ROOT, start_processes, variables
from tests.launch.programs import cases
from tests.ports import free_port

DEAF = """
import os, pathlib, signal, time
signal.signal(signal.SIGTERM, signal.SIG_IGN)
pathlib.Path(__file__).with_name("rank-" + os.environ["RANK"]).touch()
time.sleep(120)
"""
WORDS = """
    --model tiny-gpt2 --dtype float32 --report_to none --overlong truncate --max_prompt_tokens 64
    --num_train_epochs 500 --batch_size 6
    --train_data data/demonstrations_heldout.jsonl --max_response_tokens 16 --learning_rate 1e-3
"""


def launch(processes: int, *words: str, before: str = "") -> "subprocess.Popen[str]":
    """`align launch` of a script, as its user starts it, after a line of Python."""
    settings = "cpu2" if processes == 2 else "one-process"
    launcher = ["launch", "--config_file", f"configs/accelerate/{settings}.yaml"]
    launcher += ["--num_processes", str(processes), "--main_process_port", str(free_port())]
    program = [sys.executable, "-c", f"{before}\nfrom align.cli import main; main()", *launcher, *words]
    return subprocess.Popen(program, cwd=ROOT, env=variables(), stderr=subprocess.PIPE, text=True)


def start(folder: Path, processes: int, *more: str) -> "subprocess.Popen[str]":
    """A long fine-tuning."""
    return launch(processes, "align/sft/train.py", *WORDS.split(), "--output_dir", str(folder), *more)


def wait_for_update(process: "subprocess.Popen[str]", folder: Path, update: int) -> None:
    metrics = folder / "metrics.jsonl"
    while process.poll() is None and not (metrics.exists() and f'"update": {update},' in metrics.read_text()):
        time.sleep(0.05)


@pytest.mark.slow
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
    again = start(tmp_path / "run", processes, "--resume_from_checkpoint", "auto")
    wait_for_update(again, tmp_path / "run", int(saved.name.removeprefix("update-")) + 1)
    again.send_signal(number)
    assert f"resumed from {saved}" in again.communicate(timeout=240)[1]


@pytest.mark.slow
def test_two_processes_one_of_which_is_killed(tmp_path):
    process = start(tmp_path / "run", 2)
    wait_for_update(process, tmp_path / "run", 2)
    ranks = {child.environ().get("RANK"): child for child in psutil.Process(process.pid).children(recursive=True)}
    ranks["1"].kill()
    printed = process.communicate(timeout=240)[1]
    assert process.returncode == 128 + signal.SIGKILL
    assert "error: process 1 failed first (signal SIGKILL)" in printed
    assert "Traceback" not in printed, printed


@pytest.mark.parametrize("asked", [pytest.param(0, marks=pytest.mark.slow), 1])
def test_a_request_to_one_of_two_processes_before_the_first_update_ends_both(asked, tmp_path):
    """As when one pod of two is evicted: the other process waits for it in an exchange, and no launcher ends it."""
    processes = start_processes([cases.__file__, "one_signal", str(tmp_path), str(asked)], "cpu2")
    printed = [process.communicate(timeout=240)[1] for process in processes]
    assert [process.returncode for process in processes] == [EXIT_STOPPED, EXIT_STOPPED], printed
    prefixes = ("", "[process 1] ")
    assert printed[asked].splitlines()[-1] == f"{prefixes[asked]}stopped by SIGTERM"
    host = socket.gethostname()
    lost = f"{prefixes[1 - asked]}error: lost process {asked} ({host}: exited: stopped by SIGTERM)"
    assert printed[1 - asked].splitlines()[-1].startswith(lost)


@pytest.mark.parametrize(
    ("codes", "first"),
    [
        ([(-signal.SIGKILL, 100), (76, 105)], 0),  # killed; the other one names it
        ([(76, 100), (-signal.SIGKILL, 130)], 0),  # one hangs, the launcher kills it 30 s after the other's end
        ([(-signal.SIGKILL, 130), (2, 100)], 1),  # a mistake beside one that hangs
        ([(76, 100), (-signal.SIGKILL, 100)], 1),
        ([(EXIT_STOPPED, 100), (1, 100)], 1),  # the launcher has ended the first after the other's error
        ([(-signal.SIGTERM, 100), (2, 100)], 1),  # the same before it could handle signals
    ],
)
def test_the_launcher_names_the_process_that_failed_first(codes, first):
    failures = {rank: ProcessFailure(rank, 1, code, error_file="") for rank, (code, _) in enumerate(codes)}
    for rank, (_, seconds) in enumerate(codes):
        failures[rank].timestamp = seconds
    assert first_failure(failures) == (first, failures[first])


def test_the_launcher_kills_processes_that_do_not_stop(tmp_path):
    """torch's own limit is 30 seconds; a large model may need more to save, and these processes never end."""
    assert SHUTDOWN_SECONDS > WARNING_SECONDS > GRACE_SECONDS
    shorter = "import align.commands.tools as it; it.SHUTDOWN_SECONDS = 7"
    deaf = tmp_path / "deaf.py"
    deaf.write_text(DEAF)
    process = launch(2, str(deaf), before=shorter)
    while process.poll() is None and len(list(tmp_path.glob("rank-*"))) < 2:
        time.sleep(0.05)
    process.send_signal(signal.SIGTERM)
    began = time.monotonic()
    printed = process.communicate(timeout=240)[1]
    assert process.returncode == EXIT_STOPPED, printed
    assert 6 < time.monotonic() - began < 25
