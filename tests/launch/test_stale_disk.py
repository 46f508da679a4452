"""What a process sees on a shared disk decides no exchange: one process looks, and all do the same."""

import json
from pathlib import Path

import pytest

from tests.launch.launcher import launch_in_turn
from tests.launch.test_launch import metrics

SCRIPT = Path(__file__).with_name("stale_disk.py")


@pytest.mark.slow
@pytest.mark.parametrize("settings", ["cpu2", pytest.param("zero3", marks=pytest.mark.full)])
def test_a_process_that_does_not_see_a_file_ends_as_the_other(settings: str, tmp_path: Path) -> None:
    launch_in_turn([[str(SCRIPT), str(tmp_path)]], tmp_path, settings, seconds=400, real=False)
    assert [json.loads((tmp_path / f"{rank}.json").read_text()) for rank in (0, 1)] == 2 * [[False, True]]
    assert [row["update"] for row in metrics(tmp_path / "run")] == [0, 1, 2]
