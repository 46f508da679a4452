"""What a process sees on a shared disk decides no exchange: one process looks, and all do the same."""

import json
from pathlib import Path

from tests.launch.launcher import launch_in_turn
from tests.launch.test_launch import metrics

SCRIPT = Path(__file__).parent / "programs" / "stale_disk.py"


def test_a_process_that_does_not_see_a_file_ends_as_the_other(tmp_path: Path) -> None:
    launch_in_turn([[str(SCRIPT), str(tmp_path)]], tmp_path, "cpu2", seconds=400, real=False)
    checkpoint = tmp_path / "run" / "checkpoints" / "update-000001"
    lost = f"error: {checkpoint}: process 1 does not find reference.safetensors, which the first process does"
    for rank, prefix in ((0, ""), (1, "[process 1] ")):
        moved, ended = json.loads((tmp_path / f"{rank}.json").read_text())
        assert moved == [False, True]
        assert ended == [0, 2, f"{prefix}{lost}; all must see output_dir", 0]
    assert [row["update"] for row in metrics(tmp_path / "run")] == [0, 1, 2]
