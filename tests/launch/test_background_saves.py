"""Checkpoints in the background of two processes: the bytes of the foreground, and an error of one is an error of both."""

import json
from pathlib import Path

import pytest

from align.training.checkpoint.files import fault_of
from tests.launch.launcher import launch_in_turn

SAVES = Path(__file__).parent / "programs" / "background_saves.py"


@pytest.mark.parametrize(
    ("settings", "fails"),
    [("zero3", 1), *(pytest.param(name, rank, marks=pytest.mark.slow) for name, rank in (("zero1", 1), ("cpu2", 0)))],
)
def test_two_processes_save_while_they_train(settings: str, fails: int, tmp_path: Path) -> None:
    launch_in_turn([[str(SAVES), str(tmp_path), str(fails)]], tmp_path, settings)
    results = [json.loads((tmp_path / f"{rank}.json").read_text()) for rank in (0, 1)]
    checkpoints = tmp_path / "run" / "checkpoints"
    for one in results:
        assert one["sums"] == [3.0], "the exchanges of the training are not mixed up with those of the threads"
        assert one["error"].startswith(f"{checkpoints.absolute() / 'update-000003'}: cannot be written (")
    assert results[0]["error"] == results[1]["error"]
    first, second = (checkpoints / f"update-{update:06d}" for update in (1, 2))
    assert sorted(checkpoints.iterdir()) == [first, second], "nothing is left of the third"
    assert fault_of(first) == fault_of(second) == ""
    names = sorted(path.name for path in first.iterdir())
    assert sum(name.startswith("state") for name in names) == (1 if settings == "cpu2" else 3)
    for name in (name for name in names if name.endswith(".safetensors")):
        assert (first / name).read_bytes() == (second / name).read_bytes()
