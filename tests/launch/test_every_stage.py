"""Every stage, full and through LoRA, on every kind of model: several processes train what one process trains."""

import runpy
import sys
from pathlib import Path

import pytest

from tests.launch.compared import compare
from tests.launch.launcher import launch_in_turn
from tests.launch.programs.every_stage import CASES, SETTINGS, TOLERANCE
from tests.models.encoders import write_encoder

ROOT = Path(__file__).parents[2]
SCRIPT = Path(__file__).parent / "programs" / "every_stage.py"
UPDATES = 2
OF_FOUR = (
    "streamed-sft/tiny-llama/0",
    "sft/tiny-t5/4",
    "reward/tiny-llama/0",
    "reward/encoder/4",
    "ppo/tiny-llama/0",
    "ppo/tiny-t5/4",
)
"""For four processes, each kind once: they share what two have to themselves. benchmarks/processes.py tries all."""


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory, sharpen) -> Path:
    """What one process trains."""
    folder = tmp_path_factory.mktemp("alone")
    write_encoder("bert", folder / "encoder", sharpen)
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(ROOT)
        patch.setattr(sys, "argv", [str(SCRIPT), str(folder), str(folder), str(UPDATES), *CASES])
        runpy.run_path(str(SCRIPT), run_name="__main__")
    return folder


@pytest.mark.slow
@pytest.mark.parametrize("processes", [2, 4])
@pytest.mark.parametrize("settings", SETTINGS)
def test_every_stage_under_every_kind_of_sharding(settings: str, processes: int, alone: Path, tmp_path: Path) -> None:
    cases = CASES if processes == 2 else OF_FOUR
    words = [str(SCRIPT), str(tmp_path), str(alone), str(UPDATES), *cases]
    launch_in_turn([words], tmp_path, settings, processes)
    apart = {case: compare(alone / case, tmp_path / case) for case in cases}
    assert not {case: found for case, found in apart.items() if found.largest > TOLERANCE}
