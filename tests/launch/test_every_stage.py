"""Every stage, full and through LoRA, on every kind of model: several processes train what one process trains."""

import runpy
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from tests.launch.every_stage import CASES
from tests.launch.launcher import launch_in_turn
from tests.launch.test_launch import assert_close, metrics
from tests.models.encoders import write_encoder

ROOT = Path(__file__).parents[2]
SCRIPT = Path(__file__).with_name("every_stage.py")
OF_FOUR = (
    "streamed-sft/tiny-llama/0",
    "sft/tiny-t5/4",
    "reward/tiny-llama/0",
    "reward/encoder/4",
    "ppo/tiny-llama/0",
    "ppo/tiny-t5/4",
)
"""For four processes, each kind once: they share what two have to themselves."""
SETTINGS = ("cpu2", "zero1", "zero2", "zero3", "zero3-offload")
TOLERANCE = 1e-5
COUNTS = ("tokens/", "flops")


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory, sharpen) -> Path:
    """What one process trains."""
    folder = tmp_path_factory.mktemp("alone")
    write_encoder("bert", folder / "encoder", sharpen)
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(ROOT)
        patch.setattr(sys, "argv", [str(SCRIPT), str(folder), str(folder), *CASES])
        runpy.run_path(str(SCRIPT), run_name="__main__")
    return folder


def require_same(alone: Path, together: Path, cases: Sequence[str]) -> None:
    """The figures of every update, what was counted, and the saved model, whole."""
    for case in cases:
        one, several = metrics(alone / case), metrics(together / case)
        assert_close(one, several, TOLERANCE)
        for row, twin in zip(one, several, strict=True):
            counts = [name for name in row if name.startswith(COUNTS)]
            assert [row[name] for name in counts] == [twin[name] for name in counts], "rows were lost or read twice"
        (path,) = (path for path in (alone / case / "model").glob("*model.safetensors"))
        ours, theirs = (load_file(folder / case / "model" / path.name) for folder in (alone, together))
        assert ours.keys() == theirs.keys()
        for name, weight in ours.items():
            assert torch.allclose(weight, theirs[name], atol=TOLERANCE), (case, name)


@pytest.mark.full
@pytest.mark.slow
@pytest.mark.parametrize("processes", [2, 4])
@pytest.mark.parametrize("settings", SETTINGS)
def test_every_stage_under_every_kind_of_sharding(settings: str, processes: int, alone: Path, tmp_path: Path) -> None:
    cases = CASES if processes == 2 else OF_FOUR
    launch_in_turn([[str(SCRIPT), str(tmp_path), str(alone), *cases]], tmp_path, settings, processes)
    require_same(alone, tmp_path, cases)
