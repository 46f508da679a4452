import json
import subprocess
import time

import pytest
import torch
from safetensors.torch import load_file

from align.core.launch import EXIT_LOST
from tests.launch.compared import compare, metrics
from tests.launch.launcher import launch_in_turn, start_processes
from tests.launch.programs import cases

TIMEOUT = 15
REPORT, SLACK = 16, 60
"""Seconds that an error of an exchange waits for the watch to name a lost process, and what a busy machine may need."""


def told_by_both(folder, settings, *names, real=False):
    """Run cases of `cases.py` one after another in two processes; what each process returned, by case."""
    for name in names:
        (folder / name).mkdir()
    scripts = [[cases.__file__, name, str(folder / name)] for name in names]
    launch_in_turn(scripts, folder, settings, real=real)
    return [[json.loads((folder / name / f"{rank}.json").read_text()) for rank in (0, 1)] for name in names]


@pytest.mark.parametrize(
    ("settings", "real"),
    [
        ("cpu2", True),
        ("zero3", False),
        pytest.param("zero1", False, marks=pytest.mark.slow),
        pytest.param("zero2", True, marks=pytest.mark.slow),
    ],
)
def test_two_processes_know_each_other_start_from_the_same_weights_and_raise_the_same_error(settings, real, tmp_path):
    """Adapters and heads are drawn: with another seed on each rank, all of them start with those of the first.

    The process without an error waits for nobody.
    """
    known, (first, second) = told_by_both(tmp_path, settings, "same_start", "two_ends", real=real)
    assert known == 2 * [[[0, 1], 2, "cpu"]]
    folder = tmp_path / "same_start"
    drawn, drawn_by_other = (load_file(folder / f"drawn-{rank}.safetensors") for rank in (0, 1))
    assert {"head.linear.weight"} < drawn.keys(), "an adapter and a head"
    assert not torch.equal(drawn["head.linear.weight"], drawn_by_other["head.linear.weight"])
    for rank in (0, 1):
        trained = load_file(folder / f"{rank}.safetensors")
        assert trained.keys() == drawn.keys()
        assert all(torch.equal(trained[key], drawn[key]) for key in drawn)
    checkpoint = tmp_path / "two_ends" / "run" / "checkpoints" / "update-000001"
    assert first["main, a mistake"] == second["main, a mistake"] == "UserError: no such file"
    assert first["main, a bug"] == "KeyError: 'mean'"
    assert second["main, a bug"] == "OtherProcessError: process 0 failed: KeyError: 'mean'"
    assert first["main, well"] == second["main, well"] == "done"
    assert first["all, a mistake"] == second["all, a mistake"] == "UserError: no such file"
    assert first["all, a bug"] == "OtherProcessError: process 1 failed: [Errno 5] Input/output error"
    assert second["all, a bug"] == "OSError: [Errno 5] Input/output error"
    assert first["all, well"] == second["all, well"] == [0, 1]
    assert "training needs about" in first["memory"] == second["memory"], "one process has too little"
    assert first["open"] == second["open"] == "UserError: another run writes there"
    unwritten = (
        f"UserError: {checkpoint}: cannot be written (MemoryError: no room for the copy); the old contents are unchanged"
    )
    assert first["save"] == second["save"] == unwritten
    unread = (
        f"UserError: {checkpoint}: cannot be read (Input/output error), but its checksums matched before; check the disk"
    )
    assert first["load"] == second["load"] == unread
    assert first["load again"] == second["load again"] == 1


def test_ppo_of_two_processes_shares_rewards_objects_and_what_the_disk_shows(tmp_path):
    """The first process calls reward functions for both. The value models in memory differ at first: all start with that of
    the first process. A wish of one callback counts for both. A file that one process does not see ends both runs.
    """
    names = ("own_rewards", "given_objects", "stop_on_one", "stale_disk")
    (first, second), objects, stopped, disk = told_by_both(tmp_path, "cpu2", *names)
    assert first["calls"] == {"noisy": 3 + 4, "judge": 4}, "once for each rollout of 3 updates and 4 evaluations"
    assert second["calls"] == {"noisy": 0, "judge": 0}
    assert first["failing"].startswith("reward function 'failing' failed: ValueError: the service is down (")
    for name in ("selection", "drift", "judge", "failing"):
        assert first[name] == second[name]

    assert stopped == [str(tmp_path / "stop_on_one" / "run" / "model")] * 2
    assert [row["update"] for row in metrics(tmp_path / "stop_on_one" / "run")] == [1, 2], "an extension of one stops both"

    (tmp_path / "one").mkdir()
    alone = cases.given_objects(tmp_path / "one")
    assert objects[0]["events"] == objects[1]["events"] == alone["events"] == [1, 2, "save", 3, "end"]
    assert objects[0]["head"] == objects[1]["head"]
    assert objects[0]["head"] == pytest.approx(alone["head"], abs=1e-5)
    found = compare(tmp_path / "one" / "run", tmp_path / "given_objects" / "run")
    assert found.largest < 1e-4, found

    run = tmp_path / "stale_disk" / "run"
    lost = f"error: {run}/checkpoints/update-000001: process 1 does not find value_regression.safetensors, which the first "
    for (restored, ended), prefix in zip(disk, ("", "[process 1] "), strict=True):
        assert restored == [False, True]
        assert ended == [0, 2, f"{prefix}{lost}process does; all must see output_dir", 0]
    assert [row["update"] for row in metrics(run)] == [0, 1, 2]


@pytest.mark.parametrize(
    ("settings", "groups"),
    [("cpu2", 2), *(pytest.param(name, count, marks=pytest.mark.slow) for name, count in (("zero2", 3), ("zero1", 3)))],
)
def test_a_stopped_process_ends_the_others_after_collective_timeout(settings, groups, tmp_path):
    """The groups are the world, one that the program makes, and the one that DeepSpeed clones from the world."""
    processes = start_processes([cases.__file__, "stopped_process", str(tmp_path), str(TIMEOUT)], settings)
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
