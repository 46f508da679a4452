"""What fails on one of two processes ends the work on both: the other one waits for nobody. The watch is off here."""

import json
from pathlib import Path

import pytest

from tests.launch.launcher import launch_in_turn

SCRIPT = Path(__file__).parent / "programs" / "two_ends.py"


@pytest.mark.parametrize("settings", ["zero2", pytest.param("cpu2", marks=pytest.mark.slow)])
def test_an_error_of_one_process_is_raised_on_both(settings: str, tmp_path: Path) -> None:
    launch_in_turn([[str(SCRIPT), str(tmp_path)]], tmp_path, settings, seconds=240, real=False)
    first, second = (json.loads((tmp_path / f"{rank}.json").read_text()) for rank in (0, 1))
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
    assert first["load"] == second["load"]
    assert (
        first["load"]
        == f"UserError: {checkpoint}: cannot be read (Input/output error), and was whole before; check the disk"
    )
    assert first["load again"] == second["load again"] == [1, {}]
