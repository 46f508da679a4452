"""What one of two processes does, suffers or does not see, both do: they work together, or end together."""

import json
import runpy
import subprocess
import sys
import time
from pathlib import Path

import pytest

from align.core.launch import EXIT_LOST
from tests.launch.compared import compare, metrics
from tests.launch.launcher import launch_in_turn, start_processes

PROGRAMS = Path(__file__).parent / "programs"
TIMEOUT = 15
REPORT, SLACK = 16, 60
"""Seconds that an error of an exchange waits for the watch to name a lost process, and what a busy machine may need."""


def told_by_both(program, folder, settings):
    """Run a program in two processes; what each wrote to its RANK.json."""
    launch_in_turn([[str(PROGRAMS / program), str(folder)]], folder, settings)
    return [json.loads((folder / f"{rank}.json").read_text()) for rank in (0, 1)]


@pytest.mark.parametrize("settings", ["zero2", pytest.param("cpu2", marks=pytest.mark.slow)])
def test_an_error_of_one_process_is_raised_on_both(settings, tmp_path):
    """The other one waits for nobody; the watch is off here."""
    first, second = told_by_both("two_ends.py", tmp_path, settings)
    checkpoint = tmp_path / "run" / "checkpoints" / "update-000001"
    assert first["main, a mistake"] == second["main, a mistake"] == "UserError: no such file"
    assert first["main, a bug"] == "KeyError: 'mean'"
    assert second["main, a bug"] == "OtherProcessError: process 0 failed: KeyError: 'mean'"
    assert first["main, well"] == second["main, well"] == "done"
    assert first["all, a mistake"] == second["all, a mistake"] == "UserError: no such file"
    assert first["all, a bug"] == "OtherProcessError: process 1 failed: [Errno 5] Input/output error"
    assert second["all, a bug"] == "OSError: [Errno 5] Input/output error"
    assert first["all, well"] == second["all, well"] == [0, 1]
    assert "training needs about" in first["memory"] == second["memory"], "one process has too little"
    unwritten = f"UserError: {checkpoint}: cannot be written (MemoryError: no room for the copy); nothing was changed there"
    assert first["save"] == second["save"] == unwritten
    unread = f"UserError: {checkpoint}: cannot be read (Input/output error), and was whole before; check the disk"
    assert first["load"] == second["load"] == unread
    assert first["load again"] == second["load again"] == 1


def test_the_first_process_calls_reward_functions_for_both(tmp_path):
    first, second = told_by_both("own_rewards.py", tmp_path, "cpu2")
    assert first["calls"] == {"noisy": 3 + 4, "judge": 4}, "once for each rollout of 3 updates and 4 evaluations"
    assert second["calls"] == {"noisy": 0, "judge": 0}
    assert first["failing"].startswith("reward function 'failing' failed: ValueError: the service is down (")
    for name in ("selection", "drift", "judge", "failing"):
        assert first[name] == second[name]


def test_objects_in_memory_train_as_in_one_process(tmp_path, monkeypatch):
    """The value models differ at first: all start with that of the first process. A wish of one callback counts for both."""
    (tmp_path / "one").mkdir()
    monkeypatch.setattr(sys, "argv", ["given_objects.py", str(tmp_path / "one")])
    runpy.run_path(str(PROGRAMS / "given_objects.py"), run_name="__main__")
    alone = json.loads((tmp_path / "one" / "0.json").read_text())
    (tmp_path / "two").mkdir()
    first, second = told_by_both("given_objects.py", tmp_path / "two", "cpu2")
    assert first["events"] == second["events"] == alone["events"] == [1, 2, "save", 3, "end"]
    assert first["head"] == second["head"]
    assert first["head"] == pytest.approx(alone["head"], abs=1e-5)
    found = compare(tmp_path / "one" / "run", tmp_path / "two" / "run")
    assert found.largest < 1e-4, found


def test_a_process_that_does_not_see_a_file_of_a_shared_disk_ends_as_the_other(tmp_path):
    found = told_by_both("stale_disk.py", tmp_path, "cpu2")
    checkpoint = tmp_path / "run" / "checkpoints" / "update-000001"
    lost = f"error: {checkpoint}: process 1 does not find reference_refresh.safetensors, which the first process does"
    for (moved, ended), prefix in zip(found, ("", "[process 1] "), strict=True):
        assert moved == [False, True]
        assert ended == [0, 2, f"{prefix}{lost}; all must see output_dir", 0]
    assert [row["update"] for row in metrics(tmp_path / "run")] == [0, 1, 2]


@pytest.mark.parametrize(
    ("settings", "groups"),
    [("cpu2", 2), *(pytest.param(name, count, marks=pytest.mark.slow) for name, count in (("zero2", 3), ("zero1", 3)))],
)
def test_a_stopped_process_ends_the_others_after_collective_timeout(settings, groups, tmp_path):
    """The groups are the world, the one of shared rows, and the one that DeepSpeed clones from the world."""
    processes = start_processes([str(PROGRAMS / "stopped_process.py"), str(tmp_path), str(TIMEOUT)], settings)
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
