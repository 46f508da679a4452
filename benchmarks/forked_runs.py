"""Runs to be killed: forked from this process, which has imported what they need; 30 kills take a tenth of the time.

Runs of several processes get the variables of `accelerate launch`, which are read once; only the port changes.
"""

import importlib
import multiprocessing.connection
import os
import signal
import subprocess
import sys
import time
import traceback
from collections.abc import Sequence
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any, NamedTuple

from align import cli
from tests.launch.launcher import free_port

ROOT = Path(__file__).resolve().parents[1]
IMPORTED = ("align.sft", "align.reward", "align.extras.rules", "align.ppo", "align.dpo")
LOST_SECONDS = 60.0
"""Within this time after a process was killed, those that it trained with have ended."""


class Killed(NamedTuple):
    """What is to kill a run."""

    process: int = 0
    operation: int = 0
    """Of that process: the number of its operation on the run's files; 0: none does."""
    seconds: float = 0.0
    """From the start; 0: time does not kill."""
    alone: bool = True
    """Whether time kills only that process, not all of them at once."""


class _Operations:
    """Counts a process's operations on the files of its run, and kills the process at one of them.

    Args:
        fatal: the number of that one; 0: none.
    """

    def __init__(self, fatal: int, folder: Path) -> None:
        self.fatal, self.folder, self.count = fatal, str(folder), 0
        sys.addaudithook(self._watch)

    def _watch(self, event: str, arguments: tuple[Any, ...]) -> None:
        if event == "open":
            changes = isinstance(arguments[1], str) and set(arguments[1]) & set("wax+")
        else:
            changes = event in ("os.rename", "os.remove", "os.rmdir", "os.mkdir", "shutil.rmtree", "os.chmod")
        if changes and str(arguments[0]).startswith(self.folder):
            self.count += 1
            if self.count == self.fatal:
                os.kill(os.getpid(), signal.SIGKILL)


def _run(words: Sequence[str], folder: Path, rank: int, variables: dict[str, str], fatal: int) -> None:
    """The life of a forked process: one run, whose words on stderr go into a file beside its folder."""
    os.dup2(os.open(f"{folder}.told-{rank}", os.O_CREAT | os.O_WRONLY | os.O_TRUNC), 2)
    os.environ.update(variables)
    operations = _Operations(fatal, folder)
    try:
        cli.main([*words, "--output_dir", str(folder)])
    except Exception:
        traceback.print_exc()
        sys.exit(1)
    Path(f"{folder}.operations-{rank}").write_text(str(operations.count))


def run_forked(words: Sequence[str], folder: Path, launch: Sequence[dict[str, str]], killed: Killed) -> tuple[int, str]:
    """Run in forked processes, one of which, or all, may be killed.

    Args:
        words: the stage and its settings.
        launch: each process's variables, see `launched`.

    Returns:
        0 if all ended by themselves, -9 if one was killed and all ended, else another exit code; and what was told.
    """
    for name in (*IMPORTED, *(["deepspeed"] if "ACCELERATE_USE_DEEPSPEED" in launch[0] else [])):
        importlib.import_module(name)
    port = {"MASTER_PORT": str(free_port())} if len(launch) > 1 else {}
    fork = multiprocessing.get_context("fork").Process
    processes = [
        fork(target=_run, args=(words, folder, rank, each | port, killed.operation * (rank == killed.process)))
        for rank, each in enumerate(launch)
    ]
    for process in processes:
        process.start()
    return _end(processes, killed), "\n".join(Path(f"{folder}.told-{rank}").read_text() for rank in range(len(launch)))


def _end(processes: Sequence[BaseProcess], killed: Killed) -> int:
    """Wait until all have ended; those that one was taken from must do so in time."""
    if killed.seconds:
        multiprocessing.connection.wait([process.sentinel for process in processes], killed.seconds)
        for process in [processes[killed.process]] if killed.alone else processes:
            process.kill()
    multiprocessing.connection.wait([process.sentinel for process in processes])
    while all(process.exitcode in (None, 0) for process in processes) and any(process.is_alive() for process in processes):
        time.sleep(0.05)
    deadline = time.monotonic() + LOST_SECONDS
    for process in processes:
        process.join(max(0.0, deadline - time.monotonic()))
    hanging = [process for process in processes if process.is_alive()]
    for process in hanging:
        process.kill()
        process.join()
    codes = [process.exitcode or 0 for process in processes]
    if hanging:
        raise SystemExit(f"{len(hanging)} processes did not end in {LOST_SECONDS:.0f} s after another one: {codes}")
    return min(codes) if min(codes) < 0 else max(codes)


def run_alone(words: Sequence[str], folder: Path, settings: str = "", processes: int = 1) -> None:
    """Run a stage in a separate program or under a launcher, without kills.

    Raises:
        SystemExit: with its error output, if it fails.
    """
    program = [sys.executable, "-m", "align.cli"]
    if settings:
        program += ["launch", "--config_file", f"configs/accelerate/{settings}.yaml", "--num_processes", str(processes)]
        words = ["--main_process_port", str(free_port()), f"align/{words[0]}/train.py", *words[1:]]
    program += [*words, "--output_dir", str(folder)]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT), "CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run(program, cwd=ROOT, env=environment, stderr=subprocess.PIPE, text=True, check=False)
    if done.returncode:
        raise SystemExit(
            f"{folder.name}: the run that is not killed ended with code {done.returncode}:\n{done.stderr[-2000:]}"
        )
