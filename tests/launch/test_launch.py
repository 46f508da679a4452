"""Every stage under `accelerate launch` with two processes, with and without DeepSpeed: the numbers of one process."""

import math
import runpy
import shutil
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from align import cli
from align.training.checkpoint.state import StoredState
from tests.launch.compared import metrics
from tests.launch.launcher import launch_in_turn

ROOT = Path(__file__).parents[2]
SCRIPT = Path(__file__).parent / "programs" / "three_stages.py"
SAME_START = Path(__file__).parent / "programs" / "same_start.py"
WHO = Path(__file__).parent / "programs" / "who.py"
MODELS = ("tiny-llama", "tiny-t5")
NO_ZERO, ZERO_1, ZERO_2 = (pytest.param(stage, marks=pytest.mark.slow) for stage in (0, 1, 2))
SAME_STARTS = (0, 3)
TRAINED = {0: MODELS[:1], 2: MODELS, 3: MODELS[1:]}
"""The models of which every stage is trained under a stage of ZeRO (0: without DeepSpeed)."""
CHECKPOINTS = """
    --reward_functions align.ppo.toy_rewards:share_of_e --dtype float32 --log_to none --save_every 1
    --max_prompt_tokens 64 --overlong truncate --max_new_tokens 8 --rollout_size 6
    --schedule constant --learning_rate 1e-3 --missing_eos keep
"""
STAGES = ("sft", "reward", "dpo", "ppo")


def each_trained() -> list[Any]:
    """Each stage of ZeRO with each model that it trains; ZeRO-2 belongs to the full run."""
    return [
        pytest.param(stage, model, marks=[pytest.mark.slow] if stage == 2 else [])
        for stage, models in TRAINED.items()
        for model in models
    ]


def assert_close(one: list[dict[str, float]], other: list[dict[str, float]], tolerance: float) -> None:
    """Every metric of every update, to a relative and absolute tolerance."""
    assert [row["update"] for row in one] == [row["update"] for row in other]
    for row, twin in zip(one, other, strict=True):
        assert row.keys() == twin.keys()
        for key, value in row.items():
            assert math.isclose(value, twin[key], rel_tol=tolerance, abs_tol=tolerance), (
                row["update"],
                key,
                value,
                twin[key],
            )


def checkpoint_words(model: str, folder: Path, updates: int, *more: str) -> list[str]:
    """PPO with a checkpoint after every update."""
    return ["--model", model, "--output_dir", str(folder), "--updates", str(updates), *CHECKPOINTS.split(), *more]


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the three stages of each model on one process, which is this one, to compare with."""
    folder = tmp_path_factory.mktemp("alone")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(ROOT)
        for model in MODELS:
            patch.setattr(sys, "argv", [str(SCRIPT), model, str(folder / model)])
            runpy.run_path(str(SCRIPT), run_name="__main__")
    return folder


@dataclass
class Together:
    """What two processes wrote and printed under a stage of ZeRO, or under none."""

    stage: int
    folder: Path
    printed: str


@pytest.fixture(scope="module")
def launched(tmp_path_factory: pytest.TempPathFactory) -> Callable[[int], Together]:
    """`launched(3)`: all that these tests run under ZeRO-3 on two processes, in one launch, made when first asked for."""
    made: dict[int, Together] = {}

    def launch_once(stage: int) -> Together:
        if stage not in made:
            folder = tmp_path_factory.mktemp("together")
            scripts = [[str(SCRIPT), model, str(folder / model)] for model in TRAINED.get(stage, ())]
            if stage == 3:
                script = "align/ppo/train.py"
                scripts += [[script, *checkpoint_words(model, folder / f"{model}-first", 1)] for model in TRAINED[3]]
            if stage in SAME_STARTS:
                scripts.append([str(SAME_START), str(folder)])
            scripts.append([str(WHO)])
            settings, real = (f"zero{stage}", stage == 2) if stage else ("cpu2", True)
            printed = launch_in_turn(scripts, folder, settings, real=real)
            made[stage] = Together(stage, folder, printed)
        return made[stage]

    return launch_once


@pytest.mark.parametrize("stage", [NO_ZERO, ZERO_1, ZERO_2, 3])
def test_two_processes_are_started_and_know_each_other(launched: Callable[[int], Together], stage: int) -> None:
    assert launched(stage).printed.count("[0, 1] 2 cpu") == 2


@pytest.mark.parametrize(("stage", "model"), each_trained())
def test_two_processes_train_every_stage_to_the_numbers_of_one(
    alone: Path, launched: Callable[[int], Together], stage: int, model: str
) -> None:
    one, two = alone / model, launched(stage).folder / model
    for name in STAGES:
        assert_close(metrics(one / name), metrics(two / name), 2e-3)
        ours, theirs = (load_file(folder / name / "model" / "model.safetensors") for folder in (one, two))
        assert ours.keys() == theirs.keys()
        assert all(torch.allclose(ours[key], theirs[key], atol=2e-3) for key in ours)


@pytest.mark.parametrize("stage", SAME_STARTS)
def test_processes_that_draw_other_numbers_start_from_the_same_weights(
    launched: Callable[[int], Together], stage: int
) -> None:
    """Adapters and heads are drawn: with another seed on each rank, all of them start with those of the first."""
    folder = launched(stage).folder
    drawn, drawn_by_other = (load_file(folder / f"drawn-{rank}.safetensors") for rank in (0, 1))
    assert {"head.linear.weight"} < drawn.keys(), "an adapter and a head"
    assert not torch.equal(drawn["head.linear.weight"], drawn_by_other["head.linear.weight"])
    for rank in (0, 1):
        trained = load_file(folder / f"{rank}.safetensors")
        assert trained.keys() == drawn.keys()
        assert all(torch.equal(trained[key], drawn[key]) for key in drawn)


@pytest.mark.parametrize("model", TRAINED[3])
def test_a_zero3_checkpoint_resumes_on_one_process(
    launched: Callable[[int], Together],
    model: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """The state on disk knows neither ZeRO stage nor number of processes: PPO goes on alone where two left off."""
    monkeypatch.chdir(ROOT)
    cli.main(["ppo", *checkpoint_words(model, tmp_path / "whole", 2)])
    shutil.copytree(launched(3).folder / f"{model}-first", tmp_path / "first")
    capsys.readouterr()
    cli.main(["ppo", *checkpoint_words(model, tmp_path / "first", 2, "--resume", "true")])
    assert "resumed from" in capsys.readouterr().err
    assert_close(metrics(tmp_path / "whole"), metrics(tmp_path / "first"), 2e-3)


@pytest.mark.slow
def test_offload_steps_by_the_gradients_of_weights_that_the_last_loss_leaves_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A critic of its own takes no part in ptx, the last loss before each step: its gradients must reach the optimizer."""
    more = ["--critic", "separate", "--ptx_data", "data/demonstrations_heldout.jsonl", "--epochs", "2", "--minibatches", "2"]
    words = [["align/ppo/train.py", *checkpoint_words("tiny-llama", tmp_path / "two", 2, *more)]]
    launch_in_turn(words, tmp_path, "zero3-offload")
    monkeypatch.chdir(ROOT)
    cli.main(["ppo", *checkpoint_words("tiny-llama", tmp_path / "one", 2, *more)])
    assert_close(metrics(tmp_path / "one"), metrics(tmp_path / "two"), 1e-5)
    states = [dict(StoredState(tmp_path / name / "checkpoints" / "update-000002")) for name in ("one", "two")]
    assert states[0].keys() == states[1].keys()
    assert all(torch.allclose(states[0][key], states[1][key], atol=1e-5) for key in states[0])
