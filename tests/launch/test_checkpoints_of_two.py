"""Checkpoints of two processes: whole, the same however they were sharded, and resumed by one process or by two."""

import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from align import cli
from align.training.checkpoint.files import integrity_error, write_checksums
from align.training.checkpoint.state import STATE_FILE, StoredState
from tests.launch.compared import assert_close, metrics
from tests.launch.launcher import PPO, ROOT, launch_in_turn, ppo_words
from tests.launch.programs import spare_weight

PROGRAMS = Path(__file__).parent / "programs"
DECAYED = (1 - 0.1 * 0.5) ** 4
"""Of a weight that begins at 1: four steps at a rate of 0.1 and a decay of 0.5, which nothing else moves."""
AVERAGED = ["--ema_decay", "0.8", "--validation_prompts", "data/prompts_validation.jsonl", "--eval_steps", "1"]
AVERAGED += ["--reward_functions", "tests.sampling.rewards:letters"]  # hardly ever the same twice


def states(update, *runs):
    """The states of several runs at an update, which have the same names."""
    found = [dict(StoredState(run / "checkpoints" / f"update-{update:06d}")) for run in runs]
    assert found[0].keys() == found[1].keys()
    return found


@pytest.mark.parametrize(
    ("settings", "fails"),
    [("zero3", 1), *(pytest.param(name, rank, marks=pytest.mark.slow) for name, rank in (("zero1", 1), ("cpu2", 0)))],
)
def test_two_processes_of_which_one_cannot_write_keep_the_checkpoint_before(settings, fails, tmp_path):
    launch_in_turn([[str(PROGRAMS / "failing_save.py"), str(tmp_path), str(fails)]], tmp_path, settings)
    results = [json.loads((tmp_path / f"{rank}.json").read_text()) for rank in (0, 1)]
    checkpoints = tmp_path / "run" / "checkpoints"
    for one in results:
        assert one["error"].startswith(f"{checkpoints.absolute() / 'update-000002'}: cannot be written (")
    assert results[0]["error"] == results[1]["error"]
    (first,) = checkpoints.iterdir()  # nothing is left of the second
    assert first.name == "update-000001"
    assert integrity_error(first) == ""
    assert sum(path.name.startswith("state") for path in first.iterdir()) == (1 if settings == "cpu2" else 3)


def test_a_zero3_checkpoint_resumes_on_one_process(tmp_path, monkeypatch, capsys):
    """The state on disk knows neither ZeRO stage nor number of processes: PPO goes on alone where two left off."""
    launch_in_turn([[PPO, *ppo_words("tiny-t5", tmp_path / "first", 1)]], tmp_path, "zero3")
    monkeypatch.chdir(ROOT)
    cli.main(["ppo", *ppo_words("tiny-t5", tmp_path / "whole", 2)])
    capsys.readouterr()
    cli.main(["ppo", *ppo_words("tiny-t5", tmp_path / "first", 2, "--resume_from_checkpoint", "true")])
    assert "resumed from" in capsys.readouterr().err
    assert_close(metrics(tmp_path / "whole"), metrics(tmp_path / "first"), 2e-3)


@pytest.mark.slow
@pytest.mark.parametrize("more", [[], ["--lora_r", "4"]], ids=["full", "lora"])
@pytest.mark.parametrize("stage", [1, 2])
def test_a_mean_of_the_weights_under_zero_is_that_of_one_process_also_after_a_resume(stage, more, tmp_path, monkeypatch):
    monkeypatch.chdir(ROOT)
    one, two, words = tmp_path / "one", tmp_path / "two", [*AVERAGED, *more]
    cli.main(["ppo", *ppo_words("tiny-llama", one, 2, *words)])
    begun, resumed = (
        ppo_words("tiny-llama", two, 1, *words),
        ppo_words("tiny-llama", two, 2, *words, "--resume_from_checkpoint", "true"),
    )
    launch_in_turn([[PPO, *begun], [PPO, *resumed]], tmp_path, f"zero{stage}")
    assert_close(metrics(one), metrics(two), 2e-3)
    ours, theirs = states(2, one, two)
    means = [name for name in ours if name.startswith("average/")]
    moved = [name for name in means if not torch.equal(ours[name], ours[name.replace("average/", "master/")])]
    assert len(moved) > len(means) / 2 > 0, "the mean lags behind the weights"
    for name in ours:  # a step moves a weight by about 1e-3
        assert torch.allclose(ours[name], theirs[name], atol=5e-5), name
    (path,) = (one / "model").glob("*model.safetensors")
    models = [load_file(folder / "model" / path.name) for folder in (one, two)]
    assert all(torch.allclose(models[0][name], models[1][name], atol=5e-5) for name in models[0])


@pytest.mark.slow
def test_offload_steps_by_the_gradients_of_weights_that_the_last_loss_leaves_out(tmp_path, monkeypatch):
    """A critic of its own takes no part in ptx, the last loss before each step: its gradients must reach the optimizer."""
    more = [
        "--critic",
        "separate",
        "--ptx.data",
        "data/demonstrations_heldout.jsonl",
        "--num_ppo_epochs",
        "2",
        "--num_mini_batches",
        "2",
    ]
    launch_in_turn([[PPO, *ppo_words("tiny-llama", tmp_path / "two", 2, *more)]], tmp_path, "zero3-offload")
    monkeypatch.chdir(ROOT)
    cli.main(["ppo", *ppo_words("tiny-llama", tmp_path / "one", 2, *more)])
    assert_close(metrics(tmp_path / "one"), metrics(tmp_path / "two"), 1e-5)
    ours, theirs = states(2, tmp_path / "one", tmp_path / "two")
    assert all(torch.allclose(ours[key], theirs[key], atol=1e-5) for key in ours)


@pytest.fixture(scope="module")
def begun(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two updates of one process, whose checkpoint has no moments of the spare weight, as if it had no gradient yet."""
    folder = tmp_path_factory.mktemp("begun") / "run"
    spare_weight.train(folder, 2, resume_from_checkpoint=False)
    checkpoint = folder / "checkpoints" / "update-000002"
    kept = {k: v for k, v in load_file(checkpoint / STATE_FILE).items() if k.startswith("master") or "spare" not in k}
    save_file(kept, checkpoint / STATE_FILE)
    (checkpoint / "checksums.json").unlink()
    write_checksums(checkpoint)
    return folder


def test_one_process_decays_a_spare_weight_by_hand_arithmetic(tmp_path):
    spare_weight.train(tmp_path / "run", 4, resume_from_checkpoint=False)
    state = StoredState(tmp_path / "run" / "checkpoints" / "update-000004")
    torch.testing.assert_close(state["master/spare.weight"], torch.full((4, 4), DECAYED))


@pytest.mark.parametrize(
    "settings", ["zero3", *(pytest.param(name, marks=pytest.mark.slow) for name in ("cpu2", "zero1", "zero2"))]
)
def test_two_processes_resume_and_decay_a_spare_weight(begun, settings, tmp_path):
    shutil.copytree(begun, tmp_path / "two")
    shutil.copytree(begun, tmp_path / "one")
    launch_in_turn([[spare_weight.__file__, str(tmp_path / "two")]], tmp_path, settings)
    spare_weight.train(tmp_path / "one", 4, resume_from_checkpoint=True)
    one, two = states(4, tmp_path / "one", tmp_path / "two")
    torch.testing.assert_close(two["master/spare.weight"], torch.full((4, 4), DECAYED))
    for name in two:
        if not name.startswith("step/spare"):  # one process counts the steps of each weight
            torch.testing.assert_close(two[name], one[name], msg=name)
