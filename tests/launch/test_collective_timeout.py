"""`collective_timeout` ends the wait for a process that is stopped, in whichever group of processes that wait is."""

import json
import subprocess
import time
from pathlib import Path

import pytest

from align.core.launch import EXIT_LOST
from tests.launch.launcher import start_processes

SCRIPT = Path(__file__).parent / "programs" / "stopped_process.py"
TIMEOUT = 15
REPORT, SLACK = 16, 60
"""Seconds that an error of an exchange waits for the watch to name a lost process, and what a busy machine may need."""


@pytest.mark.parametrize(
    ("settings", "groups"),
    [("zero2", 3), *(pytest.param(name, count, marks=pytest.mark.slow) for name, count in (("cpu2", 2), ("zero1", 3)))],
)
def test_a_stopped_process_ends_the_others_after_the_timeout(settings: str, groups: int, tmp_path: Path) -> None:
    """The groups are the world, the one of shared rows, and the one that DeepSpeed clones from the world."""
    processes = start_processes([str(SCRIPT), str(tmp_path), str(TIMEOUT)], settings)
    try:
        while not (tmp_path / "1.json").exists():
            assert all(process.poll() is None for process in processes), processes[0].communicate()[1]
            time.sleep(0.05)
        began = time.monotonic()
        printed = processes[0].communicate(timeout=TIMEOUT + REPORT + SLACK)[1]
        assert processes[0].returncode == EXIT_LOST, printed
        assert "error: lost process 1 (" in printed
        assert time.monotonic() - began >= TIMEOUT - 1
        assert json.loads((tmp_path / "0.json").read_text()) == groups * [TIMEOUT]
    except subprocess.TimeoutExpired:
        pytest.fail(f"it still waits after {TIMEOUT + REPORT + SLACK} s")
    finally:
        for process in processes:
            process.kill()  # SIGKILL ends a stopped process as well
            process.communicate()
