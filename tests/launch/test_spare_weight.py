"""A weight that never gets a gradient: its decay is the same in every way to train, and its checkpoint resumes in each."""

import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from align.training.checkpoint.files import write_checksums
from align.training.checkpoint.state import WHOLE, StoredState
from tests.launch.launcher import launch_in_turn
from tests.launch.programs.spare_weight import train

SCRIPT = Path(__file__).parent / "programs" / "spare_weight.py"
DECAYED = (1 - 0.1 * 0.5) ** 4
"""Of a weight that begins at 1: four steps at a rate of 0.1 and a decay of 0.5, which nothing else moves."""


def end_of(run: Path) -> StoredState:
    return StoredState(run / "checkpoints" / "update-000004")


@pytest.fixture(scope="module")
def begun(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two updates of one process, whose checkpoint has no moments of the spare weight: as earlier versions wrote it."""
    folder = tmp_path_factory.mktemp("begun") / "run"
    train(folder, 2, resume=False)
    checkpoint = folder / "checkpoints" / "update-000002"
    state = load_file(checkpoint / WHOLE)
    save_file(
        {key: value for key, value in state.items() if key.startswith("master") or "spare" not in key}, checkpoint / WHOLE
    )
    (checkpoint / "checksums.json").unlink()
    write_checksums(checkpoint)
    return folder


def test_one_process_decays_it_by_hand_arithmetic(tmp_path: Path) -> None:
    train(tmp_path / "run", 4, resume=False)
    torch.testing.assert_close(end_of(tmp_path / "run")["master/spare.weight"], torch.full((4, 4), DECAYED))


@pytest.mark.parametrize(
    "settings", ["zero2", "zero3", *(pytest.param(name, marks=pytest.mark.slow) for name in ("cpu2", "zero1"))]
)
def test_two_processes_resume_and_decay_it(begun: Path, settings: str, tmp_path: Path) -> None:
    shutil.copytree(begun, tmp_path / "two")
    shutil.copytree(begun, tmp_path / "one")
    launch_in_turn([[str(SCRIPT), str(tmp_path / "two")]], tmp_path, settings, seconds=240, real=False)
    train(tmp_path / "one", 4, resume=True)
    one, two = end_of(tmp_path / "one"), end_of(tmp_path / "two")
    assert set(one) == set(two)
    torch.testing.assert_close(two["master/spare.weight"], torch.full((4, 4), DECAYED))
    for name in two:
        if not name.startswith("step/spare"):  # one process counts the steps of each weight
            torch.testing.assert_close(two[name], one[name], msg=name)
